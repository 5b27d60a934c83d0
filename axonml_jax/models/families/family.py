"""What reading and writing a family of published models needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from axonml_jax.models.config import TransformerConfig

Places = dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]
"""For every name of an array here, the array there and how to read it. One expert's part of a stack is `NAME@EXPERT`."""


@dataclass(frozen=True)
class Family:
    """A family of models that `Transformer` can be.

    Attributes:
      name: `model_type` in a `config.json`.
      prefix: what names of arrays begin with there, but for the head's.
      without: parts that a model must not have, because the transformer here has none: setting -> the values that mean so.
      settings: the arguments of `TransformerConfig`, of a `config.json` and its rotary settings.
      describe: the `config.json` of a configuration.
      is_this: whether a configuration is of this family.
      places: where each array is.
    """

    name: str
    prefix: str
    without: Mapping[str, tuple]
    settings: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    describe: Callable[[TransformerConfig], dict[str, Any]]
    is_this: Callable[[TransformerConfig], bool]
    places: Callable[[TransformerConfig], Places]


def same(x: np.ndarray) -> np.ndarray:
    """As it is."""
    return x
