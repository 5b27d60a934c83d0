"""The steps of an update as they are made while it is read: on parts, totals over ranks, and work on whole matrices."""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.compat.operation import Operation
from axonml_jax.program.program import Equation
from axonml_jax.sharding.layout import Layout
from axonml_jax.training.optimizer.sharded.mixing import Mixing
from axonml_jax.training.optimizer.sharded.sharded_program import UpdateStep, neutral
from axonml_jax.training.optimizer.sharded.value import Value
from axonml_jax.training.optimizer.sharded.whole_work import WholeWork


@dataclass
class UpdateSteps:
    """What has been read of an update.

    Attributes:
      layouts: of every parameter.
      piped: whether ranks of a pipeline hold different parameters.
      steps: in order.
      constants: by number.
    """

    layouts: Sequence[Layout]
    piped: bool
    steps: list[UpdateStep] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    _sent: dict[int, Value] = field(default_factory=dict)
    _count: Any = field(default_factory=itertools.count)

    def __post_init__(self):
        self.whole_work = WholeWork(self.layouts, self.constants)

    def new(self, aval: Any, owner: int | None, *, uniform: bool = False, level: int = 0) -> Value:
        """A value with a number of its own."""
        return Value(next(self._count), aval, owner, uniform, level)

    def constant(self, constant: Any, aval: Any) -> Value:
        """A value known when the update was traced."""
        value = self.new(aval, None)
        typed = isinstance(constant, jax.Array)
        self.constants[value.number] = constant if typed else np.asarray(constant, aval.dtype)
        return value

    def note(self, equation: Equation, given: list[Value], frames: Sequence[str]) -> list[Value]:
        """What an operation makes of the whole of a parameter."""
        if not self.may_gather(equation.op, given):
            raise Mixing(equation.name, frames)
        owner = next(value.owner for value in given if value.owner is not None)
        level = max(value.level for value in given)
        made = [self.new(aval, owner, level=level) for aval in equation.op.made]
        self.whole_work.note(equation, given, made, frames)
        return made

    def part(self, value: Value) -> Value:
        """A rank's part of a value that is whole on one rank; all others as they are."""
        if not self.whole_work.has(value):
            return value
        assert value.owner is not None
        if value.aval.shape != self.layouts[value.owner].shape:
            raise Mixing("what it keeps for a parameter has another shape", self.whole_work.frames(value))
        return self.work(value, part=True)

    def work(self, value: Value, *, part: bool) -> Value:
        """The result of what is done to whole arrays; sent once."""
        if self.piped and not part:
            raise Mixing("what all ranks would have to know of whole work", self.whole_work.frames(value))
        if value.number not in self._sent:
            work, given = self.whole_work.work(value, part=part)
            made = self.new(value.aval, value.owner if part else None, level=value.level + 1)
            inputs = tuple(each.number for each in given)
            self.steps.append(UpdateStep(work.run, inputs, (made.number,), value.owner, value.level, work=work))
            self._sent[value.number] = made
        return self._sent[value.number]

    def may_gather(self, op: Operation, given: Sequence[Value]) -> bool:
        """Whether an operation may be done to the whole of a parameter, by the one rank that gathers it."""
        owners = {value.owner for value in given if value.owner is not None}
        return len(owners) == 1 and not op.acts and not any(map(self.is_local, given))

    def is_whole(self, owner: int) -> bool:
        """Whether one rank has all of a parameter, and so may do anything with it."""
        return not self.layouts[owner].axes

    def is_local(self, value: Value) -> bool:
        """Whether a value belongs to such a parameter."""
        return value.owner is not None and self.is_whole(value.owner)

    def is_small(self, value: Value) -> bool:
        """Whether a value is a single element, of which other ranks can be told."""
        whole = self.is_local(value) or self.whole_work.has(value)
        return value.owner is not None and (value.aval.size == 1 if whole else not value.aval.shape)

    def everywhere(self, value: Value) -> Value:
        """A single element, on all ranks; sent once."""
        if value.number in self._sent:
            return self._sent[value.number]
        if self.whole_work.has(value):
            return self.work(value, part=False)
        aval = value.aval
        total = "max" if aval.dtype == bool else "sum"
        made = self.total(lambda x: jnp.reshape(x, ()), value, total, aval.dtype)
        if aval.shape:
            (made,) = self.emit(lambda values: [jnp.reshape(values[0], aval.shape)], [made], [aval], None)
        self._sent[value.number] = made
        return made

    def total(self, run: Any, value: Value, total: str, dtype: Any) -> Value:
        """What all elements come to, joined over ranks; booleans as integers."""
        if bools := value.aval.dtype == bool:
            dtype, start = np.dtype(np.int32), neutral(total, np.int32)
            as_int, over = _as(value.aval, dtype), {"max": jnp.max, "min": jnp.min}[total]
            (value,) = self.emit(lambda values: [values[0].astype(dtype)], [value], [as_int], value.owner)
            run = lambda x: over(x, initial=start)
        made = self.new(jax.ShapeDtypeStruct((), dtype), None, level=value.level + 1)
        one, numbers = (lambda values: [run(values[0])]), ((value.number,), (made.number,))
        self.steps.append(UpdateStep(one, *numbers, value.owner, value.level, total, dtype))
        if bools:
            (made,) = self.emit(lambda values: [values[0] > 0], [made], [_as(made.aval, np.bool_)], None)
        return made

    def emit(
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
            run = _spreading(run, given, split=owner is not None and (kind is not None or not self.is_whole(owner)))
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


def _as(aval: Any, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, np.dtype(dtype))
