"""A rank's part of a value of the whole batch, and how it changes from one place to another.

Collectives are those whose gradients count every rank's loss, so all transposes are exact for the objective "the sum over ranks
of what each rank returns". (A reduction that hands cotangents on unchanged would be wrong: they differ from rank to rank as
soon as a completed sum meets rows.)
"""

# What a rule says of places holds types apart, which the checker does not see.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.collectives import all_gather, all_reduce
from axonml_jax.collectives.primitives import (
    ReduceOp,
    axis_index,
    axis_size,
    max_over,
    min_over,
    sum_over,
    types_are_checked,
    vary,
)
from axonml_jax.compat.jaxpr import Operation
from axonml_jax.meaning.places import SUM, Group, Places, Split, local_outer, local_shape
from axonml_jax.sharding.layout import RankOrder, sequence_order


@dataclass(eq=False)
class Value:
    """A value of the whole batch's program, as this rank holds it.

    A whole value is made when it is read, and only the part that is read: of a mask or an identity a rank makes its rows alone.

    Attributes:
      shape: the shape of the whole value.
      dtype: its dtype.
      places: how each group holds it.
      make: `make(places)` makes this rank's part of a whole value in any places; of another value in `self.places` only.
      zero: it is known to be zeros.
    """

    shape: tuple[int, ...]
    dtype: Any
    places: Places
    make: Callable[[Places], jax.Array]
    zero: bool = False
    _made: dict[Places, jax.Array] = field(default_factory=dict)
    _changed: dict[Any, "Value"] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all groups hold it whole."""
        return not any(self.places)

    @property
    def array(self) -> jax.Array:
        """This rank's part of it, in its own places."""
        return self.at(self.places)

    def at(self, places: Places) -> jax.Array:
        """Returns this rank's part of a whole value in these places, made once for each."""
        if places not in self._made:
            self._made[places] = self.make(places)
        return self._made[places]


@dataclass(frozen=True)
class Gathered:
    """A gather of rows (or positions) that an operation mixes.

    Attributes:
      bytes: bytes that a rank receives in one step.
      operation: the name of the primitive.
      line: the user's source line; "" where it is not known.
    """

    bytes: int
    operation: str
    line: str


class Ranks:
    """The groups of ranks that split a batch, and the collectives that change a value's places.

    Attributes:
      groups: the groups of ranks, each of which splits the rows or the positions.
      axes: the mesh axes of all groups.
      gathered: the gathers so far.
      most_gathered: how many bytes they may have together; None: any number.
      typed: the mesh axes over which arrays are typed as varying: `axes`, and axes that split nothing of this loss, which have
        one rank or ranks with batches of their own.
      at: the operation that is being run, and the user's line.
      times: how often that operation runs in a step, by the lengths of the scans around it.
    """

    def __init__(self, groups: Sequence[Group], most_gathered: int | None = None, alone: tuple[str, ...] = ()):
        self.groups, self.most_gathered = tuple(groups), most_gathered
        self.axes = tuple(axis for group in groups for axis in group.axes)
        self.typed = self.axes + alone
        self.gathered: list[Gathered] = []
        self.at: tuple[str, str] = ("", "")
        self.times = 1
        self.checked = bool(self.axes) and types_are_checked(self.axes[0])

    @property
    def none(self) -> Places:
        """The places of a whole value."""
        return (None,) * len(self.groups)

    def vary(self, array: jax.Array) -> jax.Array:
        """Types an array as varying over all axes, where types are checked."""
        return vary(array, self.typed) if self.checked else array

    def index(self, group: Group) -> jax.Array:
        """This rank's number in a group; 0 in a group without mesh axes."""
        return axis_index(group.axes) if group.axes else jnp.zeros((), jnp.int32)

    def check_talk(self, groups: Sequence[Group]) -> None:
        """Called before a collective among the ranks of some groups; a subclass may refuse it."""

    # Values

    def known(self, array: Any) -> Value:
        """A whole value from an array; no operation is traced before it is read, as a stage of a pipeline may not read it."""
        array = jnp.asarray(array)
        return Value(array.shape, array.dtype, self.none, lambda places: self.block(self.vary(array), places))

    def held(self, array: jax.Array, places: Places, shape: Sequence[int]) -> Value:
        """A value from this rank's part of it."""
        if not any(places):
            return self.known(array)
        array = self.vary(array)
        return Value(tuple(shape), array.dtype, places, lambda _: array)

    def lazy(self, shape: Sequence[int], dtype: Any, make: Callable[[Places], jax.Array], zero: bool = False) -> Value:
        """A whole value that `make` computes when it is read."""
        return Value(tuple(shape), dtype, self.none, lambda places: self.vary(make(places)), zero)

    def block(self, array: jax.Array, places: Places) -> jax.Array:
        """Cuts this rank's part out of a whole array."""
        splits = [(place, group) for place, group in zip(places, self.groups, strict=True) if isinstance(place, Split)]
        for place, group in sorted(splits, key=lambda each: -each[0].outer):
            array = self._own_part(array, place.dim, place.outer, group)
        return array

    def _own_part(self, array: jax.Array, dim: int, outer: int, group: Group) -> jax.Array:
        size = array.shape[dim] // outer
        seen = array if outer == 1 else array.reshape(*array.shape[:dim], outer, size, *array.shape[dim + 1 :])
        part = size // group.ranks
        along = dim + (outer > 1)
        seen = RankOrder(along, group.order, group.ranks)(seen)
        own = jax.lax.dynamic_slice_in_dim(seen, self.index(group) * part, part, along)
        return own if outer == 1 else own.reshape(*array.shape[:dim], outer * part, *array.shape[dim + 1 :])

    # Changing places

    def settled(self, value: Value, places: Places) -> jax.Array:
        """Returns this rank's part of a value in other places: sums are completed, split dims gathered, whole dims cut.

        A whole value as a sum is itself on the group's first rank, and zeros on all others.
        """
        value = self._completed(value, places)
        for number, place in enumerate(places):
            if isinstance(value.places[number], Split) and value.places[number] != place:
                value = self._changed(value, ("gather", number), self._gathered, number)
        if value.is_whole:
            array = value.at(tuple(place if isinstance(place, Split) else None for place in places))
        else:
            array = self._narrowed(value, places)
        for number, place in enumerate(places):
            if place == SUM and value.places[number] != SUM and not value.zero:
                array = jnp.where(self.index(self.groups[number]) == 0, array, jnp.zeros_like(array))
        return array

    def _narrowed(self, value: Value, places: Places) -> jax.Array:
        """This rank's part along dims that are still whole."""
        array, held = value.array, list(value.places)
        for number, place in enumerate(places):
            if isinstance(place, Split) and held[number] is None:
                held[number] = place
                outer = local_outer(tuple(held), self.groups, number)
                array = self._own_part(array, place.dim, outer, self.groups[number])
        return array

    def _completed(self, value: Value, places: Places) -> Value:
        due = tuple(k for k, (old, new) in enumerate(zip(value.places, places, strict=True)) if old == SUM != new)
        return self._changed(value, ("sum", due), self._summed, due) if due else value

    def _changed(self, value: Value, key: Any, change: Callable[[Value, Any], Value], what: Any) -> Value:
        if key not in value._changed:
            value._changed[key] = change(value, what)
        return value._changed[key]

    def _summed(self, value: Value, due: Sequence[int]) -> Value:
        places = tuple(None if k in due else place for k, place in enumerate(value.places))
        self.check_talk([self.groups[k] for k in due])
        axes = tuple(axis for k in due for axis in self.groups[k].axes)
        with jax.named_scope("axonml.loss"):
            return self.held(all_reduce(value.array, axes), places, value.shape)

    def _gathered(self, value: Value, number: int) -> Value:
        group, place = self.groups[number], value.places[number]
        assert isinstance(place, Split)
        outer = local_outer(value.places, self.groups, number)
        places = tuple(None if k == number else each for k, each in enumerate(value.places))
        array = self.gather(value.array, place.dim, outer, group)
        return self.held(array, places, value.shape)

    def gather(self, array: jax.Array, dim: int, outer: int, group: Group) -> jax.Array:
        """Gathers a split dim. Communicates: one all-gather."""
        self.check_talk([group])
        self.note(array.size * array.dtype.itemsize * (group.ranks - 1))
        if array.dtype == bool:
            return self.gather_quietly(array.astype(jnp.int8), dim, outer, group).astype(bool)
        return self.gather_quietly(array, dim, outer, group)

    def gather_quietly(self, array: jax.Array, dim: int, outer: int, group: Group) -> jax.Array:
        """Gathers a split dim of numbers, without recording it."""
        shape, size = array.shape, array.shape[dim] // outer
        if outer > 1:
            array, dim = array.reshape(*shape[:dim], outer, size, *shape[dim + 1 :]), dim + 1
        with jax.named_scope("axonml.loss"):
            joined = _in_order(all_gather(array, group.axes, dim), dim, group)
        return joined if outer == 1 else joined.reshape(*shape[: dim - 1], outer * size * group.ranks, *shape[dim:])

    def note(self, size: int) -> None:
        """Records a gather of `size` bytes in a trip, and refuses it where all together are more than `most_gathered`.

        Raises:
          ValueError: naming the operation, the line, the sizes and the remedies.
        """
        self.gathered.append(Gathered(size * self.times, *self.at))
        total = sum(each.bytes for each in self.gathered)
        if self.most_gathered is not None and total > self.most_gathered:
            raise ValueError(too_much(self.gathered, self.most_gathered))

    # Other things that rules need

    def rows_as_sum(self, value: Value) -> jax.Array:
        """Returns this rank's summand of a value, of the whole shape: along split dims its own part among zeros."""
        zeros = [isinstance(place, Split) for place in value.places]
        if not any(zeros):
            return self.settled(value, (SUM,) * len(self.groups))
        places = tuple(place if isinstance(place, Split) else SUM for place in value.places)
        array, held = self.settled(value, places), list(places)
        for number in sorted((k for k, split in enumerate(zeros) if split), key=lambda k: held[k].outer):
            array = self._among_zeros(
                array, held[number], local_outer(tuple(held), self.groups, number), self.groups[number]
            )
            held[number] = None
        return array

    def _among_zeros(self, array: jax.Array, place: Split, outer: int, group: Group) -> jax.Array:
        dim, shape = place.dim, array.shape
        part = shape[dim] // outer
        seen = array.reshape(*shape[:dim], outer, part, *shape[dim + 1 :])
        zeros = self.vary(jnp.zeros((*shape[:dim], outer, part * group.ranks, *shape[dim + 1 :]), array.dtype))
        filled = jax.lax.dynamic_update_slice_in_dim(zeros, seen, self.index(group) * part, dim + 1)
        filled = _in_order(filled, dim + 1, group)
        return filled.reshape(*shape[:dim], shape[dim] * group.ranks, *shape[dim + 1 :])

    def unvaried(self, array: jax.Array) -> jax.Array:
        """Types a whole array as the same on every rank, for a program that was traced without varying types.

        Raises:
          ValueError: where ranks train models of their own, so that their arrays differ.
        """
        if not self.axes:
            return array
        if self.checked and (apart := [axis for axis in self.typed if axis not in self.axes and axis_size(axis) > 1]):
            name, line = self.at
            raise ValueError(
                f"check_vma=True: {name} ({line or 'no line known'}) runs a function of its own on all rows of a replica, and "
                f"replicas along {', '.join(apart)} have other rows: leave out check_vma=True (the result is the same)"
            )
        axes = self.typed if self.checked else self.axes
        return sum_over(jnp.where(axis_index(self.axes) == 0, array, 0), axes).astype(array.dtype)

    def local(self, shape: Sequence[int], places: Places) -> tuple[int, ...]:
        """The shape of this rank's part of a value."""
        return local_shape(shape, places, self.groups)


def _in_order(array: jax.Array, dim: int, group: Group) -> jax.Array:
    """Puts positions that are concatenated rank by rank in the sequence's order: the inverse of `RankOrder`."""
    if group.order == "contiguous":
        return array
    held = sequence_order(group.order, array.shape[dim], group.ranks)
    return jnp.take(array, np.argsort(held), dim, unique_indices=True)


def too_much(gathered: Sequence[Gathered], most: int) -> str:
    """The message for a loss that gathers too many bytes."""
    lines = [f"  {each.operation} ({each.line or 'no line known'}): {each.bytes:,} bytes" for each in gathered]
    return (
        "the loss mixes rows of different ranks: these operations gather rows of other ranks, "
        f"{sum(each.bytes for each in gathered):,} bytes a rank and step, and {most:,} are allowed:\n"
        + "\n".join(lines)
        + "\nAllow it with "
        "ax.mixing_rows(loss_fn, most_bytes=...), reduce what is mixed first (means, or ax.WeightedMean(total, weight)), or "
        "gather smaller arrays yourself (ax.all_gather)"
    )


# --------------------------------------------------------------------------------------------------
# What ranks do to join their parts' results where a reduction or a lookup goes along a split dim.
# --------------------------------------------------------------------------------------------------

Act = Callable[[Ranks, Operation, Sequence[jax.Array], Sequence[Group]], jax.Array]
"""`act(ranks, op, arrays, groups)`: its result of this rank's operands, joined over groups whose split dims it goes along."""


def axes_of(groups: Sequence[Group]) -> tuple[str, ...]:
    """The mesh axes of some groups."""
    return tuple(axis for group in groups for axis in group.axes)


def _extreme(ranks: Ranks, op: Operation, arrays: Sequence[jax.Array], groups: Sequence[Group]) -> jax.Array:
    """A maximum or minimum over all ranks; all elements of all ranks that attain it share its gradient."""
    (x,), axes, dims = arrays, axes_of(groups), op.options["axes"]
    reduce = min_over if op.name == "reduce_min" else max_over
    top = lambda x: vary(reduce(op.bind([x])[0], axes), ranks.axes)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return top(x)
    best = jax.custom_jvp(top)

    @best.defjvp
    def _(primals, tangents):
        (x,), (tangent,) = primals, tangents
        most = best(x)
        attained = x == jnp.expand_dims(most, dims)
        number = all_reduce(attained.astype(x.dtype).sum(dims), axes)
        return most, all_reduce(jnp.where(attained, tangent, 0).sum(dims) / number, axes)

    return best(x)


def _logical(ranks: Ranks, op: Operation, arrays: Sequence[jax.Array], groups: Sequence[Group]) -> jax.Array:
    reduce = min_over if op.name == "reduce_and" else max_over
    own = op.bind(arrays)[0]
    joined = reduce(own.astype(jnp.int32), axes_of(groups))
    return vary(joined.astype(bool) if own.dtype == bool else joined.astype(own.dtype), ranks.axes)


def _product(ranks: Ranks, op: Operation, arrays: Sequence[jax.Array], groups: Sequence[Group]) -> jax.Array:
    return all_reduce(op.bind(arrays)[0], axes_of(groups), ReduceOp.PRODUCT)


def _best(ranks: Ranks, op: Operation, arrays: Sequence[jax.Array], groups: Sequence[Group]) -> jax.Array:
    """The index of the best element: gathers each rank's best value and its index; among equals the first rank's."""
    (x,), (dim,), (group,) = arrays, op.options["axes"], groups
    own = op.bind(arrays)[0]
    value = jnp.take_along_axis(x, jnp.expand_dims(own, dim), dim).squeeze(dim)
    index = own + (axis_index(group.axes) * x.shape[dim]).astype(own.dtype)
    values, indices = (ranks.gather_quietly(each[None], 0, 1, group) for each in (value, index))
    first = (jnp.argmax if op.name == "argmax" else jnp.argmin)(values, 0)
    return jnp.take_along_axis(indices, first[None], 0)[0]


def _lookup(ranks: Ranks, op: Operation, arrays: Sequence[jax.Array], groups: Sequence[Group]) -> jax.Array:
    """A lookup along a split dim: each rank answers for its own rows, with zeros elsewhere, so that answers add up."""
    (table, index), (group,) = arrays, groups
    numbers, whole = op.options["dimension_numbers"], op.given[0].shape
    dim = next(d for d in numbers.start_index_map if d in numbers.collapsed_slice_dims and whole[d] != table.shape[d])
    column, mode = numbers.start_index_map.index(dim), str(op.options["mode"]).upper()
    at = index[..., column]
    if "CLIP" in mode:
        at = jnp.clip(at, 0, whole[dim] - 1)
    own = at - (axis_index(group.axes) * table.shape[dim]).astype(at.dtype)
    mine = (own >= 0) & (own < table.shape[dim])
    sizes = tuple(table.shape[d] if size == whole[d] else size for d, size in enumerate(op.options["slice_sizes"]))
    made = op.bind([table, index.at[..., column].set(jnp.where(mine, own, 0))], slice_sizes=sizes)[0]
    spread = lambda x: jnp.broadcast_to(jnp.expand_dims(x, numbers.offset_dims), made.shape)
    kept = jnp.where(spread(mine), made, jnp.zeros_like(made))
    if "FILL" in mode:  # what no rank has is filled, by the first
        outside = spread((at < 0) | (at >= whole[dim])) & (axis_index(group.axes) == 0)
        kept = jnp.where(outside, jnp.asarray(_filling(op), made.dtype), kept)
    if made.dtype == bool:
        return all_reduce(kept.astype(jnp.int32), group.axes).astype(bool)
    return kept


def _filling(op: Operation):
    """The value that a lookup outside of the table gives, where it fills."""
    dtype = op.made[0].dtype
    if (given := op.options["fill_value"]) is not None:
        return given
    if dtype == jnp.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max


ACTS: Mapping[str, Act] = {
    "extreme": _extreme,
    "logical": _logical,
    "product": _product,
    "best": _best,
    "lookup": _lookup,
}
"""The function of each `Step.act`."""
