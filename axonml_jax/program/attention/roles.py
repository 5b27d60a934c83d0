"""What the dims of two products are for: rows, heads, positions of queries and of keys, sizes; told by where they stand.

A product only says which dims of its operands are paired, summed, or their own. Keys own the dims that the softmax goes over,
and queries their positions, and heads that share keys; which of these are which, and which paired dims are rows and which
heads, is read from the masks, and from the order of dims before everything was moved to its place for the product.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axonml_jax.program.attention.digits import Digit, Indices, joined, labels_of
from axonml_jax.program.attention.mark import Mark, sides_of
from axonml_jax.program.attention.sources import Source, sources, visible
from axonml_jax.program.nested import Level, Nested


@dataclass(frozen=True)
class Roles:
    """What the digits of a chain stand for.

    Attributes:
      q, k, v: the operands, before heads were repeated.
      pieces: label of the chain -> its parts, the least significant first: (stride, size, the attention's label, stride there).
      sizes: of each label of the attention.
    """

    q: Source
    k: Source
    v: Source
    pieces: Mapping[Any, Sequence[tuple[int, int, str, int]]]
    sizes: Mapping[str, int]

    def of(self, indices: Indices) -> Indices:
        """The same in digits of the attention's labels."""
        return tuple([joined(part for digit in index for part in self._parts(digit)) for index in indices])

    def _parts(self, digit: Digit) -> Iterator[Digit]:
        for stride, size, label, there in reversed(self.pieces[digit.label]):
            low, high = max(stride, digit.stride), min(stride * size, digit.stride * digit.size)
            if low < high:
                yield Digit(label, there * (low // stride), high // low)


def roles_of(values: Nested, mark: Mark, level: Level) -> Roles | None:
    """What a chain's dims are for; None where its operands cannot be read by code of a level."""
    sides, (over,) = sides_of(mark.product), mark.over
    by_queries = "left" if over == "right" else "right"
    k_q, k_k = (0, 1) if by_queries == "left" else (1, 0)
    assert mark.values is not None
    given = (sides.left, sides.right)
    q = list(sources(values, mark.product.inputs[k_q], given[k_q], casts=True))
    layout = [digit for index in q[-1].indices for digit in index]
    queries, members = _positions(values, mark, layout, by_queries)
    rows, heads = _rows_and_heads([digit for digit in layout if digit.label[0] == "paired"], layout, queries)
    found = [
        _seen(values, mark.product.inputs[k_q], given[k_q], level),
        _seen(values, mark.product.inputs[k_k], given[k_k], level),
        _seen(values, *mark.values, level),
    ]
    if not all(found):
        return None
    (first, *_), keys, vals = found
    k, v = _least(keys, vals, heads)
    there = _digits(heads, k)
    repeated = [part for digit in heads for part in _minus(digit, there)]
    order = [digit for index in k.indices for digit in index]
    parts = {
        "batch": rows,
        "query": queries,
        "head": there,
        "member": [*repeated, *members],
        "key": [digit for digit in order if digit.label[0] == over],
        "size": [digit for index in given[k_q] for digit in index if digit.label[0] == "summed"],
        "value": [digit for index in mark.values[1] for digit in index if digit.label[0] == "value"],
    }
    return Roles(first, k, v, *_pieces(parts))


def _pieces(parts: Mapping[str, Sequence[Digit]]) -> tuple[Mapping[Any, Any], Mapping[str, int]]:
    """The parts of every label, of the digits that each label of the attention has, the most significant first."""
    pieces: dict[Any, list[tuple[int, int, str, int]]] = {}
    sizes: dict[str, int] = {}
    for label, digits in parts.items():
        there = 1
        for digit in reversed(digits):
            pieces.setdefault(digit.label, []).append((digit.stride, digit.size, label, there))
            there *= digit.size
        sizes[label] = there
    return {label: sorted(found) for label, found in pieces.items()}, sizes


def _positions(values: Nested, mark: Mark, layout: Sequence[Digit], side: str) -> tuple[list[Digit], list[Digit]]:
    """Of the dims that only queries have the positions, and the heads that share keys."""
    own = [digit for digit in layout if digit.label[0] == side]
    count = max(1, len(labels_of(_over(mark))))
    if len(own) <= count:
        return own, []
    for raw in mark.raws:
        if raw.how == "select":  # a bias may differ from head to head and key to key alone
            *_, last = sources(values, raw.atom, raw.indices, casts=True)
            labels = labels_of(last.indices)
            named = [digit for digit in own if digit.label in labels]
            if len(named) == count and any(label[0] in mark.over for label in labels):
                return named, [digit for digit in own if digit not in named]
    paired = [place for place, digit in enumerate(layout) if digit.label[0] == "paired"]
    places = [place for place, digit in enumerate(layout) if digit in own]
    ahead = [place for place in places if paired and place < paired[-1]]
    if len(ahead) >= count:
        chosen = ahead[-count:]
    else:
        chosen = places[-count:] if len(paired) > 1 else places[:count]
    named = [layout[place] for place in chosen]
    return named, [digit for digit in own if digit not in named]


def _over(mark: Mark) -> Indices:
    """The keys' own dims."""
    (side,), sides = mark.over, sides_of(mark.product)
    own = sides.left if side == "left" else sides.right
    return tuple([tuple([digit for digit in index if digit.label[0] == side]) for index in own])


def _rows_and_heads(
    paired: Sequence[Digit], layout: Sequence[Digit], queries: Sequence[Digit]
) -> tuple[list[Digit], list[Digit]]:
    """Paired dims before the positions are rows, those after them heads; if all stand on one side, the last of several are."""
    first = layout.index(queries[0]) if queries else len(layout)
    heads = [digit for digit in paired if layout.index(digit) > first]
    if not heads:
        heads = list(paired[-1:]) if len(paired) > 1 else []
    elif len(heads) == len(paired) > 1:
        heads = list(paired[1:])
    return [digit for digit in paired if digit not in heads], heads


def _seen(values: Nested, atom: Any, indices: Indices, level: Level) -> list[Source]:
    return [each for each in sources(values, atom, indices) if visible(values, each.atom, level)]


def _least(keys: Sequence[Source], vals: Sequence[Source], heads: Sequence[Digit]) -> tuple[Source, Source]:
    """Keys and values with as few heads as both have, and otherwise whole."""

    def found(some: Sequence[Source]) -> dict[frozenset[Digit], Source]:
        wanted = set(labels_of(some[0].indices)) - {digit.label for digit in heads}
        table: dict[frozenset[Digit], Source] = {}
        for each in some:
            if wanted <= labels_of(each.indices) and _others(each, heads) == _others(some[0], heads):
                table.setdefault(frozenset(_digits(heads, each)), each)
        return table

    of_keys, of_values = found(keys), found(vals)
    both = [digits for digits in of_keys if digits in of_values]
    if not both:
        return keys[0], vals[0]
    fewest = min(both, key=_count)
    return of_keys[fewest], of_values[fewest]


def _count(digits: Iterable[Digit]) -> int:
    return math.prod(digit.size for digit in digits)


def _others(source: Source, heads: Sequence[Digit]) -> int:
    """How many elements all that is no head has."""
    return _count(digit for index in source.indices for digit in index) // _count(_digits(heads, source))


def _digits(heads: Sequence[Digit], source: Source) -> list[Digit]:
    """The digits of heads that a value runs over."""
    return [part for index in source.indices for digit in index for head in heads for part in _overlap(digit, head)]


def _overlap(a: Digit, b: Digit) -> list[Digit]:
    low, high = max(a.stride, b.stride), min(a.stride * a.size, b.stride * b.size)
    return [Digit(a.label, low, high // low)] if a.label == b.label and low < high else []


def _minus(head: Digit, there: Sequence[Digit]) -> list[Digit]:
    """The digits of a head that others leave, the most significant first."""
    high, found = head.stride * head.size, []
    own = sorted((digit for digit in there if _overlap(digit, head)), key=lambda digit: -digit.stride)
    for digit in own:
        top = digit.stride * digit.size
        found += [Digit(head.label, top, high // top)] if top < high else []
        high = digit.stride
    found += [Digit(head.label, head.stride, high // head.stride)] if head.stride < high else []
    return found
