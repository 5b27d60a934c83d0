"""From the model a user gives to its pure view."""

import inspect
from typing import Any

from flax import linen, nnx

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.model.functional import Functional, Trainable, Variables, is_shape, with_zeros
from axonml_jax.model.linen import deferred_linen, linen_functional
from axonml_jax.model.lora.adapters import LoraModel
from axonml_jax.model.lora.lora_view import lora_functional
from axonml_jax.model.nnx import deferred_nnx, nnx_functional


def functionalize(
    model: Any, params: PyTree | None = None, trainable: Trainable = None
) -> tuple[Functional, Variables]:
    """The pure view of a model, and its arrays (not copies), or their shapes where they are still to be made or loaded.

    Args:
      model: an `nnx.Module`, a function without arguments that makes one, or a `linen.Module` given with its variables; or one
        of them with adapters (`ax.lora`), which train. A module of shapes (`nnx.eval_shape`) has zeros until it is loaded.
      params: for Linen, what `module.init` returned (`{"params": ..., "batch_stats": ...}` or the params alone), a
        function without arguments that makes it, or its shapes (`jax.eval_shape`).
      trainable: which parameters train; with adapters, which do besides.

    Raises:
      TypeError: when `model` is neither.
      ValueError: when `params` is missing or superfluous, when `trainable` matches nothing, or for arrays of which only some
        are given as shapes.
    """
    if isinstance(model, LoraModel):
        return lora_functional(*functionalize(model.model, params), model.lora, trainable)
    if isinstance(model, linen.Module):
        if params is None:
            raise ValueError(
                f"{type(model).__name__} is a Linen module and holds no arrays: give its variables too, "
                "params=module.init(key, example)"
            )
        if callable(params):
            return deferred_linen(model, params, trainable)
        return _given(*linen_functional(model, params, trainable))
    if isinstance(model, nnx.Module):
        if params is not None:
            raise ValueError(f"{type(model).__name__} is an NNX module and holds its own arrays: leave params= out")
        return _given(*nnx_functional(model, trainable))
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


def _given(view: Functional, variables: Variables) -> tuple[Functional, Variables]:
    """The view of a model that was given with its arrays, or as shapes."""
    leaves = named_leaves(variables)
    shapes = [name for name, leaf in leaves.items() if is_shape(leaf)]
    if shapes and len(shapes) < len(leaves):
        raise ValueError(
            "a model is given with its arrays, or as shapes (nnx.eval_shape, jax.eval_shape), but of "
            f"{len(leaves)} arrays these are shapes: {', '.join(shapes)}"
        )
    if shapes:
        view.create, view.hollow = (lambda: with_zeros(variables)), True
        view.order = None  # a module of shapes has its attributes in alphabetical order
    return view, variables
