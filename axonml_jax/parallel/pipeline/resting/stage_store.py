"""How the leaves of a tree rest on the ranks of a pipeline: per group one array, split over `pipe` and the group's axes.

A rank holds the leaves of its own stages behind each other, padded to the longest rank. Optimizers and users see trees.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax._types import PyTree
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.pipeline.resting.packing import BufferGroup, Buffers, Packing, Slot, slot_value
from axonml_jax.parallel.pipeline.resting.spreading import Spread
from axonml_jax.parallel.pipeline.resting.stage_buffers import StageBuffers, Stored
from axonml_jax.sharding.layout import Layout
from axonml_jax.sharding.memory import to_device_memory
from axonml_jax.sharding.place import to_host
from axonml_jax.sharding.stored import to_stored

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
    def groups(self) -> dict[str, BufferGroup]:
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

    def place(self, leaves: Iterable[Any], mesh: Mesh) -> Named:
        """The arrays that rest, from whole leaves: the same in every process, or split over devices in any way.

        Leaves are taken one after the other. No device ever holds more than its own part, and no process more than the parts
        of its devices and one leaf.
        """
        shapes = {name: shape.shape for name, shape in self.shapes().items()}
        places = {name: NamedSharding(mesh, spec) for name, spec in self.specs().items()}
        parts: dict[str, dict[int, np.ndarray]] = {}
        for name, group in self.groups.items():
            here = places[name].addressable_devices_indices_map(shapes[name]).values()
            parts[name] = {start: np.zeros(self.buffers.sizes[group], group.dtype) for start in map(_start, here)}
        for i, leaf in enumerate(leaves):
            self._fill(parts[group_name(self.slots[i].group)], i, to_host(leaf))
        return {
            # A copy: devices that hold the same part must not share this process's memory.
            name: jax.make_array_from_callback(
                shapes[name], places[name], lambda index, name=name: parts[name][_start(index)].copy()
            )
            for name in parts
        }

    def spread(self, named: Named, mesh: Mesh) -> list[jax.Array]:
        """Every leaf, of arrays over all ranks: split over as many devices as its dims divide by.

        Communicates: see `spreading.py`; no device ever holds more than the parts that come and go.
        """
        if mesh not in self._programs:
            self._programs[mesh] = self._spreading(mesh)
        return self._programs[mesh](named)

    @cached_property
    def _programs(self) -> dict[Mesh, Any]:
        return {}

    def _spreading(self, mesh: Mesh) -> Any:
        ways = [Spread.of(layout, self.rank_of(i), self.degrees) for i, layout in enumerate(self.layouts)]

        def local(named: Named) -> list[jax.Array]:
            buffers = self.grouped(named)
            parts = [slot_value(self.slots[i], buffers[self.slots[i].group]) for i in range(len(self.layouts))]
            return [way.apply(part) for way, part in zip(ways, parts, strict=True)]

        specs = [way.spec for way in ways]
        spread = jax.shard_map(local, mesh=mesh, in_specs=(self.specs(),), out_specs=specs, check_vma=False)
        return jax.jit(lambda named: spread(to_device_memory(named)))

    def _fill(self, parts: Mapping[int, np.ndarray], leaf: int, whole: Any) -> None:
        """Write a leaf into those of its group's parts that hold some of it; parts go by where they start."""
        slot, layout = self.slots[leaf], self.layouts[leaf]
        stored = np.asarray(to_stored(np.asarray(whole), layout))
        for start, part in parts.items():
            rank, *where = np.unravel_index(start // len(part) if len(part) else 0, self._grid(slot.group))
            if rank == self.rank_of(leaf):
                along = dict(zip(slot.group.axes, map(int, where), strict=True))
                part[slot.offset : slot.offset + slot.size] = _shard(stored, layout, along, self.degrees).reshape(-1)

    def _grid(self, group: BufferGroup) -> tuple[int, ...]:
        return (self.num_ranks, *(self.degrees[axis] for axis in group.axes))

    # On one rank, inside `shard_map`

    def unpack(self, buffers: Buffers, rank: int) -> dict[int, jax.Array]:
        """The rank's own leaves."""
        leaves = self.leaves_of_rank(rank)
        return dict(zip(leaves, Packing(tuple(self.slots[i] for i in leaves)).unpack(buffers), strict=True))

    def pack(self, values: Mapping[int, Any]) -> Buffers:
        """A rank's buffers, from its own leaves."""
        return Packing(tuple(self.slots[i] for i in values)).pack(list(values.values()), self.buffers.sizes)


def group_name(group: BufferGroup) -> str:
    """A group's name.

    >>> group_name(BufferGroup("float32")), group_name(BufferGroup("float32", ("fsdp",)))
    ('float32', 'float32 over fsdp')
    """
    return group.dtype + (f" over {' '.join(group.axes)}" if group.axes else "")


def _start(index: Any) -> int:
    """The first element of a part of a flat array."""
    return index[0].start or 0


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
