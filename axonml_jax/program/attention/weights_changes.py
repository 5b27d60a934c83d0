"""What is done to the weights after the softmax: dropout, and zeros where nothing is seen."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp

from axonml_jax.program.atoms import Atom, is_constant
from axonml_jax.program.attention.digits import Indices, before
from axonml_jax.program.attention.found_attention import Change, Masked, WeightsDrop
from axonml_jax.program.attention.mark import Mark, Raw
from axonml_jax.program.attention.masks.mask_reading import AROUND, MaskReader
from axonml_jax.program.attention.masks.mask_terms import Term
from axonml_jax.program.attention.operand import SCORES, Operand
from axonml_jax.program.attention.roles import Roles
from axonml_jax.program.attention.sources import operand_indices, varies_along
from axonml_jax.program.elements import number
from axonml_jax.program.nested import Nested, Node
from axonml_jax.program.rules import is_elementwise


@dataclass(frozen=True)
class ReadChain:
    """A chain whose dims have roles.

    Attributes:
      values: the program.
      mark: of the chain's result.
      roles: of its dims.
      masks: reads its masks.
    """

    values: Nested
    mark: Mark
    roles: Roles
    masks: MaskReader


class NotUnderstood(Exception):
    """Why an attention is not recognised, a clause."""


@dataclass(frozen=True)
class Factor:
    """A number where a condition holds, and zero elsewhere.

    Attributes:
      condition: bool; and what its dims run over, and the value with which it holds.
      number: the number.
    """

    condition: Atom
    indices: Indices
    seen: bool
    number: float


class WeightsChanges(NamedTuple):
    """What is done to weights: where they are not set to zero, what multiplies them, and their dropout."""

    zero: tuple[Term, ...]
    gates: tuple[Operand | Term, ...]
    drop: WeightsDrop | None


def weights_changes(chain: ReadChain, changes: Sequence[Change], marks: Mapping[int, Mark]) -> WeightsChanges:
    """What is done to the weights of a chain.

    Args:
      chain: it.
      changes: of its scores.
      marks: what every value is.

    Raises:
      NotUnderstood: for anything else.
    """
    values, mark, roles, masks = chain.values, chain.mark, chain.roles, chain.masks
    zero, gates, drop, scale = (), [], None, 1.0
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


def is_known(values: Nested, raw: Raw, raws: Sequence[Raw]) -> bool:
    """Whether the same mask hides scores before the softmax."""
    alike = [each for each in raws if (each.how, each.seen, each.indices) == ("select", raw.seen, raw.indices)]
    return any(values.same(each.atom, raw.atom) for each in alike)


def _asks_for_nan(values: Nested, atom: Atom, mark: Mark, marks: Mapping[int, Mark]) -> bool:
    """Whether a condition is true where a chain's own weights are no numbers."""
    maker = values.maker(atom)
    if maker is None or maker.name != "ne" or is_constant(maker.inputs[0]) or maker.inputs[0] != maker.inputs[1]:
        return False
    own = marks.get(maker.inputs[0])
    return own is not None and own.stage == "weights" and own.product is mark.product


def factor_of(values: Nested, atom: Atom, indices: Indices) -> Factor | None:
    """A value as a number where a condition holds and zero elsewhere; None: it is something else."""
    return _factor(values, Raw("mul", atom, indices))


def scaled_difference(values: Nested, atom: Atom, indices: Indices) -> Factor | None:
    """A value as a number times (1 - x): x as the condition. None: it is something else."""
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
    """What a value was before it was moved, or multiplied with a number: the value, its indices, the number."""
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
    """Dropout, where the condition compares random numbers with a number."""
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
    """The random bits that numbers are made of, element by element."""
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
