"""Reads the masks of an attention from a program, as terms: rules of which keys a query sees."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from axonml_jax.attention.found import (
    HOW,
    OF_KEYS,
    OF_QUERIES,
    SCORES,
    Band,
    Chunks,
    Compared,
    Indices,
    KeyMask,
    Layout,
    MaskArray,
    Operand,
    Prefix,
    QueryMask,
    Term,
    before,
    labels_of,
    operand_indices,
    sees,
    sources,
    visible,
)
from axonml_jax.program.program import Atom, is_constant, is_elementwise
from axonml_jax.program.values import Level, Nested, Node, NotStatic, elements, number

# --------------------------------------------------------------------------------------------------
# Masks that follow from positions alone: a band, prefix or chunks is guessed, and compared with the mask.
#
# Of more than `ALL` pairs of positions some rows and columns are compared whole: those at every number that the mask is
# made of, at every place where a constant array of one dim turns, at both ends, and `SPREAD` more between them. A mask
# that is made of other constant arrays is compared whole.
# --------------------------------------------------------------------------------------------------

ALL = 1 << 24
SPREAD = 64


@dataclass(frozen=True)
class MaskLeaf:
    """A value that must be nonzero, or zero where `seen` is false, for a key to be seen.

    Attributes:
      atom: the value.
      indices: what its dims run over, in digits of an attention's labels.
      seen: whether it must be nonzero.
    """

    atom: Atom
    indices: Indices
    seen: bool


def classified(values: Nested, leaves: Sequence[MaskLeaf], sizes: Mapping[str, int]) -> tuple[Term, ...] | None:
    """The terms that are equal to some leaves together; None: no known terms are.

    Args:
      values: the program.
      leaves: parts of a mask, which must all hold and follow from positions alone.
      sizes: the sizes of the labels, "query" and "key" among them.
    """
    num_queries, num_keys = sizes["query"], sizes["key"]
    seen = lambda i, j: _seen(values, leaves, i, j)
    made_of = set(_turns(values, [leaf.atom for leaf in leaves], set()))
    tried: list[tuple[Term, ...]] = []
    for terms in _guesses(seen, num_queries, num_keys):
        if terms not in tried and all(_agree(seen, terms, i, j) for i, j in _looks(num_queries, num_keys, made_of)):
            return terms
        tried.append(terms)
    return None


def _agree(seen: Any, terms: Sequence[Term], i: np.ndarray, j: np.ndarray) -> bool:
    expected = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
    for term in terms:
        expected = expected & sees(term, i[:, 0], j[0], None)[0, 0]
    return bool(np.array_equal(np.broadcast_to(seen(i, j), expected.shape), expected))


def _turns(values: Nested, atoms: Iterable[Atom], visited: set[int]) -> Iterator[int | None]:
    """Yields the numbers among the constants that values are made of, and the places at which an array of one long dim turns.

    None stands for an array of which a few places do not tell where it changes: then all of the mask must be compared.
    """
    for atom in atoms:
        if is_constant(atom):
            yield from _turns_of(np.asarray(atom.val))
        elif atom not in visited:
            visited.add(atom)
            maker = values.maker(atom)
            if atom in values.constants:
                yield from _turns_of(np.asarray(values.constants[atom]))
            yield from _turns(values, () if maker is None else maker.inputs, visited)


def _turns_of(constant: np.ndarray) -> list[int | None]:
    """The number that a constant is, or the places along its one long dim at which it is no straight line; else [None]."""
    if constant.size == 1:
        number = float(np.real(constant.item()))
        return [int(number)] if np.isfinite(number) and number.is_integer() else []
    if constant.size != max(constant.shape, default=1):
        return [None] * (constant.size > 0)
    places = np.flatnonzero(np.diff(constant.ravel().astype(float), 2))
    return [int(place) + 1 for place in places] if len(places) <= SPREAD else [None]


def _seen(values: Nested, leaves: Sequence[MaskLeaf], i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """The mask of leaves at places i [queries, 1] and j [1, keys]: bool [queries, keys]."""
    found: Any = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
    for leaf in leaves:
        places = []
        for index in leaf.indices:
            at: Any = np.zeros((1, 1), int)
            for digit in index:
                along = {"query": i, "key": j}.get(digit.label, 0)  # along all others nothing changes
                at = at * digit.size + along // digit.stride % digit.size
            places.append(at)
        found = found & ((elements(values, leaf.atom, places) != 0) == leaf.seen)
    return found


def _guesses(seen: Any, num_queries: int, num_keys: int) -> Iterator[tuple[Term, ...]]:
    """Yields guesses of terms from the mask's first, middle and last row, and its first column."""
    keys, last = np.arange(num_keys)[None, :], num_queries - 1
    rows = {i: np.flatnonzero(seen(np.array([[i]]), keys)[0]) for i in (0, num_queries // 2, last)}
    if any(len(row) == 0 for row in rows.values()):
        return
    if all(len(row) == num_keys for row in rows.values()):
        yield ()
    before = [int(last - rows[last][0])] if rows[last][0] > 0 else []
    after = [int(row[-1]) - i for i, row in rows.items() if row[-1] < num_keys - 1 or i == last]
    yield from ((Band(*pair),) for pair in itertools.product([*before, None], [*after, None]) if pair != (None, None))
    yield (Prefix(len(rows[0])),)
    yield (Chunks(len(rows[0])),)
    column = seen(np.arange(num_queries)[:, None], np.zeros((1, 1), int))[:, 0]
    yield (Chunks(int(column.sum())), Band(None, 0))


def _looks(num_queries: int, num_keys: int, made_of: Collection[int | None]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The parts of a mask to compare: all of it, or some rows and columns of a large one."""
    rows, columns = np.arange(num_queries)[:, None], np.arange(num_keys)[None, :]
    if num_queries * num_keys <= ALL or None in made_of:
        step = max(1, (1 << 22) // num_keys)
        yield from ((rows[k : k + step], columns) for k in range(0, num_queries, step))
        return
    numbers = [each for each in made_of if each is not None]
    picked = _picked(num_queries, numbers)[:, None]
    yield from ((picked[k : k + 8], columns) for k in range(0, len(picked), 8))
    picked = _picked(num_keys, numbers)[None, :]
    yield from ((rows, picked[:, k : k + 8]) for k in range(0, picked.shape[1], 8))


def _picked(count: int, made_of: Iterable[int]) -> np.ndarray:
    """Places to compare: both ends, the places around every number from either end, and `SPREAD` evenly between."""
    near = [place + step for each in made_of for place in (each, count - each) for step in (-1, 0, 1)]
    places = {*np.linspace(0, count - 1, SPREAD, dtype=int).tolist(), *near}
    return np.array(sorted(place for place in places if 0 <= place < count))


# --------------------------------------------------------------------------------------------------
# Reading a mask: splitting it into leaves that must all hold, and turning these into terms.
# --------------------------------------------------------------------------------------------------

AROUND = {"eq": "eq", "ne": "ne", "ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}
"""A comparison with its operands exchanged."""
OPPOSITE = {"eq": "ne", "ne": "eq", "ge": "lt", "gt": "le", "le": "gt", "lt": "ge"}
"""The comparison that holds where another one does not."""


class HiddenMask(Exception):
    """Raised for a mask that is made inside a body, where code at the attention's place cannot read it."""


@dataclass(frozen=True)
class MaskReader:
    """Reads masks of an attention.

    Attributes:
      values: the program.
      level: where the attention is.
      sizes: the sizes of its labels.
    """

    values: Nested
    level: Level
    sizes: Any

    def terms(self, atom: Atom, indices: Indices, seen: bool) -> tuple[Term, ...]:
        """Reads the terms of a mask.

        Args:
          atom: the mask.
          indices: what its dims run over, in digits of the attention's labels.
          seen: whether it is true, or nonzero, where keys are seen; else it is where they are hidden.

        Raises:
          HiddenMask: where it cannot be read.
        """
        leaves = self.leaves(MaskLeaf(atom, indices, seen))
        static = [leaf for leaf in leaves if self._is_static(leaf)]
        rest = [leaf for leaf in leaves if leaf not in static]
        found = classified(self.values, static, self.sizes)
        if found is None:
            alone = [(leaf, classified(self.values, [leaf], self.sizes)) for leaf in static]
            rest += [leaf for leaf, terms in alone if terms is None]
            found = tuple([term for _, terms in alone for term in terms or ()])
        return (*found, *map(self._term, rest))

    def operand(self, atom: Atom, indices: Indices, layout: Layout) -> Operand:
        """Reads a value before it was broadcast, as an operand.

        Raises:
          HiddenMask: where it cannot be read.
        """
        found = [each for each in sources(self.values, atom, indices) if visible(self.values, each.atom, self.level)]
        if not found:
            raise HiddenMask
        aval = self.values.aval(found[-1].atom)
        return Operand(found[-1].atom, aval.shape, self.values.aval(atom).dtype, found[-1].indices, layout)

    def leaves(self, leaf: MaskLeaf) -> list[MaskLeaf]:
        """Splits a mask into leaves that must all hold."""
        parts = list(self._parts(leaf))
        if parts == [leaf]:
            return parts
        found = [each for part in parts for each in self.leaves(part)]
        if len(found) == 1 and self._is_wider(found[0].atom, leaf.atom):
            return [leaf]
        readable = all(visible(self.values, each.atom, self.level) or self._is_static(each) for each in found)
        return found if readable else [leaf]

    def _is_wider(self, atom: Atom, of: Atom) -> bool:
        """Whether a value is larger in bytes than a bool condition that was made of it: as many elements of another dtype."""
        old, new = self.values.aval(atom), self.values.aval(of)
        return new.dtype == jnp.bool_ and old.dtype != jnp.bool_ and old.size == new.size

    def _parts(self, leaf: MaskLeaf) -> Iterator[MaskLeaf]:
        """One step into what a leaf is made of; the leaf itself where that is not understood."""
        maker = self.values.maker(leaf.atom)
        found = None if maker is None else self._placed(maker, leaf) or self._made(maker, leaf)
        yield from [leaf] if found is None else found

    def _placed(self, maker: Node, leaf: MaskLeaf) -> list[MaskLeaf] | None:
        op = maker.equation.op
        if maker.name == "convert_element_type" and jnp.issubdtype(op.given[0].dtype, jnp.inexact):
            return None if op.made[0].dtype != jnp.bool_ else [replace(leaf, atom=maker.inputs[0])]
        indices = before(op, leaf.indices)
        return None if indices is None else [MaskLeaf(maker.inputs[0], indices, leaf.seen)]

    def _made(self, maker: Node, leaf: MaskLeaf) -> list[MaskLeaf] | None:
        name, inputs = maker.name, maker.inputs
        on = lambda k, seen=leaf.seen: self._on(maker, k, leaf, seen)
        is_bool = maker.equation.op.made[0].dtype == jnp.bool_
        if name == "not" and is_bool:
            return [on(0, not leaf.seen)]
        if is_bool and name == ("and" if leaf.seen else "or"):
            return [on(0), on(1)]
        if (
            name == "mul" and leaf.seen
        ):  # nonzero where both are; that no product of nonzero numbers is rounded to zero is assumed
            return [on(0), on(1)]
        if name == "sub" and number(self.values, inputs[0]) == 1 and self._is_binary(inputs[1]):
            return [on(1, not leaf.seen)]
        if name == "select_n" and len(inputs) == 3 and leaf.seen:
            zeros = [number(self.values, case) == 0 for case in inputs[1:]]
            if any(zeros) and self.values.aval(inputs[0]).dtype == jnp.bool_:
                return [on(0, zeros[0]), on(1 + zeros[0])]
        if name in HOW and not (number(self.values, inputs[0]) is None and number(self.values, inputs[1]) is None):
            return self._compared_with_number(maker, leaf)
        return None

    def _compared_with_number(self, maker: Node, leaf: MaskLeaf) -> list[MaskLeaf] | None:
        """Reads a comparison with a number as a test for nonzero or zero: with 0, or of values 0 and 1 with a bound between."""
        k = 0 if number(self.values, maker.inputs[1]) is not None else 1
        bound, how = number(self.values, maker.inputs[1 - k]), maker.name if k == 0 else AROUND[maker.name]
        if self._is_binary(maker.inputs[k]):
            says = [bool(HOW[how](value, bound)) for value in (0, 1)]
            return [self._on(maker, k, leaf, says[1] == leaf.seen)] if says[0] != says[1] else None
        if bound == 0 and how in ("eq", "ne"):
            return [self._on(maker, k, leaf, (how == "ne") == leaf.seen)]
        return None

    def _on(self, maker: Node, k: int, leaf: MaskLeaf, seen: bool) -> MaskLeaf:
        """The leaf of an elementwise equation's operand, which may be of size 1 along some dims."""
        return MaskLeaf(maker.inputs[k], operand_indices(self.values, maker, k, leaf.indices), seen)

    def _is_binary(self, atom: Atom) -> bool:
        """Whether a value is 0 or 1 everywhere."""
        if self.values.aval(atom).dtype == jnp.bool_ or number(self.values, atom) in (0, 1):
            return True
        maker = self.values.maker(atom)
        if maker is None:
            return False
        if maker.name in ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose"):
            return self._is_binary(maker.inputs[0])
        if maker.name == "sub":
            return number(self.values, maker.inputs[0]) == 1 and self._is_binary(maker.inputs[1])
        first = 1 if maker.name == "select_n" else 0
        return maker.name in ("mul", "select_n", "max", "min") and all(map(self._is_binary, maker.inputs[first:]))

    def _is_static(self, leaf: MaskLeaf) -> bool:
        """Whether a mask follows from positions alone, and is the same for all rows and heads."""
        if not self._varies(leaf) <= {"query", "key"}:
            return False
        try:
            elements(self.values, leaf.atom, [np.zeros(1, int)] * len(leaf.indices))
        except NotStatic:
            return False
        return True

    def _varies(self, leaf: MaskLeaf) -> frozenset[str]:
        """The labels along which a value may differ: those of its dims, without those along which it was broadcast."""
        maker = self.values.maker(leaf.atom)
        indices = None if maker is None else before(maker.equation.op, leaf.indices)
        if maker is not None and indices is not None:
            return self._varies(MaskLeaf(maker.inputs[0], indices, True))
        if maker is not None and maker.name == "iota":
            return labels_of([leaf.indices[maker.equation.op.options["dimension"]]])
        if maker is not None and is_elementwise(maker.name):
            return frozenset().union(*(self._varies(self._on(maker, k, leaf, True)) for k in range(len(maker.inputs))))
        return labels_of(leaf.indices)

    def _term(self, leaf: MaskLeaf) -> Term:
        """The term of a leaf that is not known from positions alone."""
        labels = labels_of(leaf.indices)
        if labels <= {"batch", "key"}:
            return KeyMask(self.operand(leaf.atom, leaf.indices, OF_KEYS), leaf.seen)
        if labels <= {"batch", "query"}:
            return QueryMask(self.operand(leaf.atom, leaf.indices, OF_QUERIES), leaf.seen)
        maker = self.values.maker(leaf.atom)
        found = self._comparison(maker, leaf) if maker is not None and maker.name in HOW else None
        return found or MaskArray(self.operand(leaf.atom, leaf.indices, SCORES), leaf.seen)

    def _comparison(self, maker: Node, leaf: MaskLeaf) -> Compared | None:
        """Reads a comparison of a number of every query with one of every key; None for other comparisons."""
        how = maker.name if leaf.seen else OPPOSITE[maker.name]
        sides = [self._on(maker, k, leaf, True) for k in (0, 1)]
        try:
            found = [
                self.operand(side.atom, side.indices, layout)
                for side, layout in zip(sides, (OF_QUERIES, OF_KEYS), strict=True)
            ]
        except HiddenMask:
            return None
        if "query" not in found[0].labels:
            how, found = AROUND[how], [replace(found[1], layout=OF_QUERIES), replace(found[0], layout=OF_KEYS)]
        fits = found[0].labels <= {"batch", "query"} and found[1].labels <= {"batch", "key"}
        return Compared(how, *found) if fits else None
