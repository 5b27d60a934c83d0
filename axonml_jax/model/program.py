"""A traced program as a flat list of equations over numbered values, so that it can be cut and run in pieces."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.ad_checkpoint import checkpoint_name

from axonml_jax.model.trace import Literal, called_jaxpr, run_equation

PRODUCTS = "axonml.products"
"""The name by which a checkpoint policy knows results of weight multiplications."""

Atom = int | Literal
"""The number of a value, or a constant written into the program."""


@dataclass(frozen=True)
class Equation:
    """One operation: what it is, and the numbers of what it reads and makes."""

    eqn: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]

    @property
    def read(self) -> tuple[int, ...]:
        """The numbered values it reads."""
        return numbered(self.inputs)


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


def numbered(atoms: Iterable[Atom]) -> tuple[int, ...]:
    """The atoms that are numbers."""
    return tuple(atom for atom in atoms if isinstance(atom, int))


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
        look = lambda var: var if isinstance(var, Literal) else env[var]
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
        values = list(look(equation.inputs, env))
        env.update(zip(equation.outputs, run_equation(equation.eqn, values), strict=True))


def run_named(equations: Iterable[Equation], env: dict[int, Any]) -> None:
    """`run`, with the results of weight multiplications and convolutions named, so that a checkpoint policy may keep them."""
    for equation in equations:
        run([equation], env)
        name = equation.eqn.primitive.name
        weighs = name == "dot_general" and not any(equation.eqn.params["dimension_numbers"][1])
        if weighs or name == "conv_general_dilated":
            env |= {number: checkpoint_name(env[number], PRODUCTS) for number in equation.outputs}


def look(atoms: Iterable[Atom], env: Mapping[int, Any]) -> Iterator[Any]:
    """The value of each atom."""
    return (env[atom] if isinstance(atom, int) else atom.val for atom in atoms)
