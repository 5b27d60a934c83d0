"""The model's calls that a loss was traced without, made on one rank's operands while the loss's program is run."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.meaning.interpreter import Interpreter
from axonml_jax.meaning.model_call import Call
from axonml_jax.meaning.places import SUM, Group, Place, Places, Split
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


def places_of(whole: Sequence[int], own: Sequence[int], groups: Sequence[Group]) -> list[Split | None]:
    """How groups hold what has one shape on the whole batch and another on a rank of all of them.

    Raises:
      Unclear: where several groups may have split a dim.
    """
    if len(groups) == 1:
        return [place_of(whole, own, groups[0])]
    if len(whole) != len(own):
        raise Unclear
    found: list[Split | None] = [None] * len(groups)
    for dim, (a, b) in enumerate(zip(whole, own, strict=True)):
        fits = [k for k, group in enumerate(groups) if a == b * group.ranks]
        if a != b and (len(fits) != 1 or found[fits[0]] is not None):
            raise Unclear
        if a != b:
            found[fits[0]] = Split(dim)
    return found


class RealCalls:
    """Makes the calls, in order, on a model that is really bound.

    Attributes:
      bound: it.
      whole: the calls as noted at the whole batch's shape.
      local: for each group as noted at a part of it; None where these cannot be had, or are others.
      groups: the ranks among which rows, and positions, are split.
    """

    def __init__(
        self, bound: Any, whole: Sequence[Call], local: Sequence[Sequence[Call] | None], groups: Sequence[Group]
    ):
        known = all(each is not None and _alike(whole, each) for each in local)
        self.bound, self.whole, self.groups = bound, whole, tuple(groups)
        self.local = [each for each in local if each is not None] if known else None

    def __call__(self, run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
        """The results of a call, on what this rank holds of its operands."""
        number = equation.op.options["number"]
        call, wanted = self.whole[number], self.wanted(number, [value.places for value in given])
        arrays = [run.ranks.settled(value, places) for value, places in zip(given, wanted, strict=True)]
        made = self.made(number, arrays)
        if self.local is not None and len(self.groups) > 1:
            places = self.places(number)
        else:
            pairs = zip(made, call.made, strict=True)
            places = [self._of_result(a, places_of(a.shape, jnp.shape(x), self.groups)) for x, a in pairs]
        held = zip(made, call.made, places, strict=True)
        return [self._held(x, aval, at, run.ranks) for x, aval, at in held]

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
        locals_made = zip(*(local[number].made for local in self.local), strict=True)
        return [
            self._of_result(a, [place_of(a.shape, x.shape, group) for x, group in zip(own, self.groups, strict=True)])
            for a, own in zip(self.whole[number].made, locals_made, strict=True)
        ]

    def _of_result(self, aval: Any, places: Sequence[Place]) -> Places:
        inexact = jnp.issubdtype(aval.dtype, jnp.inexact)
        return tuple(SUM if place is None and inexact else place for place in places)

    def wanted(self, number: int, given: Sequence[Places]) -> list[Places]:
        """The places of a call's operands: those that the trace at a rank's shapes shows.

        Raises:
          Unclear: where there is none, and an operand that is whole may have rows all the same.
        """
        call = self.whole[number]
        if self.local is not None:
            of_group = lambda aval, own, group: place_of(aval.shape, own.shape, group)
            locals_given = zip(*(local[number].given for local in self.local), strict=True)
            pairs = zip(call.given, locals_given, strict=True) if call.given else ()
            return [
                tuple(of_group(a, each, group) for each, group in zip(own, self.groups, strict=True))
                for a, own in pairs
            ]
        for k in range(len(self.groups)):
            there = [(aval, each[k]) for aval, each in zip(call.given, given, strict=True)]
            sizes = {aval.shape[place.dim] for aval, place in there if isinstance(place, Split)}
            for aval, place in there:
                plain = isinstance(place, Split) and place.outer == 1
                if not plain and sizes.intersection(aval.shape):
                    raise Unclear
        return [tuple(None if place == SUM else place for place in places) for places in given]

    def _held(self, x: Any, aval: Any, places: Places, ranks: Ranks) -> Value:
        """A result: split along the dims that are shorter here; without one a mean over ranks, which integers have not."""
        parts = math.prod(group.ranks for group, place in zip(self.groups, places, strict=True) if place == SUM)
        if parts > 1 or SUM in places:
            return Value(aval.shape, aval.dtype, places, lambda _: ranks.vary(x / parts))
        if all(places):
            return ranks.held(x, places, aval.shape)
        return Value(aval.shape, aval.dtype, (None,) * len(places), lambda _: no_mean(aval))


def _alike(whole: Sequence[Call], local: Sequence[Call]) -> bool:
    return len(local) == len(whole) and all(a.alike(b) for a, b in zip(whole, local, strict=True))


def no_mean(aval: Any) -> jax.Array:
    """Refuse to read what has neither rows nor a mean."""
    raise ValueError(
        f"the model returned an array of shape {aval.shape} and dtype {aval.dtype} without a batch dim, and the loss reads it: "
        "it may differ from rank to rank and has no mean. Return it as a float, or with a dim of rows"
    )
