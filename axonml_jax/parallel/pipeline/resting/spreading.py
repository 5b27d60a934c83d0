"""A leaf that rests on one rank of a pipeline, brought to all devices: split over as many of them as its dims divide by.

Every movement is a collective that is written here. XLA's partitioner, left to find them, gathers whole leaves everywhere
("Involuntary full rematerialization").
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
from jax.sharding import PartitionSpec

from axonml_jax.collectives.along_dim import exchange_along, gather_along
from axonml_jax.collectives.gradients.pairs import own_slice
from axonml_jax.collectives.scatter import broadcast
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.sharding.layout import Layout

Move = Callable[[jax.Array], jax.Array]


@dataclass
class Spread:
    """How one leaf is brought to all devices.

    Attributes:
      shape: what a device holds in the end.
      axes: the mesh axes that split each dim in the end, outermost first.
      moves: what is done with the part that rests, one after the other, inside `shard_map`.
    """

    shape: list[int]
    axes: list[tuple[str, ...]]
    moves: list[Move] = field(default_factory=list)

    @staticmethod
    def of(layout: Layout, rank: int, degrees: Mapping[str, int]) -> "Spread":
        """Of a leaf that rests in a layout on one rank of the pipeline; `degrees` are the sizes of all mesh axes."""
        dims = range(len(layout.stored))
        spread = Spread(list(layout.shard), [layout.axes_of(dim) for dim in dims])
        for dim, size in enumerate(layout.shape or (1,) * len(dims)):
            if layout.stored[dim] != size:
                spread._cut_padding(dim, size, layout.parts[dim])
        if not layout.shape and dims:
            spread._append(lambda x: x[0], [], [])
        spread._over_pipeline(rank, degrees[AXIS])
        for axis, size in degrees.items():
            if axis != AXIS and not any(axis in axes for axes in spread.axes):
                spread._own_slice(axis, size)
        return spread

    @property
    def spec(self) -> PartitionSpec:
        """How the whole leaf is split in the end."""
        return PartitionSpec(*(axes or None for axes in self.axes))

    def apply(self, part: jax.Array) -> jax.Array:
        """A device's part of the leaf, from what it has where the leaf rests on the leaf's rank.

        Communicates: over `pipe` one all-to-all, or one all-reduce where no dim divides; over the axes that split a padded dim
        one all-to-all, or one all-gather where no other dim divides.
        """
        for move in self.moves:
            part = move(part)
        return part

    def _cut_padding(self, dim: int, size: int, count: int) -> None:
        """The padding of one dim goes: its axes split another dim, or none."""
        over, other = self.axes[dim], self._divisible(count, but=dim)
        shape, axes = list(self.shape), list(self.axes)
        shape[dim], axes[dim] = size, ()
        cut = lambda x: jax.lax.slice_in_dim(x, 0, size, axis=dim)
        if other is None:
            self._append(lambda x: cut(gather_along(x, over, dim)), shape, axes)
            return
        shape[other], axes[other] = shape[other] // count, (*axes[other], *over)
        self._append(lambda x: cut(exchange_along(x, over, other, dim)), shape, axes)

    def _over_pipeline(self, rank: int, count: int) -> None:
        """Every rank of the pipeline gets a part of what one of them has, bit for bit; all of it where no dim divides."""
        if count == 1:
            return
        dim = self._divisible(count)
        if dim is None:
            self._append(lambda x: broadcast(x, AXIS, rank), self.shape, self.axes)
            return
        shape, axes = list(self.shape), list(self.axes)
        shape[dim], axes[dim] = shape[dim] // count, (*axes[dim], AXIS)
        self._append(lambda x: exchange_along(x[None], (AXIS,), dim + 1, 0)[rank], shape, axes)

    def _own_slice(self, axis: str, count: int) -> None:
        """A part each of what all ranks of an axis have."""
        dim = self._divisible(count)
        if count == 1 or dim is None:
            return
        shape, axes = list(self.shape), list(self.axes)
        shape[dim], axes[dim] = shape[dim] // count, (*axes[dim], axis)
        self._append(lambda x: own_slice(x, axis, dim), shape, axes)

    def _divisible(self, count: int, but: int | None = None) -> int | None:
        return next((d for d, n in enumerate(self.shape) if d != but and n and n % count == 0), None)

    def _append(self, move: Move, shape: list[int], axes: list[tuple[str, ...]]) -> None:
        self.moves.append(move)
        self.shape, self.axes = shape, axes
