"""The form of an attention that was found in a program: its operands, the changes of its scores, its masks as terms."""

import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.compat.jaxpr import Operation
from axonml_jax.compat.varying_types import CASTS
from axonml_jax.program.program import Atom, Program, follow, is_constant, is_elementwise, is_light, names_of
from axonml_jax.program.values import MOVED, Level, Nested, Node

# --------------------------------------------------------------------------------------------------
# Which dims of an attention the dims of a value run over, through reshapes, transposes and broadcasts.
#
# An index along a dim is written in digits, as a number is: heads that were two dims, groups and their members, are one
# dim of two digits. A reshape only writes the same digits down in other dims.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digit:
    """A part of an index: `index // stride % size` of the index along what the label names.

    Attributes:
      label: what it is an index of, such as "head".
      stride: what one step of it counts in whole steps of the label.
      size: how many values it takes.
    """

    label: Any
    stride: int
    size: int

    def __str__(self) -> str:
        return str(self.label) if self.stride == 1 else f"{self.label}/{self.stride}"


Index = tuple[Digit, ...]
"""The digits of one dim, the most significant first; () for a dim of size 1, or one along which values do not change."""

Indices = tuple[Index, ...]
"""The index of every dim of a value."""


def whole(label: Any, size: int) -> Index:
    """The index of a dim that runs over all of a label."""
    return (Digit(label, 1, size),) if size > 1 else ()


def labels_of(indices: Iterable[Index]) -> frozenset[Any]:
    """The labels that some dims run over, in whole or in part."""
    return frozenset(digit.label for index in indices for digit in index)


def joined(digits: Iterable[Digit]) -> Index:
    """Merges digits, the most significant first, into as few as give the same index."""
    found: list[Digit] = []
    for digit in digits:
        last = found[-1] if found else None
        if last is not None and last.label == digit.label and last.stride == digit.stride * digit.size:
            found[-1] = Digit(digit.label, digit.stride, last.size * digit.size)
        elif digit.size > 1:
            found.append(digit)
    return tuple(found)


def regrouped(indices: Indices, shape: Sequence[int]) -> Indices | None:
    """The indices of a value's dims after a row-major reshape; None where a dim would end within a digit."""
    rest = [digit for index in indices for digit in index][::-1]
    found: list[Index] = []
    for size in shape:
        own: list[Digit] = []
        while size > 1:
            if not rest:
                return None
            digit = rest.pop()
            if digit.size > size:
                if digit.size % size:
                    return None
                low = digit.size // size
                rest.append(Digit(digit.label, digit.stride, low))
                digit = Digit(digit.label, digit.stride * low, size)
            if size % digit.size:
                return None
            own.append(digit)
            size //= digit.size
        found.append(joined(own))
    return None if rest else tuple(found)


def after(op: Operation, k: int, indices: Indices) -> Indices | None:
    """The indices of an operation's result from those of operand k: () where it is broadcast; None: not known."""
    given, made = op.given[k].shape, op.made[0].shape
    if op.name == "reshape":
        return None if op.options["dimensions"] is not None else regrouped(indices, made)
    if op.name in KEEPING:
        return indices
    found: list[Index] = [()] * len(made)
    for dim, index in enumerate(indices):
        if given[dim] > 1:
            goes = follow(op, k, dim, 1)
            if goes is None or made[goes] != given[dim]:
                return None
            found[goes] = index
    return tuple(found)


def before(op: Operation, indices: Indices) -> Indices | None:
    """The indices of the operand of an operation that only moves elements, from its result's; None for other operations."""
    if not op.given:
        return None
    given = op.given[0].shape
    if op.name == "reshape":
        return None if op.options["dimensions"] is not None else regrouped(indices, given)
    if op.name == "tile":
        parts = [regrouped((index,), pair) for index, *pair in zip(indices, op.options["reps"], given, strict=True)]
        return None if None in parts else tuple([part[1] for part in parts if part is not None])
    if op.name in KEEPING:
        return indices
    if op.name not in ("broadcast_in_dim", "squeeze", "transpose"):
        return None
    goes = [follow(op, 0, dim, 1) if size > 1 else None for dim, size in enumerate(given)]
    return tuple([() if to is None else indices[to] for to in goes])


KEEPING = (
    *CASTS,
    "convert_element_type",
    "copy",
    "name",
    "reshard",
    "sharding_constraint",
    "stop_gradient",
    "layout_constraint",
)
"""Operations that leave every element in its place, unchanged but for its dtype."""


def arranged(x: Any, indices: Indices, wanted: Indices, *, spread: bool = False) -> Any:
    """Reshapes and transposes an array so that its dims run over `wanted`.

    Args:
      x: its dims run over `indices`.
      wanted: what the dims of the result run over.
      spread: whether dims along which `x` does not change are broadcast to their size; else they have size 1.
    """
    cuts = _cuts([*indices, *wanted])
    parts = [part for index in indices for digit in index for part in _parts(digit, cuts)]
    x = jnp.reshape(x, [part.size for part in parts])
    asked = [[part for digit in index for part in _parts(digit, cuts)] for index in wanted]
    order = [part for index in asked for part in index if part in parts]
    assert sorted(map(parts.index, order)) == list(range(len(parts))), (indices, wanted)
    x = jnp.transpose(x, [parts.index(part) for part in order])
    there = [spread or any(part in parts for part in index) for index in asked]
    x = jnp.reshape(x, [part.size if part in parts else 1 for index in asked for part in index])
    full = [part.size if yes or part in parts else 1 for index, yes in zip(asked, there, strict=True) for part in index]
    x = jnp.broadcast_to(x, full) if list(x.shape) != full else x
    sizes = [math.prod(part.size for part in index) if yes else 1 for index, yes in zip(asked, there, strict=True)]
    return jnp.reshape(x, sizes)


def _cuts(indices: Iterable[Index]) -> Mapping[Any, set[int]]:
    """The strides at which digits of each label begin and end."""
    found: dict[Any, set[int]] = {}
    for index in indices:
        for digit in index:
            found.setdefault(digit.label, set()).update((digit.stride, digit.stride * digit.size))
    return found


def _parts(digit: Digit, cuts: Mapping[Any, set[int]]) -> list[Digit]:
    """Splits a digit at all cuts, so that no other digit overlaps a part of it."""
    ends = sorted(cut for cut in cuts[digit.label] if digit.stride <= cut <= digit.stride * digit.size)
    pairs = list(itertools.pairwise(ends))
    assert all(high % low == 0 for low, high in pairs), (digit, cuts)
    return [Digit(digit.label, low, high // low) for low, high in reversed(pairs)]


# --------------------------------------------------------------------------------------------------
# `Operand`: a value that an attention reads, and which dims of the attention each of its dims runs over.
# --------------------------------------------------------------------------------------------------

LABELS = ("batch", "head", "member", "query", "key", "size", "value")
"""The labels of an attention's dims: rows; heads of keys and values; the query heads that share one of them; positions of
queries and of keys; the size of a head of queries and keys, and that of values."""

Layout = tuple[tuple[str, ...], ...]
"""The labels of every dim of an array."""

HEADS = ("head", "member")
QUERIES: Layout = (("batch",), ("query",), HEADS, ("size",))
KEYS: Layout = (("batch",), ("key",), ("head",), ("size",))
VALUES: Layout = (("batch",), ("key",), ("head",), ("value",))
RESULT: Layout = (("batch",), ("query",), HEADS, ("value",))
SCORES: Layout = (("batch",), HEADS, ("query",), ("key",))
OF_KEYS: Layout = (("batch",), ("key",))
OF_QUERIES: Layout = (("batch",), ("query",))


@dataclass(frozen=True)
class Operand:
    """A value of the program that an attention reads.

    Attributes:
      value: its number in the `Nested` program.
      shape: its shape there.
      dtype: the dtype to which it is cast to be read.
      indices: for each of its dims what it runs over: digits of `LABELS`.
      layout: the labels of the dims in which `given` arranges it.
    """

    value: int
    shape: tuple[int, ...]
    dtype: Any
    indices: Indices
    layout: Layout

    @property
    def labels(self) -> frozenset[str]:
        """The labels that it runs over, in whole or in part."""
        return labels_of(self.indices)

    def given(self, x: Any, sizes: Mapping[str, int], *, spread: bool = False) -> Any:
        """Arranges the value in its layout.

        Args:
          x: the value.
          sizes: the size of every label.
          spread: whether dims along which it does not change are broadcast to their size; else they have size 1.
        """
        return arranged(jnp.asarray(x, self.dtype), self.indices, self.wanted(sizes), spread=spread)

    def taken(self, x: Any, sizes: Mapping[str, int]) -> Any:
        """Arranges an array from the operand's layout to the program's shape; the inverse of `given`, without its cast."""
        return arranged(x, self.wanted(sizes), self.indices).reshape(self.shape)

    def wanted(self, sizes: Mapping[str, int]) -> Indices:
        """The indices of the dims of its layout."""
        return tuple([joined(digit for label in dim for digit in whole(label, sizes[label])) for dim in self.layout])

    def __str__(self) -> str:
        says = ["*".join(map(str, index)) or "1" for index in self.indices]
        return f"{jnp.dtype(self.dtype).name}[{', '.join(map(str, self.shape))}] ({', '.join(says)})"


# --------------------------------------------------------------------------------------------------
# The value that another one was moved, broadcast or cast from, by which an attention's operands are recognised.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A value, and the indices of its dims."""

    atom: Atom
    indices: Indices


def sources(values: Nested, atom: Atom, indices: Indices, *, casts: bool = False) -> Iterator[Source]:
    """Yields a value, then step by step the values that it was moved, broadcast or cast from.

    Args:
      values: where it is made.
      atom: the value.
      indices: what its dims run over.
      casts: also go through casts that round and through stopped gradients; else the source, cast to the value's dtype, is the
        value, gradients included.
    """
    source: Source | None = Source(atom, indices)
    dtype = values.aval(atom).dtype
    while source is not None:
        yield source
        maker = values.maker(source.atom)
        found = (
            None
            if maker is None or not (casts or _is_exact(maker, dtype))
            else before(maker.equation.op, source.indices)
        )
        source = None if found is None or maker is None else Source(maker.inputs[0], found)


def varies_along(values: Nested, atom: Atom, indices: Indices, labels: Collection[Any]) -> bool:
    """Whether a value may differ along labels of these kinds (a label's first entry), where it was not broadcast."""
    *_, last = sources(values, atom, indices, casts=True)
    return any(label[0] in labels for label in labels_of(last.indices))


def operand_indices(values: Nested, node: Node, k: int, indices: Indices) -> Indices:
    """The indices of an elementwise equation's operand, from those of its result: () along dims of size 1."""
    shape = values.aval(node.inputs[k]).shape
    return tuple([index if size > 1 else () for index, size in zip(indices, shape, strict=True)]) if shape else ()


def visible(values: Nested, atom: Atom, level: Level) -> bool:
    """Whether code at a level may read a value."""
    return is_constant(atom) or values.at(atom, level) is not None


def _is_exact(maker: Node, dtype: Any) -> bool:
    """Whether the operand of a move or cast, cast to `dtype`, equals its result cast to `dtype`, gradients included."""
    if maker.name == "convert_element_type" and maker.equation.op.made[0].dtype != dtype:
        old, new = maker.equation.op.given[0].dtype, maker.equation.op.made[0].dtype
        return jnp.promote_types(old, new) == new and not (jnp.issubdtype(old, jnp.integer) and old.itemsize > 2)
    return maker.name != "stop_gradient"


def activations(values: Nested, program: Program, weights: Collection[int] | None) -> frozenset[int]:
    """The activations: values that are made by more than moves, casts and elementwise operations from weights and constants.

    Args:
      values: the values of the program.
      program: the whole program.
      weights: which of its inputs are weights, by position; None: all are taken for weights.
    """
    known = range(len(program.inputs)) if weights is None else weights
    prepared = {values.top.values[program.inputs[k]] for k in known} | set(values.constants)
    for node in values.nodes:
        if is_light(node.equation.op) and all(_is_prepared(values, each, prepared) for each in names_of(node.inputs)):
            prepared.update(node.outputs)
    return frozenset(value for value in values.avals if not _is_prepared(values, value, prepared))


def _is_prepared(values: Nested, value: int, prepared: Collection[int]) -> bool:
    """Whether a value is in `prepared`, or a loop's slice of a value that is."""
    links = values.links.get(value, ())
    return value in prepared or (len(links) == 1 and not is_constant(links[0]) and links[0] in prepared)


# --------------------------------------------------------------------------------------------------
# Arrays that an attention reads, at some positions of queries and keys; what follows from positions is computed only there.
#
# So ALiBi's biases, T5's lookups by distance and masks of positions never exist for all queries and all keys at once.
# --------------------------------------------------------------------------------------------------

Places = tuple[Any, ...]
"""For every dim of a value an array of indices along it; they are broadcast with each other."""


class PositionReader:
    """Reads values at places, inside a program that is being run.

    Args:
      values: the program.
      level: where it is run.
      whole: `whole(value)` gives all of a value, by its number.
    """

    def __init__(self, values: Nested, level: Level, whole: Callable[[int], Any]):
        self.values, self.level, self.whole = values, level, whole
        self._known: dict[Any, tuple[Any, Places]] = {}
        self._followed: dict[int, bool] = {}

    def operand(self, operand: Operand, sizes: Mapping[str, int], queries: jax.Array, keys: jax.Array) -> jax.Array:
        """An operand in its layout, of size 1 along dims where it does not change, at positions int [x] and [y] alone."""
        shape = [1] * len(operand.layout)
        at: dict[str, Any] = {}
        for dim, labels in enumerate(operand.layout):
            positions = {"query": queries, "key": keys}.get(labels[0])
            if not operand.labels & set(labels):
                continue
            shape[dim] = math.prod(sizes[label] for label in labels) if positions is None else positions.shape[0]
            index = jnp.arange(shape[dim]) if positions is None else positions
            index = index.reshape([-1 if other == dim else 1 for other in range(len(shape))])
            for label in reversed(labels):
                at[label], index = (index % sizes[label], index // sizes[label]) if len(labels) > 1 else (index, 0)
        places = []
        for index in operand.indices:
            place: Any = 0
            for digit in index:
                place = place * digit.size + at[digit.label] // digit.stride % digit.size
            places.append(place)
        found = self.of(operand.value, tuple(places)).astype(operand.dtype)
        return jnp.broadcast_to(found, shape)

    def of(self, atom: Atom, places: Places) -> Any:
        """The elements of a value at places."""
        if is_constant(atom):
            return jnp.asarray(atom.val, atom.aval.dtype)[places]
        key = (atom, tuple(map(id, places)))
        if key not in self._known:  # the places are kept so that no others take their addresses
            self._known[key] = self._made(atom, places), places
        return self._known[key][0]

    def _made(self, atom: int, places: Places) -> Any:
        node = self.values.maker(atom)
        if node is None or not self._follows(atom):
            return jnp.asarray(self.whole(atom))[places]
        op = node.equation.op
        with op.scope():
            if node.name == "iota":
                return jnp.asarray(places[op.options["dimension"]], op.options["dtype"])
            if node.name in MOVED:
                return self.of(node.inputs[0], MOVED[node.name](op, places))
            if node.name == "gather":
                return self._looked_up(node, places)
            given = [self._element(each, places) for each in node.inputs]
            shape = jnp.broadcast_shapes(*[jnp.shape(x) for x in given])
            return op.bind([jnp.broadcast_to(x, shape) for x in given])[0]

    def _element(self, atom: Atom, places: Places) -> Any:
        """The elements of an elementwise operation's operand, which may be a number, or of size 1 along some dims."""
        shape = self.values.aval(atom).shape
        return self.of(atom, tuple([p if n > 1 else 0 for p, n in zip(places, shape, strict=True)]) if shape else ())

    def _looked_up(self, node: Node, places: Places) -> Any:
        op, (table, rows) = node.equation.op, node.inputs
        dims = op.options["dimension_numbers"]
        batch = tuple([place for dim, place in enumerate(places) if dim not in dims.offset_dims])
        along = iter([places[dim] for dim in dims.offset_dims])
        looked = {dim: self.of(rows, (*batch, k)) for k, dim in enumerate(dims.start_index_map)}
        at = tuple([looked[dim] if dim in looked else next(along) for dim in range(op.given[0].ndim)])
        array = jnp.asarray(self.whole(table) if not is_constant(table) else table.val)
        mode, fill = op.options["mode"], op.options["fill_value"]
        return array.at[at].get(mode=mode, fill_value=fill, wrap_negative_indices=False)

    def _follows(self, atom: Atom) -> bool:
        """Whether a value can be computed at single places, from positions, constants and values visible at the level."""
        if is_constant(atom):
            return True
        if atom not in self._followed:
            self._followed[atom] = self._is_followed(atom)
        return self._followed[atom]

    def _is_followed(self, atom: int) -> bool:
        node = self.values.maker(atom)
        if node is None:
            return False
        at_hand = lambda each: is_constant(each) or self.values.at(each, self.level) is not None
        if node.name == "gather":
            return (
                _is_lookup(node)
                and at_hand(node.inputs[0])
                and (self._follows(node.inputs[1]) or at_hand(node.inputs[1]))
            )
        if node.name == "reshape" and node.equation.op.options["dimensions"] is not None:
            return False
        followed = is_elementwise(node.name) and len(node.outputs) == 1 and not node.equation.op.has_effects
        known = followed or node.name in MOVED or node.name == "iota"
        return known and all(self._follows(each) or at_hand(each) for each in node.inputs)


def _is_lookup(node: Node) -> bool:
    """Whether a gather takes rows of a table, whole along all other dims."""
    op = node.equation.op
    dims, sizes, shape = op.options["dimension_numbers"], op.options["slice_sizes"], op.given[0].shape
    plain = not dims.operand_batching_dims and tuple(dims.start_index_map) == tuple(dims.collapsed_slice_dims)
    taken = [1 if dim in dims.start_index_map else size for dim, size in enumerate(shape)]
    return plain and list(sizes) == taken


# --------------------------------------------------------------------------------------------------
# The terms of a mask, which must all hold: rules of positions alone, or of arrays of the program.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """Keys from `before` places before the query to `after` places after it; None: as far as there are any.

    >>> print(Band(None, 0), Band(3, 0), Band(2, 2), Band(None, 4), sep=" | ")
    causal | causal window 3 | window 2 2 | causal, keys 4 ahead
    """

    before: int | None
    after: int | None

    def __str__(self) -> str:
        if self.before is None:
            return "causal" if self.after == 0 else f"causal, keys {self.after} ahead"
        return f"causal window {self.before}" if self.after == 0 else f"window {self.before} {self.after}"


@dataclass(frozen=True)
class Prefix:
    """Keys that are not after the query, and the first `length` of all."""

    length: int

    def __str__(self) -> str:
        return f"prefix {self.length}"


@dataclass(frozen=True)
class Chunks:
    """Keys of the query's own chunk of `size` positions."""

    size: int

    def __str__(self) -> str:
        return f"chunks of {self.size}"


@dataclass(frozen=True)
class KeyMask:
    """Keys where an array over keys, of each row, is nonzero; or zero, where `seen` is false: a padding mask."""

    mask: Operand
    seen: bool = True

    def __str__(self) -> str:
        return f"keys where {self.mask}{'' if self.seen else ' is zero'}"


@dataclass(frozen=True)
class QueryMask:
    """All keys where an array over queries is nonzero, or zero, where `seen` is false; no key elsewhere."""

    mask: Operand
    seen: bool = True

    def __str__(self) -> str:
        return f"queries where {self.mask}{'' if self.seen else ' is zero'}"


@dataclass(frozen=True)
class Compared:
    """Keys whose number compares with the query's: "eq" for segment ids; "ge" for positions, no key after the query's.

    Attributes:
      how: "eq", "ne", "ge", "gt", "le" or "lt", the query's number on the left.
      queries, keys: the numbers, of each row.
    """

    how: str
    queries: Operand
    keys: Operand

    def __str__(self) -> str:
        return f"{'segments' if self.how == 'eq' else self.how} of {self.queries} and {self.keys}"


@dataclass(frozen=True)
class MaskArray:
    """Keys where an array over queries and keys is nonzero; or zero, where `seen` is false."""

    mask: Operand
    seen: bool = True

    def __str__(self) -> str:
        return f"{'' if self.seen else 'not '}the mask {self.mask}"


Term = Band | Prefix | Chunks | KeyMask | QueryMask | Compared | MaskArray
"""One rule of which keys a query sees."""


def sees(term: Term, queries: Any, keys: Any, given: Any) -> Any:
    """The mask of a term: bool [batch or 1, heads or 1, queries, keys].

    Args:
      term: the term.
      queries, keys: their positions, int [queries] and [keys].
      given: `given(operand)` gives an operand in its layout; not called for terms of positions alone.
    """
    i, j = queries[:, None], keys[None, :]
    match term:
        case Band(before, after):
            seen = (j <= i + after) if after is not None else (i == i) & (j == j)
            return (seen if before is None else seen & (j >= i - before))[None, None]
        case Prefix(length):
            return ((j <= i) | (j < length))[None, None]
        case Chunks(size):
            return (i // size == j // size)[None, None]
        case KeyMask(mask, seen):
            return ((given(mask) != 0) == seen)[:, None, None, :]
        case QueryMask(mask, seen):
            return ((given(mask) != 0) == seen)[:, None, :, None]
        case Compared(how, numbers, others):
            return HOW[how](given(numbers)[:, None, :, None], given(others)[:, None, None, :])
        case MaskArray(mask, seen):
            return (given(mask) != 0) == seen


HOW: Mapping[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "ge", "gt", "le", "lt")
}
"""The functions of the comparisons in `Compared`."""


# --------------------------------------------------------------------------------------------------
# `FoundAttention`: an attention of a program in one form, whatever its spelling; and what looks like one but is not
# recognised.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled:
    """Scores multiplied, or divided, by a number or an array."""

    by: float | Operand
    divides: bool = False

    @property
    def factor(self) -> float | None:
        """The number by which scores are multiplied; None for an array."""
        return None if isinstance(self.by, Operand) else 1 / self.by if self.divides else self.by


@dataclass(frozen=True)
class Added:
    """A bias added to the scores, or subtracted.

    Attributes:
      by: the bias.
      subtracts: whether it is subtracted.
      hides: the terms of the mask that it is if the array that it is made of holds zeros and ones only; () if it is none.
    """

    by: float | Operand
    subtracts: bool = False
    hides: tuple[Term, ...] = ()

    def __str__(self) -> str:
        mask = " and ".join(map(str, self.hides))
        return f"bias {self.by}" + (f", of zeros and ones a mask of {mask}" if mask else "")


@dataclass(frozen=True)
class Tanh:
    """The hyperbolic tangent of the scores: between two scales a soft cap."""


@dataclass(frozen=True)
class Cast:
    """Scores cast to a dtype."""

    dtype: Any


@dataclass(frozen=True)
class Masked:
    """Scores of keys that are not seen replaced by a number, or a number added to them.

    Attributes:
      terms: the rules by which keys are seen, which must all hold; (): every key is.
      fill: the number.
      adds: whether it is added.
    """

    terms: tuple[Term, ...]
    fill: float
    adds: bool = False


Change = Scaled | Added | Tanh | Cast | Masked
"""A change of the scores before the softmax."""


@dataclass(frozen=True)
class WeightsDrop:
    """Dropout of the weights.

    Attributes:
      rate: the probability of being dropped; None where it is no number.
      scale: what those that stay are multiplied by.
      keep: bool, which weights stay.
      key: the number of the random key in the `Nested` program.
      bits: the shape in which random bits are drawn with the key.
      bit_dims: what the dims of the bits run over, as `Operand.indices`.
      bit_width: how many bits each element has.
    """

    rate: float | None
    scale: float
    keep: Operand
    key: int
    bits: tuple[int, ...]
    bit_dims: tuple[Any, ...]
    bit_width: int

    def __str__(self) -> str:
        dims = ", ".join("*".join(map(str, index)) or "1" for index in self.bit_dims)
        return f"dropout {'?' if self.rate is None else f'{self.rate:.3g}'} of bits ({dims})"


@dataclass(frozen=True)
class FoundAttention:
    """softmax(changes(q · k)) · v.

    Attributes:
      q, k, v: given as [batch, query, heads, size], [batch, key, kv heads, size] and [batch, key, kv heads, value]; query head
        i reads key head i // (heads / kv heads). A scale that is multiplied into q or k is part of it.
      out: the result, taken as [batch, query, heads, value].
      sizes: the size of each label of `operand.LABELS`.
      changes: the changes of the scores, in order, without what is the same for all keys of a query: the softmax drops it.
      scores_dtype, weights_dtype: the dtypes of the product of q and k, and of the weights in their product with v.
      precisions: the precisions of the two products.
      zero: rules of `mask` outside which the weights are set to zero too, so that a query that sees no key gets zeros.
      gates: arrays by which the weights are multiplied, and rules outside which they are set to zero, the same for all keys.
      dropout: the dropout of the weights.
      line: the user's line that computes the scores.
      scopes: the name scopes of the result, as a path.
      left: why it is left as it is; "" where it may be replaced.
      replaces: the primitives that need not run once it is replaced.
    """

    q: Operand
    k: Operand
    v: Operand
    out: Operand
    sizes: Mapping[str, int]
    changes: tuple[Change, ...]
    scores_dtype: Any
    weights_dtype: Any
    precisions: tuple[Any, Any]
    zero: tuple[Term, ...]
    gates: tuple[Operand | Term, ...]
    dropout: WeightsDrop | None
    line: str
    scopes: str
    left: str = ""
    replaces: tuple[str, ...] = ()

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.sizes["head"] * self.sizes["member"]

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.sizes["head"]

    @property
    def mask(self) -> tuple[Term, ...]:
        """All rules of which keys a query sees."""
        return tuple([term for change in self.changes if isinstance(change, Masked) for term in change.terms])

    @property
    def causal(self) -> bool:
        """Whether positions alone hide what comes after a query."""
        return any(isinstance(term, Band) and term.after == 0 for term in self.mask)

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """(before, after): positions that a query sees on each side, by the first rule that bounds those before; else None."""
        bands = [term for term in self.mask if isinstance(term, Band) and term.before is not None]
        return (bands[0].before, bands[0].after) if bands else None

    @property
    def biases(self) -> tuple[Operand, ...]:
        """Arrays that are added to the scores."""
        return tuple([c.by for c in self.changes if isinstance(c, Added) and isinstance(c.by, Operand)])

    @property
    def scales(self) -> tuple[Operand, ...]:
        """Arrays that the scores are multiplied with."""
        return tuple([c.by for c in self.changes if isinstance(c, Scaled) and isinstance(c.by, Operand)])

    @property
    def cap(self) -> float | None:
        """The soft cap c of c · tanh(scale · q · k / c); None without one, or if it is no number."""
        steps = [change for change in self.changes if not isinstance(change, Cast)]
        places = [i for i, change in enumerate(steps) if isinstance(change, Tanh)]
        after = steps[places[0] + 1] if places and len(steps) > places[0] + 1 else None
        return after.factor if isinstance(after, Scaled) else None

    @property
    def scale(self) -> float | None:
        """The number by which q · k is scaled before biases and masks, inside a soft cap; None where it is an array."""
        factors: list[float | None] = []
        for change in self.changes:
            if not isinstance(change, Scaled | Cast):
                break
            factors += [change.factor] if isinstance(change, Scaled) else []
        capped = [self.cap] if any(isinstance(change, Tanh) for change in self.changes) else []
        known = [factor for factor in (*factors, *capped) if factor is not None]
        return math.prod(known) if len(known) == len(factors) + len(capped) else None

    @property
    def regular(self) -> bool:
        """Whether the scores are scale q · k, or c tanh(scale q · k / c), and then only biases and masks follow.

        Where `scale` is None, it is an array of `scales`.
        """
        kinds = "".join(_KIND[type(change)] for change in self.changes)
        return re.fullmatch("s*(ts)?b*", kinds) is not None

    def __str__(self) -> str:
        sizes = {label: size for label, size in self.sizes.items() if label != "member"}
        sizes["head"] = self.heads
        said = [f"{sizes['query']} queries, {sizes['key']} keys, {_heads(self)}, size {sizes['size']}"]
        said += [", ".join(map(str, self.mask)) or "every key"]
        said += [f"scale {self.scale:.3g}"] if self.scale not in (1, None) else []
        said += [f"scores times {scale}" for scale in self.scales]
        said += [f"soft cap {self.cap:.3g}"] if self.cap is not None else []
        said += [str(change) for change in self.changes if isinstance(change, Added) and isinstance(change.by, Operand)]
        said += [f"weights {'times' if isinstance(gate, Operand) else 'of'} {gate}" for gate in self.gates]
        said += [str(self.dropout)] if self.dropout is not None else []
        said += [] if self.regular else ["its scores are changed in an order of their own"]
        said += [f"left as it is: {self.left}"] if self.left else [f"in place of {len(self.replaces)} equations"]
        place = self.line or "an unknown line"
        return f"attention at {place}{f' ({self.scopes})' if self.scopes else ''}: " + "; ".join(said)


_KIND: Mapping[type, str] = {Scaled: "s", Tanh: "t", Added: "b", Masked: "b", Cast: ""}


def _heads(found: FoundAttention) -> str:
    return f"{found.heads} heads" + (f" ({found.kv_heads} of keys)" if found.kv_heads != found.heads else "")


@dataclass(frozen=True)
class Missed:
    """A product that looks like an attention's and is not recognised.

    Attributes:
      line: the user's line that computes the scores.
      why: the reason, as a clause.
    """

    line: str
    why: str

    def __str__(self) -> str:
        return f"not recognised at {self.line or 'an unknown line'}: {self.why}"


@dataclass(frozen=True)
class Recognised:
    """The attentions of a program that were found, and what was missed.

    Attributes:
      attentions: the attentions that were found, in the order of their results.
      missed: what looks like one and is not recognised.
      values: the program that they are in.
    """

    attentions: tuple[FoundAttention, ...]
    missed: tuple[Missed, ...]
    values: Nested = field(compare=False, repr=False)

    @property
    def replaceable(self) -> tuple[FoundAttention, ...]:
        """The attentions that may be replaced."""
        return tuple([found for found in self.attentions if not found.left])

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.attentions, *self.missed))) or "no attention"
