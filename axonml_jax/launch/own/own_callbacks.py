"""Callbacks of one's own, as a configuration names them."""

from collections.abc import Mapping, Sequence
from typing import Any

from axonml_jax.launch.objects.import_rules import is_named
from axonml_jax.launch.objects.named_object import make
from axonml_jax.training.callbacks import Callback, checked


def own_callbacks(described: Sequence[Mapping[str, Any]] | None) -> tuple[Callback, ...]:
    """The callbacks that the key `callbacks` names.

    Raises:
      ValueError, TypeError: for what cannot be made, or is none.
    """
    if strange := [each for each in described or () if not is_named(each)]:
        raise ValueError(f"callbacks: {strange[0]}: each must be a class_path and its init_args")
    return checked([make(each, f"callbacks[{number}]") for number, each in enumerate(described or ())])
