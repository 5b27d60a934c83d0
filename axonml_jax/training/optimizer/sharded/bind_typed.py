"""Equations that were traced without mesh axes, run on values that vary over some: loops and branches are traced anew."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.program.program import Equation, Program
from axonml_jax.program.run import run_bodies, run_program


def bind_typed(equation: Equation, values: Sequence[Any]) -> list[Any]:
    """The results of an equation; its operands, and all that it makes, are typed as varying over the same axes."""
    values = typed_alike(list(values))
    axes = tuple(sorted(frozenset[str]().union(*map(varying_axes, values))))
    if not axes or not equation.bodies:
        return equation.op.bind(values)

    def run(program: Program, given: Sequence[Any]) -> list[Any]:
        return [vary(jnp.asarray(each), axes) for each in run_program(program, given, bind_typed)]

    made = run_bodies(equation, values, run)
    return equation.op.bind(values) if made is None else made


def typed_alike(values: list[Any]) -> list[Any]:
    """Values typed as varying over the same axes, as operations want them."""
    axes = frozenset[str]().union(*(varying_axes(value) for value in values))
    return [vary(jnp.asarray(value), tuple(sorted(axes))) for value in values] if axes else values
