"""The model's calls that a loss was traced without, made on one rank's operands while the loss's program is run."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.meaning.interpreter import Interpreter
from axonml_jax.meaning.model_call import Call
from axonml_jax.meaning.places import SUM, Group, Places, Split
from axonml_jax.meaning.values import Ranks, Value
from axonml_jax.program.program import Equation


class Unclear(Exception):
    """It cannot be told how ranks hold what a call of the model returns."""


def place_of(whole: Sequence[int], own: Sequence[int], group: Group) -> Split | None:
    """How a group holds what has one shape on the whole batch and another on a rank; None: the shapes are the same.

    Raises:
      Unclear: where that is not one dim, split evenly.
    """
    if len(whole) != len(own):
        raise Unclear
    dims = [dim for dim, (a, b) in enumerate(zip(whole, own, strict=True)) if a != b]
    if not dims:
        return None
    if len(dims) > 1 or whole[dims[0]] != own[dims[0]] * group.ranks:
        raise Unclear
    return Split(dims[0])


class RealCalls:
    """Makes the calls, in order, on a model that is really bound.

    Attributes:
      bound: it.
      whole: the calls as noted at the whole batch's shape.
      local: as noted at a rank's; None where these cannot be had, or are others.
      group: the ranks among which rows are split.
    """

    def __init__(self, bound: Any, whole: Sequence[Call], local: Sequence[Call] | None, group: Group):
        alike = local is not None and len(local) == len(whole)
        alike = alike and all(a.alike(b) for a, b in zip(whole, local or (), strict=True))
        self.bound, self.whole, self.local, self.group = bound, whole, local if alike else None, group

    def __call__(self, run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
        """The results of a call, on what this rank holds of its operands."""
        number = equation.op.options["number"]
        call, wanted = self.whole[number], self.wanted(number, [value.places for value in given])
        arrays = [run.ranks.settled(value, places) for value, places in zip(given, wanted, strict=True)]
        made = self.made(number, arrays)
        return [self._held(x, aval, run.ranks) for x, aval in zip(made, call.made, strict=True)]

    def made(self, number: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of a call on what this rank holds of its operands."""
        return self.whole[number].run(self.bound, arrays)

    def places(self, number: int) -> list[Places]:
        """The places of a call's results, before it is made.

        Raises:
          Unclear: where there is no trace at a rank's shapes.
        """
        if self.local is None:
            raise Unclear
        pairs = zip(self.whole[number].made, self.local[number].made, strict=True)
        return [self._of_result(a, b.shape) for a, b in pairs]

    def _of_result(self, aval: Any, own: Sequence[int]) -> Places:
        place = place_of(aval.shape, own, self.group)
        return (SUM if place is None and jnp.issubdtype(aval.dtype, jnp.inexact) else place,)

    def wanted(self, number: int, given: Sequence[Places]) -> list[Places]:
        """The places of a call's operands: those that the trace at a rank's shapes shows.

        Raises:
          Unclear: where there is none, and an operand that is whole may have rows all the same.
        """
        call = self.whole[number]
        if self.local is not None:
            pairs = zip(call.given, self.local[number].given, strict=True)
            return [(place_of(a.shape, b.shape, self.group),) for a, b in pairs]
        sizes = {
            aval.shape[each[0].dim] for aval, each in zip(call.given, given, strict=True) if isinstance(each[0], Split)
        }
        for aval, places in zip(call.given, given, strict=True):
            plain = isinstance(places[0], Split) and places[0].outer == 1
            if not plain and sizes.intersection(aval.shape):
                raise Unclear
        return [tuple(None if place == SUM else place for place in places) for places in given]

    def _held(self, x: Any, aval: Any, ranks: Ranks) -> Value:
        """A result: split along the dim that is shorter here; without one a mean over ranks, which integers have not."""
        places = self._of_result(aval, jnp.shape(x))
        if SUM in places:
            return Value(aval.shape, aval.dtype, places, lambda _: ranks.vary(x / self.group.ranks))
        if any(places):
            return ranks.held(x, places, aval.shape)
        return Value(aval.shape, aval.dtype, (None,), lambda _: no_mean(aval))


def no_mean(aval: Any) -> jax.Array:
    """Refuse to read what has neither rows nor a mean."""
    raise ValueError(
        f"the model returned an array of shape {aval.shape} and dtype {aval.dtype} without a batch dim, and the loss reads it: "
        "it may differ from rank to rank and has no mean. Return it as a float, or with a dim of rows"
    )
