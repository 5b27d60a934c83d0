"""The norm of gradients that rest anyhow, and clipping by it."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree
from axonml_jax.collectives.primitives import max_over, sum_over

Part = tuple[jax.Array, Any, tuple[str, ...]]
"""An array of gradients, its parameters' dtype, and the mesh axes over which it is split."""


def norm(parts: Iterable[Part], p: float = 2.0) -> jax.Array:
    """The p-norm of all gradients on all ranks, each element counted once, in at least float32; p may be infinite.

    Communicates: inside `shard_map` one small all-reduce for every set of axes that splits parts.
    """
    infinite, totals = p == math.inf, {}
    for grad, dtype, axes in parts:
        size = jnp.abs(grad).astype(jnp.promote_types(jnp.finfo(dtype).dtype, jnp.float32))
        if infinite:
            totals[axes] = jnp.maximum(totals.get(axes, 0.0), jnp.max(size, initial=0))
        else:
            totals[axes] = totals.get(axes, 0.0) + jnp.sum(jnp.square(size) if p == 2 else size**p)
    join = max_over if infinite else sum_over
    with jax.named_scope("axonml.norm"):
        wholes = [join(total, axes) if axes else total for axes, total in totals.items()]
    if infinite:
        return functools.reduce(jnp.maximum, wholes, jnp.zeros(()))
    return sum(wholes, jnp.zeros(())) ** (1 / p) if p != 2 else jnp.sqrt(sum(wholes, jnp.zeros(())))


def clipped(grads: PyTree, norm: jax.Array, max_norm: Any) -> PyTree:
    """Gradients scaled by min(1, max_norm / (norm + 1e-6)), PyTorch's rule."""
    scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
