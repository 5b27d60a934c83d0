"""A traced program as a flat list of equations over numbered values, so that it can be cut and run in pieces."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axonml_jax.model.atoms import Atom, is_constant, names_of, values_of
from axonml_jax.model.elementwise import PARTS, PRODUCT_PARTS, redone
from axonml_jax.model.trace import called_jaxpr, run_equation

PRODUCTS = "axonml.products"
"""The name by which a checkpoint policy knows results of weight multiplications."""


@dataclass(frozen=True)
class Equation:
    """One operation: what it is, and the numbers of what it reads and makes."""

    eqn: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]

    @property
    def read(self) -> tuple[int, ...]:
        """The numbered values it reads."""
        return names_of(self.inputs)


@dataclass(frozen=True)
class Program:
    """A program without calls: what `jit` wraps stands in its place.

    Attributes:
      equations: in order.
      inputs, outputs: its arguments and results.
      constants: values known when it was traced.
      avals: the abstract value of every number.
    """

    equations: tuple[Equation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Atom, ...]
    constants: Mapping[int, Any]
    avals: Mapping[int, Any]


def flatten(jaxpr: Any) -> Program:
    """The flat program of a closed jaxpr."""
    avals, constants, equations, count = {}, {}, [], itertools.count()

    def new(var) -> int:
        number = next(count)
        avals[number] = var.aval
        return number

    def inline(jaxpr, arguments: Sequence[Atom]) -> list[Atom]:
        env: dict = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = new(var)
            constants[env[var]] = value
        look = lambda var: var if is_constant(var) else env[var]
        for eqn in jaxpr.eqns:
            given = [look(var) for var in eqn.invars]
            if (inner := called_jaxpr(eqn)) is not None:
                made = inline(inner, given)
            else:
                made = [new(var) for var in eqn.outvars]
                equations.append(Equation(eqn, tuple(given), tuple(made)))
            env.update(zip(eqn.outvars, made, strict=True))
        return [look(var) for var in jaxpr.outvars]

    inputs = [new(var) for var in jaxpr.invars]
    outputs = inline(jaxpr, inputs)
    return Program(tuple(equations), tuple(inputs), tuple(outputs), constants, avals)


def run(equations: Iterable[Equation], env: dict[int, Any]) -> None:
    """Run equations on the values in `env`, adding what they make."""
    for equation in equations:
        made = run_equation(equation.eqn, values_of(equation.inputs, env))
        env.update(zip(equation.outputs, made, strict=True))


def run_named(equations: Iterable[Equation], env: dict[int, Any]) -> None:
    """`run`, with results named that a checkpoint policy may keep: those of weight multiplications and convolutions.

    Complex ones are joined of parts, and these are named, whatever made them: `jax.checkpoint` can keep real numbers alone
    (it passes what it keeps through `reduce_precision`, which complex ones do not have).
    """
    for equation in equations:
        run([equation], env)
        eqn, primitive = equation.eqn, equation.eqn.primitive.name
        weighs = primitive == "dot_general" and not any(eqn.params["dimension_numbers"][1])
        weighs = weighs or primitive == "conv_general_dilated"
        if not redone(primitive) and any(map(_is_complex, (*eqn.invars, *eqn.outvars))):
            name = PRODUCT_PARTS if weighs else PARTS
        elif weighs:
            name = PRODUCTS
        else:
            continue
        env |= {number: _named(env[number], name) for number in equation.outputs}


def _is_complex(atom: Atom) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.complexfloating)


def _named(value: Any, name: str) -> Any:
    if not jnp.iscomplexobj(value):
        return checkpoint_name(value, name)
    return jax.lax.complex(checkpoint_name(value.real, name), checkpoint_name(value.imag, name))
