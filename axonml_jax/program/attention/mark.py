"""What a value is on the way from a product through a softmax to another product."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from axonml_jax.program.atoms import Atom
from axonml_jax.program.attention.digits import Digit, Index, Indices, whole
from axonml_jax.program.nested import Node

Stage = Literal["scores", "exps", "sum", "inverse", "log sum", "log weights", "weights", "mixed", "done", "lost"]


@dataclass(frozen=True)
class Raw:
    """Something done to scores or weights, as the program writes it.

    Attributes:
      how: "mul", "div", "add", "sub", "tanh", "cast" or "select".
      atom: the other operand, or the condition of a select.
      indices: what its dims run over.
      seen: for a select the condition's value where scores stay; else whatever.
      number: for a select what stands in the place of the others; for a cast the dtype.
    """

    how: str
    atom: Atom = None
    indices: Indices = ()
    seen: bool = True
    number: Any = None


@dataclass(frozen=True)
class Mark:
    """What a value is.

    Attributes:
      stage: "exps" are exponentials of scores, "sum" theirs over all keys, "inverse" 1 / sum, "weights" exps / sum, "mixed" the
        product of exps and values, "done" that divided by the sum; "lost": something made of scores in a way that is
        not understood.
      product: the product that made the scores.
      indices: what its dims run over: digits of ("paired", i), ("left", dim), ("right", dim) and ("value", dim).
      raws: what was done to the scores.
      base: of exps and all that is made of them the first value of the exps; of a log sum the scores.
      over: what was summed over.
      zeroed: masks that exps were multiplied with; `summed` those of the sum.
      afters: what was done to the weights.
      values: what the exps or weights were multiplied with, and what its dims run over.
      mix: the product that did it.
      why: for the lost: why, and `late`: what was made of them: "", "exps" or "sum".
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

    def lost(self, node: Node) -> "Mark":
        """Where something is done to it that is not understood."""
        if self.stage == "lost":
            return self
        late = {"exps": "exps", "sum": "sum", "inverse": "sum"}.get(self.stage, "")
        line = node.equation.op.line
        why = f"its {PLURAL[self.stage]} go through {node.name}{f' at {line}' if line else ''}"
        return replace(self, stage="lost", why=why, late=late, indices=())


ORDER: Sequence[Stage] = ("mixed", "weights", "exps", "log weights", "scores", "inverse", "sum", "log sum", "lost")
"""Of several marked operands the one that decides."""

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
"""Of each stage what it is called."""


@dataclass(frozen=True)
class Sides:
    """What the dims of a product's operands and of its result run over."""

    left: Indices
    right: Indices
    result: Indices


def sides_of(product: Node) -> Sides:
    """With labels of its own for every dim."""
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
    """What the dims of a product's result run over: paired dims, the left operand's own, the right one's."""
    contracted, batched = product.equation.op.contraction
    own = [
        [index for dim, index in enumerate(side) if dim not in (*contracted[k], *batched[k])]
        for k, side in enumerate((left, right))
    ]
    return (*[left[dim] for dim in batched[0]], *own[0], *own[1])


def side_over(product: Node, indices: Indices) -> str | None:
    """The operand of whose own dims these are all, "left" or "right"; None: they are not. What a softmax goes over are keys."""
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
