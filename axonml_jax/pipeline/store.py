"""How parameters rest on the ranks of a pipeline, and how they are brought from there to all devices."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.collectives.collectives import broadcast
from axonml_jax.collectives.gradients import own_slice
from axonml_jax.collectives.primitives import exchange_along, gather_along
from axonml_jax.pipeline.assign import Assignment, Stack
from axonml_jax.pipeline.pack import BufferGroup, Buffers, Packing, Slot, StageBuffers, Stored, slot_value
from axonml_jax.pipeline.schedules import AXIS, Pipelined
from axonml_jax.sharding.layout import Layout, in_window, is_layout, to_device_memory, to_host, to_stored

# --------------------------------------------------------------------------------------------------
# A leaf that rests on one rank of a pipeline, brought to all devices: split over as many of them as its dims divide by.
#
# Every movement is a collective that is written here. XLA's partitioner, left to find them, gathers whole leaves
# everywhere ("Involuntary full rematerialization").
# --------------------------------------------------------------------------------------------------

Move = Callable[[jax.Array], jax.Array]


@dataclass
class Spread:
    """The moves that bring a leaf from one rank of the pipeline to all devices, split over as many as its dims divide by.

    Attributes:
      shape: what a device holds in the end.
      axes: the mesh axes that split each dim in the end, outermost first.
      moves: what is done with the part that rests, one after the other, inside `shard_map`.
    """

    shape: list[int]
    axes: list[tuple[str, ...]]
    moves: list[Move] = field(default_factory=list)

    @staticmethod
    def of(layout: Layout, rank: int | None, degrees: Mapping[str, int], chunks: int = 1) -> "Spread":
        """The moves of a leaf that rests in a layout.

        Args:
          layout: the leaf's.
          rank: the rank of the pipeline that has it; None: every rank has the rows of its stages (see `StageStore`).
          degrees: the sizes of all mesh axes.
          chunks: stages per rank.
        """
        dims = range(len(layout.stored))
        spread = Spread(list(layout.shard), [layout.axes_of(dim) for dim in dims])
        if rank is None and chunks > 1:
            whole = [dim for dim, size in enumerate(layout.shape) if layout.stored[dim] == size]
            spread._order_rows(chunks, degrees[AXIS], whole)
        scalars = len(layout.stored) - len(layout.shape)  # they rest as one element per rank
        for dim, size in enumerate((*layout.shape, *[1] * scalars)):
            if layout.stored[dim] != size:
                spread._cut_padding(dim, size, layout.parts[dim])
        if scalars:
            spread._append(lambda x: x[..., 0], spread.shape[:-1], spread.axes[:-1])
        if rank is not None:
            spread._over_pipeline(rank, degrees[AXIS])
        for axis, size in degrees.items():
            if axis != AXIS and not any(axis in axes for axes in spread.axes):
                spread._own_slice(axis, size)
        return spread

    @property
    def spec(self) -> PartitionSpec:
        """The spec of the whole leaf after all moves."""
        return PartitionSpec(*(axes or None for axes in self.axes))

    def apply(self, part: jax.Array) -> jax.Array:
        """Runs the moves on a device's part, inside `shard_map`.

        Communicates: over `pipe` one all-to-all, or one all-reduce where no dim divides; over the axes that split a padded dim
        one all-to-all, or one all-gather where no other dim divides.
        """
        for move in self.moves:
            part = move(part)
        return part

    def _cut_padding(self, dim: int, size: int, count: int) -> None:
        """Cuts the padding of a dim; the axes that split it split another one then, or none."""
        over, other = self.axes[dim], self._divisible(count, but=dim)
        shape, axes = list(self.shape), list(self.axes)
        shape[dim], axes[dim] = size, ()
        cut = lambda x: jax.lax.slice_in_dim(x, 0, size, axis=dim)
        if other is None:
            self._append(lambda x: cut(gather_along(x, over, dim)), shape, axes)
            return
        shape[other], axes[other] = shape[other] // count, (*axes[other], *over)
        self._append(lambda x: cut(exchange_along(x, over, other, dim)), shape, axes)

    def _order_rows(self, chunks: int, count: int, whole: Sequence[int]) -> None:
        """Puts rows that lie rank by rank into the model's order; their ranks split another dim then, or none."""
        shape, axes = list(self.shape), list(self.axes)
        shape[0], axes[0] = shape[0] * count, ()
        ordered = lambda x: _regrouped(x, count, chunks)
        other = next((d for d in whole if d and self.shape[d] and self.shape[d] % count == 0), None)
        if other is None:
            self._append(lambda x: ordered(gather_along(x, (AXIS,), 0)), shape, axes)
            return
        shape[other], axes[other] = shape[other] // count, (*axes[other], AXIS)
        self._append(lambda x: ordered(exchange_along(x, (AXIS,), other, 0)), shape, axes)

    def _over_pipeline(self, rank: int, count: int) -> None:
        """Gives every rank of the pipeline a part of what one of them has, bit for bit; all of it if no dim divides."""
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
        """Cuts each rank's part out of what all ranks of an axis have."""
        dim = self._divisible(count)
        if count == 1 or dim is None:
            return
        shape, axes = list(self.shape), list(self.axes)
        shape[dim], axes[dim] = shape[dim] // count, (*axes[dim], axis)
        self._append(lambda x: own_slice(x, axis, dim), shape, axes)

    def _divisible(self, count: int, but: int | None = None) -> int | None:
        dims = sorted(range(len(self.shape)), key=lambda d: in_window(d, len(self.shape)))
        return next((d for d in dims if d != but and self.shape[d] and self.shape[d] % count == 0), None)

    def _append(self, move: Move, shape: list[int], axes: list[tuple[str, ...]]) -> None:
        self.moves.append(move)
        self.shape, self.axes = shape, axes


# --------------------------------------------------------------------------------------------------
# How the leaves of a tree rest on the ranks of a pipeline: per group one array, split over `pipe` and the group's axes.
#
# A rank holds the leaves of its own stages behind each other, padded to the longest rank. Optimizers and users see
# trees.
# --------------------------------------------------------------------------------------------------

Named = dict[str, Any]
"""The arrays of groups by their names: the form in which they rest, and that optimizers and checkpoints hold."""


@dataclass(frozen=True)
class StageStore:
    """The buffers in which the leaves of a tree rest on the ranks of a pipeline.

    Attributes:
      layouts: the layout of every leaf, in tree order: along the other axes than the pipeline's, and of a stack along that too.
      stages: the stage of every leaf; None: it is a stack, and every rank has the rows of its stages, one after the other.
      num_stages, num_ranks: S*V and S.
      degrees: size of every mesh axis.
      frozen: whether the leaves have no gradient.
      numbers: the number of every leaf's group; empty: all 0.
    """

    layouts: tuple[Layout, ...]
    stages: tuple[int | None, ...]
    num_stages: int
    num_ranks: int
    degrees: Mapping[str, int]
    frozen: bool = False
    numbers: tuple[int, ...] = ()

    @cached_property
    def buffers(self) -> StageBuffers:
        """The layout of a rank's buffers."""
        trees = [[self.stored(i) for i in leaves] for leaves in self.leaves_of_stages]
        return StageBuffers.of(trees, self.num_ranks)

    @cached_property
    def slots(self) -> dict[int, Slot]:
        """The slot of every leaf on its rank."""
        own = zip(self.leaves_of_stages, self.buffers.packings, strict=True)
        return {i: slot for leaves, packing in own for i, slot in zip(leaves, packing.slots, strict=True)}

    def stored(self, leaf: int) -> Stored:
        """A leaf as one rank holds it."""
        layout = self.layouts[leaf]
        number, rows = self.numbers[leaf] if self.numbers else 0, self.stages[leaf] is None
        axes = tuple(axis for axis in layout.axes if axis != AXIS) if rows else layout.axes
        return Stored(layout.shard, layout.dtype, axes, self.frozen, number=number, rows=rows)

    @cached_property
    def leaves_of_stages(self) -> list[list[int]]:
        """The leaves that live on each stage; a stack's part counts to the first stage of every rank."""
        found: list[list[int]] = [[] for _ in range(self.num_stages)]
        for i, stage in enumerate(self.stages):
            for each in range(self.num_ranks) if stage is None else (stage,):
                found[each] += [i]
        return found

    def leaves_of_rank(self, rank: int) -> list[int]:
        """The leaves that live on a rank."""
        return [i for i, stage in enumerate(self.stages) if stage is None or stage % self.num_ranks == rank]

    def rank_of(self, leaf: int) -> int | None:
        """The rank of a leaf; None: it is a stack, of which every rank has a part."""
        stage = self.stages[leaf]
        return None if stage is None else stage % self.num_ranks

    # The rows of a stack, [L, ...]: in the model's order, or rank by rank, each rank's in the order of its stages

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.num_stages // self.num_ranks

    def by_rank(self, whole: Any, leaf: int) -> Any:
        """A whole leaf with the rows of a stack rank by rank."""
        return whole if self.stages[leaf] is not None else _regrouped(whole, self.chunks, self.num_ranks)

    def in_order(self, whole: Any, leaf: int) -> Any:
        """The inverse of `by_rank`."""
        return whole if self.stages[leaf] is not None else _regrouped(whole, self.num_ranks, self.chunks)

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
        """Buffers by the names of their groups."""
        return {group_name(group): buffer for group, buffer in buffers.items()}

    def grouped(self, named: Named) -> Buffers:
        """Buffers by group. The inverse of `named`."""
        return {group: named[name] for name, group in self.groups.items()}

    def place(self, leaves: Iterable[Any], mesh: Mesh) -> Named:
        """Packs full leaves into the resting arrays; they are the same in every process, or split over devices in any way.

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
        """Unpacks every leaf from the resting arrays, split over as many devices as its dims divide by.

        Communicates: see `Spread.apply`; no device ever holds more than the parts that come and go.
        """
        if mesh not in self._programs:
            self._programs[mesh] = self._spreading(mesh)
        return self._programs[mesh](named)

    @cached_property
    def _programs(self) -> dict[Mesh, Any]:
        return {}

    def _spreading(self, mesh: Mesh) -> Any:
        ways = [Spread.of(layout, self.rank_of(i), self.degrees, self.chunks) for i, layout in enumerate(self.layouts)]

        def local(named: Named) -> list[jax.Array]:
            buffers = self.grouped(named)
            parts = [slot_value(self.slots[i], buffers[self.slots[i].group]) for i in range(len(self.layouts))]
            return [way.apply(part) for way, part in zip(ways, parts, strict=True)]

        specs = [way.spec for way in ways]
        spread = jax.shard_map(local, mesh=mesh, in_specs=(self.specs(),), out_specs=specs, check_vma=False)
        return jax.jit(lambda named: spread(to_device_memory(named)))

    def _fill(self, parts: Mapping[int, np.ndarray], leaf: int, whole: Any) -> None:
        """Writes a leaf into those parts of its group that hold some of it; parts are known by where they start."""
        slot, layout = self.slots[leaf], self.layouts[leaf]
        stored = np.asarray(to_stored(self.by_rank(np.asarray(whole), leaf), layout))
        for start, part in parts.items():
            rank, *where = np.unravel_index(start // len(part) if len(part) else 0, self._grid(slot.group))
            if self.rank_of(leaf) in (None, rank):
                along = dict(zip(slot.group.axes, map(int, where), strict=True)) | {AXIS: int(rank)}
                part[slot.offset : slot.offset + slot.size] = _shard(stored, layout, along, self.degrees).reshape(-1)

    def _grid(self, group: BufferGroup) -> tuple[int, ...]:
        return (self.num_ranks, *(self.degrees[axis] for axis in group.axes))

    # On one rank, inside `shard_map`

    def unpack(self, buffers: Buffers, rank: int) -> dict[int, jax.Array]:
        """Unpacks a rank's own leaves, by position."""
        leaves = self.leaves_of_rank(rank)
        return dict(zip(leaves, Packing(tuple(self.slots[i] for i in leaves)).unpack(buffers), strict=True))

    def pack(self, values: Mapping[int, Any]) -> Buffers:
        """Packs a rank's own leaves into its buffers."""
        return Packing(tuple(self.slots[i] for i in values)).pack(list(values.values()), self.buffers.sizes)


def group_name(group: BufferGroup) -> str:
    """The name of a group.

    >>> group_name(BufferGroup("float32")), group_name(BufferGroup("float32", ("fsdp",)))
    ('float32', 'float32 over fsdp')
    """
    over = f" over {' '.join(group.axes)}" if group.axes else ""
    return group.dtype + " in rows" * group.rows + over + (f" ({group.number})" if group.number else "")


def _regrouped(x: Any, outer: int, inner: int) -> Any:
    """An array [outer * inner * n, ...] with its blocks of n rows in the order of [inner, outer]."""
    if 1 in (outer, inner):
        return x
    blocks = x.reshape(outer, inner, -1, *x.shape[1:])
    return blocks.swapaxes(0, 1).reshape(x.shape)


def _start(index: Any) -> int:
    """The first element of a part of a flat array."""
    return index[0].start or 0


def _shard(stored: np.ndarray, layout: Layout, along: Mapping[str, int], degrees: Mapping[str, int]) -> np.ndarray:
    """The part of a stored array on the rank with these positions along the axes."""
    index = []
    for dim, size in enumerate(layout.shard):
        place = 0
        for axis in layout.axes_of(dim):
            place = place * degrees[axis] + along[axis]
        index.append(slice(place * size, (place + 1) * size))
    return stored[tuple(index)]


# --------------------------------------------------------------------------------------------------
# A pipelined plan bound to a model: on which stage each parameter lives and how all of them rest.
# --------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """What a stage reads as one: a parameter, or one row of a stack of them.

    Attributes:
      name: its path; a row's has the row's number behind the stack's path.
      leaf: the parameter's position, trained ones first.
      row: the row's number; None: it is the whole parameter.
      stage: where it lives.
      layout: how it is split over the other axes than the pipeline's.
      frozen: whether it has no gradient.
    """

    name: str
    leaf: int
    row: int | None
    stage: int
    layout: Layout
    frozen: bool


@dataclass(frozen=True)
class Staging:
    """The stages of one model's parameters, and the buffers in which they rest.

    Attributes:
      policy: the schedule and its options.
      assignment: the stages of all parameters, trained ones first.
      params, frozen: how trained and frozen parameters rest.
      names: the names of all parameters, trained ones first.
      treedefs: the structures of both trees.
    """

    policy: Pipelined
    assignment: Assignment
    params: StageStore
    frozen: StageStore
    names: tuple[str, ...]
    treedefs: tuple[Any, Any]

    @classmethod
    def of(
        cls, policy: Pipelined, assignment: Assignment, params: PyTree, frozen: PyTree, degrees: Mapping[str, int]
    ) -> "Staging":
        """Binds an assignment to stages to the layouts of the parameters.

        Args:
          policy: the plan's.
          assignment: the stages of all parameters, trained ones first.
          params, frozen: trees of layouts.
          degrees: size of every mesh axis.
        """
        num_ranks = degrees[AXIS]
        flat = [jax.tree.flatten(tree, is_leaf=is_layout) for tree in (params, frozen)]
        count, num_stages = len(flat[0][0]), policy.num_stages(num_ranks)
        sizes = (num_stages, num_ranks, degrees)
        stores = (
            StageStore(tuple(flat[0][0]), assignment.stages[:count], *sizes),
            StageStore(tuple(flat[1][0]), assignment.stages[count:], *sizes, frozen=True),
        )
        names = (*_names(params), *_names(frozen))
        return cls(policy, assignment, *stores, names, (flat[0][1], flat[1][1]))

    @property
    def num_ranks(self) -> int:
        """S, the ranks of the pipeline."""
        return self.params.num_ranks

    @property
    def num_stages(self) -> int:
        """S*V, the stages of the model."""
        return self.params.num_stages

    @property
    def stack(self) -> Stack | None:
        """The blocks that are divided row by row; None: there are none."""
        return self.assignment.stack

    @property
    def rows_per_stage(self) -> int:
        """How many rows of a stack every stage has; 0: there is none."""
        return self.stack.rows // self.num_stages if self.stack is not None else 0

    @cached_property
    def weights(self) -> list[Weight]:
        """What stages read, parameter by parameter, trained ones first, and of a stack row by row."""
        found, count = [], len(self.params.layouts)
        layouts = (*self.params.layouts, *self.frozen.layouts)
        for leaf, (name, layout, stage) in enumerate(zip(self.names, layouts, self.assignment.stages, strict=True)):
            if stage is not None:
                found.append(Weight(name, leaf, None, stage, layout, leaf >= count))
                continue
            assert self.stack is not None
            own = layout.row()
            for row in range(self.stack.rows):
                place = row // self.rows_per_stage
                found.append(Weight(self.stack.row_name(name, row), leaf, row, place, own, leaf >= count))
        return found

    @cached_property
    def begins(self) -> Sequence[Sequence[int]] | None:
        """For every stage but the first the weights (positions) whose first use begins it; None: marks say where."""
        if self.stack is None:
            return self.assignment.begins
        firsts = [stage * self.rows_per_stage for stage in range(1, self.num_stages)]
        return [[i for i, weight in enumerate(self.weights) if weight.row == first] for first in firsts]

    def slots(self, rank: int) -> dict[int, Slot]:
        """The slots in which the weights (positions) of a rank rest."""
        found, count = {}, len(self.params.layouts)
        for i, (_, leaf, row, stage, layout, frozen) in enumerate(self.weights):
            if stage % self.num_ranks != rank:
                continue
            slot = self.frozen.slots[leaf - count] if frozen else self.params.slots[leaf]
            if row is not None:
                place = stage // self.num_ranks * self.rows_per_stage + row % self.rows_per_stage
                size = math.prod(layout.shard)
                slot = slot._replace(offset=slot.offset + place * size, shape=layout.shard)
            found[i] = slot
        return found

    def place_params(self, params: PyTree, mesh: Mesh) -> Named:
        """Packs full trained parameters in this process's memory into the resting arrays."""
        return self.params.place(jax.tree.leaves(params), mesh)

    def place_frozen(self, frozen: PyTree, mesh: Mesh) -> Named:
        """Packs full frozen parameters in this process's memory into the resting arrays."""
        return self.frozen.place(jax.tree.leaves(frozen), mesh)

    def spread_params(self, named: Named, mesh: Mesh) -> PyTree:
        """Unpacks trained parameters, or their gradients, into the model's tree, split over all devices."""
        return self.treedefs[0].unflatten(self.params.spread(named, mesh))

    def spread_frozen(self, named: Named, mesh: Mesh) -> PyTree:
        """Unpacks frozen parameters into the model's tree, split over all devices."""
        return self.treedefs[1].unflatten(self.frozen.spread(named, mesh))

    def parts(self, named: Named) -> Iterator[tuple[jax.Array, Any, tuple[str, ...]]]:
        """Every buffer of trained parameters or their gradients, its dtype, and the axes that split it."""
        for name, group in sorted(self.params.groups.items()):
            yield named[name], group.dtype, (AXIS, *group.axes)

    def resting(self, params: Named, frozen: Named) -> Buffers:
        """This rank's buffers of trained and frozen parameters, by group."""
        return self.params.grouped(params) | self.frozen.grouped(frozen)


def _names(tree: PyTree) -> Sequence[str]:
    return list(named_leaves(jax.tree.map(lambda _: 0, tree, is_leaf=is_layout)))
