"""What masks that follow from positions alone look like: bands, prefixes, chunks; each is held against all of the mask.

Of more than `ALL` pairs of positions some rows and columns are looked at whole: those at every number that the mask is made
of, at both ends, and `SPREAD` more between them.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from axonml_jax.program.atoms import Atom, is_constant
from axonml_jax.program.attention.digits import Indices
from axonml_jax.program.attention.masks.mask_terms import Band, Chunks, Prefix, Term, sees
from axonml_jax.program.elements import elements
from axonml_jax.program.nested import Nested

ALL = 1 << 24
SPREAD = 64


@dataclass(frozen=True)
class MaskLeaf:
    """What must be nonzero, or zero where `seen` is false, for a key to be seen.

    Attributes:
      atom: the value.
      indices: what its dims run over, in digits of an attention's labels.
      seen: whether it must be nonzero.
    """

    atom: Atom
    indices: Indices
    seen: bool


def classified(values: Nested, leaves: Sequence[MaskLeaf], sizes: Mapping[str, int]) -> tuple[Term, ...] | None:
    """The terms that say the same as some leaves together; None: no terms are known for it.

    Args:
      values: the program.
      leaves: parts of a mask that follow from positions alone.
      sizes: of queries and keys.
    """
    num_queries, num_keys = sizes["query"], sizes["key"]
    seen = lambda i, j: _seen(values, leaves, i, j)
    made_of = set(_numbers(values, [leaf.atom for leaf in leaves], set()))
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


def _numbers(values: Nested, atoms: Iterable[Atom], visited: set[int]) -> Iterator[int]:
    """The whole numbers that values are made of."""
    for atom in atoms:
        if is_constant(atom):
            if np.ndim(atom.val) == 0 and np.isfinite(float(atom.val)) and float(atom.val).is_integer():
                yield int(atom.val)
        elif atom not in visited:
            visited.add(atom)
            maker = values.maker(atom)
            yield from _numbers(values, () if maker is None else maker.inputs, visited)


def _seen(values: Nested, leaves: Sequence[MaskLeaf], i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """bool [queries, keys] of places i [queries, 1] and j [1, keys]."""
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
    """What the mask could be, from its first row, one in the middle, its last one, and its first column."""
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


def _looks(num_queries: int, num_keys: int, made_of: Iterable[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Parts of the mask that cover all of it, or some rows and columns of a large one."""
    rows, columns = np.arange(num_queries)[:, None], np.arange(num_keys)[None, :]
    if num_queries * num_keys <= ALL:
        step = max(1, (1 << 22) // num_keys)
        yield from ((rows[k : k + step], columns) for k in range(0, num_queries, step))
        return
    picked = _picked(num_queries, made_of)[:, None]
    yield from ((picked[k : k + 8], columns) for k in range(0, len(picked), 8))
    picked = _picked(num_keys, made_of)[None, :]
    yield from ((rows, picked[:, k : k + 8]) for k in range(0, picked.shape[1], 8))


def _picked(count: int, made_of: Iterable[int]) -> np.ndarray:
    """Places at both ends, around every number from either end, and some between them."""
    near = [place + step for each in made_of for place in (each, count - each) for step in (-1, 0, 1)]
    places = {*np.linspace(0, count - 1, SPREAD, dtype=int).tolist(), *near}
    return np.array(sorted(place for place in places if 0 <= place < count))
