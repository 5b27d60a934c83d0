"""Code inside a model that mixes rows of the batch, such as `x - x.mean(0)`: found in the trace of its calls.

Only what is certain is found: a reduction along the dim that holds the rows whose value then, as a float, as a condition or as
the choice of a branch, meets rows again in an elementwise operation, a concatenation or a product. A count and a truth value of
rows are followed through elementwise operations alone. Contractions over rows, sorts and lookups are not taken for it: routers
of experts send every row by itself with them.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from axonml_jax.compat.jaxpr import Operation
from axonml_jax.compat.model_call import PRIMITIVE as MODEL_CALL
from axonml_jax.meaning.asked import Asked, Traced
from axonml_jax.meaning.following import Following
from axonml_jax.meaning.places import SUM, Place, Places, Split, Step
from axonml_jax.program.program import Equation, all_but_named, is_elementwise, read_program, rule_of

JOINED = "joined"
"""The place of what is made of several rows by more than a sum; a rule of places never says it."""

_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
_MEETINGS = ("concatenate", "dot_general", "stack")
_KEEP_EXACT = ("broadcast_in_dim", "reshape", "squeeze", "clamp")


def mixing_inside(asked: Asked, local: Traced) -> list[str]:
    """The operations in which a model's own code mixes rows, with the user's lines.

    Args:
      asked: the loss; a model whose BatchNorm keeps to a rank's rows mixes them as it is meant to.
      local: the loss traced at a rank's shapes.
    """
    numbers = [k for k, group in enumerate(asked.groups) if not group.positions]
    if not numbers or not asked.mode.batch_norm_axes:
        return []
    (rows,) = numbers
    walk = _Mixing(asked, local, rows)
    walk.program(local.program, [(places[rows],) for places in asked.places()])
    return list(dict.fromkeys(walk.found))


class _Mixing(Following):
    """Follows rows on one rank, through the model's own code too."""

    def __init__(self, asked: Asked, local: Traced, rows: int):
        super().__init__((asked.groups[rows]._replace(ranks=1),))
        self.axes, self.noted, self.inside, self.found = frozenset(asked.typed_axes), local.noted, False, []
        self._choice: Places = ()

    def equation(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """The places of an equation's results; those of a collective over the batch's axes are whole."""
        if equation.name == MODEL_CALL:
            return self._of_model(equation, given)
        if self.axes.intersection(equation.op.mesh_axes) and rule_of(equation.name).sends is not None:
            return [self.none] * len(equation.outputs)
        self._choice = self.settled(given[0]) if equation.branches else ()
        return super().equation(equation, given)

    def _of_model(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        program = read_program(self.noted[equation.op.options["number"]].traced, all_but_named)
        fixed = [self.none] * (len(program.inputs) - len(given))
        self.inside = True
        try:
            made = self.program(program, [*fixed, *map(_rows_alone, given)])
        finally:
            self.inside = False
        return [_rows_alone(places) for places in made]

    def steps(self, op: Operation, given: Sequence[Places]) -> list[Step]:
        """What is joined of rows stays so, and is noted where it meets rows."""
        places = [place for (place,) in given]
        floats = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in op.given]
        exact = op.name in _KEEP_EXACT or is_elementwise(op.name)  # counts and truth values of several rows stay so
        joined = any(place in (SUM, JOINED) and (each or exact) for place, each in zip(places, floats, strict=True))
        [step] = self._of_one_row(op, places) or super().steps(op, [(None if p == JOINED else p,) for p in places])
        if not self.inside:
            return [step]
        rows = any(each and isinstance(place, Split) for place, each in zip(places, floats, strict=True))
        meets = [each or (op.name == "select_n" and k == 0) for k, each in enumerate(floats)]
        joins = any(each and place in (SUM, JOINED) for place, each in zip(places, meets, strict=True))
        if joins and rows and (is_elementwise(op.name) or op.name in _MEETINGS):
            self._note(op)
        reduces = op.name in _REDUCTIONS
        joined |= reduces and isinstance(places[0], Split) and bool(step.act)
        made = [_made(op.name, place, joined) for place in step.made]
        kept = [exact or reduces or jnp.issubdtype(aval.dtype, jnp.inexact) for aval in op.made]
        return [step._replace(made=tuple(m if m != JOINED or k else None for m, k in zip(made, kept, strict=True)))]

    def branches(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """As ever; noted where several rows choose the branch, and it reads rows."""
        if self._choice == (JOINED,) and _has_rows(given, equation.op.given[1:]):
            self._note(equation.op)
        return super().branches(equation, given)

    def loop(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """As ever; noted where several rows end the loop, and rows go through it."""
        carry = super().loop(equation, given)
        loop, condition = equation.op.loop, equation.condition
        assert loop is not None and condition is not None
        [ends] = self.program(condition, [*map(self.settled, given[: loop.num_condition_consts]), *carry])
        if self.settled(ends) == (JOINED,) and _has_rows(carry, equation.op.made):
            self._note(equation.op)
        return carry

    def _note(self, op: Operation) -> None:
        if self.inside:
            self.found.append(f"{op.name} ({op.line or 'no line known'})")

    def settled(self, places: Places) -> Places:
        """A sum that a call with a derivative of its own, a loop or a branch is given is still one of several rows."""
        return tuple(JOINED if place == SUM else place for place in places)

    def _of_one_row(self, op: Operation, places: Sequence[Place]) -> list[Step]:
        """A reshape of a rank's only row, whose dim of size 1 is where it was; none for other operations."""
        place = places[0] if places else None
        if op.name != "reshape" or not isinstance(place, Split) or op.given[0].shape[place.dim] != place.outer:
            return []
        old, new = op.given[0].shape, op.made[0].shape
        before = math.prod(old[: place.dim]) * place.outer
        there = [dim for dim, size in enumerate(new) if size == 1 and math.prod(new[:dim]) == before]
        return [Step((place,), (Split(there[0]) if there else None,))]


def _has_rows(values: Sequence[Places], avals: Sequence[Any]) -> bool:
    """Whether floats are among values that hold rows."""
    pairs = zip(values, avals, strict=True)
    return any(isinstance(place, Split) and jnp.issubdtype(aval.dtype, jnp.inexact) for (place,), aval in pairs)


def _made(name: str, place: Place, joined: bool) -> Any:
    """The place of a result: a sum that no reduction makes is not known to mix rows."""
    if place is None and joined:
        return JOINED
    return None if place == SUM and not joined and name not in _REDUCTIONS else place


def _rows_alone(places: Places) -> Places:
    return tuple(place if isinstance(place, Split) else None for place in places)
