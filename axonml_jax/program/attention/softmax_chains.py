"""Chains of equations from a product through a softmax to another product, whatever stands between.

Every value that is made of the product of two others is marked with what it is (`mark.py`): scores, exponentials, their sum,
weights. One rule for each stage says what an equation makes of it (`stage_rules.py`); what has no rule is lost, and told if a
softmax follows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from axonml_jax.program.atoms import is_constant
from axonml_jax.program.attention.digits import Index, Indices, labels_of, whole
from axonml_jax.program.attention.mark import Mark, Raw, result_of, side_over, sides_of
from axonml_jax.program.attention.stage_rules import StageRules
from axonml_jax.program.nested import Nested, Node
from axonml_jax.program.rules import rule_of


@dataclass(frozen=True)
class SoftmaxChain:
    """A softmax between two products.

    Attributes:
      found: what the result is: its product, its changes, what it was mixed with.
      out: the result.
    """

    found: Mark
    out: int


@dataclass(frozen=True)
class SoftmaxChains:
    """All of a program.

    Attributes:
      chains: in the order of their results.
      marks: what every value is that is made of a product.
      broken: products whose scores go through a softmax that is not understood, or whose weights meet no values: why.
      over: of these the operands of whose dims such a softmax goes over some.
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
        """Mark what an equation makes."""
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
    """Weights multiplied element by element, as `einsum("bhqk,h->bhqk")` does it."""
    contracted, batched = node.equation.op.contraction
    if contracted[k] or len(batched[1 - k]) != len(node.equation.op.given[1 - k].shape):
        return None
    other = _matched(node, k, mark)
    sides = (mark.indices, other) if k == 0 else (other, mark.indices)
    raw = Raw("mul", node.inputs[1 - k], other)
    return replace(mark, indices=result_of(node, *sides), afters=(*mark.afters, raw))


def _mixed(node: Node, k: int, mark: Mark) -> Mark | str:
    """Weights, or exps, times values, summed over all keys and nothing else; or why it is something else."""
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
    """What the dims of a product's other operand run over, of those of operand k."""
    contracted, batched = node.equation.op.contraction
    own: list[Index] = [whole(("value", dim), size) for dim, size in enumerate(node.equation.op.given[1 - k].shape)]
    for mine, theirs in zip((*contracted[k], *batched[k]), (*contracted[1 - k], *batched[1 - k]), strict=True):
        own[theirs] = mark.indices[mine]
    return tuple(own)
