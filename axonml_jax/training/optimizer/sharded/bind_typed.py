"""Equations that were traced without mesh axes, run on values that vary over some: loops and branches are traced anew."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.program.program import Equation, Program
from axonml_jax.program.run import run_program


def bind_typed(equation: Equation, values: Sequence[Any]) -> list[Any]:
    """The results of an equation; its operands, and all that it makes, are typed as varying over the same axes."""
    values = typed_alike(list(values))
    axes = tuple(sorted(frozenset[str]().union(*map(varying_axes, values))))
    if not axes or not equation.bodies:
        return equation.op.bind(values)

    def run(program: Program | None, given: Sequence[Any]) -> list[Any]:
        assert program is not None
        return [vary(jnp.asarray(each), axes) for each in run_program(program, given, bind_typed)]

    if equation.called is not None:
        return run(equation.called, values)
    if equation.branches:
        index, *given = values
        branches = [lambda given=given, branch=branch: run(branch, given) for branch in equation.branches]
        return list(jax.lax.switch(index.astype("int32"), branches))
    if (scan := equation.op.scan) is not None:
        consts, first = values[: scan.num_consts], scan.first_scanned

        def trip(carry: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
            made = run(equation.body, [*consts, *carry, *sliced])
            return made[: scan.num_carry], made[scan.num_carry :]

        carry, ys = jax.lax.scan(trip, values[scan.num_consts : first], values[first:], **scan.options)
        return [*carry, *ys]
    if (loop := equation.op.loop) is not None:
        split = loop.num_condition_consts, loop.num_condition_consts + loop.num_body_consts
        of_condition, consts, start = values[: split[0]], values[split[0] : split[1]], values[split[1] :]
        goes_on = lambda carry: run(equation.condition, [*of_condition, *carry])[0]
        return list(jax.lax.while_loop(goes_on, lambda carry: run(equation.body, [*consts, *carry]), start))
    return equation.op.bind(values)


def typed_alike(values: list[Any]) -> list[Any]:
    """Values typed as varying over the same axes, as operations want them."""
    axes = frozenset[str]().union(*(varying_axes(value) for value in values))
    return [vary(jnp.asarray(value), tuple(sorted(axes))) for value in values] if axes else values
