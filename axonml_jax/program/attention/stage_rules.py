"""What an equation makes of scores, of their exponentials, of sums and weights: one rule for each stage of a softmax."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from axonml_jax.program.atoms import Atom, is_constant
from axonml_jax.program.attention.digits import KEEPING, Indices, after, labels_of
from axonml_jax.program.attention.mark import ORDER, Mark, Raw, Stage, side_over
from axonml_jax.program.elements import number
from axonml_jax.program.nested import Nested, Node
from axonml_jax.program.rules import rule_of

PLACED = (*KEEPING, "broadcast_in_dim", "reshape", "squeeze", "transpose")
NARROW: Sequence[Stage] = ("sum", "inverse", "log sum")
"""They may be spread over keys again."""


@dataclass(frozen=True)
class StageRules:
    """The rules, on what is known so far.

    Attributes:
      values: the program.
      marks: what its values are; filled by whoever asks.
      broken: products whose scores go through a softmax that is not understood, or whose weights meet no values: why.
      over: of products the operands of whose dims a softmax goes over some that are not all, or not alone.
    """

    values: Nested
    marks: Mapping[int, Mark]
    broken: dict[Node, str]
    over: dict[Node, frozenset[int]] = field(default_factory=dict)

    def mark(self, atom: Atom) -> Mark | None:
        """What a value is."""
        return None if is_constant(atom) else self.marks.get(atom)

    def made(self, node: Node) -> tuple[Mark | None, Mark | None]:
        """(what an equation's results are, the operand that decided it)."""
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
        """Moved, spread or cast."""
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
        """What another operand of an elementwise operation does: its dims are those of the marked one, or of size 1."""
        shape = self.values.aval(atom).shape
        indices = [index if size > 1 else () for index, size in zip(mark.indices, shape, strict=True)] if shape else []
        return Raw(how, atom, tuple(indices), **more)

    def _selected(self, node: Node, mark: Mark) -> Raw | None:
        """Scores where a condition says so, and a number elsewhere."""
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
        """log sum exp(s - c) + c is log sum exp(s)."""
        shifted = self.values.maker(mark.base)
        if node.name == "add" and shifted is not None and shifted.name == "sub":
            scores, shift = shifted.inputs
            if not is_constant(scores) and self.values.same(self._root(shift), self._root(node.inputs[1 - k])):
                return replace(mark, base=scores)
        return mark.lost(node)

    def _root(self, atom: Atom) -> Atom:
        """A value before it was moved or spread."""
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
        """Divided by the sum of the exponentials after the product."""
        others = [m for atom in node.inputs if (m := self.mark(atom)) is not None]
        stage = {"div": "sum", "mul": "inverse"}.get(node.name)
        if len(others) == 2 and others[1 - k].stage == stage and not (stage == "sum" and k == 1):
            other = others[1 - k]
            if other.base == mark.base and other.over == mark.over and _fits(mark.indices, other):
                return replace(mark, stage="done", summed=other.summed)
        return mark.lost(node)

    def _lost(self, node: Node, mark: Mark) -> Mark | None:
        """What is made of something lost, as far as one would still see a softmax in it."""
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
    """Whether a sum stands beside what it is the sum of: dim by dim the same, and nothing where it was summed."""
    pairs = zip(indices, other.indices, strict=True)
    gone = lambda index: all(digit.label[0] in (*other.over, "value") for digit in index)
    return all(mine == theirs or (not theirs and gone(mine)) for mine, theirs in pairs)


def _is_paired(mark: Mark) -> bool:
    """Whether a product pairs dims, as that of queries and keys does and that of a linear layer does not."""
    return any(mark.product.equation.op.contraction.batched)
