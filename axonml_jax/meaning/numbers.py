"""Tells whether numbers that the model returns without rows, such as a loss that is its method, are means of the ranks'.

Of a call of the model shapes alone are known, and a number without rows is taken as the mean of the ranks'. Here its traces at
both shapes are walked side by side (`plain_mean.py`). What is known to be no such mean, as a sum, a masked mean or a maximum,
is then taken with the model's own code. Of what is not proven to be one, it is asked whether something else than sums loses
rows on the way to it (`_lost_in_numbers`); a call outside of a loss, which takes the mean in any case, names it.
"""

from collections.abc import Container, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from axonml_jax.meaning.following import Following
from axonml_jax.meaning.model_call import Call, Unclear, places_of
from axonml_jax.meaning.places import SUM, Group, shifted
from axonml_jax.meaning.plain_mean import Known, NotProven, Walk
from axonml_jax.program.program import Equation, Program, all_but_named, made_by, read_program, rule_of

UNKNOWN, MIXED = Known(()), Known(())
"""Not known; and known to be made of several rows, but no sum over ranks. Both are told apart by identity."""

_BENDING = """
abs cbrt cos div erf exp exp2 expm1 integer_pow log log1p log2 logistic max min mul pow rsqrt sin sqrt square tanh
"""
BENDING = frozenset(_BENDING.split())
"""Operations whose value at a sum is none of their values at its parts, besides factorizations.

Of choices and tests nothing is said, as they guard."""

_SOME_ROWS = ("dynamic_slice", "gather", "slice")


def mixes_rows(whole: Call, local: Call, groups: Sequence[Group]) -> bool:
    """Whether a call returns a number without rows that is known to be no mean of the ranks'.

    Args:
      whole, local: the call, noted at the whole batch's shapes and at a rank's.
      groups: the groups of ranks.
    """
    walk = Numbers(groups)
    no_mean = lambda known: known is MIXED or known.literal or (known.is_sum and known.factor != walk.parts)
    return any(map(no_mean, _walked(walk, whole, local).values()))


def _walked(walk: "Numbers", whole: Call, local: Call) -> dict[int, Known]:
    """What is known of the results of a call without rows, by their numbers; none where the traces cannot be walked."""
    pairs = list(zip(whole.made, local.made, strict=True))[: whole.out_rest.count(None)]
    numbers = [k for k, (a, b) in enumerate(pairs) if a.shape == b.shape]
    if not numbers or whole.traced is None or local.traced is None:
        return {}
    try:
        of_all, of_rank = (read_program(each.traced, all_but_named) for each in (whole, local))
        rows = [walk.placed(a.shape, b.shape) for a, b in zip(whole.given, local.given, strict=True)]
        fixed = [Known((None,) * len(walk.groups))] * (len(of_all.inputs) - len(rows))
        found = walk.program(of_all, of_rank, [*fixed, *rows])
    except (NotProven, Unclear):
        return {}
    return {k: found[k] for k in numbers}


def unproven(whole: Call, local: Call, groups: Sequence[Group], axes: Container[str] = ()) -> dict[int, bool]:
    """The floats that a call returns without rows, and that are not proven to be means of the ranks', or the same on all.

    With each whether it is a mean if what cannot be followed keeps rows apart.

    Args:
      whole, local: the call, noted at the whole batch's shapes and at a rank's.
      groups: the groups of ranks.
      axes: mesh axes over which a collective makes values of the whole batch.
    """
    pairs = list(zip(whole.made, local.made, strict=True))[: whole.out_rest.count(None)]
    numbers = [k for k, (a, b) in enumerate(pairs) if a.shape == b.shape and jnp.issubdtype(a.dtype, jnp.inexact)]
    if not numbers:
        return {}
    of_all, of_rank = (read_program(each.traced, all_but_named) for each in (whole, local))
    proven = lambda k: _is_proven(_only(of_all, k), _only(of_rank, k), (whole, local), groups, axes)
    if not (others := [k for k in numbers if not proven(k)]):
        return {}
    found = _walked(walk := Guarded(groups), whole, local)
    seems = lambda known: known is not None and known.is_sum and known.factor == walk.parts
    return {k: seems(found.get(k)) for k in others}


def _only(program: Program, k: int) -> Program:
    """What of a program makes one of its outputs."""
    wanted = (program.outputs[k],)
    return replace(program, outputs=wanted, equations=tuple(made_by(program.equations, wanted)))


def _is_proven(
    of_all: Program, of_rank: Program, calls: Sequence[Call], groups: Sequence[Group], axes: Container[str]
) -> bool:
    walk = Proof(groups, axes)
    try:
        rows = [walk.placed(a.shape, b.shape) for a, b in zip(*(call.given for call in calls), strict=True)]
        fixed = [Known((None,) * len(groups))] * (len(of_all.inputs) - len(rows))
        [found] = walk.program(of_all, of_rank, [*fixed, *rows])
        return not found.literal and walk.mean(found) == walk.parts
    except (NotProven, Unclear):
        return False


class Numbers(Walk):
    """Walks two traces of a call side by side, and goes on where a value is not known."""

    def placed(self, whole: Sequence[int], own: Sequence[int]) -> Known:
        """The places of a value by its two shapes: it has rows where they differ."""
        return Known(tuple(places_of(whole, own, self.groups)))

    def _equation(self, equation: Equation, own: Equation, given: list[Known]) -> list[Known]:
        if any(known is MIXED for known in given):
            return [MIXED] * len(equation.outputs)
        if any(known is UNKNOWN for known in given):
            return self._by_shape(equation, own)
        try:
            return self._proven(equation, own, given)
        except (NotProven, Unclear):
            return (
                [MIXED] * len(equation.outputs) if self._mixes(equation, own, given) else self._by_shape(equation, own)
            )

    def _proven(self, equation: Equation, own: Equation, given: list[Known]) -> list[Known]:
        if equation.name in ("scatter-add", "scatter_add") and any(any(known.places) for known in given[1:]):
            return [Known(tuple(SUM for _ in self.groups))]
        if rule_of(equation.name).kind == "random":  # every shard draws its rows' own
            pairs = zip(equation.op.made, own.op.made, strict=True)
            return [self.placed(np.shape(a), np.shape(b)) for a, b in pairs]
        if equation.op.scan is not None and own.op.scan is not None:
            return self._scan(equation, own, given)
        return super()._equation(equation, own, given)

    @staticmethod
    def _mixes(equation: Equation, own: Equation, given: list[Known]) -> bool:
        """Whether an operation that is no step of a proof is known to make no mean: it bends a sum, or takes some rows."""
        name, rule = equation.name, rule_of(equation.name)
        if any(known.is_sum for known in given):
            factorizes = rule.kind == "heavy" and name not in ("dot_general", "conv_general_dilated", "fft")
            return name in BENDING or factorizes
        rows = bool(given) and any(given[0].places)
        fixed = all(np.shape(a) == np.shape(b) for a, b in zip(equation.op.made, own.op.made, strict=True))
        return rows and (rule.total in ("max", "min") or name == "reduce_prod" or (name in _SOME_ROWS and fixed))

    def _by_shape(self, equation: Equation, own: Equation) -> list[Known]:
        """The results of an equation without a rule, by their shapes, as those of a call of the model."""
        found = []
        for a, b in zip(equation.op.made, own.op.made, strict=True):
            try:
                known = self.placed(np.shape(a), np.shape(b))
            except Unclear:
                known = UNKNOWN
            found.append(known if any(known.places) else UNKNOWN)
        return found

    def _scan(self, equation: Equation, own: Equation, given: list[Known]) -> list[Known]:
        """Walks a scan whose carry keeps its places; a carry that starts as zeros may become rows."""
        scan, other, body, own_body = equation.op.scan, own.op.scan, equation.body, own.body
        assert scan is not None and other is not None and body is not None and own_body is not None
        stacks, sliced = given[scan.first_scanned :], Following(self.groups).sliced
        over_rows = any(any(known.places) and not any(sliced(known.places)) for known in stacks)
        if over_rows or any(known.is_sum for known in given) or scan.options != other.options:
            raise NotProven
        consts, carry = given[: scan.num_consts], given[scan.num_consts : scan.first_scanned]
        slices = [Known(sliced(known.places)) for known in stacks]
        for _ in range(2):
            made = self.program(body, own_body, [*consts, *carry, *slices])
            if made[: scan.num_carry] == carry:
                return [*carry, *map(_stacked, made[scan.num_carry :])]
            carry = made[: scan.num_carry]
        raise NotProven


def _stacked(known: Known) -> Known:
    """Slices stacked along dim 0; what is not known stays so."""
    return known if known is UNKNOWN or known is MIXED else replace(known, places=shifted(known.places, 1))


class Guarded(Numbers):
    """Takes a mean that is chosen, or a constant in its place, for that mean: such choices guard it."""

    def _equation(self, equation: Equation, own: Equation, given: list[Known]) -> list[Known]:
        means = [known for known in given[1:] if known.is_sum and known.factor == self.parts]
        if (
            equation.name == "select_n"
            and means
            and all(known in means or not any(known.places) for known in given[1:])
        ):
            return [means[0]]
        return super()._equation(equation, own, given)


class Proof(Numbers):
    """Walks two traces of a call side by side, and ends where a value is not known."""

    def _equation(self, equation: Equation, own: Equation, given: list[Known]) -> list[Known]:
        return self._proven(equation, own, given)
