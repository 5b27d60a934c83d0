"""Changes to a traced program before XLA:CPU compiles it: an order of collectives, and faster kernel gradients."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from axonml_jax.compat.jaxpr import Operation, Reader, Writer, live, rewritten
from axonml_jax.compat.order import can_wait, waiting
from axonml_jax.program.program import (
    Equation,
    Program,
    is_constant,
    names_of,
    read_program,
    rule_of,
    run_bodies,
    run_program,
)
from axonml_jax.program.values import stays

# --------------------------------------------------------------------------------------------------
# Collectives in one order on every device, for a runtime that lets a loop's collectives overlap with others: XLA:CPU's.
#
# What reads no result of an earlier loop with collectives is made to wait for one (`compat/order.py`), and a loop with
# collectives for earlier ones that it reads nothing of; so inside loops. Nothing else changes: in a program where every
# collective depends on the loops before it, or without such loops, no equation is added. Conditionals count as loops.
# --------------------------------------------------------------------------------------------------


def collectives_in_order(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Run a traced program such that, inside its `shard_map`s, collectives begin in the order of their calls.

    Args:
      jaxpr: what `trace` returns.
      values: of its inputs.

    Returns:
      Its results, flat.
    """
    return run_program(read_program(jaxpr), values, _with_order_inside)


def _with_order_inside(equation: Equation, operands: list[Any]) -> list[Any] | None:
    if (mapped := equation.op.mapped) is None:
        return None
    program = read_program(live(mapped.body))  # what is dead is not to be waited for
    if not _may_overlap(program):
        return None
    with equation.op.scope():
        return list(jax.shard_map(lambda *values: tuple(_in_order(program, values)), **mapped.options)(*operands))


def may_overlap(jaxpr: Any) -> bool:
    """Whether a traced program has, at any one level, a loop with collectives beside another equation with collectives."""
    return _may_overlap(read_program(jaxpr))


def _may_overlap(program: Program) -> bool:
    """The same of a program: a loop with collectives beside another equation with collectives, at any one level."""
    sending = [equation for equation in program.equations if _sends(equation)]
    return (len(sending) > 1 and any(map(_loops, sending))) or any(
        _may_overlap(body) for equation in sending for body in equation.bodies
    )


def _sends(equation: Equation) -> bool:
    """Whether an equation is a collective of arrays that are not empty, or contains one."""
    if rule_of(equation.name).sends is not None:
        return any(given.size for given in equation.op.given)
    bodies = equation.bodies  # of most equations none
    return bool(bodies) and any(_sends(inner) for body in bodies for inner in body.equations)


def _is_loop(equation: Equation) -> bool:
    return rule_of(equation.name).kind in ("loop", "branch")


def _loops(equation: Equation) -> bool:
    """Whether an equation that sends is a loop, or contains a loop that sends."""
    return _is_loop(equation) or any(
        _sends(inner) and _loops(inner) for body in equation.bodies for inner in body.equations
    )


@dataclass(frozen=True)
class _Value:
    """An array, and a bit mask of the program's collectives and loops that it comes after."""

    array: Any
    after: int


@dataclass
class _Order:
    """The state of running a program with its collectives in order.

    Attributes:
      read: the values that something reads.
      ends: of each collective and loop the arrays that are there when it has ended.
      after: of each, itself and what it comes after, a bit each.
      loops: of each, whether it is a loop.
    """

    read: Collection[int]
    ends: list[Sequence[Any]] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    loops: list[bool] = field(default_factory=list)

    def __call__(self, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        """Run an equation after the collectives and loops that it must not overlap with."""
        arrays = [each.array if isinstance(each, _Value) else each for each in operands]
        after = 0
        for each in operands:
            after |= each.after if isinstance(each, _Value) else 0
        if not _sends(equation):
            return [_Value(each, after) for each in equation.op.bind(arrays)]
        if equation.op.scan is not None and not operands and not equation.op.acts:
            return self._trips_alike(equation, equation.op.scan.options["length"])
        loops = _loops(equation)
        behind = after
        for k in reversed(range(len(self.ends))):
            if not behind >> k & 1 and (loops or self.loops[k]):
                arrays = _waiting(equation, arrays, self.ends[k])
                behind |= self.after[k]
        made = _run(equation, arrays)
        behind |= 1 << len(self.ends)
        self.ends.append(_ends(equation, made, self.read))
        self.after.append(behind)
        self.loops.append(loops)
        return [_Value(each, behind) for each in made]

    def _trips_alike(self, equation: Equation, length: int) -> list[_Value]:
        """Run one trip of a scan without operands, which has nothing to wait for, in this order, and repeat its results."""
        assert equation.body is not None
        made = run_program(equation.body, [], replace(self, read=_read(equation.body)))
        values = [each if isinstance(each, _Value) else _Value(each, 0) for each in made]
        stacked = lambda x: jax.numpy.broadcast_to(x, (length, *jax.numpy.shape(x)))
        return [_Value(stacked(each.array), each.after) for each in values]


def _in_order(program: Program, values: Sequence[Any]) -> list[Any]:
    made = run_program(program, [_Value(each, 0) for each in values], _Order(_read(program)))
    return [each.array if isinstance(each, _Value) else each for each in made]


def _read(program: Program) -> set[int]:
    """The numbers of the values that an equation or the result of a program reads."""
    return {number for equation in program.equations for number in equation.read}.union(names_of(program.outputs))


def _run(equation: Equation, arrays: Sequence[Any]) -> list[Any]:
    """Run an equation that sends; loops, branches and recomputed calls order the collectives inside of them."""
    inside = any(map(_may_overlap, equation.bodies))
    made = run_bodies(equation, arrays, _in_order) if inside else None
    return equation.op.bind(arrays) if made is None else made


def _waiting(equation: Equation, arrays: Sequence[Any], ends: Sequence[Any]) -> list[Any]:
    """The operands of an equation that sends; those that its collectives read are made to wait for `ends`."""
    found, starts = list(arrays), _starts(equation)
    if not starts or not ends:
        raise _no_order(equation)
    for k in starts:
        found[k] = waiting(jax.numpy.asarray(found[k], equation.op.given[k].dtype), ends)
    return found


def _no_order(equation: Equation) -> ValueError:
    where = f" ({equation.op.line})" if equation.op.line else ""
    return ValueError(
        f"`{equation.name}`{where} and a loop, with collectives in both, depend on each other by no value, and one of them has "
        "no array to wait by: neither an operand that all its collectives read nor a result. On several CPU devices their "
        "collectives could meet. Give the loop or what it calls an array of some elements to read, and return one that its "
        "collectives make"
    )


def _starts(equation: Equation) -> list[int]:
    """The indices of the operands without which an equation that sends cannot start; empty if there are none."""
    able = [k for k, given in enumerate(equation.op.given) if can_wait(given)]
    if rule_of(equation.name).sends is not None:
        return able
    if equation.branches:
        return [k for k in able if k == 0]  # the index
    if (inner := equation.called or equation.body) is None:
        return able
    loop = equation.op.loop
    first = 0 if loop is None else loop.num_condition_consts
    cost = lambda k: (is_constant(equation.inputs[k]), equation.op.given[k].size)
    found = _covering(inner, [k - first for k in able], lambda k: cost(first + k))
    known = [first + k for k in found if k is not None]
    if _is_loop(equation):  # it begins when all its operands are there
        return known[:1] or sorted(able, key=cost)[:1]
    return known if len(known) == len(found) else []


def _covering(program: Program, able: Sequence[int], cost: Callable[[int], Any]) -> list[int | None]:
    """The cheapest inputs on which all collectives inside depend; None if a collective depends on no input."""
    reached, sets = {number: {k} for k, number in enumerate(program.inputs)}, []
    for equation in program.equations:
        given: set[int] = set().union(*(reached.get(number, set()) for number in equation.read))
        reached.update(dict.fromkeys(equation.outputs, given))
        if _sends(equation):
            sets.append(given)
    chosen: list[int | None] = []
    for given in sets:
        if not given.intersection(chosen):
            chosen += sorted(given.intersection(able), key=cost)[:1] or [None]
    return chosen


def _ends(equation: Equation, made: Sequence[Any], read: Collection[int]) -> list[Any]:
    """Results that exist only after all of an equation's collectives; for a loop one result, preferably one that is read."""
    able = [k for k, each in enumerate(made) if can_wait(each)]
    is_read = lambda k: equation.outputs[k] in read
    if not _is_loop(equation):
        return [made[k] for k in able if is_read(k)] or [made[k] for k in able]
    if (scan := equation.op.scan) is not None and equation.body is not None:
        given = range(scan.num_carry)
        able = [k for k in able if k not in given or not stays(equation.body, scan.num_consts + k, k)]
    return [made[k] for k in sorted(able, key=lambda k: (not is_read(k), made[k].size))[:1]]


# --------------------------------------------------------------------------------------------------
# Gradients of kernels as XLA:CPU multiplies them fast: with the operand transposed first whose rows they sum over.
#
# The gradient of a kernel [i, o] is x^T dy, of x [r, i] and dy [r, o], where r counts rows (positions of all
# sequences). XLA:CPU has no fast product that sums over the first dims of two matrices: it takes up to twice the time,
# and the compiler moves every transposition back into the product. So x^T is made first, behind a barrier that keeps it
# there (docs/performance.md). Of operands with more dims XLA:CPU makes a transposed one by itself: they stay as they
# are.
# --------------------------------------------------------------------------------------------------

FEWEST = 128
"""Rows and widths below which a product gains nothing."""

MOST_BYTES = 8 * 2**20
"""Bytes of the largest operand that is transposed: a larger one takes as long to transpose as the product gains."""


def with_transposed_operands(jaxpr: Any) -> Any:
    """Rewrite the kernel gradients of a traced step to transpose their operands first.

    Nothing else changes, nor do the numbers but for the order in which rows are added. A `shard_map` that leaves an axis to
    XLA's partitioner stays as it is.

    Args:
      jaxpr: what `trace` returns.

    Returns:
      The jaxpr; the same object where it has no such product.
    """
    return rewritten(jaxpr, _at, where=lambda op: op.mapped is None or _is_manual(op))


def _is_manual(op: Operation) -> bool:
    mapped = op.mapped
    return mapped is not None and mapped.manual == set(mapped.axis_sizes)


def _at(op: Operation, reader: Reader, writer: Writer) -> bool:
    """Rewrite an operation if it is a kernel's gradient and gains from it."""
    if op.name != "dot_general" or not _gains(op):
        return False
    x, y = op.operands
    last = reader()
    swaps = last is not None and last.name == "transpose"
    first, second = (y, x) if swaps else (x, y)  # whose dim comes first in memory
    if first.aval.size * first.aval.dtype.itemsize > MOST_BYTES:
        return False
    turned = writer.barrier(writer.transpose(first, (1, 0)))
    made = writer.product(turned, second, **{**op.options, "dimension_numbers": (((1,), (0,)), ((), ()))})
    if swaps:
        writer.transpose(made, (1, 0))
    return True


def _gains(op: Operation) -> bool:
    """Whether a product contracts the rows of two float32 matrices that are large enough."""
    x, y = op.given
    rows = op.contraction.contracted == ((0,), (0,)) and x.ndim == y.ndim == 2
    alike = x.dtype == y.dtype == op.made[0].dtype == np.float32
    return rows and alike and min(*x.shape, *y.shape) >= FEWEST
