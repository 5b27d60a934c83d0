"""From the model a user gives to its pure view."""

import inspect
from typing import Any

from flax import linen, nnx

from axonml_jax._types import PyTree
from axonml_jax.model.functional import Functional, Trainable, Variables
from axonml_jax.model.linen import deferred_linen, linen_functional
from axonml_jax.model.lora.adapters import LoraModel
from axonml_jax.model.lora.lora_view import lora_functional
from axonml_jax.model.nnx import deferred_nnx, nnx_functional


def functionalize(
    model: Any, params: PyTree | None = None, trainable: Trainable = None
) -> tuple[Functional, Variables]:
    """The pure view of a model, and its arrays (not copies), or their shapes where they are still to be made.

    Args:
      model: an `nnx.Module`, a function without arguments that makes one, or a `linen.Module` given with its variables; or one
        of them with adapters (`ax.lora`), which train.
      params: for Linen, what `module.init` returned (`{"params": ..., "batch_stats": ...}` or the params alone), or a
        function without arguments that makes it.
      trainable: which parameters train; with adapters, which do besides.

    Raises:
      TypeError: when `model` is neither.
      ValueError: when `params` is missing or superfluous, or when `trainable` matches nothing.
    """
    if isinstance(model, LoraModel):
        return lora_functional(*functionalize(model.model, params), model.lora, trainable)
    if isinstance(model, linen.Module):
        if params is None:
            raise ValueError(
                f"{type(model).__name__} is a Linen module and holds no arrays: give its variables too, "
                "params=module.init(key, example)"
            )
        return (
            deferred_linen(model, params, trainable) if callable(params) else linen_functional(model, params, trainable)
        )
    if isinstance(model, nnx.Module):
        if params is not None:
            raise ValueError(f"{type(model).__name__} is an NNX module and holds its own arrays: leave params= out")
        return nnx_functional(model, trainable)
    if callable(model) and not isinstance(model, type):
        make: Any = model
        try:
            inspect.signature(make).bind()
        except TypeError as error:
            raise TypeError(
                "a model is a flax.nnx.Module, or a function without arguments that makes one, but a function was given that "
                f"cannot be called so: {error}"
            ) from None
        if params is not None:
            raise ValueError("a function that makes an NNX module makes its arrays too: leave params= out")
        return deferred_nnx(make, trainable)
    raise TypeError(
        "a model is a flax.nnx.Module, a function without arguments that makes one, or a flax.linen.Module with params=, but "
        f"{f'the class {model.__name__}' if isinstance(model, type) else f'a {type(model).__name__}'} was given"
    )
