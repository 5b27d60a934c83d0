"""`find_attention`: every attention of a program, told in one form."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from axonml_jax.program.atoms import Atom, is_constant
from axonml_jax.program.attention.digits import Indices
from axonml_jax.program.attention.found_attention import (
    Added,
    Cast,
    Change,
    FoundAttention,
    Masked,
    Missed,
    Recognised,
    Scaled,
    Tanh,
)
from axonml_jax.program.attention.mark import Mark, Raw
from axonml_jax.program.attention.masks.mask_reading import HiddenMask, MaskReader
from axonml_jax.program.attention.masks.mask_terms import Term
from axonml_jax.program.attention.operand import KEYS, QUERIES, RESULT, SCORES, VALUES, Layout, Operand
from axonml_jax.program.attention.roles import roles_of
from axonml_jax.program.attention.softmax_chains import SoftmaxChain, SoftmaxChains, find_chains
from axonml_jax.program.attention.sources import Source, activations, operand_indices, sources, varies_along
from axonml_jax.program.attention.weights_changes import (
    NotUnderstood,
    ReadChain,
    factor_of,
    is_known,
    scaled_difference,
    weights_changes,
)
from axonml_jax.program.attention.what_remains import settled
from axonml_jax.program.elements import number
from axonml_jax.program.nested import Level, Nested, Node, nested
from axonml_jax.program.program import Program

HIDDEN = -1e4
"""A score of at most this much stands for a key that is not seen: its weight is 0, or all weights of its query are alike."""


def find_attention(program: Program, weights: Collection[int] | None = None) -> Recognised:
    """Every attention of a program: softmax(q · k) · v, however it is written.

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
    """Whether two activations are multiplied; or scores that they are are mixed, and a softmax still goes over their dims."""
    if all(is_constant(atom) or atom in active for atom in product.inputs):
        return True
    mixed = [product.inputs[k] for k in chains.over.get(product, ())]
    marks = [chains.marks[atom] for atom in mixed if not is_constant(atom) and atom in chains.marks]
    return any(mark.stage == "scores" and all(atom in active for atom in mark.product.read) for mark in marks)


class _Reader:
    """Reads one chain."""

    def __init__(self, values: Nested, chain: SoftmaxChain, marks: Mapping[int, Mark], active: Collection[int] | None):
        self.marks, self.active = marks, active
        self.values, self.mark, self.out = values, chain.found, chain.out
        maker = values.maker(chain.out)
        assert maker is not None and chain.found.mix is not None
        self.at, self.mix = maker, chain.found.mix
        self.level: Level = maker.level

    def read(self) -> FoundAttention:
        """In digits of the attention's labels."""
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
        """In order, without what is added to all keys of a query alike at the end."""
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
        """A bias; large negative numbers, alone or in a sum, where keys are not seen, as a mask."""
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
        """What a bias of (1 - x) times a large negative number hides, where x is zero or one."""
        found = scaled_difference(self.values, raw.atom, raw.indices)
        if found is None or not (-found.number if raw.how == "sub" else found.number) <= HIDDEN:
            return ()
        return self._terms(found.condition, found.indices, True)

    def _terms(self, atom: Atom, indices: Indices, seen: bool) -> tuple[Term, ...]:
        return self.masks.terms(atom, self.roles.of(indices), seen)

    def _array(self, raw: Raw) -> Operand:
        return self.masks.operand(raw.atom, self.roles.of(raw.indices), SCORES)

    def _additive(self, raw: Raw) -> Masked | None:
        """A large negative number added where keys are not seen."""
        factor = factor_of(self.values, raw.atom, raw.indices)
        if factor is None:
            return None
        fill = -factor.number if raw.how == "sub" else factor.number
        if not fill <= HIDDEN:
            return None
        return Masked(self._terms(factor.condition, factor.indices, not factor.seen), fill, adds=True)

    def _zeroed(self) -> list[Change]:
        """Exponentials that a mask sets to zero, and not in their sum alone, are not seen."""
        mark: Mark = self.mark
        if all(is_known(self.values, raw, mark.raws) for raw in (*mark.zeroed, *mark.summed)):
            return []
        pairs = zip(mark.zeroed, mark.summed, strict=False)
        alike = len(mark.zeroed) == len(mark.summed)
        if not alike or not all(self._same(*pair) for pair in pairs):
            raise NotUnderstood("its exponentials are masked otherwise than their sum")
        return [self._hidden(raw) for raw in mark.zeroed]

    def _same(self, a: Raw, b: Raw) -> bool:
        """Whether two masks are the same. Of sums the dims of keys were there when they were masked."""
        return (a.how, a.seen, a.indices) == (b.how, b.seen, b.indices) and self.values.same(a.atom, b.atom)

    def _hidden(self, raw: Raw) -> Change:
        if raw.how == "mul":
            factor = factor_of(self.values, raw.atom, raw.indices)
            if factor is None:
                raise NotUnderstood("its exponentials are multiplied with an array")
            raw = replace(raw, atom=factor.condition, indices=factor.indices, seen=factor.seen)
        return Masked(self._terms(raw.atom, raw.indices, raw.seen), -math.inf)
