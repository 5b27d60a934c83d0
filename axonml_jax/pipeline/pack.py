"""Arrays of unlike stages packed in flat buffers by dtype and axes, the buffers of a rank's stages, and leaves they share."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from axonml_jax.base import PyTree
from axonml_jax.collectives.primitives import axis_index, sum_over, types_are_checked, vary, vary_like
from axonml_jax.compat.order import together
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.sharding.batch import BatchLayout

# --------------------------------------------------------------------------------------------------
# Arrays of which a dim is split over an axis that is left to XLA's partitioner, as rows of a buffer: a row for each
# rank.
#
# A flat buffer of such arrays would be whole on every rank of the axis: flat, the parts of a dim lie between each
# other. Which dim is split is a guess from its size, since the partitioner decides it after everything is traced. Where
# the guess is wrong the partitioner sends what it must to store an array so; numbers are the same.
# --------------------------------------------------------------------------------------------------


class PartRanks(NamedTuple):
    """The ranks of an axis, each of which has one row of a buffer in parts.

    Attributes:
      axis: the mesh axis.
      count: how many.
    """

    axis: str
    count: int


@dataclass(frozen=True)
class PositionParts:
    """Guesses from sizes which dim of an array holds positions, which an axis left to XLA's partitioner splits.

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
        """Finds the dims of positions from the shapes of a microbatch's leaves by path.

        Returns:
          None where no axis that splits positions is left to XLA's partitioner.
        """
        rules = {axis: rule for axis, rule in layout.positions if axis in layout.automatic and layout.size((axis,)) > 1}
        if not rules:
            return None
        ((axis, rule),) = rules.items()
        count = layout.size((axis,))
        dims = ((shape, rule(name, shape)) for name, shape in shapes.items() if shape)
        lengths = {shape[dim] for shape, dim in dims if dim is not None and shape[dim] % count == 0}
        return cls(PartRanks(axis, count), tuple(sorted(lengths)))

    def dim_of(self, shape: tuple[int, ...]) -> int | None:
        """The dim of an array that is as long as the sequences, or shorter by fewer positions than ranks, as after a shift.

        None where there is none. Rows come first, so dim 0 is taken last.
        """
        count = self.parts.count
        near = lambda size: any(length - count < size <= length for length in self.lengths)
        dims = [dim for dim, size in enumerate(shape) if size >= count and near(size)]
        return next((dim for dim in dims if dim), dims[0] if dims else None)


def row_size(shape: tuple[int, ...], dim: int, count: int) -> int:
    """Elements of one part, of `count`, of an array that is split along `dim`; the last part may be padded."""
    return math.prod(size for d, size in enumerate(shape) if d != dim) * -(-shape[dim] // count)


def apart(x: jax.Array, dim: int, parts: PartRanks) -> jax.Array:
    """Splits a dim into a row for each rank, the last one padded with zeros: [..., s, ...] -> [N, n]."""
    size, each = x.shape[dim], -(-x.shape[dim] // parts.count)
    if more := each * parts.count - size:
        x = jnp.pad(x, [(0, more if d == dim else 0) for d in range(x.ndim)])
    cut = x.reshape(*x.shape[:dim], parts.count, each, *x.shape[dim + 1 :])
    rows = split_over(jnp.moveaxis(cut, dim, 0), parts.axis)
    return rows.reshape(parts.count, math.prod(rows.shape[1:]))


def reassembled(rows: jax.Array, shape: tuple[int, ...], dim: int, parts: PartRanks) -> jax.Array:
    """Joins rows [N, n] to the array; the inverse of `apart`."""
    each = -(-shape[dim] // parts.count)
    cut = split_over(rows.reshape(parts.count, *shape[:dim], each, *shape[dim + 1 :]), parts.axis)
    whole = jnp.moveaxis(cut, 0, dim).reshape(*shape[:dim], parts.count * each, *shape[dim + 1 :])
    return jax.lax.slice_in_dim(whole, 0, shape[dim], axis=dim)


def split_over(x: jax.Array, axis: str) -> jax.Array:
    """Constrains dim 0 of x to be split over an axis that is left to the partitioner."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axis))


def on_every_rank(x: Any) -> Any:
    """Constrains x to be replicated over the axes that are left to the partitioner; random keys stay as they are."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.lax.with_sharding_constraint(x, PartitionSpec())


# --------------------------------------------------------------------------------------------------
# Several arrays in one flat buffer per (dtype, axes they vary over): what lets unlike stages share one program.
#
# All ranks run the same program, so what stages hold, send and keep must have one shape on all of them, however
# different their arrays are. Concatenating arrays joins the axes they vary over, so those that vary over other axes
# stay apart; so do those of which XLA's partitioner splits a dim (`apart`).
# --------------------------------------------------------------------------------------------------


class BufferGroup(NamedTuple):
    """The common properties of the arrays in one buffer.

    Attributes:
      dtype: numpy's name.
      axes: the mesh axes over which they vary, sorted.
      frozen: whether they are parameters without a gradient.
      parts: the ranks among which a dim of each is split by XLA's partitioner, the buffer's dim before the last; (): it is not.
      number: tells buffers apart whose arrays have the rest in common.
      rows: whether they are rows of stacks, of which all ranks have as many, at the same places.
    """

    dtype: str
    axes: tuple[str, ...] = ()
    frozen: bool = False
    parts: PartRanks | tuple[()] = ()
    number: int = 0
    rows: bool = False

    def shape(self, size: int) -> tuple[int, ...]:
        """The shape of a buffer of `size` elements (per part)."""
        return (self.parts.count, size) if self.parts else (size,)


Buffers = dict[BufferGroup, jax.Array]
"""A flat array per group, [n], or one per group and slot, [slots, n]; [N, n] and [slots, N, n] of groups in N parts."""

Sizes = Mapping[BufferGroup, int]
"""Elements per group, or per part of one."""


class Slot(NamedTuple):
    """The place of one array in a buffer.

    Attributes:
      group: the group of its buffer.
      offset: at which element it begins.
      shape: the shape of the array; for a key array, of its data.
      key_impl: which random generator's keys these are; None: they are no keys.
      place: the offset as a value of the running program, by which the array is read and written; None: a constant.
      dim: in a group in parts, the dim of the array that is split.
    """

    group: BufferGroup
    offset: int
    shape: tuple[int, ...]
    key_impl: Any = None
    place: Any = None
    dim: int = 0

    @property
    def size(self) -> int:
        """Elements, or those of one part."""
        parts = self.group.parts
        return row_size(self.shape, self.dim, parts.count) if parts else math.prod(self.shape)

    def flat(self, data: jax.Array) -> jax.Array:
        """Flattens the array as it lies in its buffer: [n], or [N, n]."""
        return apart(data, self.dim, self.group.parts) if self.group.parts else jnp.ravel(data)

    def opened(self, flat: jax.Array) -> jax.Array:
        """The inverse of `flat`; leading dims of size 1 are allowed."""
        if not (parts := self.group.parts):
            return flat.reshape(self.shape)
        return reassembled(flat.reshape(parts.count, self.size), self.shape, self.dim, parts)


@dataclass(frozen=True)
class Packing:
    """The slots of several arrays.

    >>> packing = Packing.of([jnp.zeros((2, 3), "float32"), jnp.zeros(4, "int32"), jnp.ones((), "float32")])
    >>> packing.sizes[BufferGroup("float32")], [slot.offset for slot in packing.slots]
    (7, [0, 0, 6])
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(
        cls, arrays: Iterable[Any], axis: str | None = None, split: tuple[PartRanks, Sequence[int | None]] | None = None
    ) -> "Packing":
        """Places one array behind the other, each in the group of its dtype, its varying axes and its parts.

        Args:
          arrays: arrays or abstract values, of which only shape, dtype and varying axes are read.
          axis: a mesh axis over which they are all to vary; without a meaning where types are not checked.
          split: in which parts, and the dim of each array that is split so, or None; None: none is.
        """
        slots, ends = [], {}
        more = {axis} if axis is not None and types_are_checked(axis) else frozenset()
        for i, array in enumerate(arrays):
            data, key_impl = data_of(array.dtype, array.shape)
            dim = None if split is None or key_impl is not None else split[1][i]
            group = BufferGroup(jnp.dtype(data.dtype).name, tuple(sorted(varying_axes(array) | more)))
            if split is not None and dim is not None:
                group = group._replace(parts=split[0])
            slots.append(Slot(group, ends.get(group, 0), data.shape, key_impl, dim=dim or 0))
            ends[group] = slots[-1].offset + slots[-1].size
        return cls(tuple(slots))

    @cached_property
    def sizes(self) -> dict[BufferGroup, int]:
        """The size of each group's buffer: where its last array ends."""
        return largest({slot.group: slot.offset + slot.size} for slot in self.slots)

    def at(self, places: Mapping[int, Any]) -> "Packing":
        """The same slots, with offsets as values of the running program where `places` has them."""
        return Packing(tuple(slot._replace(place=places.get(slot.offset)) for slot in self.slots))

    def pack(self, arrays: Sequence[Any], sizes: Sizes) -> Buffers:
        """Packs the arrays into buffers of these sizes, with zeros elsewhere."""
        pieces: dict[BufferGroup, list[Any]] = {group: [] for group in sizes}
        ends = dict.fromkeys(sizes, 0)
        # By size too: an array without elements begins where the next one does, and could come behind it.
        for slot, array in sorted(
            zip(self.slots, arrays, strict=True), key=lambda pair: (pair[0].offset, pair[0].size)
        ):
            gap = slot.offset - ends[slot.group]
            pieces[slot.group] += [_group_zeros(slot.group, gap)] * (gap > 0) + [slot.flat(_data(array)[0])]
            ends[slot.group] = slot.offset + slot.size
        for group, size in sizes.items():
            pieces[group] += [_group_zeros(group, size - ends[group])] * (size > ends[group])
        return {group: jnp.concatenate(vary(these, group.axes), axis=-1) for group, these in pieces.items()}

    def unpack(self, buffers: Buffers, row: ArrayLike | None = None) -> list[jax.Array]:
        """Unpacks the arrays from flat buffers, or from one row of buffers with slots."""
        return [slot_value(slot, buffers[slot.group], row) for slot in self.slots]

    def write(self, buffers: Buffers, arrays: Sequence[Any]) -> Buffers:
        """Writes the arrays into flat buffers at their places."""
        return self._changed(buffers, arrays, lambda old, value: value)

    def add(self, buffers: Buffers, arrays: Sequence[Any]) -> Buffers:
        """Adds the arrays to flat buffers at their places, the last one first, as a backward makes its gradients."""
        # Apart from the write: one fusion that reads and writes a part of a buffer writes all of it on CPU.
        backwards = replace(self, slots=self.slots[::-1])
        return backwards._changed(buffers, arrays[::-1], lambda old, value: together(old + value))

    def store(self, buffers: Buffers, arrays: Sequence[Any], row: ArrayLike) -> Buffers:
        """Writes the arrays into one row of buffers with slots, [slots, n]."""
        buffers = dict(buffers)
        for group in {slot.group: None for slot in self.slots}:
            own = [
                (slot, _data(array)[0]) for slot, array in zip(self.slots, arrays, strict=True) if slot.group == group
            ]
            # All at once, so that XLA does not compute what makes an array again in the loop that stores it.
            values = together([value for _, value in own])
            for (slot, _), value in zip(own, values, strict=True):
                flat = vary_like(slot.flat(value), buffers[group])
                at = _row_start(slot, row)
                buffers[group] = jax.lax.dynamic_update_slice(
                    buffers[group], flat[None], at, allow_negative_indices=False
                )
        return buffers

    def _changed(self, buffers: Buffers, arrays: Sequence[Any], change) -> Buffers:
        buffers = dict(buffers)
        for slot, array in zip(self.slots, arrays, strict=True):
            buffer = buffers[slot.group]
            value = vary_like(slot.flat(_data(array)[0]).astype(buffer.dtype), buffer)
            new = change(_flat(slot, buffer), value)
            at = slot.offset if slot.place is None else slot.place
            buffers[slot.group] = jax.lax.dynamic_update_slice(buffer, new, (at,), allow_negative_indices=False)
        return buffers


def slot_value(slot: Slot, buffer: jax.Array, row: ArrayLike | None = None) -> jax.Array:
    """Unpacks one array from its buffer."""
    data = slot.opened(_flat(slot, buffer, row))
    return data if slot.key_impl is None else jax.random.wrap_key_data(data, impl=slot.key_impl)


def _flat(slot: Slot, buffer: jax.Array, row: ArrayLike | None = None) -> jax.Array:
    """The elements of an array in a buffer, or in one row of it."""
    sizes = slot.group.shape(slot.size)
    if row is not None:
        return jax.lax.dynamic_slice(buffer, _row_start(slot, row), (1, *sizes), allow_negative_indices=False)
    if slot.place is not None:
        at = (*_firsts(slot, slot.place), slot.place)
        return jax.lax.dynamic_slice(buffer, at, sizes, allow_negative_indices=False)
    return jax.lax.slice_in_dim(buffer, slot.offset, slot.offset + slot.size, axis=-1)


def _row_start(slot: Slot, row: ArrayLike) -> tuple[jax.Array, ...]:
    """The start of an array in a row of a buffer with slots."""
    row = jnp.asarray(row)
    offset = slot.offset if slot.place is None else slot.place
    return row, *_firsts(slot, row), vary_like(jnp.asarray(offset, row.dtype), row)


def _firsts(slot: Slot, like: jax.Array) -> list[jax.Array]:
    """The index of the first part, for a group in parts; else nothing."""
    return [vary_like(jnp.zeros_like(like), like)] * bool(slot.group.parts)


def nothing(sizes: Sizes) -> Buffers:
    """Zero buffers, which an idle rank writes and sends; they go to the trash slot and are never read."""
    return {group: vary(jnp.zeros(group.shape(size), group.dtype), group.axes) for group, size in sizes.items()}


def _group_zeros(group: BufferGroup, size: int) -> jax.Array:
    return jnp.zeros(group.shape(size), group.dtype)


def data_of(dtype: Any, shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, Any]:
    """The shape and dtype of an array's numbers, and the random generator whose keys they are, or None."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.ShapeDtypeStruct(shape, dtype), None
    impls = []

    def data(keys):
        impls.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    return jax.eval_shape(data, jax.ShapeDtypeStruct(shape, dtype)), impls[0]


def largest(many: Iterable[Sizes]) -> dict[BufferGroup, int]:
    """The largest size of each group among several sizes, in a fixed order.

    >>> largest([{BufferGroup("int8"): 1}, {BufferGroup("int8"): 3, BufferGroup("bool"): 2}])[BufferGroup("int8")]
    3
    """
    sizes: dict[BufferGroup, int] = {}
    for each in many:
        for group, size in each.items():
            sizes[group] = max(size, sizes.get(group, 0))
    return dict(sorted(sizes.items()))


def _data(array: Any) -> tuple[Any, Any]:
    """The numbers of an array, and the random generator whose keys they are, or None."""
    if jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key):
        return jax.random.key_data(array), jax.random.key_impl(array)
    return jnp.asarray(array), None


# --------------------------------------------------------------------------------------------------
# How the stages' parameters (or states) lie on the ranks: one padded buffer per group, a rank's chunks behind each
# other.
#
# The executor reads buffers; optimizers and users see trees, by `pack_rank` and `unpack_rank`.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One leaf of a stage, as a rank holds it.

    Attributes:
      shape: the shape of the rank's own part, without the axes that split it.
      dtype: the dtype in which its buffer holds it.
      axes: other mesh axes over which its parts differ ("fsdp", "tensor", ...), in any order.
      frozen: whether it has no gradient.
      shared: a name that the same leaf has in other stages too (a tied embedding); None: it is in one stage alone.
      number: the number of its buffer's group.
      rows: whether it is made of rows of a stack.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...] = ()
    frozen: bool = False
    shared: str | None = None
    number: int = 0
    rows: bool = False

    @property
    def group(self) -> BufferGroup:
        """The group of the buffer in which it lies."""
        data, _ = data_of(self.dtype, self.shape)
        name, axes = jnp.dtype(data.dtype).name, tuple(sorted(self.axes))
        return BufferGroup(name, axes, self.frozen, number=self.number, rows=self.rows)


@dataclass(frozen=True)
class StageBuffers:
    """The slot of every leaf of every stage. Stage p lives on rank p mod S; a shared leaf lies once on each of its ranks.

    >>> stages = [{"w": Stored((2, 3), "float32")}, {"w": Stored((4,), "float32")}]
    >>> StageBuffers.of(stages, num_ranks=2).sizes[BufferGroup("float32")]
    6

    Attributes:
      num_ranks: S.
      packings: the packing of every stage.
      treedefs: the tree of every stage.
      shared: for every shared leaf its slot on each rank that holds it, by name.
    """

    num_ranks: int
    packings: tuple[Packing, ...]
    treedefs: tuple[Any, ...]
    shared: dict[str, dict[int, Slot]] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Sequence[PyTree], num_ranks: int) -> "StageBuffers":
        """Lays out every stage's tree.

        Args:
          stages: per stage a tree of `Stored`, or of anything with shape and dtype: leaves of one stage and rank alone.
          num_ranks: S.

        Raises:
          ValueError: when the stages do not divide over the ranks, or a shared leaf differs between stages; all are named.
        """
        if len(stages) % num_ranks:
            raise ValueError(f"{len(stages)} stages do not divide over {num_ranks} ranks: give every rank as many")
        trees = [jax.tree.map(_stored, stage, is_leaf=_is_stored) for stage in stages]
        flat = [jax.tree.flatten(tree, is_leaf=_is_stored) for tree in trees]
        _check_shared([leaves for leaves, _ in flat])
        ends: list[dict[BufferGroup, int]] = [{} for _ in range(num_ranks)]
        shared: dict[str, dict[int, Slot]] = {}
        packings = []
        for stage, (leaves, _) in enumerate(flat):
            rank = stage % num_ranks
            slots = [_slot_of(leaf, ends[rank], shared, rank) for leaf in leaves]
            packings.append(Packing(tuple(slots)))
        return cls(num_ranks, tuple(packings), tuple(treedef for _, treedef in flat), shared)

    @cached_property
    def sizes(self) -> dict[BufferGroup, int]:
        """Elements per group, the same on every rank."""
        return largest(packing.sizes for packing in self.packings)

    def stages(self, rank: int) -> range:
        """The stages of a rank."""
        return range(rank, len(self.packings), self.num_ranks)

    def pack_rank(self, rank: int, trees: Sequence[PyTree]) -> Buffers:
        """Packs the trees of a rank's stages, in order, into its buffers, each [n]."""
        placed: dict[Slot, Any] = {}
        for stage, tree in zip(self.stages(rank), trees, strict=True):
            placed |= dict(zip(self.packings[stage].slots, self.treedefs[stage].flatten_up_to(tree), strict=True))
        return Packing(tuple(placed)).pack(list(placed.values()), self.sizes)

    def unpack_rank(self, rank: int, buffers: Buffers) -> list[PyTree]:
        """Unpacks the trees of a rank's stages, in order."""
        return [self.unpack(stage, buffers) for stage in self.stages(rank)]

    def unpack(self, stage: int, buffers: Buffers) -> PyTree:
        """Unpacks the tree of one stage from its rank's buffers."""
        return self.treedefs[stage].unflatten(self.packings[stage].unpack(buffers))


def _slot_of(leaf: Stored, ends: dict[BufferGroup, int], shared: dict[str, dict[int, Slot]], rank: int) -> Slot:
    """The slot of a leaf on a rank: the one it has there already, or the next free one."""
    holders = {} if leaf.shared is None else shared.setdefault(leaf.shared, {})
    if rank not in holders:
        data, key_impl = data_of(leaf.dtype, leaf.shape)
        holders[rank] = Slot(leaf.group, ends.get(leaf.group, 0), data.shape, key_impl)
        ends[leaf.group] = holders[rank].offset + holders[rank].size
    return holders[rank]


def _check_shared(stages: Sequence[Sequence[Stored]]) -> None:
    seen: dict[str, tuple[int, Stored]] = {}
    wrong = []
    for stage, leaves in enumerate(stages):
        for leaf in leaves:
            first, other = seen.setdefault(leaf.shared, (stage, leaf)) if leaf.shared is not None else (stage, leaf)
            if leaf != other:
                wrong.append(f"{leaf.shared!r} is {other} in stage {first} and {leaf} in stage {stage}")
    if wrong:
        raise ValueError(f"a shared leaf must be the same in all its stages: {'; '.join(wrong)}")


def _stored(leaf: Any) -> Stored:
    return leaf if isinstance(leaf, Stored) else Stored(tuple(leaf.shape), leaf.dtype)


def _is_stored(leaf: Any) -> bool:
    return isinstance(leaf, Stored)


# --------------------------------------------------------------------------------------------------
# Leaves that several stages share, such as a tied embedding: copied to their ranks, one gradient, counted once.
#
# Communicates: what `sum_shared` says.
# --------------------------------------------------------------------------------------------------


def sum_shared(layout: StageBuffers, grads: Buffers, axis: str = "pipe") -> Buffers:
    """Sums the gradients of all copies of a shared leaf, and gives each copy the sum; inside `shard_map`.

    Args:
      layout: where the leaves lie.
      grads: this rank's gradients.
      axis: the pipeline's mesh axis.

    Communicates: one all-reduce over `axis` per leaf that several ranks hold.
    """
    holders = [slots for slots in _copied(layout).values() if next(iter(slots.values())).group in grads]
    if not holders:
        return grads
    rank = axis_index(axis)

    def own(r: int):
        # A leaf that this rank does not hold adds zeros.
        return lambda: [
            slot_value(slots[r], grads[slots[r].group])
            if r in slots
            else _slot_zeros(next(iter(slots.values())), grads)
            for slots in holders
        ]

    totals = [sum_over(part, axis) for part in jax.lax.switch(rank, [own(r) for r in range(layout.num_ranks)])]

    def put(r: int):
        held = [(slots[r], total) for slots, total in zip(holders, totals, strict=True) if r in slots]
        return lambda: Packing(tuple(slot for slot, _ in held)).write(grads, [total for _, total in held])

    return jax.lax.switch(rank, [put(r) for r in range(layout.num_ranks)])


def _copied(layout: StageBuffers) -> dict[str, dict[int, Slot]]:
    return {name: slots for name, slots in layout.shared.items() if len(slots) > 1}


def _slot_zeros(slot: Slot, grads: Buffers) -> jax.Array:
    return vary_like(jnp.zeros(slot.shape, grads[slot.group].dtype), grads[slot.group])
