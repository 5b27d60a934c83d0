"""What is known of the values of a program, forward from its inputs; and which equations make some values, backward."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp

from axonml_jax.program.atoms import Atom, entry_of, names_of
from axonml_jax.program.program import Equation, Program

M = TypeVar("M")

Rule = Callable[[Equation, list[M]], Sequence[M]]
"""`rule(equation, operands) -> results`: what is known of an equation's results, of what is known of its operands."""

Join = Callable[[M, M], M]
"""What is known of a value that is one or the other. Growing with it must come to an end."""


def forward(program: Program, given: Iterable[M], rule: Rule[M], nothing: M) -> dict[int, M]:
    """What is known of every numbered value.

    Args:
      program: the program.
      given: of its inputs.
      rule: called with each equation in order.
      nothing: what is known of constants.
    """
    table = dict(zip(program.inputs, given, strict=True))
    for equation in program.equations:
        operands = [entry_of(atom, table, nothing) for atom in equation.inputs]
        table.update(zip(equation.outputs, rule(equation, operands), strict=True))
    return table


def results(program: Program, given: Iterable[M], rule: Rule[M], nothing: M) -> list[M]:
    """What is known of a program's results; see `forward`."""
    table = forward(program, given, rule, nothing)
    return [entry_of(atom, table, nothing) for atom in program.outputs]


def through(equation: Equation, operands: list[M], rule: Rule[M], join: Join[M], nothing: M) -> list[M] | None:
    """The same through an equation's inner programs: calls, branches, and loops until what is known of the carry stays.

    Args:
      equation: any.
      operands: what is known of what it reads.
      rule: for the equations inside, which may be called with each of them several times.
      join: of what branches or trips say.
      nothing: of constants.

    Returns:
      What is known of its results; None: it has no inner program, or one of which it is not known what it is for. What a
      condition or an index depends on is joined into everything that depends on it.
    """
    if equation.called is not None:
        return results(equation.called, operands, rule, nothing)
    if (scan := equation.op.scan) is not None:
        consts, rest = operands[: scan.num_consts], operands[scan.num_consts :]
        return _trips(equation.body, consts, rest, scan.num_carry, rule, join, nothing)
    if equation.op.loop is not None:
        return _while(equation, operands, rule, join, nothing)
    if equation.branches:
        index, *given = operands
        cases = [results(branch, given, rule, nothing) for branch in equation.branches]
        return [_all(join, [index, *each]) for each in zip(*cases, strict=True)]
    return None


def _trips(
    body: Any, consts: list[M], rest: list[M], num_carry: int, rule: Rule[M], join: Join[M], nothing: M
) -> list[M]:
    while True:
        made = results(body, [*consts, *rest], rule, nothing)
        carry = [join(old, new) for old, new in zip(rest[:num_carry], made[:num_carry], strict=True)]
        if carry == rest[:num_carry]:
            return [*carry, *made[num_carry:]]
        rest = [*carry, *rest[num_carry:]]


def _while(equation: Equation, operands: list[M], rule: Rule[M], join: Join[M], nothing: M) -> list[M]:
    loop = equation.op.loop
    assert loop is not None and equation.condition is not None
    split = loop.num_condition_consts, loop.num_condition_consts + loop.num_body_consts
    of_condition, consts, carry = operands[: split[0]], operands[split[0] : split[1]], operands[split[1] :]
    while True:
        made = _trips(equation.body, consts, carry, len(carry), rule, join, nothing)
        (ends,) = results(equation.condition, [*of_condition, *made], rule, nothing)
        grown = [join(each, ends) for each in made]
        if grown == carry:
            return grown
        carry = grown


def _all(join: Join[M], known: Sequence[M]) -> M:
    first, *others = known
    for other in others:
        first = join(first, other)
    return first


def with_gradient(program: Program, start: Iterable[int]) -> frozenset[int]:
    """The floating values that depend on the given inputs, they included."""
    given = frozenset(start)
    floats = lambda aval: jnp.issubdtype(aval.dtype, jnp.inexact)
    known = [number in given and floats(program.avals[number]) for number in program.inputs]
    rule = lambda equation, operands: [any(operands) and floats(aval) for aval in equation.op.made]
    return frozenset(number for number, does in forward(program, known, rule, False).items() if does)


def made_by(equations: Sequence[Equation], wanted: Iterable[Atom], given: Container[int] = ()) -> list[Equation]:
    """The equations, in order, that make the wanted values, or what these are made of; `given` values are there already."""
    needed, found = {number for number in names_of(wanted) if number not in given}, []
    for equation in reversed(equations):
        if needed.intersection(equation.outputs):
            found.append(equation)
            needed.update(number for number in equation.read if number not in given)
    return found[::-1]


def reads(program: Program) -> Mapping[int, int]:
    """How often each value is read, by equations and as a result; results count once."""
    counts: dict[int, int] = dict.fromkeys(names_of(program.outputs), 1)
    for equation in program.equations:
        for number in equation.read:
            counts[number] = counts.get(number, 0) + 1
    return counts
