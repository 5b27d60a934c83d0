"""A loss of the whole batch where a rank takes its rows in microbatches, one after the other.

A microbatch is to the program as a rank is: it has a part of the rows. But nothing can be exchanged between microbatches while
one is at work. So what depends on the batch alone (masks, counts, advantages) is made whole from all rows first, and what
depends on the model must be a sum over rows, which accumulates; a largest or smallest value of a metric accumulates as a sum
too, with a place for every microbatch. A loss of which anything else is needed is refused.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.base import PyTree
from axonml_jax.compat.model_call import PRIMITIVE as MODEL_CALL
from axonml_jax.meaning.following import Watching, calls_model
from axonml_jax.meaning.interpreter import Interpreter
from axonml_jax.meaning.places import SUM, Group, Places, Split
from axonml_jax.meaning.values import Ranks, Value
from axonml_jax.program.program import Equation, Program, is_constant, made_by


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Microbatch:
    """One of a rank's microbatches.

    Attributes:
      rows: its rows, as the batch.
      known: the whole values of what depends on the batch alone, in the order of the plan's.
      number: which it is.
      plan: how the loss is run (`deciding.Decided`).
      count: how many each rank has.
      swept: the results of a first sweep over all of them (`two_sweeps.Swept`); None: before it, or the loss takes one sweep.
    """

    rows: PyTree
    known: list[jax.Array]
    number: jax.Array | None
    plan: Any = field(metadata={"static": True})
    count: int = field(metadata={"static": True})
    swept: Any = None


class MicroRanks(Ranks):
    """Treats each microbatch of each rank as a rank; rows are not sent between microbatches.

    Args:
      groups: the ranks times the microbatches of each; then, where positions are split, the ranks among which they are.
      count: the microbatches of each rank.
      number: the number of the microbatch that is being run.
      alone: other mesh axes over which arrays are typed as varying (see `Ranks.typed`).
    """

    def __init__(self, groups: Sequence[Group], count: int, number: jax.Array, alone: tuple[str, ...] = ()):
        super().__init__(groups, alone=alone)
        self.count, self.number = count, number

    def index(self, group: Group) -> jax.Array:
        """The number of this rank's microbatch among all ranks', or of this rank among those that split positions."""
        return super().index(group) if group.positions else super().index(group) * self.count + self.number

    def check_talk(self, groups: Sequence[Group]) -> None:
        """Refuse to send rows; positions may be sent. `divided` does not see a loop's condition, nor gradients of custom rules.

        Raises:
          ValueError: naming the operation and the line.
        """
        if not all(group.positions for group in groups):
            name, line = self.at
            raise ValueError(
                "a loop's condition, or a custom derivative in the loss, needs the model's results of other microbatches: "
                f"{name} ({line or 'no line known'}) is not a sum over rows. Take all rows at once "
                "(accumulate=1, num_microbatches=1), or return ax.WeightedMean(total, weight)"
            )


class Mixing(Exception):
    """Raised where a value of the model is needed whole, or of other rows: the operation, and the user's line."""


@dataclass(frozen=True)
class Division:
    """The values of a program by when they can be made: before, in, or after the microbatches.

    Attributes:
      early: numbers of those that are made of the batch alone, whole, before all microbatches.
      late: of sums of what the model makes, that accumulate and are completed after all microbatches.
      after: of what is made of late ones.
      extremes: the late ones that are largest or smallest values, or truth values of any or all, over rows: a microbatch makes
        that of its own rows.
    """

    early: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    after: frozenset[int] = frozenset()
    extremes: frozenset[int] = frozenset()


def divided(
    program: Program,
    places: Sequence[Places],
    dependent: Sequence[bool],
    groups: Sequence[Group],
    calls: Any,
    *,
    only_calls: bool = False,
) -> Division:
    """Divides the values of a program by when they can be made.

    Args:
      program: the loss traced at the whole batch's shape.
      places: the places of its inputs.
      dependent: which of them are of the model, not of the batch.
      groups: all microbatches of all ranks; then, where positions are split, the ranks among which they are.
      calls: the model's.
      only_calls: of the program only what its calls of the model need.

    Raises:
      Mixing: where rows of one microbatch meet what the model makes of others.
    """
    walk = _Divider(groups, calls)
    walk.env = dict.fromkeys(program.constants, walk.none)
    walk.env.update(zip(program.inputs, places, strict=True))
    walk.constants = set(program.constants)
    walk.dependent = {number for number, own in zip(program.inputs, dependent, strict=True) if own}
    calls_made = [number for equation in program.equations if calls_model(equation) for number in equation.outputs]
    for equation in made_by(program.equations, calls_made if only_calls else [*program.outputs, *calls_made]):
        walk.take(equation)
    return Division(
        tuple(sorted(walk.early)), tuple(sorted(walk.late)), frozenset(walk.after), frozenset(walk.extremes)
    )


OF_PARTS: Mapping[str, Callable[..., jax.Array]] = {
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_or": jnp.any,
    "reduce_and": jnp.all,
}
"""What makes a number of the whole batch of those of its microbatches, [count, ...], by the name of the reduction over rows."""


class OfParts(Interpreter):
    """Runs the loss on one microbatch; of what is reduced over rows by `OF_PARTS` it makes its own rows' number.

    That is a sum over all microbatches, [count, ...], with a place for each.

    Args:
      ranks, call: as of an `Interpreter`.
      extremes: the equations that reduce.
    """

    def __init__(self, ranks: MicroRanks, call: Any, extremes: Collection[Equation]):
        super().__init__(ranks, call)
        self._extremes = extremes

    def _equation(self, equation: Equation, given: Sequence[Value]) -> list[Value]:
        if equation not in self._extremes:
            return super()._equation(equation, given)
        ranks, (group,), (value,) = self.ranks, self.ranks.groups, given
        own = equation.op.bind([ranks.settled(value, value.places)])[0]
        places = jnp.zeros((group.ranks, *own.shape), own.dtype)
        made = ranks.vary(places).at[ranks.index(group)].set(own)
        return [ranks.held(made, (SUM,), made.shape)]


class _Divider(Watching):
    watched = 1  # positions are exchanged within a microbatch

    def __init__(self, groups: Sequence[Group], calls: Any):
        super().__init__(groups, calls)
        self.env: dict[int, Places] = {}
        self.constants: set[int] = set()
        self.dependent: set[int] = set()
        self.early: set[int] = set()
        self.late: set[int] = set()
        self.after: set[int] = set()
        self.extremes: set[int] = set()

    def take(self, equation: Equation) -> None:
        """Follows one equation of the program itself."""
        read = [None if is_constant(atom) else atom for atom in equation.inputs]
        if self.after.intersection(read):
            return self._later(equation, read)
        model = calls_model(equation) or bool(self.dependent.intersection(read))
        made, moved = self._followed(equation, read)
        if moved and model:
            self._make_early(self._movable(equation, read))
            made, moved = self._followed(equation, read)
            if moved and self._is_extreme(equation, read):
                self.late.update(equation.outputs)
                self.extremes.update(equation.outputs)
                self.after.update(equation.outputs)
                self.env.update(dict.fromkeys(equation.outputs, self.none))
                return None
            if moved:
                return self._later(equation, read)
        elif moved:
            self.early.update(equation.outputs)
            made = [self.none] * len(equation.outputs)
        self.env.update(zip(equation.outputs, made, strict=True))
        if model:
            self.dependent.update(equation.outputs)
        return None

    def _is_extreme(self, equation: Equation, read: Sequence[int | None]) -> bool:
        """Whether an equation reduces the rows of microbatches to a number of each, and these to the whole batch's."""
        if equation.name not in OF_PARTS or len(self.groups) > 1 or read[0] is None:
            return False
        (place,) = given = self.env[read[0]]
        return isinstance(place, Split) and self.steps(equation.op, [given])[0].act in ("extreme", "logical")

    def _make_early(self, numbers: Sequence[int]) -> None:
        self.early.update(numbers)
        self.env.update(dict.fromkeys(numbers, self.none))

    def _later(self, equation: Equation, read: Sequence[int | None]) -> None:
        """Puts an equation after all microbatches, if it reads completed sums and values of the batch alone."""
        own = [number for number in read if number is not None and number not in self.after]
        model = [number for number in own if number in self.dependent]
        if calls_model(equation) or any(self.env[number][0] != SUM for number in model):
            raise Mixing(equation.name, equation.op.line)
        self.late.update(model)
        self._make_early([number for number in own if number not in self.dependent | self.constants])
        self.after.update(equation.outputs)
        self.env.update(dict.fromkeys(equation.outputs, self.none))

    def _followed(self, equation: Equation, read: Sequence[int | None]) -> tuple[list[Places], bool]:
        given = [self.none if number is None else self.env[number] for number in read]
        self.moved = False
        if equation.name == MODEL_CALL:
            wanted = self.calls.wanted(equation.op.options["number"], given)
            self.moved = any(map(self.moves, given, wanted))
        return self.equation(equation, given), self.moved

    def _movable(self, equation: Equation, read: Sequence[int | None]) -> list[int]:
        """The operands that depend on the batch alone, and are not whole everywhere."""
        alone = [number for number in read if number is not None and number not in self.dependent]
        found = [number for number in dict.fromkeys(alone) if self.env[number][0] is not None]
        sums = [number for number in found if self.env[number][0] == SUM]
        return sums or found
