"""Several arrays in one flat buffer per (dtype, axes they vary over): what lets unlike stages share one program.

All ranks run the same program, so what stages hold, send and keep must have one shape on all of them, however different
their arrays are. Concatenating arrays joins the axes they vary over, so those that vary over other axes stay apart; so do
those of which XLA's partitioner splits a dim (`position_parts.py`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from axonml_jax.collectives.varying import types_are_checked, vary, vary_like, varying_axes
from axonml_jax.compat.barrier import together
from axonml_jax.parallel.pipeline.resting.position_parts import PartRanks, apart, joined, row_size


class BufferGroup(NamedTuple):
    """What the arrays of one buffer have in common.

    Attributes:
      dtype: numpy's name.
      axes: the mesh axes over which they vary, sorted.
      frozen: whether they are parameters without a gradient.
      parts: the ranks among which a dim of each is split by XLA's partitioner, the buffer's dim before the last; (): it is not.
    """

    dtype: str
    axes: tuple[str, ...] = ()
    frozen: bool = False
    parts: PartRanks | tuple[()] = ()

    def shape(self, size: int) -> tuple[int, ...]:
        """Of a buffer."""
        return (self.parts.count, size) if self.parts else (size,)


Buffers = dict[BufferGroup, jax.Array]
"""A flat array per group, [n], or one per group and slot, [slots, n]; [N, n] and [slots, N, n] of groups in N parts."""

Sizes = Mapping[BufferGroup, int]
"""Elements per group, or per part of one."""


class Slot(NamedTuple):
    """Where one array lies.

    Attributes:
      group: in which buffer.
      offset: at which element it begins.
      shape: of the array; of a key array's data.
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
        """The array as it lies in its buffer: [n], or [N, n]."""
        return apart(data, self.dim, self.group.parts) if self.group.parts else jnp.ravel(data)

    def opened(self, flat: jax.Array) -> jax.Array:
        """The inverse of `flat`, whatever dims of size 1 stand before."""
        if not (parts := self.group.parts):
            return flat.reshape(self.shape)
        return joined(flat.reshape(parts.count, self.size), self.shape, self.dim, parts)


@dataclass(frozen=True)
class Packing:
    """Where each of several arrays lies.

    >>> packing = Packing.of([jnp.zeros((2, 3), "float32"), jnp.zeros(4, "int32"), jnp.ones((), "float32")])
    >>> packing.sizes[BufferGroup("float32")], [slot.offset for slot in packing.slots]
    (7, [0, 0, 6])
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(
        cls,
        arrays: Iterable[Any],
        axis: str | None = None,
        split: tuple[PartRanks, Sequence[int | None]] | None = None,
    ) -> "Packing":
        """One array behind the other, each in the group of its dtype, its varying axes and whether it is in parts.

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
        """Where the last array of each group ends."""
        return largest({slot.group: slot.offset + slot.size} for slot in self.slots)

    def at(self, places: Mapping[int, Any]) -> "Packing":
        """The same, with offsets as values of the running program where `places` has them."""
        return Packing(tuple(slot._replace(place=places.get(slot.offset)) for slot in self.slots))

    def pack(self, arrays: Sequence[Any], sizes: Sizes) -> Buffers:
        """Buffers of these sizes with the arrays in their places and zeros elsewhere."""
        pieces: dict[BufferGroup, list[Any]] = {group: [] for group in sizes}
        ends = dict.fromkeys(sizes, 0)
        for slot, array in sorted(zip(self.slots, arrays, strict=True), key=lambda pair: pair[0].offset):
            gap = slot.offset - ends[slot.group]
            pieces[slot.group] += [_zeros(slot.group, gap)] * (gap > 0) + [slot.flat(_data(array)[0])]
            ends[slot.group] = slot.offset + slot.size
        for group, size in sizes.items():
            pieces[group] += [_zeros(group, size - ends[group])] * (size > ends[group])
        return {group: jnp.concatenate(vary(these, group.axes), axis=-1) for group, these in pieces.items()}

    def unpack(self, buffers: Buffers, row: ArrayLike | None = None) -> list[jax.Array]:
        """The arrays, out of flat buffers, or out of one row of buffers with slots."""
        return [slot_value(slot, buffers[slot.group], row) for slot in self.slots]

    def write(self, buffers: Buffers, arrays: Sequence[Any]) -> Buffers:
        """Flat buffers with the arrays in their places and everything else as it was."""
        return self._changed(buffers, arrays, lambda old, value: value)

    def add(self, buffers: Buffers, arrays: Sequence[Any]) -> Buffers:
        """Flat buffers with the arrays added in their places."""
        # Apart from the write: one fusion that reads and writes a part of a buffer writes all of it on CPU.
        return self._changed(buffers, arrays, lambda old, value: together(old + value))

    def store(self, buffers: Buffers, arrays: Sequence[Any], row: ArrayLike) -> Buffers:
        """Buffers with slots, [slots, n], with the arrays in their places of one row and everything else as it was."""
        buffers = dict(buffers)
        for group in {slot.group: None for slot in self.slots}:
            own = [
                (slot, _data(array)[0]) for slot, array in zip(self.slots, arrays, strict=True) if slot.group == group
            ]
            # All at once, so that XLA does not compute what makes an array again in the loop that stores it.
            values = together([value for _, value in own])
            for (slot, _), value in zip(own, values, strict=True):
                flat = vary_like(slot.flat(value), buffers[group])
                at = _place(slot, row)
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
    """One array out of its buffer."""
    data = slot.opened(_flat(slot, buffer, row))
    return data if slot.key_impl is None else jax.random.wrap_key_data(data, impl=slot.key_impl)


def _flat(slot: Slot, buffer: jax.Array, row: ArrayLike | None = None) -> jax.Array:
    """The part of a buffer, or of one row of it, that is an array."""
    sizes = slot.group.shape(slot.size)
    if row is not None:
        return jax.lax.dynamic_slice(buffer, _place(slot, row), (1, *sizes), allow_negative_indices=False)
    if slot.place is not None:
        at = (*_firsts(slot, slot.place), slot.place)
        return jax.lax.dynamic_slice(buffer, at, sizes, allow_negative_indices=False)
    return jax.lax.slice_in_dim(buffer, slot.offset, slot.offset + slot.size, axis=-1)


def _place(slot: Slot, row: ArrayLike) -> tuple[jax.Array, ...]:
    """Where an array begins in a row of a buffer with slots."""
    row = jnp.asarray(row)
    offset = slot.offset if slot.place is None else slot.place
    return row, *_firsts(slot, row), vary_like(jnp.asarray(offset, row.dtype), row)


def _firsts(slot: Slot, like: jax.Array) -> list[jax.Array]:
    """Where its parts begin, if it has any: at the first."""
    return [vary_like(jnp.zeros_like(like), like)] * bool(slot.group.parts)


def _zeros(group: BufferGroup, size: int) -> jax.Array:
    return jnp.zeros(group.shape(size), group.dtype)


def data_of(dtype: Any, shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, Any]:
    """The numbers that an array of this dtype and shape is made of, and which generator's keys they are."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.ShapeDtypeStruct(shape, dtype), None
    impls = []

    def data(keys):
        impls.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    return jax.eval_shape(data, jax.ShapeDtypeStruct(shape, dtype)), impls[0]


def largest(many: Iterable[Sizes]) -> dict[BufferGroup, int]:
    """The most that any of them needs, by group, in a fixed order.

    >>> largest([{BufferGroup("int8"): 1}, {BufferGroup("int8"): 3, BufferGroup("bool"): 2}])[BufferGroup("int8")]
    3
    """
    sizes: dict[BufferGroup, int] = {}
    for each in many:
        for group, size in each.items():
            sizes[group] = max(size, sizes.get(group, 0))
    return dict(sorted(sizes.items()))


def _data(array: Any) -> tuple[Any, Any]:
    """The numbers of an array, and which generator's keys they are."""
    if jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key):
        return jax.random.key_data(array), jax.random.key_impl(array)
    return jnp.asarray(array), None
