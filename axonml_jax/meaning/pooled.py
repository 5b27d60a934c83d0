"""How results of the model without a dim of positions are made of the ranks', each of which holds some positions.

The shapes of such a result, as of a first token or a mean over positions, do not say how it is made. So the model's traces, at
whole sequences and at a rank's part, are walked side by side (`plain_mean.py`), back from the result: to a mean, to a sum, or
to one position, which one rank holds. The way ends where the operations of the traces differ, as in attention: what is made
there has positions, or is the same on all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import or_
from typing import Any

import numpy as np
from jax.core import Tracer

from axonml_jax.base import is_key
from axonml_jax.meaning.model_call import Call, Share, Unclear, place_of
from axonml_jax.meaning.places import Group, Places, Split, split_sizes
from axonml_jax.meaning.plain_mean import Known, NotProven, Walk, options_of
from axonml_jax.program.program import (
    Atom,
    Equation,
    Program,
    aval_of,
    forward,
    is_constant,
    read_program,
    results,
    rule_of,
    through,
)
from axonml_jax.program.values import SAME, Axes, made_over
from axonml_jax.sharding.layout import sequence_order

WHOLE, UNKNOWN = Known((None,)), Known(())


@dataclass(frozen=True)
class OfRank(Known):
    """A value of the whole batch that is one rank's.

    Attributes:
      rank: its number in the group.
    """

    rank: int = 0


def shares(whole: Call, local: Call, group: Group) -> tuple[Share | None, ...]:
    """How each array that a call returns is made of the ranks', where it has no dim of positions.

    Args:
      whole, local: the call, noted at whole sequences and at a rank's part of them.
      group: the ranks that have parts.

    Returns:
      For each array a factor of the sum over ranks, or the number of a rank; None: it is not known how. Of those with
      positions, and of those that are the same on all ranks, it is the mean.
    """
    found: list[Share | None] = [Fraction(1, group.ranks)] * whole.out_rest.count(None)
    if numbers := pooled(whole, local, group):
        of_all, of_rank, given = _read(whole, local, group)
        lengths = split_sizes([aval.shape for aval in whole.given], [at for (at,) in _split(whole, local, group)])
        for k, known in zip(numbers, _Back(group, lengths).outputs(of_all, of_rank, given, numbers), strict=True):
            found[k] = known.rank if isinstance(known, OfRank) else known.factor if known.is_sum else None
    return tuple(found)


def pooled(whole: Call, local: Call, group: Group) -> list[int]:
    """The numbers of the arrays that a call returns without positions, and that are other ones on ranks with others."""
    _, of_rank, given = _read(whole, local, group)
    apart = results(of_rank, [_axes(known, group) for known in given], _differing, SAME)
    pairs = zip(range(whole.out_rest.count(None)), whole.made, local.made, strict=False)
    return [k for k, a, b in pairs if a.shape == b.shape and not apart[k].isdisjoint(group.axes)]


def _read(whole: Call, local: Call, group: Group) -> tuple[Program, Program, list[Known]]:
    """The programs of a call at both shapes, and how their inputs are made."""
    of_all, of_rank, split = read_program(whole.traced), read_program(local.traced), _split(whole, local, group)
    return of_all, of_rank, [WHOLE] * (len(of_all.inputs) - len(split)) + [Known(places) for places in split]


def _split(whole: Call, local: Call, group: Group) -> list[Places]:
    return [(place_of(a.shape, b.shape, group),) for a, b in zip(whole.given, local.given, strict=True)]


def _axes(known: Known, group: Group) -> Axes:
    return SAME if known == WHOLE or known.literal else frozenset(group.axes)


def _differing(equation: Equation, operands: list[Axes]) -> list[Axes]:
    """The mesh axes over which results differ (see `differing`)."""
    inside = through(equation, operands, _differing, or_, SAME)
    return made_over(equation, operands) if inside is None else inside


def _any(equation: Equation, operands: list[bool]) -> list[bool]:
    return [any(operands)] * len(equation.outputs)


class _Back(Walk):
    """Walks two traces from results back to where they do other things.

    Args:
      group: the ranks that have parts of the positions.
      lengths: of whole sequences.
    """

    def __init__(self, group: Group, lengths: set[int]):
        super().__init__((group,))
        self.group, self.lengths = group, lengths

    def outputs(self, whole: Program, local: Program, given: Sequence[Known], wanted: Sequence[int]) -> list[Known]:
        """How the results with the numbers `wanted` are made; both programs need not do the same throughout."""
        if not wanted:
            return []
        level = _Level(whole, local, self._by_shape(local, given))
        ends = [level.pair(whole.outputs[k], local.outputs[k]) for k in wanted]
        env = dict(zip(whole.inputs, given, strict=True))
        for equation in reversed(whole.equations):
            level.step_back(equation)
        for number, value in whole.constants.items():
            own = local.constants.get(level.pairs.get(number, -1))
            env[number] = WHOLE if own is not None and _equal(value, own) else UNKNOWN
        for equation, own in reversed(level.steps):
            made = None if own is None else self._made(equation, own, level, env)
            for k, number in enumerate(equation.outputs):
                if number in level.pairs:
                    env[number] = level.by_shape(number, level.pairs[number]) if made is None else made[k]
        return [level.read(a, b, env) for a, b in ends]

    def program(self, whole: Program, local: Program, given: Sequence[Known]) -> list[Known]:
        """How all results of a program inside are made."""
        return self.outputs(whole, local, given, range(len(whole.outputs)))

    def _by_shape(self, local: Program, given: Sequence[Known]) -> Callable[[Any, Any, Any], Known]:
        """A function of two shapes and a number of the local program: what has positions, or was joined over ranks."""
        axes = [_axes(known, self.group) for known in given]
        apart = forward(local, axes, _differing, SAME)
        reads = forward(local, list(map(bool, axes)), _any, False)

        def known(a: Any, b: Any, number: int) -> Known:
            try:
                place = place_of(a.shape, b.shape, self.group)
            except Unclear:
                return UNKNOWN
            joined = reads.get(number, False) and apart.get(number, SAME).isdisjoint(self.group.axes)
            return Known((place,)) if place is not None else WHOLE if joined else UNKNOWN

        return known

    def _made(self, equation: Equation, own: Equation, level: "_Level", env: dict[int, Known]) -> list[Known] | None:
        """How the results of an equation that both traces have are made; None: by their shapes."""
        pairs = zip(equation.inputs, own.inputs, strict=True)
        given, unknown = [level.read(a, b, env) for a, b in pairs], [UNKNOWN] * len(equation.outputs)
        if not set(self.group.axes).isdisjoint(equation.op.mesh_axes):
            return None
        if UNKNOWN in given:
            return unknown
        if equation.called is not None or equation.op.checkpointed is not None:
            custom = equation.name.startswith("custom_") and any(known.is_sum for known in given)
            return unknown if custom else super()._body(equation, own, given)
        if (found := self._of_rank(equation, own, given)) is not None:
            return [found] * len(equation.outputs)
        try:
            made = super()._equation(equation, own, given)
            for known, a, b in zip(made, equation.op.made, own.op.made, strict=True):
                self._check_shape(a, b, known)
        except (NotProven, Unclear):
            return unknown if any(known.is_sum or known.literal for known in given) else None
        return made

    def _derivative(self, *args: Any) -> None:
        """Takes derivatives of one's own as those of what is computed."""

    def _of_rank(self, equation: Equation, own: Equation, given: Sequence[Known]) -> Known | None:
        """What is made of one rank's values, or is one position; None: it is made of other things."""
        ranks = {known.rank for known in given if isinstance(known, OfRank)}
        if not ranks:
            return self._position(equation, own, given)
        alone = len(ranks) == 1 and all(isinstance(known, OfRank) or known == WHOLE for known in given)
        alone = alone and not equation.op.bodies and options_of(equation) == options_of(own)
        alone = alone and all(a.shape == b.shape for a, b in zip(equation.op.made, own.op.made, strict=True))
        return OfRank((None,), rank=ranks.pop()) if alone else UNKNOWN

    def _position(self, equation: Equation, own: Equation, given: Sequence[Known]) -> Known | None:
        """The rank of a slice that is one position, where both traces take the same one."""
        place = given[0].places[0] if equation.name == "slice" and given[0].places else None
        if not isinstance(place, Split) or (length := equation.op.given[0].shape[place.dim]) not in self.lengths:
            return None
        (first, last), (here, end) = (
            (each.op.options["start_indices"][place.dim], each.op.options["limit_indices"][place.dim])
            for each in (equation, own)
        )
        if last != first + 1 or end != here + 1:
            return None
        at = int(np.flatnonzero(sequence_order(self.group.order, length, self.group.ranks) == first)[0])
        rank, index = divmod(at, length // self.group.ranks)
        beside = lambda each: [x for dim, x in enumerate(each.op.options["start_indices"]) if dim != place.dim]
        return OfRank((None,), rank=rank) if index == here and beside(equation) == beside(own) else UNKNOWN


class _Level:
    """The pairs of values of two programs that are made alike, from their results back.

    Attributes:
      pairs: the number in the local program of each that is paired, by that in the whole one.
      steps: the equations of the whole program on the way, last first, each with the local one; None: it does other things.
    """

    def __init__(self, whole: Program, local: Program, by_shape: Callable[[Any, Any, Any], Known]):
        self.whole, self.local, self._by_shape = whole, local, by_shape
        self.pairs: dict[int, int] = {}
        self.steps: list[tuple[Equation, Equation | None]] = []
        self._names = dict(zip(local.inputs, whole.inputs, strict=True))
        self._makers = [{n: each for each in program.equations for n in each.outputs} for program in (whole, local)]

    def _before_casts(self, atom: Atom, k: int) -> Atom:
        while not is_constant(atom) and (maker := self._makers[k].get(atom)) and rule_of(maker.name).casts:
            atom = maker.inputs[maker.outputs.index(atom)]
        return atom

    def pair(self, a: Atom, b: Atom) -> tuple[Atom, Atom]:
        """Pairs two values, before casts of types, and returns them."""
        a, b = self._before_casts(a, 0), self._before_casts(b, 1)
        if not is_constant(a) and not is_constant(b):
            self._names.setdefault(b, a)
            self.pairs.setdefault(a, b)
        return a, b

    def step_back(self, equation: Equation) -> None:
        """Pairs what an equation reads, if its results are paired and the other program makes them alike."""
        there = [(k, self.pairs[n]) for k, n in enumerate(equation.outputs) if n in self.pairs]
        if not there:
            return
        own = self._makers[1].get(there[0][1])
        if own is not None and (
            (own.name, len(own.inputs)) != (equation.name, len(equation.inputs))
            or any(k >= len(own.outputs) or own.outputs[k] != number for k, number in there)
        ):
            own = None
        self.steps.append((equation, own))
        for a, b in zip(equation.inputs, () if own is None else own.inputs, strict=own is not None):
            self.pair(a, b)

    def read(self, a: Atom, b: Atom, env: dict[int, Known]) -> Known:
        """What is known of two values that are read in the same place."""
        a, b = self._before_casts(a, 0), self._before_casts(b, 1)
        if is_constant(a) and is_constant(b):
            return WHOLE if _equal(a.val, b.val) else Known((None,), literal=(a.val, b.val))
        if is_constant(a) or is_constant(b) or self.pairs.get(a) != b or self._names.get(b) != a:
            return UNKNOWN
        return env.get(a, UNKNOWN)

    def by_shape(self, a: Atom, b: Atom) -> Known:
        """What the shapes of two values say."""
        return self._by_shape(aval_of(a, self.whole.avals), aval_of(b, self.local.avals), b)


def _equal(a: Any, b: Any) -> bool:
    """Whether two constants are the same."""
    if a is b or isinstance(a, Tracer) or isinstance(b, Tracer):
        return a is b
    if is_key(a) or is_key(b):
        return False
    return np.shape(a) == np.shape(b) and np.array_equal(a, b)
