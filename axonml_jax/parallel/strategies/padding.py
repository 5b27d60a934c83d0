"""Zeros behind parameters that do not divide: put there, cut off, counted, and told to the ledger."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.primitives import axis_size
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.sharding.layout import Layout


def cut(whole: jax.Array, layout: Layout, axis: AxisNames, dim: int | None) -> jax.Array:
    """What was gathered without its padding."""
    if dim is None:
        return whole
    if not layout.shape:
        return whole[0]
    size = _read_size(layout, dim, axis_size(axis))
    return whole if whole.shape[dim] == size else jax.lax.slice_in_dim(whole, 0, size, axis=dim)


def _read_size(layout: Layout, dim: int, ranks: int) -> int:
    """The size of a dim that was gathered over so many ranks: of one that layers split too their part, with its padding.

    Sizes are arrays where a layout stands for many meshes.
    """
    size, gathered = layout.shape[dim], layout.stored[dim] * ranks // layout.parts[dim]
    return min(size, gathered) if isinstance(gathered, int) else np.minimum(size, gathered)


def pad(grad: jax.Array, layout: Layout, axis: AxisNames, dim: int | None) -> jax.Array:
    """A gradient with zeros behind it, so that it divides."""
    if dim is None:
        return grad
    if not layout.shape:
        grad = grad[None]
    more = layout.shard[dim] * axis_size(axis) - grad.shape[dim]
    return jnp.pad(grad, [(0, more if d == dim else 0) for d in range(grad.ndim)]) if more else grad


def padding_of(layout: Layout, dim: int, ranks: int) -> int:
    """How many elements of a leaf gathered along a dim are padding."""
    shard = layout.shard
    size = _read_size(layout, dim, ranks) if layout.shape else 1
    return math.prod(shard[:dim] + shard[dim + 1 :]) * (shard[dim] * ranks - size)


def padding_scope(
    label: str, layouts: Sequence[Layout], dims: Sequence[int | None], axis: AxisNames, filled: int = 0
) -> AbstractContextManager:
    """A name scope that tells the ledger how many of a bucket's elements are padding, `filled` of each rank's among them."""
    count = axis_size(axis)
    more = sum(padding_of(layout, dim, count) for layout, dim in zip(layouts, dims, strict=True) if dim is not None)
    more += filled * count
    return jax.named_scope(f"{label}.pad{more}") if more else nullcontext()
