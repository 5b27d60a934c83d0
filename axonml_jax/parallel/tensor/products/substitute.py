"""A Flax layer's own arithmetic on other values: Flax computes what is local, this library only adds what is communicated."""

from typing import TypeVar

import jax
from flax import nnx

M = TypeVar("M", bound=nnx.Module)


def substitute(module: M, **attributes) -> M:
    """A shallow copy of `module` in which some attributes differ; arrays become parameters.

    The module itself is not touched, so that this works inside any transformation.
    """
    copy = object.__new__(type(module))
    values = {name: nnx.Param(value) if isinstance(value, jax.Array) else value for name, value in attributes.items()}
    for name, value in (vars(module) | values).items():
        object.__setattr__(copy, name, value)  # Flax's own would look at the trace the module was made in
    return copy


def linear(module: nnx.Linear, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """What `nnx.Linear` does with that kernel and no bias: [..., i] and [i, o] -> [..., o]."""
    return nnx.Linear.__call__(substitute(module, kernel=kernel, bias=None, use_bias=False), x)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Add a bias over the last dim as Flax does."""
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))
