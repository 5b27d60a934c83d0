"""How the leaves of a tree rest on the ranks of a pipeline: per group one array, split over `pipe` and the group's axes.

A rank holds the leaves of its own stages behind each other, padded to the longest rank. Optimizers and users see trees.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax._types import PyTree
from axonml_jax.parallel.pipeline.packing import Buffers, Group, Packing, Slot
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.pipeline.stage_buffers import StageBuffers, Stored
from axonml_jax.sharding.layout import Layout
from axonml_jax.sharding.stored import from_stored, to_stored

Named = dict[str, Any]
"""A group's array by its name: what rests, and what optimizers and checkpoints hold."""


@dataclass(frozen=True)
class StageStore:
    """Where every leaf of a tree rests.

    Attributes:
      layouts: of every leaf, in tree order, along the other axes than the pipeline's.
      stages: of every leaf.
      num_stages, num_ranks: S*V and S.
      degrees: size of every mesh axis.
      frozen: whether the leaves have no gradient.
    """

    layouts: tuple[Layout, ...]
    stages: tuple[int, ...]
    num_stages: int
    num_ranks: int
    degrees: Mapping[str, int]
    frozen: bool = False

    @cached_property
    def buffers(self) -> StageBuffers:
        """The layout of a rank's buffers."""
        trees = [[self.stored(i) for i in self.leaves_of_stage(p)] for p in range(self.num_stages)]
        return StageBuffers.of(trees, self.num_ranks)

    @cached_property
    def slots(self) -> dict[int, Slot]:
        """Where every leaf lies on its rank."""
        packings = self.buffers.packings
        own = [(self.leaves_of_stage(p), packings[p].slots) for p in range(self.num_stages)]
        return {i: slot for leaves, slots in own for i, slot in zip(leaves, slots, strict=True)}

    def stored(self, leaf: int) -> Stored:
        """A leaf as one rank holds it."""
        layout = self.layouts[leaf]
        return Stored(layout.shard, layout.dtype, layout.axes, self.frozen)

    def leaves_of_stage(self, stage: int) -> list[int]:
        """The leaves that live on a stage."""
        return [i for i, p in enumerate(self.stages) if p == stage]

    def leaves_of_rank(self, rank: int) -> list[int]:
        """The leaves that live on a rank."""
        return [i for i, p in enumerate(self.stages) if p % self.num_ranks == rank]

    def rank_of(self, leaf: int) -> int:
        """The rank of a leaf."""
        return self.stages[leaf] % self.num_ranks

    # Names, and the whole arrays over all ranks

    @property
    def groups(self) -> dict[str, Group]:
        """Every group by its name."""
        return {group_name(group): group for group in self.buffers.sizes}

    def specs(self) -> dict[str, PartitionSpec]:
        """The PartitionSpec of every group's array."""
        return {name: PartitionSpec((AXIS, *group.axes)) for name, group in self.groups.items()}

    def shapes(self) -> Named:
        """Shape and dtype of every group's array over all ranks."""
        sizes = self.buffers.sizes
        return {
            name: jax.ShapeDtypeStruct((math.prod(self._grid(group)) * sizes[group],), group.dtype)
            for name, group in self.groups.items()
        }

    def named(self, buffers: Buffers) -> Named:
        """Buffers by name."""
        return {group_name(group): buffer for group, buffer in buffers.items()}

    def grouped(self, named: Named) -> Buffers:
        """Buffers by group. The inverse of `named`."""
        return {group: named[name] for name, group in self.groups.items()}

    def place(self, leaves: Sequence[Any], mesh: Mesh) -> Named:
        """The arrays that rest, from whole leaves in this process's memory (the same in every process).

        No device ever holds more than its own part.
        """
        sizes = self.buffers.sizes
        stored = {i: np.asarray(to_stored(np.asarray(leaf), self.layouts[i])) for i, leaf in enumerate(leaves)}

        def array(name: str, group: Group, shape: Any, spec: PartitionSpec) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                number = (index[0].start or 0) // sizes[group] if sizes[group] else 0
                return self._rank_buffer(group, np.unravel_index(number, self._grid(group)), stored)

            return jax.make_array_from_callback(shape.shape, NamedSharding(mesh, spec), part)

        groups, specs, shapes = self.groups, self.specs(), self.shapes()
        return {name: array(name, groups[name], shapes[name], specs[name]) for name in groups}

    def whole(self, named: Named) -> list[Any]:
        """Every leaf, whole; of arrays over all ranks, NumPy's or JAX's."""
        return [self._join(i, named) for i in range(len(self.layouts))]

    def _rank_buffer(self, group: Group, where: Sequence[Any], stored: Mapping[int, np.ndarray]) -> np.ndarray:
        rank, along = int(where[0]), dict(zip(group.axes, map(int, where[1:]), strict=True))
        buffer = np.zeros(self.buffers.sizes[group], group.dtype)
        for i in self.leaves_of_rank(rank):
            if (slot := self.slots[i]).group == group:
                own = _shard(stored[i], self.layouts[i], along, self.degrees)
                buffer[slot.offset : slot.offset + slot.size] = own.reshape(-1)
        return buffer

    def _join(self, leaf: int, named: Named) -> Any:
        slot, layout = self.slots[leaf], self.layouts[leaf]
        axes = slot.group.axes
        grid = named[group_name(slot.group)].reshape(*self._grid(slot.group), -1)
        parts = grid[self.rank_of(leaf)][..., slot.offset : slot.offset + slot.size]
        parts = parts.reshape(*(self.degrees[axis] for axis in axes), *layout.shard)
        order: list[int] = []
        for dim in range(len(layout.shard)):
            order += [axes.index(axis) for axis in layout.axes_of(dim)] + [len(axes) + dim]
        return from_stored(parts.transpose(order).reshape(layout.stored), layout)

    def _grid(self, group: Group) -> tuple[int, ...]:
        return (self.num_ranks, *(self.degrees[axis] for axis in group.axes))

    # On one rank, inside `shard_map`

    def unpack(self, buffers: Buffers, rank: int) -> dict[int, jax.Array]:
        """The rank's own leaves."""
        leaves = self.leaves_of_rank(rank)
        return dict(zip(leaves, Packing(tuple(self.slots[i] for i in leaves)).unpack(buffers), strict=True))

    def pack(self, values: Mapping[int, Any]) -> Buffers:
        """A rank's buffers, from its own leaves."""
        return Packing(tuple(self.slots[i] for i in values)).pack(list(values.values()), self.buffers.sizes)


def group_name(group: Group) -> str:
    """A group's name.

    >>> group_name(Group("float32")), group_name(Group("float32", ("fsdp",)))
    ('float32', 'float32 over fsdp')
    """
    return group.dtype + (f" over {' '.join(group.axes)}" if group.axes else "")


def _shard(stored: np.ndarray, layout: Layout, along: Mapping[str, int], degrees: Mapping[str, int]) -> np.ndarray:
    """The part of a stored array that the rank at these places of the axes holds."""
    index = []
    for dim, size in enumerate(layout.shard):
        place = 0
        for axis in layout.axes_of(dim):
            place = place * degrees[axis] + along[axis]
        index.append(slice(place * size, (place + 1) * size))
    return stored[tuple(index)]


def on_own_rank(index: Any, num_ranks: int, run: Callable[[int], PyTree]) -> PyTree:
    """`run(rank)` of the rank that this is; ranks run different programs that return the same types."""
    if num_ranks == 1:
        return run(0)
    return jax.lax.switch(index, [lambda rank=rank: run(rank) for rank in range(num_ranks)])


def absent(leaf: Any) -> jax.Array:
    """What stands for a leaf that lives on another rank: an array of its dims without elements."""
    return jnp.zeros((0, *leaf.shape[1:]), leaf.dtype)
