"""Proof that a loss is a plain mean over ranks, so that a step that takes each rank's rows alone is right.

The loss is traced at the whole batch's shape and at a rank's. Both programs are walked side by side: they must do the same, and
of every value it must be known how the whole one is made of the ranks': equal, their rows, or a factor times their sum. A
number that came from the batch's size differs between the two, and changes the factor. Whatever is not known ends the proof.
"""

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from axonml_jax.meaning.interpreter import (
    ClosedOver,
    backward_derivative,
    forward_derivative,
    moving_of,
    of_cotangent,
    open_floats,
)
from axonml_jax.meaning.model_call import Unclear, place_of
from axonml_jax.meaning.places import SUM, Group, Places, Split, local_shape, step_of
from axonml_jax.program.program import Equation, Program, is_constant, is_elementwise, is_row_by_row, names_of, rule_of


class NotProven(Exception):
    """Raised where it is not known how a value of the whole batch is made of the ranks' values."""


@dataclass(frozen=True)
class Known:
    """How a value of the whole batch is made of the ranks' values: equal, parts of it, or a factor times their sum.

    Attributes:
      places: as in `places.py`: of a whole one the ranks' are equal, or their parts of what is spread evenly.
      factor: what a sum is multiplied by.
      literal: of a constant that differs between both programs, its number in the whole batch's and in a rank's; None: no such.
    """

    places: Places
    factor: Fraction = Fraction(1)
    literal: tuple[Any, Any] | None = None

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum over all ranks."""
        return SUM in self.places


def talks(program: Program, axes: Sequence[str]) -> bool:
    """Whether a program has collectives over mesh axes, or asks for its rank along them."""
    for equation in program.equations:
        if set(equation.op.mesh_axes) & set(axes) and not rule_of(equation.name).casts:
            return True
        if any(talks(body, axes) for body in equation.bodies):
            return True
    return False


def is_plain_mean(
    local: Any, whole: Any, places: Sequence[Places], groups: Sequence[Group], joined: Container[str] = ()
) -> bool:
    """Whether the whole batch's loss and metrics are means of the ranks'.

    Args:
      local, whole: the loss traced at a rank's shapes and at the whole batch's (`asked.Traced`).
      places: the places of the programs' inputs.
      groups: the groups of ranks.
      joined: mesh axes over which a collective makes values of the whole batch, as layers do that say so.
    """
    if local.out_tree != whole.out_tree or whole.changed or len(local.noted) != len(whole.noted):
        return False
    if not all(a.alike(b) for a, b in zip(local.noted, whole.noted, strict=True)):
        return False
    walk = Walk(groups, joined)
    try:
        found = walk.program(whole.program, local.program, [Known(each) for each in places])
        loss, _ = whole.out_tree.unflatten(found)
        pairs = [(loss.total, loss.weight), *((each.total, each.weight) for each in loss.metrics.values())]
        return all(walk.mean(total) == (walk.parts if weight is None else walk.mean(weight)) for total, weight in pairs)
    except (NotProven, Unclear):
        return False


class Walk:
    """Walks two traces of one function side by side, at the whole batch's shapes and at a rank's.

    Args:
      groups: the groups of ranks.
      joined: mesh axes over which a collective makes values of the whole batch.
    """

    def __init__(self, groups: Sequence[Group], joined: Container[str] = ()):
        self.groups, self.joined, self.in_derivative = groups, joined, False
        self._asked = dict[Equation, list[bool]]()  # which results are read of what is needed
        ranks = 1
        for group in groups:
            ranks *= group.ranks
        self.parts = Fraction(1, ranks)

    def mean(self, known: Known) -> Fraction:
        """The factor by which the sum over ranks gives a value; of one that is equal on all ranks, that of a mean."""
        if known.is_sum:
            return known.factor
        if any(known.places):
            raise NotProven
        return self.parts

    def program(self, whole: Program, local: Program, given: Sequence[Known]) -> list[Known]:
        """Derives how each result of a program is made of the ranks' values (`Known`), from the same of its inputs."""
        sizes = lambda program: [
            len(x) for x in (program.equations, program.inputs, program.constants, program.outputs)
        ]
        if sizes(whole) != sizes(local):
            raise NotProven
        env, names = dict(zip(whole.inputs, given, strict=True)), dict(zip(local.inputs, whole.inputs, strict=True))
        for (number, value), (other, own) in zip(whole.constants.items(), local.constants.items(), strict=True):
            if np.shape(value) != np.shape(own) or not (value is own or np.array_equal(value, own)):
                raise NotProven
            env[number], names[other] = Known((None,) * len(self.groups)), number
        needed = self._needed(whole)
        for equation, own in zip(whole.equations, local.equations, strict=True):
            if equation not in needed:
                continue
            if len(equation.inputs) != len(own.inputs) or len(equation.outputs) != len(own.outputs):
                raise NotProven
            pairs, unread = zip(equation.inputs, own.inputs, strict=True), self._unread(equation)
            none = Known((None,) * len(self.groups))
            read = [none if k < unread else self._atom(*pair, env, names) for k, pair in enumerate(pairs)]
            made = self._equation(equation, own, read)
            for number, other, known in zip(equation.outputs, own.outputs, made, strict=True):
                env[number], names[other] = known, number
                self._check_shape(whole.avals[number], local.avals[other], known)
        return [self._atom(a, b, env, names) for a, b in zip(whole.outputs, local.outputs, strict=True)]

    def _unread(self, equation: Equation) -> int:
        """How many of its first operands say nothing of an equation's results, which are known without them."""
        if rule_of(equation.name).sends is not None and any(axis in self.joined for axis in equation.op.mesh_axes):
            return len(equation.inputs)
        return len(equation.inputs) - 1 if is_row_by_row(equation.op) else 0

    def _needed(self, program: Program) -> set[Equation]:
        """The equations that say something of a program's results."""
        wanted, needed = set(names_of(program.outputs)), set[Equation]()
        for equation in reversed(program.equations):
            if not wanted.isdisjoint(equation.outputs):
                needed.add(equation)
                self._asked[equation] = [number in wanted for number in equation.outputs]
                wanted.update(names_of(equation.inputs[self._unread(equation) :]))
        return needed

    def _check_shape(self, whole: Any, own: Any, known: Known) -> None:
        if known.is_sum or any(known.places):
            wanted = local_shape(whole.shape, known.places, self.groups)
            if tuple(own.shape) != wanted:
                raise NotProven
        if whole.dtype != own.dtype:
            raise NotProven

    def _atom(self, atom: Any, own: Any, env: Mapping[int, Known], names: Mapping[int, int]) -> Known:
        none = (None,) * len(self.groups)
        if is_constant(atom) != is_constant(own):
            raise NotProven
        if not is_constant(atom):
            if names.get(own) != atom:
                raise NotProven
            return env[atom]
        if np.array_equal(atom.val, own.val, equal_nan=_is_float(np.asarray(atom.val))):
            return Known(none)
        return Known(none, literal=(atom.val, own.val))

    def _equation(self, equation: Equation, own: Equation, given: list[Known]) -> list[Known]:
        if equation.name != own.name or len(equation.inputs) != len(own.inputs):
            raise NotProven
        if equation.name == "model_call":
            return self._call(equation, own, given)
        if equation.inputs and self._unread(equation) == len(equation.inputs):
            return [Known((None,) * len(self.groups))] * len(equation.outputs)
        if is_row_by_row(equation.op):
            return [given[-1]]
        if rule_of(equation.name).casts:
            return given  # in typed mode numbers that grow with the batch are cast, too
        if any(known.literal for known in given):
            return [self._by_number(equation, given)]
        if equation.called is not None or equation.op.checkpointed is not None:
            return self._body(equation, own, given)
        if equation.op.bodies or options_of(equation) != options_of(own):
            raise NotProven
        if not any(any(known.places) for known in given):
            return self._alike(equation, own)
        return self._step(equation, given)

    def _call(self, equation: Equation, own: Equation, given: list[Known]) -> list[Known]:
        """The results of a call of the model, by their shapes: rows, or the mean of the ranks' numbers."""
        for known, a, b in zip(given, equation.op.given, own.op.given, strict=True):
            if known.is_sum or known.literal or local_shape(a.shape, known.places, self.groups) != tuple(b.shape):
                raise NotProven
        (group,), found = self.groups, []
        for a, b in zip(equation.op.made, own.op.made, strict=True):
            place = place_of(a.shape, b.shape, group)
            if place is None and not _is_float(a):
                raise NotProven  # a count has no mean
            found.append(Known((SUM,), self.parts) if place is None else Known((place,)))
        return found

    def _by_number(self, equation: Equation, given: list[Known]) -> Known:
        """A sum that is divided by a number that grows with the batch, or multiplied by its inverse."""
        numbers = [known.literal for known in given if known.literal]
        sums = [known for known in given if known.is_sum]
        if equation.name not in ("div", "mul") or len(sums) != 1 or len(numbers) != 1:
            raise NotProven
        (known,), (whole, own) = sums, map(np.asarray, numbers[0])
        if not _is_float(whole) or (equation.name == "div" and not given[0].is_sum):
            raise NotProven
        grown, base = map(complex, (whole, own) if equation.name == "div" else (own, whole))
        # Numbers of 16 bits are held to float32 too: n - 1 is within their rounding of n.
        precision = min(float(jnp.finfo(kind).eps) for kind in (whole.dtype, jnp.float32))
        if not abs(grown * float(self.parts) - base) <= 4 * precision * abs(base):
            raise NotProven
        return Known(known.places, known.factor * self.parts)

    def _body(self, equation: Equation, own: Equation, given: list[Known]) -> list[Known]:
        """A call: its body, and its own derivatives if it has some, must do the same in both, without sums over ranks."""
        inside = lambda each: each.called if each.called is not None else each.body
        custom = equation.name.startswith("custom_")
        if custom and not self.in_derivative and any(known.is_sum for known in given):
            raise NotProven
        if not custom:
            return self._of_asked(inside(equation), inside(own), given, self._asked[equation])
        made = self.program(inside(equation), inside(own), given)
        if not self.in_derivative:  # a step differentiates once
            self.in_derivative = True
            self._derivative(equation, own, given, made)
            self.in_derivative = False
        return made

    def _of_asked(self, whole: Program, local: Program, given: list[Known], asked: list[bool]) -> list[Known]:
        """The results of a body that somebody reads; of the others nothing is said."""
        cut = lambda program: replace(program, outputs=tuple(itertools.compress(program.outputs, asked)))
        made = iter(self.program(cut(whole), cut(local), given))
        return [next(made) if each else Known((None,) * len(self.groups)) for each in asked]

    def _derivative(self, equation: Equation, own: Equation, given: list[Known], made: list[Known]) -> None:
        floats = lambda known, avals: [k for k, aval in zip(known, avals, strict=True) if _is_float(aval)]
        if equation.name == "custom_jvp_call":
            moving = floats(given, equation.op.given)
            found = self.program(forward_derivative(equation.op), forward_derivative(own.op), [*given, *moving])
            wanted = [*made, *floats(made, equation.op.made)]
        else:
            spread = lambda known: Known(of_cotangent(known.places))
            moving, cotangents = moving_of(equation), map(spread, floats(made, equation.op.made))
            if len(moving) < len(open_floats(equation)):
                raise NotProven  # by rows alone, what its rule says of a constant would be typed otherwise than that
            try:
                of_all, of_rank = (backward_derivative(each.op, moving) for each in (equation, own))
            except ClosedOver:
                raise NotProven from None
            found = self.program(of_all, of_rank, [*given, *cotangents])
            wanted = [spread(given[k]) for k in moving]
        if [known.places for known in found] != [known.places for known in wanted] or any(k.factor != 1 for k in found):
            raise NotProven

    def _alike(self, equation: Equation, own: Equation) -> list[Known]:
        """The results of whole operands: whole, though perhaps longer; an index along a longer dim ends the proof."""
        op, none = equation.op, Known((None,) * len(self.groups))
        grown = lambda avals, others: any(a.shape != b.shape for a, b in zip(avals, others, strict=True))
        if is_elementwise(op.name) or op.name == "broadcast_in_dim":
            return [none] * len(op.made)
        if op.name == "iota":
            along = op.options["dimension"]
            if op.made[0].shape[along] == own.op.made[0].shape[along]:
                return [none]
        if grown(op.given, own.op.given) or grown(op.made, own.op.made) or op.acts:
            raise NotProven
        return [none] * len(op.made)

    def _step(self, equation: Equation, given: list[Known]) -> list[Known]:
        """The results of an operation that each rank does on its part."""
        steps = step_of(equation.op, [known.places for known in given], self.groups)
        if any(step.act for step in steps):
            raise NotProven
        factors = {known.factor for known in given if known.is_sum}
        for known, wanted in zip(given, zip(*(step.wanted for step in steps), strict=True), strict=True):
            for old, new in zip(known.places, wanted, strict=True):
                if old == SUM != new or (isinstance(old, Split) and old != new):
                    raise NotProven
                if old is None and new == SUM:
                    factors.add(self.parts)
        if len(factors) > 1:
            raise NotProven
        made = [tuple(each) for each in zip(*(step.made for step in steps), strict=True)]
        factor = next(iter(factors), Fraction(1))
        return [Known(places, factor if SUM in places else Fraction(1)) for places in made]


def _is_float(x: Any) -> bool:
    """Whether an array is of floats or complex numbers; NumPy does not count bfloat16 and floats of 8 bits among them."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


_OF_SHAPES = ("shape", "new_sizes", "limit_indices", "slice_sizes", "sharding", "out_sharding")


def options_of(equation: Equation) -> str:
    """The options of an equation as text, without those that hold shapes."""
    return str({name: value for name, value in equation.op.options.items() if name not in _OF_SHAPES})
