"""Which values of a traced program may differ from rank to rank of an axis; all others are whole, the same on every rank.

JAX's own types say the same where `check_vma` is on; this says it of any program, after it was traced.
"""

import operator
from collections.abc import Callable, Sequence

from axonml_jax.program.dataflow import results, through
from axonml_jax.program.program import Equation, Program
from axonml_jax.program.rules import rule_of

Axes = frozenset[str]

SAME: Axes = frozenset()


def differing(program: Program, given: Sequence[Axes], visit: Callable[[Equation, Sequence[Axes]], None]) -> list[Axes]:
    """Over which axes each result may differ.

    Args:
      program: a traced program.
      given: over which axes each input may.
      visit: called with every equation, in bodies too and perhaps more than once, and what its operands may differ over.
    """

    def rule(equation: Equation, operands: list[Axes]) -> Sequence[Axes]:
        visit(equation, operands)
        inside = through(equation, operands, rule, operator.or_, SAME)
        return _made(equation, operands) if inside is None else inside

    return results(program, given, rule, SAME)


def _made(equation: Equation, operands: list[Axes]) -> list[Axes]:
    rule, axes, found = rule_of(equation.name), frozenset(equation.op.mesh_axes), SAME.union(*operands)
    if rule.passes:
        return operands
    if rule.joins and equation.op.groups is None:
        found -= axes
    elif not rule.casts:  # what is scattered, exchanged or permuted, and the rank's own index
        found |= axes
    return [found] * len(equation.outputs)
