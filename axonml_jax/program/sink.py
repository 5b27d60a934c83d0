"""Put hooks on a function's inputs where they are first used, instead of at its top.

A hook is an identity with a gradient rule. JAX runs the backward in the reverse order of the forward, so a hook at the
top of a loss runs after the whole backward; one sunk to the first use of its inputs runs as soon as their gradients are
complete. An input that is only scanned over is hooked in the scan's body, slice by slice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.compat.jaxpr import trace
from axonml_jax.program.atoms import among, names_of, results_of
from axonml_jax.program.dataflow import reads
from axonml_jax.program.program import Equation, Program, read_program
from axonml_jax.program.run import run

Grouping = Callable[[Sequence[int], Sequence[Any]], Sequence[Sequence[int]]]
"""`group(indices, values)`: which of some inputs, given in the order in which their gradients become ready, share a hook:
groups of positions in what was given. `values` have the shapes read at this level (slices in a scan's body)."""

Sliceable = Callable[[int, int], bool]

Hook = Callable[[Sequence[int], Sequence[Any], Sequence[Any]], Sequence[Any]]
"""`hook(indices, inputs, extras) -> values`: what the function reads in the place of these inputs."""


@dataclass
class _Level:
    """Where inputs are hooked: in the program itself, or in the body of a scan.

    Attributes:
      program: it; calls that read hooked inputs are opened.
      hooked: number -> the input that it is.
      first_use: input -> the equation that reads it first; None: only the end does.
      scans: those with inputs that are hooked in their bodies.
    """

    program: Program
    hooked: Mapping[int, int]
    first_use: dict[int, Equation | None] = field(default_factory=dict)
    scans: dict[Equation, "_Scanned"] = field(default_factory=dict)


@dataclass(frozen=True)
class _Scanned:
    """The inputs that are hooked in a scan's body, by their positions among its operands; and the body."""

    inputs: Mapping[int, int]
    body: _Level


def sink(
    fun: Callable[..., PyTree],
    read: Sequence[jax.Array],
    args: tuple,
    *,
    group: Grouping,
    hook: Hook,
    sliceable: Sliceable = lambda leaf, depth: True,
) -> Callable[..., PyTree]:
    """Trace `fun(read, *args)` and return a function of (inputs, extras, *args) that hooks each input at its first use.

    Args:
      fun: a function of a list of arrays and anything else.
      read: the arrays `fun` reads, as the hooks will give them (dtypes and varying types count, values do not).
      args: the other arguments.
      group: which inputs share a hook, decided at each level separately.
      hook: called once per group while the returned function is traced. `inputs` may differ from `read` in shape, dtype
        and in what they vary over; `extras` (a tree per input, None allowed) are handed through, sliced where inputs are.
      sliceable: `sliceable(input, depth)`: whether slices of an input (along its first `depth` dims) may be hooked in the
        body of a scan; others are hooked whole, before it.

    Returns:
      The function; an input that is never used is never hooked.
    """
    traced = trace(fun, list(read), *args)
    level = _level(traced.jaxpr, {i: i for i in range(len(read))}, sliceable, 0)

    def hooked(inputs, extras, *args):
        pending = _Pending(level, list(inputs), list(extras), list(read), group, hook)
        values = [*map(_Input, range(len(read))), *jax.tree.leaves(args)]
        return traced.out_tree.unflatten(_run(level, values, pending))

    return hooked


def _level(jaxpr: Any, hooked: Mapping[int, int], sliceable: Sliceable, depth: int) -> _Level:
    program = read_program(jaxpr, lambda op, inputs: any(among(atom, hooked) for atom in inputs))
    level, counts = _Level(program, hooked), reads(program)
    for equation in program.equations:
        used = {k: hooked[atom] for k, atom in enumerate(equation.inputs) if among(atom, hooked)}
        if (scan := equation.op.scan) is not None and used:
            alone = {k: i for k, i in used.items() if k >= scan.first_scanned and counts[equation.inputs[k]] == 1}
            scanned = {k: i for k, i in alone.items() if sliceable(i, depth + 1)}
            if scanned:
                level.scans[equation] = _Scanned(scanned, _level(scan.body, scanned, sliceable, depth + 1))
            used = {k: i for k, i in used.items() if k not in scanned}
        for i in used.values():
            level.first_use.setdefault(i, equation)
    for number in names_of(program.outputs):
        if number in hooked:
            level.first_use.setdefault(hooked[number], None)
    return level


@dataclass(frozen=True)
class _Input:
    """Stands for a hooked input in the environment until it is read."""

    index: int


class _Pending:
    """The inputs of one level: raw until the place of their group's hook is reached, then what the hook returned."""

    def __init__(self, level: _Level, inputs, extras, read, group: Grouping, hook: Hook):
        self.inputs, self.extras, self.group, self.hook = inputs, extras, group, hook
        self.values: dict[int, Any] = {}
        self.due: dict[Equation | None, list[list[int]]] = {}
        order = list(level.first_use)
        ready = order[::-1]
        for positions in group(ready, [read[i] for i in ready]) if ready else ():
            members = sorted((ready[k] for k in positions), key=order.index)
            self.due.setdefault(level.first_use[members[0]], []).append(members)

    def reach(self, place: Equation | None) -> None:
        for members in self.due.pop(place, ()):
            values = self.hook(members, [self.inputs[i] for i in members], [self.extras[i] for i in members])
            self.values.update(zip(members, values, strict=True))

    def read(self, value):
        return self.values[value.index] if isinstance(value, _Input) else value


def _run(level: _Level, values: Sequence[Any], pending: _Pending) -> list[Any]:
    def at(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        if equation in pending.due:
            with equation.op.scope():
                pending.reach(equation)
        if equation in level.scans:
            return _run_scan(equation, level.scans[equation], operands, pending)
        return equation.op.bind([pending.read(value) for value in operands])

    program = level.program
    env = dict(program.constants)
    env.update(zip(program.inputs, values, strict=True))
    run(program.equations, env, at)
    pending.reach(None)
    return [pending.read(value) for value in results_of(program.outputs, env)]


def _run_scan(equation: Equation, scanned: _Scanned, operands: list[Any], outer: _Pending) -> list[Any]:
    scan, level, own = equation.op.scan, scanned.body, scanned.inputs
    assert scan is not None
    operands = [outer.inputs[own[k]] if k in own else outer.read(value) for k, value in enumerate(operands)]
    consts, carry = operands[: scan.num_consts], operands[scan.num_consts : scan.first_scanned]
    xs = operands[scan.first_scanned :]
    read = {i: level.program.avals[k] for k, i in own.items()}

    def step(carry, slices):
        xs, extras = slices
        values = [*consts, *carry, *xs]
        pending = _Pending(level, {i: values[k] for k, i in own.items()}, extras, read, outer.group, outer.hook)
        for k, i in own.items():
            values[k] = _Input(i)
        results = _run(level, values, pending)
        return results[: scan.num_carry], results[scan.num_carry :]

    extras = {i: outer.extras[i] for i in own.values()}
    with equation.op.scope():
        carry, ys = jax.lax.scan(step, carry, (xs, extras), **scan.options)
    return [*carry, *ys]
