"""`Program`: a traced function as a list of equations over numbered values, so that it can be analysed, cut and run in pieces.

It is the library's only representation of a traced function. What `jit` wraps stands in the place of the call, unless whoever
reads the program wants the call kept; bodies of loops, branches and other calls are programs of their own, read when asked for.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from axonml_jax.compat.jaxpr import Literal, opened
from axonml_jax.compat.operation import Operation
from axonml_jax.program.atoms import Atom, names_of

Opens = Callable[[Operation, Sequence[Atom]], bool]
"""`opens(operation, inputs)`: whether the body of a call stands in its place."""


@dataclass(frozen=True, eq=False)
class Equation:
    """One operation: what it is, and the numbers of what it reads and makes.

    Attributes:
      op: the operation.
      name: the primitive's.
      inputs: what it reads: numbers and constants.
      outputs: the numbers of what it makes.
      opens: which calls in its bodies are opened.
    """

    op: Operation
    name: str
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    opens: Opens

    @cached_property
    def read(self) -> tuple[int, ...]:
        """The numbered values that it reads."""
        return names_of(self.inputs)

    @property
    def called(self) -> "Program | None":
        """What it calls once, on its own operands."""
        return self._inner(self.op.call)

    @property
    def body(self) -> "Program | None":
        """One trip of a scan or of a while loop, or what is under `jax.checkpoint`."""
        view = self.op.scan or self.op.loop or self.op.checkpointed
        return None if view is None else self._inner(view.body)

    @property
    def condition(self) -> "Program | None":
        """The condition of a while loop."""
        return None if self.op.loop is None else self._inner(self.op.loop.condition)

    @cached_property
    def branches(self) -> "tuple[Program, ...]":
        """The branches of a conditional."""
        return tuple(map(self._inner, self.op.branches or ()))

    @cached_property
    def bodies(self) -> "tuple[Program, ...]":
        """All programs in it, whatever they are for."""
        return tuple(map(self._inner, self.op.bodies))

    def _inner(self, jaxpr: Any) -> Any:
        """The program of one of its jaxprs, read once: its equations are told apart by identity."""
        if jaxpr is not None and id(jaxpr) not in self._programs:
            self._programs[id(jaxpr)] = read_program(jaxpr, self.opens)
        return None if jaxpr is None else self._programs[id(jaxpr)]

    @cached_property
    def _programs(self) -> "dict[int, Program]":
        return {}


@dataclass(frozen=True, eq=False)
class Program:
    """A traced function.

    Attributes:
      equations: in order.
      inputs: the numbers of its arguments: 0, 1, 2, ...
      outputs: what it returns: numbers and constants.
      constants: number -> value, of those known when it was traced.
      avals: the abstract value of every number.
    """

    equations: tuple[Equation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Atom, ...]
    constants: Mapping[int, Any]
    avals: Mapping[int, Any]


def all_calls(op: Operation, inputs: Sequence[Atom]) -> bool:
    """Opens every `jit`."""
    return True


def no_calls(op: Operation, inputs: Sequence[Atom]) -> bool:
    """Opens none."""
    return False


def read_program(jaxpr: Any, opens: Opens = all_calls) -> Program:
    """The program of a jaxpr.

    Args:
      jaxpr: what `trace` returns.
      opens: which `jit` equations are replaced by their bodies. The numbers that it is given are those of the result, whose
        inputs come first.
    """
    reader = _Reader(opens)
    top = opened(jaxpr)
    inputs = tuple(map(reader.new, top.inputs))
    outputs = reader.inline(top, inputs, None)
    return Program(tuple(reader.equations), inputs, tuple(outputs), reader.constants, reader.avals)


class _Reader:
    def __init__(self, opens: Opens):
        self.opens, self._count = opens, itertools.count()
        self.equations: list[Equation] = []
        self.constants: dict[int, Any] = {}
        self.avals: dict[int, Any] = {}

    def new(self, var: Any) -> int:
        number = next(self._count)
        self.avals[number] = var.aval
        return number

    def inline(self, parts: Any, arguments: Sequence[Atom], around: Any) -> list[Atom]:
        """Add the equations of a jaxpr on these arguments; returns its results."""
        env: dict = dict(zip(parts.inputs, arguments, strict=True))
        for var, value in parts.constants:
            env[var] = self.new(var)
            self.constants[env[var]] = value
        for eqn in parts.equations:
            op = Operation(eqn, around)
            given = tuple([var if isinstance(var, Literal) else env[var] for var in op.operands])
            if op.name == "jit" and self.opens(op, given):
                made = self.inline(opened(op.called), given, op.scopes)
            else:
                made = tuple(map(self.new, op.results))
                self.equations.append(Equation(op, op.name, given, made, self.opens))
            env.update(zip(op.results, made, strict=True))
        return [var if isinstance(var, Literal) else env[var] for var in parts.outputs]
