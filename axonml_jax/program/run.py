"""Running a program equation by equation; whoever runs it may do something else in the place of some equations."""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

from axonml_jax.program.atoms import results_of, values_of
from axonml_jax.program.program import Equation, Program

At = Callable[[Equation, list[Any]], Sequence[Any] | None]
"""`at(equation, operands) -> results`: what is done in an equation's place; None: the equation is run."""


def run_program(program: Program, values: Sequence[Any], at: At | None = None) -> list[Any]:
    """The results of a program of `values`.

    Args:
      program: the program.
      values: of its inputs; anything that `at` understands.
      at: what is done at an equation.
    """
    env = dict(program.constants)
    env.update(zip(program.inputs, values, strict=True))
    run(program.equations, env, at)
    return results_of(program.outputs, env)


def run(equations: Iterable[Equation], env: MutableMapping[int, Any], at: At | None = None) -> None:
    """Run equations on the values in `env`, adding what they make."""
    for equation in equations:
        operands = values_of(equation.inputs, env)
        made = at(equation, operands) if at is not None else None
        if made is None:
            made = equation.op.bind(operands)
        env.update(zip(equation.outputs, made, strict=True))
