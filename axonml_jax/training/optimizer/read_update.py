"""Reads a traced update: what acts element by element, what sums over all elements, and what no rank can do with its part.

The update is traced on whole arrays, so that whatever looks at shapes is decided as on one device. What is followed through the
program is the parameter of which a value holds elements: values of one parameter may meet each other and numbers, but neither
another parameter's nor arrays made apart from them (docs/adr/0007). A parameter that one rank holds whole, along a
pipeline, may meet anything there.
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax._types import PyTree
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.operation import Operation
from axonml_jax.program.atoms import is_constant
from axonml_jax.program.program import Equation, Program, no_calls, read_program
from axonml_jax.program.rules import is_elementwise, rule_of
from axonml_jax.sharding.layout import Layout
from axonml_jax.training.optimizer.mixing import Mixing, frames_of
from axonml_jax.training.optimizer.sharded_program import ShardedProgram, UpdateStep, neutral
from axonml_jax.training.optimizer.value import Value, kind_of

_STILL = frozenset(("broadcast_in_dim", "reshape", "reshard", "sharding_constraint"))
"""What leaves a part of a parameter as it is, where the result is the parameter's shape or its elements in a row."""

_JOINING = frozenset(("add", "and", "max", "min", "or"))
"""How single elements join totals: then they are sent in the round of these, and not what comes of them in the next."""


def read_update(
    fun: Any,
    args: Sequence[PyTree],
    owners: tuple[Sequence[int | None], Sequence[int | None]],
    layouts: Sequence[Layout],
    pipe: tuple[str, ...] = (),
) -> ShardedProgram:
    """The program of `fun(*args)`.

    Args:
      fun: a function of trees of arrays.
      args: their whole shapes.
      owners: of every leaf of the arguments, and of the result: the parameter that it holds elements of, or None.
      layouts: of every parameter.
      pipe: axes along which ranks hold different parameters.

    Raises:
      Mixing: when ranks cannot run it on what they hold.
    """
    program = read_program(trace(fun, *args).jaxpr, no_calls)
    reader = _Reader(layouts)
    inputs = [reader.new(program.avals[number], owner) for number, owner in zip(program.inputs, owners[0], strict=True)]
    results = [reader.returned(*each) for each in zip(reader.read(program, inputs, ()), owners[1], strict=True)]
    return ShardedProgram(
        steps=tuple(reader.steps),
        inputs=tuple(value.number for value in inputs),
        outputs=tuple(value.number for value in results),
        owners=(tuple(owners[0]), tuple(owners[1])),
        constants=reader.constants,
        layouts=tuple(layouts),
        pipe=pipe,
    )


@dataclass
class _Reader:
    """Turns a traced function into steps."""

    layouts: Sequence[Layout]
    steps: list[UpdateStep] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    _sent: dict[int, Value] = field(default_factory=dict)
    _count: Any = field(default_factory=itertools.count)

    def new(self, aval: Any, owner: int | None, *, uniform: bool = False, level: int = 0) -> Value:
        return Value(next(self._count), aval, owner, uniform, level)

    def read(self, program: Program, given: Sequence[Value], frames: Sequence[str]) -> list[Value]:
        """The results of a program of these arguments."""
        env: dict[int, Value] = dict(zip(program.inputs, given, strict=True))
        for number, constant in program.constants.items():
            env[number] = self._constant(constant, program.avals[number])
        look = lambda atom: self._constant(atom.val, atom.aval) if is_constant(atom) else env[atom]
        for equation in program.equations:
            made = self._equation(equation, [look(atom) for atom in equation.inputs], frames_of(equation.op, frames))
            env.update(zip(equation.outputs, made, strict=True))
        return [look(atom) for atom in program.outputs]

    def returned(self, value: Value, owner: int | None) -> Value:
        """A result, which must hold elements of the parameter that it belongs to, or be the same on all ranks."""
        if value.owner != owner and self._is_small(value):
            value = self._everywhere(value)
        if value.owner is None and (owner is None or value.is_number or self._whole(owner)):
            part = None if owner is None or self._whole(owner) else self.layouts[owner]
            shape = value.aval.shape if part is None or not part.shape else part.shard
            spread = lambda values: [jnp.broadcast_to(values[0], shape)]
            return self._emit(spread, [value], [value.aval], owner, raw=True)[0] if value.uniform else value
        if value.owner == owner:
            return value
        raise Mixing("what it returns for one parameter, or for none, holds elements of another")

    def _constant(self, constant: Any, aval: Any) -> Value:
        value = self.new(aval, None)
        typed = isinstance(constant, jax.Array)
        self.constants[value.number] = constant if typed else np.asarray(constant, aval.dtype)
        return value

    def _equation(self, equation: Equation, given: list[Value], frames: Sequence[str]) -> list[Value]:
        op, name, avals = equation.op, equation.name, equation.op.made
        if equation.called is not None:
            return self.read(equation.called, given, frames)
        split = any(each.axes for each in self.layouts)
        if split and name == "random_bits" and any(aval.size > 1 for aval in avals):
            raise Mixing("random numbers of a parameter's shape", frames)
        if equation.branches and given[0].owner is None and self._must_split(given) and not op.acts:
            cases = [self.read(branch, given[1:], frames) for branch in equation.branches]
            return [self._chosen(given[0], list(each), frames) for each in zip(*cases, strict=True)]
        given, owner = self._settled(op, given, frames)
        if owner is None:
            spread = name == "broadcast_in_dim"
            uniform = (is_elementwise(name) or spread) and all(value.is_number for value in given)
            run = (lambda values: values) if uniform and spread else op.bind
            return self._emit(run, given, avals, None, uniform=uniform, kind=kind_of(op, given) if uniform else None)
        if not self._whole(owner) and name in _STILL:
            return [given[0]._replace(aval=avals[0])]
        if not self._whole(owner) and name == "dot_general":  # of all dims: a sum of products
            kinds = [jax.ShapeDtypeStruct(given[0].aval.shape, avals[0].dtype)]
            product = lambda values: [jnp.asarray(values[0] * values[1], avals[0].dtype)]
            given = self._emit(product, given, kinds, owner)
            return [self._total(jnp.sum, given[0], "sum", avals[0].dtype)]
        if (total := rule_of(name).total) and given[0].aval.shape and not self._whole(owner):
            return [self._total(lambda x: op.bind([x])[0], given[0], total, avals[0].dtype)]
        return self._emit(op.bind, given, avals, owner, kind=kind_of(op, given))

    def _chosen(self, index: Value, cases: list[Value], frames: Sequence[str]) -> Value:
        """A result of a conditional: all branches run, as totals in them need all ranks."""
        if len({case.number for case in cases}) == 1:
            return cases[0]
        given, owner = self._together([index, *cases], cases[0].aval.shape, "cond", frames)
        uniform = owner is None and all(value.is_number for value in given)
        choose = lambda values: [jax.lax.select_n(values[0], *map(jnp.asarray, values[1:]))]
        return self._emit(choose, given, [cases[0].aval], owner, uniform=uniform)[0]

    def _settled(self, op: Operation, given: list[Value], frames: Sequence[str]) -> tuple[list[Value], int | None]:
        """What an operation acts on, and the parameter whose elements these are, or None: the same on all ranks."""
        name, owned = op.name, [value for value in given if value.owner is not None]
        if name in _JOINING and any(value.owner is None and value.level for value in given):
            given = [self._everywhere(value) if self._is_small(value) else value for value in given]
            owned = [value for value in given if value.owner is not None]
        if not owned:
            return given, None
        if len({value.owner for value in owned}) == 1 and self._is_local(owned[0]) and not op.acts:
            return given, owned[0].owner
        if is_elementwise(name):
            return self._together(given, op.made[0].shape, name, frames)
        shapes = {aval.shape for aval in op.made}
        if name in _STILL and shapes <= self._still(owned[0]):
            return given, owned[0].owner
        if name == "dot_general" and _contracts_all(op):
            return self._together(given, given[0].aval.shape, name, frames)
        if rule_of(name).total and len(op.options["axes"]) == len(owned[0].aval.shape):
            return given, owned[0].owner
        given = [self._everywhere(value) if self._is_small(value) else value for value in given]
        if any(value.owner is not None for value in given):
            raise Mixing(name, frames)
        return given, None

    def _together(
        self, given: list[Value], shape: tuple[int, ...], name: str, frames: Sequence[str]
    ) -> tuple[list[Value], int | None]:
        """Values that meet element by element: of one parameter, or the same on all ranks."""
        owned = [value for value in given if value.owner is not None]
        several = len({value.owner for value in owned}) > 1
        if owned and not several and self._is_local(owned[0]):
            return given, owned[0].owner
        if several or any(value.aval.shape != shape for value in owned):
            if not any(map(self._is_small, given)):
                raise Mixing(f"{name} of several parameters", frames)
            given = [self._everywhere(value) if self._is_small(value) else value for value in given]
            return self._together(given, shape, name, frames)
        if owned and not all(value.owner is not None or value.is_number for value in given):
            raise Mixing(f"{name} with an array that is not a parameter's own", frames)
        return given, owned[0].owner if owned else None

    def _must_split(self, given: Sequence[Value]) -> bool:
        """Whether values belong to several parameters, or to one that is split."""
        owned = [value for value in given if value.owner is not None]
        return len({value.owner for value in owned}) > 1 or not all(map(self._is_local, owned))

    def _whole(self, owner: int) -> bool:
        """Whether one rank has all of a parameter, and so may do anything with it."""
        return not self.layouts[owner].axes

    def _is_local(self, value: Value) -> bool:
        """Whether a value belongs to such a parameter."""
        return value.owner is not None and self._whole(value.owner)

    def _still(self, value: Value) -> set[tuple[int, ...]]:
        """The shapes in which a part of a parameter has the same elements in the same order."""
        assert value.owner is not None
        rows = {(value.aval.size,), self.layouts[value.owner].shape} if value.aval.shape else set()
        return {value.aval.shape} | rows

    def _is_small(self, value: Value) -> bool:
        """Whether a value is a single element, of which other ranks can be told."""
        return value.owner is not None and (value.aval.size == 1 if self._is_local(value) else not value.aval.shape)

    def _everywhere(self, value: Value) -> Value:
        """A single element, on all ranks; sent once."""
        if value.number in self._sent:
            return self._sent[value.number]
        aval = value.aval
        total = "max" if aval.dtype == bool else "sum"
        made = self._total(lambda x: jnp.reshape(x, ()), value, total, aval.dtype)
        if aval.shape:
            (made,) = self._emit(lambda values: [jnp.reshape(values[0], aval.shape)], [made], [aval], None)
        self._sent[value.number] = made
        return made

    def _total(self, run: Any, value: Value, total: str, dtype: Any) -> Value:
        """What all elements come to, joined over ranks; booleans as integers."""
        if bools := value.aval.dtype == bool:
            dtype, start = np.dtype(np.int32), neutral(total, np.int32)
            as_int, over = _as(value.aval, dtype), {"max": jnp.max, "min": jnp.min}[total]
            (value,) = self._emit(lambda values: [values[0].astype(dtype)], [value], [as_int], value.owner)
            run = lambda x: over(x, initial=start)
        made = self.new(jax.ShapeDtypeStruct((), dtype), None, level=value.level + 1)
        one, numbers = (lambda values: [run(values[0])]), ((value.number,), (made.number,))
        self.steps.append(UpdateStep(one, *numbers, value.owner, value.level, total, dtype))
        if bools:
            (made,) = self._emit(lambda values: [values[0] > 0], [made], [_as(made.aval, np.bool_)], None)
        return made

    def _emit(
        self,
        run: Any,
        given: Sequence[Value],
        avals: Any,
        owner: int | None,
        *,
        uniform: bool = False,
        raw: bool = False,
        kind: Hashable = None,
    ) -> list[Value]:
        """A step; `raw`: it takes single numbers in the place of uniform arrays, as uniform results do anyway."""
        level = max((value.level for value in given), default=0)
        made = [self.new(aval, owner, uniform=uniform, level=level) for aval in avals]
        if not (uniform or raw) and any(value.uniform for value in given):
            run = _spreading(run, given, split=owner is not None and (kind is not None or not self._whole(owner)))
        inputs, outputs = tuple(value.number for value in given), tuple(value.number for value in made)
        self.steps.append(UpdateStep(run, inputs, outputs, owner, level, kind=kind))
        return made


def _spreading(run: Any, given: Sequence[Value], *, split: bool) -> Any:
    """An operation that spreads numbers over whole arrays, or over the part of a parameter that it acts on."""
    part = next((i for i, value in enumerate(given) if value.owner is not None), 0)

    def spread(values: Sequence[Any]) -> Sequence[Any]:
        shapes = [jnp.shape(values[part]) if split else value.aval.shape for value in given]
        each = zip(given, values, shapes, strict=True)
        return run([jnp.broadcast_to(x, shape) if value.uniform else x for value, x, shape in each])

    return spread


def _contracts_all(op: Operation) -> bool:
    """Whether a product is one of all elements with their like."""
    left, right = op.contraction.contracted
    return left == right == tuple(range(op.given[0].ndim)) == tuple(range(op.given[1].ndim))


def _as(aval: Any, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, np.dtype(dtype))
