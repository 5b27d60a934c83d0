"""From the model a user gives to its pure view."""

from typing import Any

from flax import linen, nnx

from axonml_jax._types import PyTree
from axonml_jax.model.functional import Functional, Trainable, Variables
from axonml_jax.model.linen import linen_functional
from axonml_jax.model.nnx import nnx_functional


def functionalize(
    model: Any, params: PyTree | None = None, trainable: Trainable = None
) -> tuple[Functional, Variables]:
    """The pure view of a model, and its arrays (not copies).

    Args:
      model: an `nnx.Module`, or a `linen.Module` given with its variables.
      params: for Linen, what `module.init` returned (`{"params": ..., "batch_stats": ...}` or the params alone).
      trainable: which parameters train.

    Raises:
      TypeError: when `model` is neither.
      ValueError: when `params` is missing or superfluous, or when `trainable` matches nothing.
    """
    if isinstance(model, linen.Module):
        if params is None:
            raise ValueError(
                f"{type(model).__name__} is a Linen module and holds no arrays: give its variables too, "
                "params=module.init(key, example)"
            )
        return linen_functional(model, params, trainable)
    if isinstance(model, nnx.Module):
        if params is not None:
            raise ValueError(f"{type(model).__name__} is an NNX module and holds its own arrays: leave params= out")
        return nnx_functional(model, trainable)
    raise TypeError(
        f"a model is a flax.nnx.Module, or a flax.linen.Module with params=, but a {type(model).__name__} was given"
    )
