"""Finds attention in a program in any spelling: softmax chains between two products, their dims' roles, their masks."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from axonml_jax.attention.found import (
    KEEPING,
    KEYS,
    QUERIES,
    RESULT,
    SCORES,
    VALUES,
    Added,
    Cast,
    Change,
    Digit,
    FoundAttention,
    Index,
    Indices,
    Layout,
    Masked,
    Missed,
    Operand,
    Recognised,
    Scaled,
    Source,
    Tanh,
    Term,
    WeightsDrop,
    activations,
    after,
    before,
    joined,
    labels_of,
    operand_indices,
    sources,
    varies_along,
    visible,
    whole,
)
from axonml_jax.attention.masks import AROUND, HiddenMask, MaskReader
from axonml_jax.program.program import Atom, Equation, Program, is_constant, is_elementwise, names_of, rule_of
from axonml_jax.program.values import Level, Nested, Node, nested, number

# --------------------------------------------------------------------------------------------------
# The stages of values between a product, a softmax and another product.
# --------------------------------------------------------------------------------------------------

Stage = Literal["scores", "exps", "sum", "inverse", "log sum", "log weights", "weights", "mixed", "done", "lost"]


@dataclass(frozen=True)
class Raw:
    """An operation on scores, exponentials or weights, as the program writes it.

    Attributes:
      how: "mul", "div", "add", "sub", "tanh", "cast" or "select".
      atom: the other operand, or the condition of a select.
      indices: what its dims run over.
      seen: for a select the condition's value where scores stay; unused for others.
      number: for a select the number that replaces the other scores; for a cast the dtype.
    """

    how: str
    atom: Atom = None
    indices: Indices = ()
    seen: bool = True
    number: Any = None


@dataclass(frozen=True)
class Mark:
    """The stage of a value on the way from scores to an attention's result, and the operations that led to it.

    Attributes:
      stage: "exps" are exponentials of scores, "sum" their sum over all keys, "inverse" 1 / sum, "log sum" its logarithm,
        "log weights" scores - log sum, "weights" exps / sum, "mixed" the product of exps and values, "done" mixed / sum;
        "lost": made of scores in a way that is not understood.
      product: the product that made the scores.
      indices: what its dims run over: digits of ("paired", i), ("left", dim), ("right", dim) and ("value", dim).
      raws: the operations on the scores.
      base: for exps and what is made of them, the result of `exp`, which tells exps apart; for a log sum, the scores.
      over: the operand of the product ("left" or "right") over whose dims the sum goes: the keys'.
      zeroed: masks by which exps were zeroed, or factors by which they were multiplied; `summed`: those of the exps in the sum.
      afters: the operations on the weights.
      values: the value that exps or weights were multiplied with, and what its dims run over.
      mix: the product of exps or weights with `values`.
      why: of "lost", the reason; `late`: what was made of the lost scores, "", "exps" or "sum".
    """

    stage: Stage
    product: Node
    indices: Indices
    raws: tuple[Raw, ...] = ()
    base: int = -1
    over: frozenset[Any] = frozenset()
    zeroed: tuple[Raw, ...] = ()
    summed: tuple[Raw, ...] = ()
    afters: tuple[Raw, ...] = ()
    values: tuple[Atom, Indices] | None = None
    mix: Node | None = None
    why: str = ""
    late: str = ""

    @property
    def hiding(self) -> list[Raw]:
        """The masks that set scores to -inf."""
        return [raw for raw in self.raws if raw.how == "select" and raw.number == -math.inf]

    def lost(self, node: Node) -> "Mark":
        """The mark of a value after an operation that is not understood."""
        if self.stage == "lost":
            return self
        late = {"exps": "exps", "sum": "sum", "inverse": "sum"}.get(self.stage, "")
        line = node.equation.op.line
        why = f"its {PLURAL[self.stage]} go through {node.name}{f' at {line}' if line else ''}"
        return replace(self, stage="lost", why=why, late=late, indices=())


ORDER: Sequence[Stage] = ("mixed", "weights", "exps", "log weights", "scores", "inverse", "sum", "log sum", "lost")
"""The order of stages: of an equation's marked operands the one whose stage comes first decides."""

PLURAL: Mapping[str, str] = {
    "scores": "scores",
    "exps": "exponentials",
    "sum": "sums of exponentials",
    "inverse": "sums of exponentials",
    "log sum": "sums of exponentials",
    "log weights": "weights",
    "weights": "weights",
    "mixed": "unfinished results",
    "lost": "scores",
}
"""The words for the values of each stage."""


@dataclass(frozen=True)
class Sides:
    """The indices of the dims of a product's operands and of its result."""

    left: Indices
    right: Indices
    result: Indices


def sides_of(product: Node) -> Sides:
    """The indices of a product, with a label of its own for every dim."""
    op = product.equation.op
    contracted, batched = op.contraction
    given: list[list[Index]] = []
    for k, side in enumerate(("left", "right")):
        found: list[Index] = []
        for dim, size in enumerate(op.given[k].shape):
            if dim in contracted[k]:
                found.append(whole(("summed", contracted[k].index(dim)), size))
            elif dim in batched[k]:
                found.append(whole(("paired", batched[k].index(dim)), size))
            else:
                found.append(whole((side, dim), size))
        given.append(found)
    return Sides(tuple(given[0]), tuple(given[1]), result_of(product, tuple(given[0]), tuple(given[1])))


def result_of(product: Node, left: Indices, right: Indices) -> Indices:
    """The indices of a product's result: paired dims, the left operand's own, the right one's."""
    contracted, batched = product.equation.op.contraction
    own = [
        [index for dim, index in enumerate(side) if dim not in (*contracted[k], *batched[k])]
        for k, side in enumerate((left, right))
    ]
    return (*[left[dim] for dim in batched[0]], *own[0], *own[1])


def side_over(product: Node, indices: Indices) -> str | None:
    """The operand, "left" or "right", whose own dims are exactly these; None: neither. A softmax goes over the keys'."""
    digits = [digit for index in indices for digit in index]
    sides = sides_of(product)
    for side, own in (("left", sides.left), ("right", sides.right)):
        wanted = {digit.label: digit.size for index in own for digit in index if digit.label[0] == side}
        if wanted and wanted == _sizes(digits) and len(set(digits)) == len(digits):
            return side
    return None


def _sizes(digits: list[Digit]) -> dict[Any, int]:
    labels = {digit.label for digit in digits}
    return {label: math.prod(digit.size for digit in digits if digit.label == label) for label in labels}


# --------------------------------------------------------------------------------------------------
# The roles of the dims of two products: rows, heads, positions of queries and of keys, sizes.
#
# A product only says which dims of its operands are batched ("paired"), contracted ("summed"), or their own. Keys own the
# dims that the softmax goes over; queries own their positions, and heads that share keys. Which of the latter are which, and
# which batched dims are rows and which heads, is read from the masks, and from the order of dims before they were transposed
# for the product.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roles:
    """The roles of a chain's digits in the attention: rows, heads, positions and sizes.

    Attributes:
      q, k, v: the operands, before heads were repeated.
      pieces: label of the chain -> its parts, the least significant first: (stride, size, the attention's label, stride there).
      sizes: the size of each label of the attention.
    """

    q: Source
    k: Source
    v: Source
    pieces: Mapping[Any, Sequence[tuple[int, int, str, int]]]
    sizes: Mapping[str, int]

    def of(self, indices: Indices) -> Indices:
        """The same indices in digits of the attention's labels."""
        return tuple([joined(part for digit in index for part in self._parts(digit)) for index in indices])

    def _parts(self, digit: Digit) -> Iterator[Digit]:
        for stride, size, label, there in reversed(self.pieces[digit.label]):
            low, high = max(stride, digit.stride), min(stride * size, digit.stride * digit.size)
            if low < high:
                yield Digit(label, there * (low // stride), high // low)


def roles_of(values: Nested, mark: Mark, level: Level) -> Roles | None:
    """Finds the roles of a chain's dims; None if code at the level of its result cannot read its operands."""
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
    """The parts of every label of a chain, and the sizes of the attention's labels.

    Args:
      parts: the digits of each label of the attention, the most significant first.
    """
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
    """Divides the dims that only queries have into (positions, heads that share keys)."""
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
    """The indices of the keys' own dims."""
    (side,), sides = mark.over, sides_of(mark.product)
    own = sides.left if side == "left" else sides.right
    return tuple([tuple([digit for digit in index if digit.label[0] == side]) for index in own])


def _rows_and_heads(
    paired: Sequence[Digit], layout: Sequence[Digit], queries: Sequence[Digit]
) -> tuple[list[Digit], list[Digit]]:
    """Divides paired dims into (rows, heads): rows come before the positions, heads after; if all are on one side, the order
    decides."""
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
    """Keys and values before heads were repeated: the sources with the fewest heads that both have."""

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
    """The number of elements of a value along all dims but its heads."""
    return _count(digit for index in source.indices for digit in index) // _count(_digits(heads, source))


def _digits(heads: Sequence[Digit], source: Source) -> list[Digit]:
    """The digits of heads that a value runs over."""
    return [part for index in source.indices for digit in index for head in heads for part in _overlap(digit, head)]


def _overlap(a: Digit, b: Digit) -> list[Digit]:
    low, high = max(a.stride, b.stride), min(a.stride * a.size, b.stride * b.size)
    return [Digit(a.label, low, high // low)] if a.label == b.label and low < high else []


def _minus(head: Digit, there: Sequence[Digit]) -> list[Digit]:
    """The digits of a head that others do not cover, the most significant first."""
    high, found = head.stride * head.size, []
    own = sorted((digit for digit in there if _overlap(digit, head)), key=lambda digit: -digit.stride)
    for digit in own:
        top = digit.stride * digit.size
        found += [Digit(head.label, top, high // top)] if top < high else []
        high = digit.stride
    found += [Digit(head.label, head.stride, high // head.stride)] if head.stride < high else []
    return found


# --------------------------------------------------------------------------------------------------
# Rules for what an equation makes of scores, exponentials, sums and weights: one for each stage of a softmax.
# --------------------------------------------------------------------------------------------------

PLACED = (*KEEPING, "broadcast_in_dim", "reshape", "squeeze", "transpose")
NARROW: Sequence[Stage] = ("sum", "inverse", "log sum")
"""Stages whose values may be broadcast over keys again."""


@dataclass(frozen=True)
class StageRules:
    """Rules of what an equation makes of marked values, one for each stage of a softmax.

    Attributes:
      values: the program.
      marks: the marks of its values, which the caller fills.
      broken: product -> why the softmax of its scores is not understood, or that its weights are not multiplied with values.
      over: product -> the operands over whose dims a softmax goes that does not go over all keys and keys alone.
    """

    values: Nested
    marks: Mapping[int, Mark]
    broken: dict[Node, str]
    over: dict[Node, frozenset[int]] = field(default_factory=dict)

    def mark(self, atom: Atom) -> Mark | None:
        """The mark of a value; None: it has none."""
        return None if is_constant(atom) else self.marks.get(atom)

    def made(self, node: Node) -> tuple[Mark | None, Mark | None]:
        """(mark of an equation's results, mark of the operand that decided it); None for each that there is not."""
        marked = [(ORDER.index(m.stage), k) for k, atom in enumerate(node.inputs) if (m := self.mark(atom)) is not None]
        if not marked or not any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in node.equation.op.made):
            return None, None
        k = min(marked)[1]
        mark = self.mark(node.inputs[k])
        assert mark is not None
        return (self._placed(node, mark) if node.name in PLACED else self._ruled(node, k, mark)), mark

    def _ruled(self, node: Node, k: int, mark: Mark) -> Mark | None:
        match mark.stage:
            case "scores":
                return self._scores(node, k, mark)
            case "exps":
                return self._exps(node, k, mark)
            case "sum" | "inverse":
                return self._sum(node, k, mark)
            case "log sum":
                return self._log_sum(node, k, mark)
            case "log weights":
                return replace(mark, stage="weights", base=-1) if node.name == "exp" else mark.lost(node)
            case "weights":
                return self._weights(node, k, mark)
            case "mixed":
                return self._mixed(node, k, mark)
            case "lost":
                return self._lost(node, mark)

    def _placed(self, node: Node, mark: Mark) -> Mark | None:
        """The mark of a value that is moved, broadcast or cast."""
        if mark.stage == "lost":
            return mark
        if node.name == "stop_gradient":
            return None
        op = node.equation.op
        indices = after(op, 0, mark.indices)
        if indices is None or (mark.stage not in NARROW and _spread(indices, op.made[0].shape)):
            return mark.lost(node)
        if node.name == "convert_element_type" and mark.stage == "scores":
            mark = replace(mark, raws=(*mark.raws, Raw("cast", number=op.made[0].dtype)))
        return replace(mark, indices=indices)

    def _scores(self, node: Node, k: int, mark: Mark) -> Mark | None:
        name, op = node.name, node.equation.op
        if name == "exp":
            return replace(mark, stage="exps", base=node.outputs[0])
        if name == "tanh":
            return replace(mark, raws=(*mark.raws, Raw("tanh")))
        if name in ("reduce_max", "reduce_min", "argmax", "reduce_sum"):
            return None
        if op.made[0].shape != op.given[k].shape:
            return mark.lost(node)
        if name in ("add", "sub", "mul", "div") and not (name in ("sub", "div") and k == 1):
            return self._changed(node, k, mark)
        if name == "select_n" and (raw := self._selected(node, mark)) is not None:
            return replace(mark, raws=(*mark.raws, raw))
        return mark.lost(node)

    def _changed(self, node: Node, k: int, mark: Mark) -> Mark:
        other = self.mark(node.inputs[1 - k])
        if other is not None and other.stage == "log sum" and node.name == "sub" and other.base == node.inputs[0]:
            return replace(mark, stage="log weights", base=other.base, over=other.over, summed=other.summed)
        if other is not None and other.stage == "scores" and not _is_paired(mark) and _is_paired(other):
            k, mark, other = 1 - k, other, mark
            if node.name in ("sub", "div"):
                return mark.lost(node)
        return replace(mark, raws=(*mark.raws, self._raw(node.name, node.inputs[1 - k], mark)))

    def _raw(self, how: str, atom: Atom, mark: Mark, **more) -> Raw:
        """The operation that an elementwise equation's other operand does; its dims are the marked one's, or of size 1."""
        shape = self.values.aval(atom).shape
        indices = [index if size > 1 else () for index, size in zip(mark.indices, shape, strict=True)] if shape else []
        return Raw(how, atom, tuple(indices), **more)

    def _selected(self, node: Node, mark: Mark) -> Raw | None:
        """Reads a select between a marked value and a number by a condition; None for other selects."""
        condition, *cases = node.inputs
        if len(cases) != 2 or self.values.aval(condition).dtype != jnp.bool_:
            return None
        k = next(k for k, case in enumerate(cases) if self.mark(case) is mark)
        fill = number(self.values, cases[1 - k])
        return None if fill is None else self._raw("select", condition, mark, seen=k == 1, number=fill)

    def _exps(self, node: Node, k: int, mark: Mark) -> Mark | None:
        name, op, others = (
            node.name,
            node.equation.op,
            [m for atom in node.inputs if (m := self.mark(atom)) is not None],
        )
        if name == "reduce_sum":
            return self._summed(node, mark)
        if name == "reduce_max":
            return None
        if op.made[0].shape != op.given[k].shape:
            return mark.lost(node)
        if name == "select_n" and (raw := self._selected(node, mark)) is not None and raw.number == 0:
            return replace(mark, zeroed=(*mark.zeroed, raw))
        divides = name == "div" and k == 0 and len(others) == 2 and others[1].stage == "sum"
        times = name == "mul" and len(others) == 2 and others[1 - k].stage == "inverse"
        if divides or times:
            other = others[1 - k]
            if other.base == mark.base and _fits(mark.indices, other):
                return replace(mark, stage="weights", over=other.over, summed=other.summed)
        elif name == "mul" and len(others) == 1:
            return replace(mark, zeroed=(*mark.zeroed, self._raw("mul", node.inputs[1 - k], mark)))
        for other in others:
            if other.late == "sum":
                self.broken.setdefault(mark.product, other.why)
        return mark.lost(node)

    def _summed(self, node: Node, mark: Mark) -> Mark:
        axes = {axis % len(mark.indices) for axis in node.equation.op.options["axes"]}
        over = tuple([index for dim, index in enumerate(mark.indices) if dim in axes])
        left = tuple([index for dim, index in enumerate(mark.indices) if dim not in axes])
        side = side_over(mark.product, over)
        if side is None:
            sides = {label[0] for label in labels_of(over)}
            self.over[mark.product] = frozenset(k for k, name in enumerate(("left", "right")) if name in sides)
            lost = mark.lost(node)
            return replace(lost, why="its softmax does not go over all keys and over keys alone", late="sum")
        return replace(mark, stage="sum", indices=left, over=frozenset((side,)), summed=mark.zeroed, zeroed=())

    def _sum(self, node: Node, k: int, mark: Mark) -> Mark | None:
        name = node.name
        if name == "sign" or node.equation.op.made[0].shape != node.equation.op.given[k].shape:
            return None if name == "sign" else mark.lost(node)
        if mark.stage == "sum" and name == "abs":
            return mark
        if mark.stage == "sum" and name == "log":
            maker = self.values.maker(mark.base)
            assert maker is not None
            return replace(mark, stage="log sum", base=maker.inputs[0])
        inverts = name == "div" and k == 1 and number(self.values, node.inputs[0]) == 1
        inverts = inverts or (name == "integer_pow" and node.equation.op.options["y"] == -1)
        return replace(mark, stage="inverse") if mark.stage == "sum" and inverts else mark.lost(node)

    def _log_sum(self, node: Node, k: int, mark: Mark) -> Mark | None:
        """The mark of a log-sum-exp to which the shift is added back: log sum exp(s - c) + c is log sum exp(s)."""
        shifted = self.values.maker(mark.base)
        if node.name == "add" and shifted is not None and shifted.name == "sub":
            scores, shift = shifted.inputs
            if not is_constant(scores) and self.values.same(self._root(shift), self._root(node.inputs[1 - k])):
                return replace(mark, base=scores)
        return mark.lost(node)

    def _root(self, atom: Atom) -> Atom:
        """A value before it was reshaped or broadcast."""
        while (maker := self.values.maker(atom)) is not None and maker.name in (
            "broadcast_in_dim",
            "reshape",
            "squeeze",
        ):
            atom = maker.inputs[0]
        return atom

    def _weights(self, node: Node, k: int, mark: Mark) -> Mark | None:
        name, op = node.name, node.equation.op
        if op.made[0].shape != op.given[k].shape:
            return mark.lost(node)
        if name == "mul" or (name == "div" and k == 0):
            return replace(mark, afters=(*mark.afters, self._raw(name, node.inputs[1 - k], mark)))
        if name == "select_n" and (raw := self._selected(node, mark)) is not None and raw.number == 0:
            return replace(mark, afters=(*mark.afters, raw))
        return mark.lost(node)

    def _mixed(self, node: Node, k: int, mark: Mark) -> Mark | None:
        """The mark of unfinished results that are divided by the sum of exponentials after the product."""
        others = [m for atom in node.inputs if (m := self.mark(atom)) is not None]
        stage = {"div": "sum", "mul": "inverse"}.get(node.name)
        if len(others) == 2 and others[1 - k].stage == stage and not (stage == "sum" and k == 1):
            other = others[1 - k]
            if other.base == mark.base and other.over == mark.over and _fits(mark.indices, other):
                return replace(mark, stage="done", summed=other.summed)
        return mark.lost(node)

    def _lost(self, node: Node, mark: Mark) -> Mark | None:
        """The mark of what is made of a lost value, as far as a softmax can still be seen in it."""
        if rule_of(node.name).kind not in ("elementwise", "placing", "selecting"):
            return None
        if node.name == "exp":
            return replace(mark, late="exps")
        if node.name == "reduce_sum":
            return replace(mark, late="sum") if mark.late == "exps" else None
        if node.name == "div" and _has_late(map(self.mark, node.inputs), mark.product):
            self.broken.setdefault(mark.product, mark.why)
        return mark


def _has_late(marks: Iterable[Mark | None], product: Node) -> bool:
    found = [mark.late or mark.stage for mark in marks if mark is not None and mark.product is product]
    return found == ["exps", "sum"]


def _spread(indices: Indices, shape: Sequence[int]) -> bool:
    return any(size > 1 and not index for index, size in zip(indices, shape, strict=True))


def _fits(indices: Indices, other: Mark) -> bool:
    """Whether a sum stands beside what it is the sum of, dim by dim."""
    pairs = zip(indices, other.indices, strict=True)
    gone = lambda index: all(digit.label[0] in (*other.over, "value") for digit in index)
    return all(mine == theirs or (not theirs and gone(mine)) for mine, theirs in pairs)


def _is_paired(mark: Mark) -> bool:
    """Whether a product pairs dims, as that of queries and keys does and that of a linear layer does not."""
    return any(mark.product.equation.op.contraction.batched)


# --------------------------------------------------------------------------------------------------
# What is still read of a program once attentions are replaced; and which cannot be replaced, as inner values of them are
# read elsewhere.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Remains:
    """A program in which some values are replaced, and which of its values are still read.

    Attributes:
      values: the program.
      replaced: replaced value -> the values that its replacement reads.
      places: the levels at which they are made.
    """

    values: Nested
    replaced: Mapping[int, Sequence[Atom]]
    places: Sequence[Level] = field(default=())

    @cached_property
    def opened(self) -> frozenset[Equation]:
        """The equations around a replaced value, whose bodies are run equation by equation; others run as one."""
        return frozenset(
            level.equation for place in self.places for level in place.around if level.equation is not None
        )

    @cached_property
    def live(self) -> frozenset[int]:
        """The values on which the results, or equations that act, depend."""
        found: set[int] = set()
        todo = [*names_of(self.values.results)]
        for node in self.values.nodes:
            if node.equation.op.acts:
                todo += self._needs_of(node.level, node.equation, node.inputs)
        for equation in self.opened:
            if equation.op.loop is not None:  # a while loop keeps all that it carries
                for level in self.values.levels[equation]:
                    todo += names_of(level.of((*level.program.inputs, *level.program.outputs)))
        while todo:
            value = todo.pop()
            if value not in found:
                found.add(value)
                todo += self._needs(value)
        return frozenset(found)

    def is_live(self, atom: Atom) -> bool:
        """Whether a value is read; True for constants."""
        return is_constant(atom) or atom in self.live

    def _needs(self, value: int) -> tuple[int, ...]:
        if value in self.replaced:
            return names_of(self.replaced[value])
        home = self.values.homes.get(value)
        if home is None:
            return ()
        return self._needs_of(*home, self.values.read_for(value))

    def _needs_of(self, level: Level, equation: Equation | None, inputs: Sequence[Atom]) -> tuple[int, ...]:
        """The values that an equation reads; inside a body that runs as it is, all that the outermost such equation reads."""
        found = names_of(inputs)
        if equation is not None and equation in self.values.levels and equation not in self.opened:
            found = names_of(level.of(equation.inputs))
        for each in level.around:
            if each.equation is not None and each.parent is not None and each.equation not in self.opened:
                found = names_of(each.parent.of(each.equation.inputs))
        return found


def remaining(values: Nested, attentions: Sequence[FoundAttention]) -> Remains:
    """The program once these attentions are replaced."""
    places = [node.level for found in attentions if (node := values.maker(found.out.value)) is not None]
    made_of = {found.out.value: (found.q.value, found.k.value, found.v.value) for found in attentions}
    return Remains(values, made_of, places)


def settled(
    values: Nested, attentions: Sequence[FoundAttention], products: Sequence[Node], marks: Mapping[int, Mark]
) -> tuple[FoundAttention, ...]:
    """Adds to attentions the reason why they are left as they are, or the primitives that go with them.

    Args:
      values: the program.
      attentions: the attentions that were found.
      products: the product of queries and keys of each.
      marks: the marks of all values.
    """
    found = list(attentions)
    whole = Remains(values, {}, [level for levels in values.levels.values() for level in levels])
    found = [each if each.out.value in whole.live else replace(each, left="nothing reads its result") for each in found]
    while True:
        remains = remaining(values, [each for each in found if not each.left])
        still = [
            i for i, (each, product) in enumerate(zip(found, products, strict=True))
            if not each.left and product.outputs[0] in remains.live
        ]  # fmt: skip
        if not still:
            break
        for i in still:
            found[i] = replace(found[i], left=_reader(values, remains, products[i], marks))
    return tuple([each if each.left else replace(each, replaces=_gone(values, each, whole, remains)) for each in found])


def _reader(values: Nested, remains: Remains, product: Node, marks: Mapping[int, Mark]) -> str:
    """Says which equation reads an inner value of an attention; of several, one of the stage that is first in `ORDER`."""
    own = {value: mark for value, mark in marks.items() if mark.product is product and mark.stage != "lost"}
    found = [(own[value].stage, "are returned") for value in names_of(values.results) if value in own]
    for node in values.nodes:
        stages = [own[value].stage for value in node.read if value in own]
        others = [value for value in node.outputs if value not in own and value not in remains.replaced]
        reads = node.equation.op.acts or any(value in remains.live for value in others)
        if stages and reads:
            at = f" at {node.equation.op.line}" if node.equation.op.line else ""
            found += [(stage, f"are read by {node.name}{at}") for stage in stages]
    stage, how = min(found, key=lambda each: ORDER.index(each[0]), default=("scores", "are read elsewhere"))
    return f"its {PLURAL[stage]} {how}"


def _gone(values: Nested, found: FoundAttention, whole: Remains, remains: Remains) -> tuple[str, ...]:
    """The primitives that only an attention needs, which do not run once it is replaced."""
    maker, names, visited = values.maker(found.out.value), [], set()
    todo = [] if maker is None else [maker]
    while todo:
        node = todo.pop()
        if node in visited:
            continue
        visited.add(node)
        names.append(node.name)
        for atom in node.read:
            before = values.maker(atom)
            if before is not None and atom in whole.live and atom not in remains.live:
                todo.append(before)
    return tuple(names[::-1])


# --------------------------------------------------------------------------------------------------
# Operations on the weights after the softmax: dropout, zeros where nothing is seen, gates.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadChain:
    """A chain whose dims have roles, and the reader of its masks.

    Attributes:
      values: the program.
      mark: the mark of the chain's result.
      roles: the roles of its dims.
      masks: reads its masks.
    """

    values: Nested
    mark: Mark
    roles: Roles
    masks: MaskReader


class NotUnderstood(Exception):
    """Raised where an attention is not recognised, with the reason as a clause."""


@dataclass(frozen=True)
class Factor:
    """A number where a condition holds, and zero elsewhere.

    Attributes:
      condition: a bool value.
      indices: what its dims run over.
      seen: the value of the condition where the number is.
      number: the number.
    """

    condition: Atom
    indices: Indices
    seen: bool
    number: float


class WeightsChanges(NamedTuple):
    """Changes of weights after the softmax: where they are zeroed, what multiplies them, and their dropout."""

    zero: tuple[Term, ...]
    gates: tuple[Operand | Term, ...]
    drop: WeightsDrop | None


def weights_changes(chain: ReadChain, changes: Sequence[Change], marks: Mapping[int, Mark]) -> WeightsChanges:
    """Reads the changes of a chain's weights after the softmax.

    Args:
      chain: it.
      changes: the changes of its scores.
      marks: the marks of all values.

    Raises:
      NotUnderstood: for changes that are none of these.
    """
    values, mark, roles, masks = chain.values, chain.mark, chain.roles, chain.masks
    zero, gates, drop, scale = _zeroed_alone(chain), [], None, 1.0
    for raw in mark.afters:
        keyed = varies_along(values, raw.atom, raw.indices, mark.over)
        by = number(values, raw.atom) if raw.how != "select" else None
        if by is not None:
            scale *= 1 / by if raw.how == "div" else by
            continue
        if raw.how == "select" and not raw.seen and _asks_for_nan(values, raw.atom, mark, marks):
            hidden = [each for each in changes if isinstance(each, Masked) and each.fill == -math.inf]
            zero += tuple(term for each in hidden for term in each.terms)
            continue
        factor = _factor(values, raw) if raw.how != "div" else None
        if factor is None and raw.how == "mul" and not keyed:
            gates.append(masks.operand(raw.atom, roles.of(raw.indices), SCORES))
            continue
        if factor is None:
            raise NotUnderstood("its weights are multiplied with an array")
        scale *= factor.number
        terms = lambda factor=factor: masks.terms(factor.condition, roles.of(factor.indices), factor.seen)
        if is_known(values, Raw("select", factor.condition, factor.indices, factor.seen), mark.raws):
            zero += terms()
        elif not keyed:
            gates += terms()
        elif drop is None:
            drop = _drop(values, factor, roles, masks)
        else:
            raise NotUnderstood("its weights are dropped twice")
    if drop is None and abs(scale - 1) > 1e-6:
        raise NotUnderstood("its weights are scaled after the softmax")
    return WeightsChanges(zero, tuple(gates), drop and replace(drop, scale=scale))


def _zeroed_alone(chain: ReadChain) -> tuple[Term, ...]:
    """The masks that set exponentials to zero, but not in their sum: a query that sees no key then gets zero weights.

    Where a mask's scores are -inf their sum is NaN, and so are the weights.
    """
    values, mark = chain.values, chain.mark
    summed = lambda raw: any(
        (each.how, each.seen, each.indices) == (raw.how, raw.seen, raw.indices) and values.same(each.atom, raw.atom)
        for each in mark.summed
    )
    alone = [raw for raw in mark.zeroed if not summed(raw) and not is_known(values, raw, mark.hiding)]
    return tuple(term for raw in alone for term in chain.masks.terms(raw.atom, chain.roles.of(raw.indices), raw.seen))


def is_known(values: Nested, raw: Raw, raws: Sequence[Raw]) -> bool:
    """Whether the same mask hides scores before the softmax."""
    alike = [each for each in raws if (each.how, each.seen, each.indices) == ("select", raw.seen, raw.indices)]
    return any(values.same(each.atom, raw.atom) for each in alike)


def _asks_for_nan(values: Nested, atom: Atom, mark: Mark, marks: Mapping[int, Mark]) -> bool:
    """Whether a condition is true where a chain's own weights are NaN."""
    maker = values.maker(atom)
    if maker is None or maker.name != "ne" or is_constant(maker.inputs[0]) or maker.inputs[0] != maker.inputs[1]:
        return False
    own = marks.get(maker.inputs[0])
    return own is not None and own.stage == "weights" and own.product is mark.product


def factor_of(values: Nested, atom: Atom, indices: Indices) -> Factor | None:
    """Reads a value as a number where a condition holds and zero elsewhere; None: it is something else."""
    return _factor(values, Raw("mul", atom, indices))


def scaled_difference(values: Nested, atom: Atom, indices: Indices) -> Factor | None:
    """Reads a value as a number times (1 - x), with x as the condition, which need not be bool; None: it is another value."""
    scale = 1.0
    while (maker := values.maker(atom)) is not None:
        numbers = [number(values, each) for each in maker.inputs]
        if maker.name == "sub" and 1 in numbers:
            k = 1 if numbers[0] == 1 else 0
            inner = operand_indices(values, maker, k, indices)
            return Factor(maker.inputs[k], inner, True, scale if k == 1 else -scale)
        if (step := _step(values, maker, indices)) is None:
            return None
        atom, indices, scale = step[0], step[1], scale * step[2]
    return None


def _factor(values: Nested, raw: Raw) -> Factor | None:
    if raw.how == "select":
        return Factor(raw.atom, raw.indices, raw.seen, 1.0)
    atom, indices, scale = raw.atom, raw.indices, 1.0
    while (maker := values.maker(atom)) is not None:
        op = maker.equation.op
        if maker.name == "convert_element_type" and op.given[0].dtype == jnp.bool_:
            return Factor(maker.inputs[0], indices, True, scale)
        if maker.name == "select_n" and len(maker.inputs) == 3:
            cases = [number(values, case) for case in maker.inputs[1:]]
            if None in cases or 0 not in cases or op.given[0].shape != op.made[0].shape:
                return None
            return Factor(maker.inputs[0], indices, cases[0] == 0, scale * sum(case or 0 for case in cases))
        if (step := _step(values, maker, indices)) is None:
            return None
        atom, indices, scale = step[0], step[1], scale * step[2]
    return None


def _step(values: Nested, maker: Node, indices: Indices) -> tuple[Atom, Indices, float] | None:
    """Undoes one move of a value, or one product with a number: (value before, indices, number); None for other operations."""
    if (found := before(maker.equation.op, indices)) is not None:
        return maker.inputs[0], found, 1.0
    numbers = [number(values, each) for each in maker.inputs]
    if maker.name == "mul" and numbers[0] is not None:
        return maker.inputs[1], operand_indices(values, maker, 1, indices), numbers[0]
    if maker.name in ("mul", "div") and len(numbers) > 1 and numbers[1] is not None:
        times = numbers[1] if maker.name == "mul" else 1 / numbers[1]
        return maker.inputs[0], operand_indices(values, maker, 0, indices), times
    return (maker.inputs[0], indices, -1.0) if maker.name == "neg" else None


def _drop(values: Nested, factor: Factor, roles: Roles, masks: MaskReader) -> WeightsDrop:
    """Reads dropout from a condition that compares random numbers with a number."""
    atom, indices = factor.condition, factor.indices
    compare = values.maker(atom)
    while compare is not None and (found := before(compare.equation.op, indices)) is not None:
        atom, indices = compare.inputs[0], found
        compare = values.maker(atom)
    if compare is None or compare.name not in ("lt", "le", "gt", "ge"):
        raise NotUnderstood("its weights are masked after the softmax")
    drawn = [_bits(values, compare.inputs[k], operand_indices(values, compare, k, indices)) for k in (0, 1)]
    if (drawn[0] is None) == (drawn[1] is None):
        raise NotUnderstood("its weights are masked after the softmax")
    k = 0 if drawn[0] is not None else 1
    bits, bit_dims = drawn[k] or (None, None)
    assert bits is not None and bit_dims is not None
    how = compare.name if k == 0 else AROUND[compare.name]
    bound = number(values, compare.inputs[1 - k])
    below = (how in ("lt", "le")) == factor.seen
    rate = None if bound is None else 1 - bound if below else bound
    keep = masks.operand(factor.condition, roles.of(factor.indices), SCORES)
    if not factor.seen:
        raise NotUnderstood("its dropout keeps weights where its random mask is false")
    op = bits.equation.op
    return WeightsDrop(rate, 1.0, keep, bits.inputs[0], op.made[0].shape, roles.of(bit_dims), op.options["bit_width"])


def _bits(values: Nested, atom: Atom, indices: Indices) -> tuple[Node, Indices] | None:
    """Finds the random bits that numbers are made of, element by element."""
    maker = values.maker(atom)
    if maker is None:
        return None
    if maker.name == "random_bits":
        return maker, indices
    if (found := before(maker.equation.op, indices)) is not None:
        return _bits(values, maker.inputs[0], found)
    if not is_elementwise(maker.name):
        return None
    drawn = [_bits(values, each, operand_indices(values, maker, k, indices)) for k, each in enumerate(maker.inputs)]
    return next((each for each in drawn if each is not None), None)


# --------------------------------------------------------------------------------------------------
# Chains of equations from a product through a softmax to another product, with other operations between.
#
# Every value that is made of a product is marked with its stage: scores, exponentials, their sum, weights. One rule for each
# stage says what an equation makes of it; what has no rule is lost, and reported if a softmax follows.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftmaxChain:
    """A softmax between two products.

    Attributes:
      found: the mark of the result.
      out: the result.
    """

    found: Mark
    out: int


@dataclass(frozen=True)
class SoftmaxChains:
    """All softmax chains of a program.

    Attributes:
      chains: the chains, in the order of their results.
      marks: the marks of all values that are made of a product.
      broken: as of `StageRules`, for products of no chain.
      over: as of `StageRules`.
    """

    chains: Sequence[SoftmaxChain]
    marks: Mapping[int, Mark]
    broken: Mapping[Node, str]
    over: Mapping[Node, frozenset[int]]


def find_chains(values: Nested) -> SoftmaxChains:
    """Every softmax between two products."""
    finder = _Finder(values)
    for node in values.nodes:
        finder.visit(node)
    done = {chain.found.product for chain in finder.chains}
    broken = {product: why for product, why in finder.broken.items() if product not in done}
    return SoftmaxChains(tuple(finder.chains), finder.marks, broken, finder.rules.over)


class _Finder:
    def __init__(self, values: Nested):
        self.marks: dict[int, Mark] = {}
        self.chains: list[SoftmaxChain] = []
        self.broken: dict[Node, str] = {}
        self.rules = StageRules(values, self.marks, self.broken)

    def visit(self, node: Node) -> None:
        """Marks the results of an equation."""
        if rule_of(node.name).passes:
            for made, atom in zip(node.outputs, node.inputs, strict=True):
                if not is_constant(atom) and atom in self.marks:
                    self.marks[made] = self.marks[atom]
        elif node.name == "dot_general":
            self._product(node)
        else:
            found, of = self.rules.made(node)
            if of is not None and of.stage == "weights" and (found is None or found.stage == "lost"):
                self.broken[of.product] = of.lost(node).why
            if found is not None and found.stage == "weights":
                self.broken.setdefault(found.product, "no values are multiplied with its weights")
            if found is not None and found.stage == "done":
                self.chains.append(SoftmaxChain(found, node.outputs[0]))
            elif found is not None:
                self.marks.update(dict.fromkeys(node.outputs, found))

    def _product(self, node: Node) -> None:
        (made,) = node.outputs
        if jnp.issubdtype(node.equation.op.made[0].dtype, jnp.inexact):
            self.marks[made] = Mark("scores", node, sides_of(node).result)
        for k, atom in enumerate(node.inputs):
            mark = None if is_constant(atom) else self.marks.get(atom)
            if mark is None or mark.stage not in ("weights", "exps"):
                continue
            if mark.stage == "weights" and (gated := _gated(node, k, mark)) is not None:
                self.marks[made] = gated
                return
            found = _mixed(node, k, mark)
            if isinstance(found, Mark) and mark.stage == "weights":
                self.chains.append(SoftmaxChain(found, made))
                return
            if isinstance(found, Mark):
                self.marks[made] = replace(found, stage="mixed")
                why = "its exponentials meet values and are not divided by their sum, as in a loop over blocks of keys"
                self.broken.setdefault(mark.product, why)
                return
            if mark.stage == "weights":
                self.broken[mark.product] = found


def _gated(node: Node, k: int, mark: Mark) -> Mark | None:
    """The mark of weights that are multiplied element by element, as `einsum("bhqk,h->bhqk")` does it; else None."""
    contracted, batched = node.equation.op.contraction
    if contracted[k] or len(batched[1 - k]) != len(node.equation.op.given[1 - k].shape):
        return None
    other = _matched(node, k, mark)
    sides = (mark.indices, other) if k == 0 else (other, mark.indices)
    raw = Raw("mul", node.inputs[1 - k], other)
    return replace(mark, indices=result_of(node, *sides), afters=(*mark.afters, raw))


def _mixed(node: Node, k: int, mark: Mark) -> Mark | str:
    """The mark of weights, or exponentials, times values, summed over all keys; or the reason why it is something else."""
    contracted, _ = node.equation.op.contraction
    side = side_over(mark.product, tuple([mark.indices[dim] for dim in contracted[k]]))
    if side is None or (mark.stage == "weights" and side not in mark.over):
        return "its weights are multiplied, and not summed over all keys, and over keys alone"
    own = _matched(node, k, mark)
    if any(label[0] == ("left" if side == "right" else "right") for label in labels_of(own)):
        return "its values differ from query to query"
    sides = (mark.indices, own) if k == 0 else (own, mark.indices)
    values = (node.inputs[1 - k], own)
    return replace(mark, indices=result_of(node, *sides), values=values, mix=node, over=frozenset((side,)))


def _matched(node: Node, k: int, mark: Mark) -> Indices:
    """The indices of a product's other operand, from those of operand k."""
    contracted, batched = node.equation.op.contraction
    own: list[Index] = [whole(("value", dim), size) for dim, size in enumerate(node.equation.op.given[1 - k].shape)]
    for mine, theirs in zip((*contracted[k], *batched[k]), (*contracted[1 - k], *batched[1 - k]), strict=True):
        own[theirs] = mark.indices[mine]
    return tuple(own)


# --------------------------------------------------------------------------------------------------
# `find_attention`: every attention of a program in one form.
# --------------------------------------------------------------------------------------------------

HIDDEN = -1e4
"""A score of at most this much hides a key: its weight is 0, unless all scores of its query are such."""


def find_attention(program: Program, weights: Collection[int] | None = None) -> Recognised:
    """Finds every attention of a program: softmax(q · k) · v, however it is written.

    The bodies of calls, of `jax.checkpoint`, loops and conditionals are searched too, and masks followed through them.

    Args:
      program: a traced function, not its gradient.
      weights: which of its inputs are weights, by position: a product with one of them is a layer, and no missed attention;
        None: all of them may be.

    Returns:
      The attentions, in the order of their results, and what looks like attention and is not recognised.
    """
    values = nested(program)
    chains = find_chains(values)
    active = activations(values, program, weights)
    found: list[FoundAttention] = []
    products = []
    missed: list[Missed] = []
    for chain in chains.chains:
        product = chain.found.product
        try:
            found.append(_Reader(values, chain, chains.marks, None if weights is None else active).read())
            products.append(product)
        except NotUnderstood as error:
            missed.append(Missed(product.equation.op.line, str(error)))
    for product, why in chains.broken.items():
        if _looks_like_scores(product, chains, active):
            missed.append(Missed(product.equation.op.line, why))
    return Recognised(settled(values, found, products, chains.marks), tuple(missed), values)


def _looks_like_scores(product: Node, chains: SoftmaxChains, active: Collection[int]) -> bool:
    """Whether a product may be of queries and keys: of two activations, or of such a product's scores before a softmax."""
    if all(is_constant(atom) or atom in active for atom in product.inputs):
        return True
    mixed = [product.inputs[k] for k in chains.over.get(product, ())]
    marks = [chains.marks[atom] for atom in mixed if not is_constant(atom) and atom in chains.marks]
    return any(mark.stage == "scores" and all(atom in active for atom in mark.product.read) for mark in marks)


class _Reader:
    """Reads one chain into a `FoundAttention`."""

    def __init__(self, values: Nested, chain: SoftmaxChain, marks: Mapping[int, Mark], active: Collection[int] | None):
        self.marks, self.active = marks, active
        self.values, self.mark, self.out = values, chain.found, chain.out
        maker = values.maker(chain.out)
        assert maker is not None and chain.found.mix is not None
        self.at, self.mix = maker, chain.found.mix
        self.level: Level = maker.level

    def read(self) -> FoundAttention:
        """The attention of the chain, in digits of the attention's labels."""
        mark = self.mark
        roles = roles_of(self.values, mark, self.level)
        if roles is None:
            raise NotUnderstood("its queries, keys or values are made where its result cannot read them")
        self.roles, self.masks = roles, MaskReader(self.values, self.level, roles.sizes)
        try:
            changes = self._changes()
            weights = weights_changes(ReadChain(self.values, mark, roles, self.masks), changes, self.marks)
        except HiddenMask:
            raise NotUnderstood("its masks are made where its result cannot read them") from None
        op, mixed = mark.product.equation.op, self.mix.equation.op
        k = self.mix.inputs.index(mark.values[0]) if mark.values else 0
        keys = 0 if "left" in mark.over else 1
        return FoundAttention(
            q=self._operand(roles.q, QUERIES, op.given[1 - keys]),
            k=self._operand(roles.k, KEYS, op.given[keys]),
            v=self._operand(roles.v, VALUES, mixed.given[k]),
            out=self._operand(Source(self.out, mark.indices), RESULT, self.values.aval(self.out)),
            sizes=roles.sizes,
            changes=changes,
            scores_dtype=op.made[0].dtype,
            weights_dtype=mixed.given[1 - k].dtype,
            precisions=(op.options["precision"], mixed.options["precision"]),
            zero=weights.zero,
            gates=weights.gates,
            dropout=weights.drop,
            line=op.line,
            scopes="/".join(part for part in str(mixed.scopes).split("/") if "->" not in part),
            left=self._left(),
        )

    def _operand(self, source: Source, layout: Layout, read: Any) -> Operand:
        shape = self.values.aval(source.atom).shape
        return Operand(source.atom, shape, read.dtype, self.roles.of(source.indices), layout)

    def _left(self) -> str:
        if self.active is not None and self.roles.k.atom not in self.active:
            return "its keys are weights"
        own = [each.equation.name for each in self.level.around if each.equation is not None]
        if any(name in ("custom_jvp_call", "custom_vjp_call") for name in own):
            return "it is inside a function with derivatives of its own"
        return "it has one query" if self.roles.sizes["query"] == 1 else ""

    # What is done to scores

    def _changes(self) -> tuple[Change, ...]:
        """The changes of scores in order, without what is added at the end to all keys of a query alike: softmax drops it."""
        found: list[Change] = []
        last = True
        for raw in reversed(self.mark.raws):
            if (
                last
                and raw.how in ("add", "sub")
                and not varies_along(self.values, raw.atom, raw.indices, self.mark.over)
            ):
                continue
            last = last and raw.how in ("add", "sub", "select", "cast")
            found += reversed(self._change(raw))
        return (*reversed(found), *self._zeroed())

    def _change(self, raw: Raw) -> list[Change]:
        if raw.how == "tanh":
            return [Tanh()]
        if raw.how == "cast":
            return [Cast(raw.number)]
        if raw.how == "select":
            if not raw.number <= HIDDEN:
                raise NotUnderstood(
                    f"its scores are replaced by {raw.number:g} where its mask says so, which hides nothing"
                )
            return [Masked(self._terms(raw.atom, raw.indices, raw.seen), raw.number)]
        if raw.how in ("add", "sub"):
            return self._added(raw)
        by = number(self.values, raw.atom)
        return [Scaled(self._array(raw) if by is None else by, raw.how == "div")]

    def _added(self, raw: Raw) -> list[Change]:
        """Reads an added value: as a mask if it holds large negative numbers where keys are not seen, else as a bias."""
        if (by := number(self.values, raw.atom)) is not None:
            return [Added(by, raw.how == "sub")] if by else []
        if (mask := self._additive(raw)) is not None:
            return [mask]
        for source in sources(self.values, raw.atom, raw.indices):
            maker = self.values.maker(source.atom)
            if maker is not None and maker.name == "add":
                on = lambda k, maker=maker, source=source: operand_indices(self.values, maker, k, source.indices)
                parts = [self._added(replace(raw, atom=maker.inputs[k], indices=on(k))) for k in (0, 1)]
                if any(isinstance(change, Masked) for part in parts for change in part):
                    return [change for part in parts for change in part]
        return [Added(self._array(raw), raw.how == "sub", self._hides(raw))]

    def _hides(self, raw: Raw) -> tuple[Term, ...]:
        """The terms of the mask that a bias of (1 - x) times a large negative number is, if x is zero or one; else ()."""
        found = scaled_difference(self.values, raw.atom, raw.indices)
        if found is None or not (-found.number if raw.how == "sub" else found.number) <= HIDDEN:
            return ()
        return self._terms(found.condition, found.indices, True)

    def _terms(self, atom: Atom, indices: Indices, seen: bool) -> tuple[Term, ...]:
        return self.masks.terms(atom, self.roles.of(indices), seen)

    def _array(self, raw: Raw) -> Operand:
        return self.masks.operand(raw.atom, self.roles.of(raw.indices), SCORES)

    def _additive(self, raw: Raw) -> Masked | None:
        """Reads a large negative number that is added where keys are not seen; None: it is something else."""
        factor = factor_of(self.values, raw.atom, raw.indices)
        if factor is None:
            return None
        fill = -factor.number if raw.how == "sub" else factor.number
        if not fill <= HIDDEN:
            return None
        return Masked(self._terms(factor.condition, factor.indices, not factor.seen), fill, adds=True)

    def _zeroed(self) -> list[Change]:
        """The masks that set exponentials to zero, in numerator and sum alike, or in the sum if they also hide the scores.

        Where the sum is zero so are all that a query sees: its weights are NaN, as by scores of -inf.
        """
        mark: Mark = self.mark
        if all(is_known(self.values, raw, mark.raws) for raw in (*mark.zeroed, *mark.summed)):
            return [self._hidden(raw) for raw in mark.summed if not is_known(self.values, raw, mark.hiding)]
        pairs = zip(mark.zeroed, mark.summed, strict=False)
        alike = len(mark.zeroed) == len(mark.summed)
        if not alike or not all(self._same(*pair) for pair in pairs):
            raise NotUnderstood("its exponentials are masked otherwise than their sum")
        return [self._hidden(raw) for raw in mark.zeroed]

    def _same(self, a: Raw, b: Raw) -> bool:
        """Whether two operations on exponentials are the same mask; both come before keys are summed, so indices compare."""
        return (a.how, a.seen, a.indices) == (b.how, b.seen, b.indices) and self.values.same(a.atom, b.atom)

    def _hidden(self, raw: Raw) -> Change:
        if raw.how == "mul":
            factor = factor_of(self.values, raw.atom, raw.indices)
            if factor is None:
                raise NotUnderstood("its exponentials are multiplied with an array")
            raw = replace(raw, atom=factor.condition, indices=factor.indices, seen=factor.seen)
        return Masked(self._terms(raw.atom, raw.indices, raw.seen), -math.inf)
