"""Which equations of a program only prepare weights (casts, reshapes, masks): they are run again where they are needed.

A cast weight that lay among the residuals of a backward pass would be a whole copy of it, kept for nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from axonml_jax.program.atoms import names_of
from axonml_jax.program.dataflow import made_by
from axonml_jax.program.program import Equation, Program
from axonml_jax.program.rules import is_light


@dataclass(frozen=True)
class Marks:
    """What every value of a program is made of.

    Attributes:
      weights: number -> weight, for the weights themselves.
      made_of: for weights, and for what light equations make of weights and constants alone, the weights in it.
      work: positions of all other equations.
      used: for each of these the weights in what it reads.
    """

    weights: Mapping[int, int]
    made_of: Mapping[int, frozenset[int]]
    work: tuple[int, ...]
    used: Mapping[int, frozenset[int]]


def mark(program: Program, weights: Mapping[int, int]) -> Marks:
    """Tell the work of a program from the preparation of its weights (given as number -> weight)."""
    made_of = {number: frozenset((weight,)) for number, weight in weights.items()}
    results, work = set(names_of(program.outputs)), []
    for position, equation in enumerate(program.equations):
        prepares = is_light(equation.op) and all(number in made_of for number in equation.read)
        if prepares and not results.intersection(equation.outputs):
            made = frozenset().union(*(made_of[number] for number in equation.read))
            made_of |= dict.fromkeys(equation.outputs, made)
        else:
            work.append(position)
    used = {p: frozenset().union(*(made_of[n] for n in program.equations[p].read if n in made_of)) for p in work}
    return Marks(dict(weights), made_of, tuple(work), used)


def prelude_of(program: Program, derived: Iterable[int], marks: Marks) -> tuple[Equation, ...]:
    """The light equations that make `derived` from the weights, in order."""
    return tuple(made_by(program.equations, derived, marks.weights))
