"""Arrays of which a dim is split over an axis that is left to XLA's partitioner, as rows of a buffer: a row for each rank.

A flat buffer of such arrays would be whole on every rank of the axis: flat, the parts of a dim lie between each other.
Which dim is split is a guess from its size, since the partitioner decides it after everything is traced. Where the guess is
wrong the partitioner sends what it must to store an array so; numbers are the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axonml_jax.sharding.batch import BatchLayout


class PartRanks(NamedTuple):
    """The ranks that have a row each.

    Attributes:
      axis: the mesh axis.
      count: how many.
    """

    axis: str
    count: int


@dataclass(frozen=True)
class PositionParts:
    """Which arrays of a stage have a dim of positions.

    Attributes:
      parts: the ranks among which positions are split.
      lengths: how many positions sequences have, in the batch's leaves.

    >>> guess = PositionParts(PartRanks("context", 2), (16,))
    >>> [guess.dim_of(shape) for shape in ((4, 16, 8), (16,), (4, 15, 8), (16, 16), (4, 6))]
    [1, 0, 1, 1, None]
    """

    parts: PartRanks
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, layout: BatchLayout, shapes: Mapping[str, tuple[int, ...]]) -> "PositionParts | None":
        """Of a microbatch's leaves, by their paths. None: no axis that splits positions is left to the partitioner."""
        left = {axis: rule for axis, rule in layout.positions if axis in layout.left and layout.size((axis,)) > 1}
        if not left:
            return None
        ((axis, rule),) = left.items()
        count = layout.size((axis,))
        dims = ((shape, rule(name, shape)) for name, shape in shapes.items() if shape)
        lengths = {shape[dim] for shape, dim in dims if dim is not None and shape[dim] % count == 0}
        return cls(PartRanks(axis, count), tuple(sorted(lengths)))

    def dim_of(self, shape: tuple[int, ...]) -> int | None:
        """The dim of an array that holds positions, or all but a few of them as a shift leaves them; None: none does.

        Rows come first, so dim 0 is taken last.
        """
        count = self.parts.count
        near = lambda size: any(length - count < size <= length for length in self.lengths)
        dims = [dim for dim, size in enumerate(shape) if size >= count and near(size)]
        return next((dim for dim in dims if dim), dims[0] if dims else None)


def row_size(shape: tuple[int, ...], dim: int, count: int) -> int:
    """Elements of one part, of `count`, of an array that is split along `dim`; the last part may be padded."""
    return math.prod(size for d, size in enumerate(shape) if d != dim) * -(-shape[dim] // count)


def apart(x: jax.Array, dim: int, parts: PartRanks) -> jax.Array:
    """[..., s, ...] -> [N, n]: each rank's part of `dim` in a row of its own, the last one padded with zeros."""
    size, each = x.shape[dim], -(-x.shape[dim] // parts.count)
    if more := each * parts.count - size:
        x = jnp.pad(x, [(0, more if d == dim else 0) for d in range(x.ndim)])
    cut = x.reshape(*x.shape[:dim], parts.count, each, *x.shape[dim + 1 :])
    rows = split_over(jnp.moveaxis(cut, dim, 0), parts.axis)
    return rows.reshape(parts.count, math.prod(rows.shape[1:]))


def joined(rows: jax.Array, shape: tuple[int, ...], dim: int, parts: PartRanks) -> jax.Array:
    """The inverse of `apart`, of rows [N, n]."""
    each = -(-shape[dim] // parts.count)
    cut = split_over(rows.reshape(parts.count, *shape[:dim], each, *shape[dim + 1 :]), parts.axis)
    whole = jnp.moveaxis(cut, 0, dim).reshape(*shape[:dim], parts.count * each, *shape[dim + 1 :])
    return jax.lax.slice_in_dim(whole, 0, shape[dim], axis=dim)


def split_over(x: jax.Array, axis: str) -> jax.Array:
    """x, of which the partitioner is to split dim 0 over an axis that is left to it."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axis))


def on_every_rank(x: Any) -> Any:
    """x, of which the partitioner is to split nothing; random keys stay as they are."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.lax.with_sharding_constraint(x, PartitionSpec())
