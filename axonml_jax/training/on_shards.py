"""An optimizer's update read from its traced program, and run on the shards that ranks hold."""

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axonml_jax.base import PyTree
from axonml_jax.collectives.primitives import (
    axis_index,
    axis_size,
    gather_whole,
    max_over,
    min_over,
    sum_over,
    swap_parts,
    vary,
)
from axonml_jax.compat.jaxpr import Operation, trace
from axonml_jax.compat.order import together
from axonml_jax.compat.varying_types import CASTS, varying_axes
from axonml_jax.parallel.placement import Placement
from axonml_jax.pipeline.schedules import AXIS
from axonml_jax.program.program import (
    ELEMENTWISE,
    Equation,
    Program,
    entry_of,
    is_constant,
    is_elementwise,
    no_calls,
    read_program,
    rule_of,
    run_bodies,
    run_program,
)
from axonml_jax.sharding.layout import Layout, is_layout, map_layouts
from axonml_jax.training.optimizer import apply, culprit, whole_shape

# --------------------------------------------------------------------------------------------------
# Equations that were traced without mesh axes, run on values that vary over some: loops and branches are traced anew.
# --------------------------------------------------------------------------------------------------


def bind_typed(equation: Equation, values: Sequence[Any]) -> list[Any]:
    """Runs an equation after typing its operands as varying over the union of their axes; in loops and branches too."""
    values = typed_alike(list(values))
    axes = tuple(sorted(frozenset[str]().union(*map(varying_axes, values))))
    if not axes or not equation.bodies:
        return equation.op.bind(values)

    def run(program: Program, given: Sequence[Any]) -> list[Any]:
        return [vary(jnp.asarray(each), axes) for each in run_program(program, given, bind_typed)]

    made = run_bodies(equation, values, run)
    return equation.op.bind(values) if made is None else made


def typed_alike(values: list[Any]) -> list[Any]:
    """Types values as varying over the union of their axes, as operations require."""
    axes = frozenset[str]().union(*(varying_axes(value) for value in values))
    return [vary(jnp.asarray(value), tuple(sorted(axes))) for value in values] if axes else values


# --------------------------------------------------------------------------------------------------
# Work on whole matrices, such as Muon's: each matrix is gathered by one rank, its owner, worked on there, and scattered
# back.
#
# Matrices of one shape and place, with the same work to do, share one exchange: of N ranks each owns every N-th. A rank
# sends its part of a matrix to the owner and gets its part of the result back, so that N matrices of P elements cost it
# 2 P (N-1)/N, and it holds one N-th of them whole. Where they do not divide, the last owners work on zeros.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatrixWork:
    """Operations that need one parameter's full array, done by the rank that gathers it.

    Attributes:
      run: from whole arrays of the parameter's shape, then what is the same on all ranks, to one array.
      parts: how many of the values that it reads are parts of the parameter; the others are the same on all ranks.
      part: whether the result has the parameter's elements, of which each rank gets its part; else all ranks get all of it.
      like: equal where works do the same.
    """

    run: Callable[[Sequence[Any]], Any]
    parts: int
    part: bool
    like: Hashable


def on_owners(work: MatrixWork, layout: Layout, given: Sequence[Sequence[Any]]) -> list[jax.Array]:
    """Runs equal works on parameters of equal layouts, each on the rank that owns its matrix, and returns their results.

    Args:
      work: any of them.
      layout: any of the parameters'.
      given: for each, the values that it reads, parts first.

    Communicates: one all-to-all of each part that is read, and one of the results, or an all-gather of these.
    """
    ranks, count = axis_size(layout.axes), len(given)
    slots = -(-count // ranks)
    stacks = [_stacked([values[k] for values in given], ranks * slots) for k in range(len(given[0]))]
    whole = [_whole(stack, layout, slots) for stack in stacks[: work.parts]]
    mine = axis_index(layout.axes)
    same = [
        jax.lax.dynamic_index_in_dim(stack.reshape(slots, ranks, *stack.shape[1:]), mine, 1, keepdims=False)
        for stack in stacks[work.parts :]
    ]
    made = jax.lax.map(lambda values: work.run(values), [*whole, *same])
    results = _parts(made, layout, slots) if work.part else _everywhere(made, layout)
    return list(results[:count])


def _stacked(values: Sequence[Any], count: int) -> jax.Array:
    """Stacks values along a new dim 0, padded with zeros to `count` entries."""
    stack = jnp.stack([jnp.asarray(value) for value in values])
    if count == len(values):
        return stack
    # XLA would send the zeros apart from the stack, in a layout of their own, which its verifier refuses.
    return together(jnp.pad(stack, [(0, count - len(values))] + [(0, 0)] * (stack.ndim - 1)))


def _whole(stack: jax.Array, layout: Layout, slots: int) -> jax.Array:
    """Parts [slots * N, *shard] of matrices, number k of which rank k % N owns -> those that this rank owns [slots, *shape]."""
    ranks = axis_size(layout.axes)
    to_owner = stack.reshape(slots, ranks, *layout.shard).swapaxes(0, 1)
    parts = swap_parts(to_owner, layout.axes)  # [N, slots, *shard], by the rank that held them
    grid = parts.reshape(*(axis_size(axis) for axis in layout.axes), slots, *layout.shard)
    grid = grid.transpose(_joined_dims(layout))
    whole = grid.reshape(slots, *layout.stored)
    return whole[(slice(None), *map(slice, layout.shape))]


def _parts(whole: jax.Array, layout: Layout, slots: int) -> jax.Array:
    """The inverse of `_whole`: matrices that this rank owns [slots, *shape] -> its parts of all [slots * N, *shard]."""
    whole = whole.reshape(slots, *layout.shape)
    more = [(0, stored - size) for size, stored in zip(layout.shape, layout.stored, strict=True)]
    whole = jnp.pad(whole, [(0, 0), *more])
    sizes = [
        n for dim, size in enumerate(layout.shard) for n in (*(axis_size(axis) for axis in layout.axes_of(dim)), size)
    ]
    order = _joined_dims(layout)
    back = [order.index(k) for k in range(len(order))]
    grid = whole.reshape(slots, *sizes).transpose(back)
    by_part = grid.reshape(axis_size(layout.axes), slots, *layout.shard)
    from_owner = swap_parts(by_part, layout.axes)  # [N, slots, *shard], by owner
    return jax.lax.collapse(from_owner.swapaxes(0, 1), 0, 2)


def _joined_dims(layout: Layout) -> list[int]:
    """The order of dims (axes, slot, shard's dims) that puts the axes of every dim before it, and the slot first."""
    count = len(layout.axes)
    order = [count]
    for dim in range(len(layout.shard)):
        order += [layout.axes.index(axis) for axis in layout.axes_of(dim)]
        order.append(count + 1 + dim)
    return order


def _everywhere(made: jax.Array, layout: Layout) -> jax.Array:
    """Gathers the results of all owners on every rank: [slots, ...] -> [slots * N, ...]."""
    found = gather_whole(made[None], layout.axes, 0, invarying=True)
    return jax.lax.collapse(found.swapaxes(0, 1), 0, 2)


def same_place(layout: Layout) -> Hashable:
    """A key that is equal for layouts of one shape, padding and split, whose parts may travel together."""
    return layout.shape, layout.stored, layout.parts, tuple(map(layout.axes_of, range(len(layout.shard))))


# --------------------------------------------------------------------------------------------------
# What a rank cannot do with its part of a parameter, and whose code asked for it.
# --------------------------------------------------------------------------------------------------


class Mixing(Exception):
    """An operation that a rank cannot do with its part of a parameter.

    Attributes:
      what: the operation.
      frames: names of the functions that called it, innermost first.
    """

    def __init__(self, what: str, frames: Sequence[str] = ()):
        super().__init__(what)
        self.what, self.frames = what, tuple(frames)


def frames_of(op: Operation, outer: Sequence[str]) -> list[str]:
    """Names of the functions around an operation: those around the outermost call first, as inner ones may be cached."""
    return [*outer, *op.functions]


# --------------------------------------------------------------------------------------------------
# A value of an update's program, as it is read: whose elements it holds, if it is not the same on all ranks.
# --------------------------------------------------------------------------------------------------


class Value(NamedTuple):
    """A value of an update's program: its shape, and the parameter whose elements it holds.

    Attributes:
      number: its number.
      aval: its whole shape and dtype.
      owner: the parameter (position) of which it holds elements; None: it is the same on all ranks.
      uniform: whether all its elements are one number, which is then kept in its place.
      level: how many rounds of totals come before it.
    """

    number: int
    aval: Any
    owner: int | None
    uniform: bool
    level: int

    @property
    def is_number(self) -> bool:
        """Tells whether a value is a scalar that is the same on all ranks, so that any shard may be combined with it."""
        return self.owner is None and (not self.aval.shape or self.uniform)


class ByElement(NamedTuple):
    """An elementwise operation, which does the same to each element whatever the shape.

    Attributes:
      op: the operation.
      given: its operands: numbers, or of the shape of the result.
    """

    op: Operation
    given: Sequence[Value]

    def kind(self) -> Hashable:
        """A key that is equal for operations that do the same to their elements."""
        op, given = self
        options = () if op.name == _SPREAD else tuple(sorted((name, str(value)) for name, value in op.options.items()))
        met = tuple(value.owner is None and (value.uniform, not value.aval.shape) for value in given)
        return op.name, options, met, *(str(aval.dtype) for aval in op.made)


_SPREAD = "broadcast_in_dim"


def by_element(op: Operation, given: Sequence[Value]) -> ByElement | None:
    """An operation with its operands as a `ByElement`; None where it is not elementwise, or operands differ in shape."""
    shape = op.made[0].shape
    if op.name not in ELEMENTWISE and not (op.name == _SPREAD and given[0].is_number):
        return None
    if any(not value.is_number and (value.owner is None or value.aval.shape != shape) for value in given):
        return None
    return ByElement(op, given)


# --------------------------------------------------------------------------------------------------
# An update of parameters as a program of what ranks hold: element by element, and sums over all elements in between.
#
# `read_update` makes one of the traced update. A rank runs the steps of the parameters of which it holds something, and
# those of values that are the same on all ranks; a total (a sum, a maximum or a minimum over all elements of an array)
# is joined over the ranks that hold parts of it, all totals of a round at once.
# --------------------------------------------------------------------------------------------------

Held = Mapping[int, Any]
"""Arguments that a rank holds parts of, by position."""

OnRank = Callable[[Callable[[Held], Any]], Any]
"""Runs a function of what this rank holds; along a pipeline ranks hold different arguments."""

_JOIN = {"sum": sum_over, "max": max_over, "min": min_over}


@dataclass(frozen=True)
class UpdateStep:
    """One operation of an update's program, on the shards of a parameter or on values that all ranks share.

    Attributes:
      run: from the values it reads to those it makes; of a total what one rank's elements come to.
      inputs, outputs: what it reads and makes.
      owner: the parameter (position) whose elements it acts on; None: the same on all ranks.
      level: how many rounds of totals come before it.
      total: how the ranks' values are joined ("sum", "max", "min"); None: they are not.
      dtype: the dtype of a total.
      by_element: what it does to each element, whatever the shape; None: it may do anything.
      work: what it does to the whole of the parameter, on the rank that gathers it; None: it acts on parts.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    owner: int | None
    level: int
    total: str | None = None
    dtype: Any = None
    by_element: ByElement | None = None
    work: MatrixWork | None = None

    @property
    def communicates(self) -> bool:
        """Whether running it takes a collective."""
        return self.total is not None or self.work is not None


@dataclass(frozen=True)
class ShardedProgram:
    """An update as a program over shards: of each argument a rank holds a shard, all of it, or nothing (another stage's).

    Attributes:
      steps: the steps, in order.
      inputs: the numbers of its arguments.
      outputs: what it returns.
      owners: for every argument, then for every result, the parameter that it belongs to, or None.
      constants: by number.
      layouts: the layout of every parameter.
      pipe: axes along which ranks hold different parameters.
    """

    steps: tuple[UpdateStep, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    owners: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    constants: Mapping[int, Any]
    layouts: tuple[Layout, ...]
    pipe: tuple[str, ...]

    @property
    def communicates(self) -> bool:
        """Whether any of its steps takes a collective."""
        return any(step.communicates for step in self.steps)

    def run(
        self, whole: Held, on_rank: OnRank, finish: Callable[[dict[int, Any]], Any], on_runs: OnRank | None = None
    ) -> tuple[Any, dict[int, Any]]:
        """Runs the update inside `shard_map`.

        Args:
          whole: the arguments that are the same on all ranks, by position.
          on_rank: what runs a function of the arguments that this rank holds parts of.
          finish: makes of a rank's results, by position, something of the same type on all ranks.
          on_runs: the same for the results, where one parameter may stand for several (`training/staged.py`); None: `on_rank`.

        Returns:
          What `finish` made, and the results that are the same on all ranks, by position.

        Communicates: one all-reduce of scalars per round of totals, kind of join, and axes that split what is joined; for
        work on whole matrices see `on_owners`.
        """
        env = dict(self.constants) | {self.inputs[i]: value for i, value in whole.items()}
        for level in range(1 + max((step.level for step in self.steps), default=0)):
            _run_steps((step for step in self.steps if step.owner is None and step.level == level), env)
            if not self.pipe:  # else every rank does the work of its own parameters where it needs the results
                env |= on_rank(functools.partial(self._worked, self._works(level), env))
            for group in self._groups(step for step in self.steps if step.total and step.level == level):
                parts = on_rank(functools.partial(self._parts, group, env))
                joined = _JOIN[group[0].total or ""](parts, self._axes(group[0]))
                env |= {step.outputs[0]: joined[k] for k, step in enumerate(group)}
        mine = (on_runs or on_rank)(lambda held: finish(self._results(env, held)))
        loose = [i for i, owner in enumerate(self.owners[1]) if owner is None]
        return mine, {i: env[self.outputs[i]] for i in loose}

    def _works(self, level: int) -> list[UpdateStep]:
        return [step for step in self.steps if step.work is not None and step.level == level]

    def _worked(self, works: Sequence[UpdateStep], env: Mapping[int, Any], held: Held) -> dict[int, jax.Array]:
        """The results of full-matrix works that do not depend on each other; equal works share one exchange."""
        own = self._made([number for step in works for number in step.inputs], env, held)
        return self._exchanged(works, own)

    def _exchanged(self, works: Sequence[UpdateStep], own: Mapping[int, Any]) -> dict[int, jax.Array]:
        groups: dict[Hashable, list[UpdateStep]] = {}
        for step in works:
            assert step.work is not None
            groups.setdefault(step.work.like, []).append(step)
        made = {}
        for first, *others in groups.values():
            assert first.work is not None and first.owner is not None
            given = [[own[number] for number in step.inputs] for step in (first, *others)]
            results = on_owners(first.work, self.layouts[first.owner], given)
            made |= {step.outputs[0]: result for step, result in zip((first, *others), results, strict=True)}
        return made

    def _results(self, env: Mapping[int, Any], held: Held) -> dict[int, Any]:
        """The results that belong to parameters of which this rank holds a part."""
        present = self._present(held)
        mine = [i for i, owner in enumerate(self.owners[1]) if owner in present]
        own = self._made([self.outputs[i] for i in mine], env, held)
        return {i: own[self.outputs[i]] for i in mine}

    def _parts(self, totals: Sequence[UpdateStep], env: Mapping[int, Any], held: Held) -> jax.Array:
        """This rank's partial value of every total, [len(totals)]."""
        present = self._present(held)
        own = self._made([n for step in totals for n in step.inputs if step.owner in present], env, held)
        values = []
        for step in totals:
            empty = jnp.asarray(neutral(step.total, step.dtype))
            if step.owner is None or step.owner not in present:
                values.append(empty)
                continue
            (x,) = (own[number] for number in step.inputs)
            values += step.run([within(jnp.asarray(x), self.layouts[step.owner], empty)])
        return jnp.stack([vary(value, self._axes(totals[0])) for value in values])

    def _made(self, wanted: Iterable[int], env: Mapping[int, Any], held: Held) -> dict[int, Any]:
        """The wanted values, computed from what this rank holds, among others of the program."""
        own = dict(env) | {self.inputs[i]: value for i, value in held.items()}
        needed, chosen, present = set(wanted), [], self._present(held)
        for step in reversed(self.steps):
            here = step.total is None and (step.work is None or bool(self.pipe))
            if step.owner in present and here and needed.intersection(step.outputs):
                needed.update(step.inputs)
                chosen.append(step)
        for level in sorted({step.level for step in chosen}):
            now = [step for step in reversed(chosen) if step.level == level]
            _run_steps((step for step in now if step.work is None), own)
            own |= self._exchanged([step for step in now if step.work is not None], own)
        return own

    def _present(self, held: Held) -> Collection[int]:
        return {owner for i in held if (owner := self.owners[0][i]) is not None}

    def _axes(self, total: UpdateStep) -> tuple[str, ...]:
        assert total.owner is not None
        return tuple(dict.fromkeys((*self.pipe, *self.layouts[total.owner].axes)))

    def _groups(self, totals: Iterable[UpdateStep]) -> list[list[UpdateStep]]:
        """Groups totals by kind, axes and dtype: each group takes one all-reduce."""
        groups: dict[Any, list[UpdateStep]] = {}
        for step in totals:
            groups.setdefault((step.total, self._axes(step), jnp.dtype(step.dtype)), []).append(step)
        return list(groups.values())


def neutral(total: str | None, dtype: Any) -> np.ndarray:
    """The neutral element of a total, which a rank without elements contributes."""
    if total == "sum":
        return np.zeros((), dtype)
    floating = jnp.issubdtype(dtype, jnp.floating)
    info = None if floating else jnp.iinfo(dtype)
    least, most = (-np.inf, np.inf) if info is None else (info.min, info.max)
    return np.asarray(least if total == "max" else most, dtype)


def within(x: jax.Array, layout: Layout, empty: jax.Array | None = None) -> jax.Array:
    """Replaces a shard's padding by `empty`, or zeros."""
    if not layout.axes or not layout.padding:
        return x
    empty = jnp.zeros((), x.dtype) if empty is None else empty
    for dim, more in enumerate(layout.stored):
        # A scalar rests as one element per rank, of which the first is meant.
        size = layout.shape[dim] if dim < len(layout.shape) else 1
        if more > size:
            start = axis_index(layout.axes_of(dim)) * layout.shard[dim]
            place = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim) if dim < x.ndim else 0
            x = jnp.where(start + place < size, x, empty.astype(x.dtype))
    return x


def _run_steps(steps: Iterable[UpdateStep], env: dict[int, Any]) -> None:
    for step in steps:
        env.update(zip(step.outputs, step.run(typed_alike([env[number] for number in step.inputs])), strict=True))


# --------------------------------------------------------------------------------------------------
# What an update does to the whole of one parameter, noted while the update is read, until its result is asked for.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Noted:
    """An operation on full arrays: what it reads, the numbers of what it makes, and the functions around it."""

    equation: Equation
    given: tuple[Value, ...]
    made: tuple[int, ...]
    frames: Sequence[str]


@dataclass
class WholeWork:
    """The operations of an update that need full arrays, and how to run those that make a value.

    Attributes:
      layouts: the layout of every parameter.
      constants: the constants of the update, by number.
      noted: the operation that makes a whole value, by that value's number.
    """

    layouts: Sequence[Layout]
    constants: Mapping[int, Any]
    noted: dict[int, _Noted] = field(default_factory=dict)

    def has(self, value: Value) -> bool:
        """Tells whether one rank has the full value: the rank that does this parameter's work on full matrices."""
        return value.number in self.noted

    def note(self, equation: Equation, given: Sequence[Value], made: Sequence[Value], frames: Sequence[str]) -> None:
        """Records an operation as the maker of its results."""
        noted = _Noted(equation, tuple(given), tuple(value.number for value in made), frames)
        self.noted.update(dict.fromkeys(noted.made, noted))

    def frames(self, value: Value) -> Sequence[str]:
        """The functions around the operation that makes a value."""
        return self.noted[value.number].frames

    def work(self, value: Value, *, part: bool) -> tuple[MatrixWork, list[Value]]:
        """Finds the equations that make a value, and what they read: the parameter's shards, then values that all ranks share.

        Args:
          value: a whole one.
          part: whether each rank is to have its part of it, else all ranks all of it.

        Raises:
          Mixing: where something that it reads is neither.
        """
        assert value.owner is not None
        layout, order = self.layouts[value.owner], self._order(value)
        read = {each.number: each for noted in order for each in noted.given if not self.has(each)}
        parts = [each for each in read.values() if each.owner is not None]
        same = [each for each in read.values() if each.owner is None and each.number not in self.constants]
        for each in parts:
            if each.aval.size != layout.size:
                raise Mixing("state of another shape than its parameter's", self.frames(value))
        given = [*parts, *same]
        known = {number: self.constants[number] for number in read if number in self.constants}
        names: dict[int, Hashable] = {each.number: k for k, each in enumerate(given)}
        names |= {number: _bits(constant) for number, constant in known.items()}
        names |= {made: ("made", i, j) for i, noted in enumerate(order) for j, made in enumerate(noted.made)}
        told = lambda noted: [(names[each.number], each.aval.shape) for each in noted.given]
        like = tuple((noted.equation.name, str(noted.equation.op.options), *told(noted)) for noted in order)
        avals = tuple((each.aval.shape, str(each.aval.dtype), each.uniform) for each in given)
        key = (like, avals, names[value.number], part, same_place(layout))
        return MatrixWork(_run_whole(order, given, known, value), len(parts), part, key), given

    def _order(self, value: Value) -> list[_Noted]:
        """The operations that make a value, in topological order."""
        found: dict[int, _Noted] = {}

        def visit(number: int) -> None:
            noted = self.noted.get(number)
            if noted is None or noted.made[0] in found:
                return
            for each in noted.given:
                visit(each.number)
            found[noted.made[0]] = noted

        visit(value.number)
        return list(found.values())


def _run_whole(
    order: Sequence[_Noted], given: Sequence[Value], known: Mapping[int, Any], value: Value
) -> Callable[[Sequence[Any]], Any]:
    """A function from what is read to the value; uniform values are broadcast to their shapes, flat ones reshaped."""

    def read(env: Mapping[int, Any], value: Value) -> Any:
        found, shape = env[value.number], value.aval.shape
        return jnp.broadcast_to(found, shape) if value.uniform else jnp.reshape(found, shape)

    def run(values: Sequence[Any]) -> Any:
        env = dict(known) | {each.number: x for each, x in zip(given, values, strict=True)}
        for noted in order:
            made = bind_typed(noted.equation, [read(env, each) for each in noted.given])
            env.update(zip(noted.made, made, strict=True))
        return env[value.number]

    return run


def _bits(constant: Any) -> Hashable:
    array = np.asarray(constant)
    return array.shape, str(array.dtype), array.tobytes()


# --------------------------------------------------------------------------------------------------
# The steps of an update as they are made while it is read: on parts, totals over ranks, and work on whole matrices.
# --------------------------------------------------------------------------------------------------


@dataclass
class UpdateSteps:
    """Builds the steps of an update while it is read.

    Attributes:
      layouts: the layout of every parameter.
      piped: whether ranks of a pipeline hold different parameters.
      steps: the steps, in order.
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
        """A value with a new number."""
        return Value(next(self._count), aval, owner, uniform, level)

    def constant(self, constant: Any, aval: Any) -> Value:
        """A value that was a constant when the update was traced."""
        value = self.new(aval, None)
        typed = isinstance(constant, jax.Array)
        self.constants[value.number] = constant if typed else np.asarray(constant, aval.dtype)
        return value

    def note(self, equation: Equation, given: list[Value], frames: Sequence[str]) -> list[Value]:
        """Records an operation that needs a parameter's full array, and returns its results, which only the owner has."""
        if not self.may_gather(equation.op, given):
            raise Mixing(equation.name, frames)
        owner = next(value.owner for value in given if value.owner is not None)
        level = max(value.level for value in given)
        made = [self.new(aval, owner, level=level) for aval in equation.op.made]
        self.whole_work.note(equation, given, made, frames)
        return made

    def part(self, value: Value) -> Value:
        """A rank's part of a value that is full on its owner; all other values as they are."""
        if not self.whole_work.has(value):
            return value
        assert value.owner is not None
        if value.aval.shape != self.layouts[value.owner].shape:
            raise Mixing("what it keeps for a parameter has another shape", self.whole_work.frames(value))
        return self.work(value, part=True)

    def work(self, value: Value, *, part: bool) -> Value:
        """Adds the step that computes a full value on its owner and sends parts of it, or all, to the ranks; once per value."""
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
        """Whether an operation reads one parameter alone, so that the rank that gathers it may run it on the full array."""
        owners = {value.owner for value in given if value.owner is not None}
        # Of a stack along a pipeline stages have rows in an order of their own.
        if any(AXIS in self.layouts[owner].axes for owner in owners):
            return False
        return len(owners) == 1 and not op.acts and not any(map(self.is_local, given))

    def is_whole(self, owner: int) -> bool:
        """Tells whether a parameter is not split: a rank that holds it has all of it, and any operation may act on it."""
        return not self.layouts[owner].axes

    def is_local(self, value: Value) -> bool:
        """Whether a value belongs to a parameter that is not split."""
        return value.owner is not None and self.is_whole(value.owner)

    def is_small(self, value: Value) -> bool:
        """Tells whether a value is a single element, which can be sent to the other ranks."""
        whole = self.is_local(value) or self.whole_work.has(value)
        return value.owner is not None and (value.aval.size == 1 if whole else not value.aval.shape)

    def everywhere(self, value: Value) -> Value:
        """Adds the step that sends a single element to all ranks; once per value."""
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
        """Adds the step that reduces all elements of a value and joins the results over ranks; booleans travel as integers."""
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
        by_element: ByElement | None = None,
    ) -> list[Value]:
        """Adds a step, and returns its results; `raw`: it takes single numbers in the place of uniform arrays."""
        level = max((value.level for value in given), default=0)
        made = [self.new(aval, owner, uniform=uniform, level=level) for aval in avals]
        if not (uniform or raw) and any(value.uniform for value in given):
            split = owner is not None and (by_element is not None or not self.is_whole(owner))
            run = _spreading(run, given, split=split)
        inputs, outputs = tuple(value.number for value in given), tuple(value.number for value in made)
        self.steps.append(UpdateStep(run, inputs, outputs, owner, level, by_element=by_element))
        return made


def _spreading(run: Any, given: Sequence[Value], *, split: bool) -> Any:
    """An operation whose uniform operands are broadcast first, to their full shape or to that of the part it acts on."""
    part = next((i for i, value in enumerate(given) if value.owner is not None), 0)

    def spread(values: Sequence[Any]) -> Sequence[Any]:
        shapes = [jnp.shape(values[part]) if split else value.aval.shape for value in given]
        each = zip(given, values, shapes, strict=True)
        return run([jnp.broadcast_to(x, shape) if value.uniform else x for value, x, shape in each])

    return spread


def _as(aval: Any, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, np.dtype(dtype))


# --------------------------------------------------------------------------------------------------
# Reads a traced update: what acts element by element, what sums over all elements, and what no rank can do with its
# part.
#
# The update is traced on whole arrays, so that whatever looks at shapes is decided as on one device. What is followed
# through the program is the parameter of which a value holds elements: values of one parameter may meet each other and
# numbers, but neither another parameter's nor arrays made apart from them (docs/adr/0007). A parameter that one rank
# holds whole, along a pipeline, may meet anything there.
# --------------------------------------------------------------------------------------------------

_STILL = frozenset(("broadcast_in_dim", "reshape", "reshard", "sharding_constraint"))
"""Operations that keep a part's elements and their order, where the result has the parameter's shape or is flat."""

_JOINING = frozenset(("add", "and", "max", "min", "or"))
"""Operations that join totals and single elements: an element is sent in the total's round, not the result in the next."""


def read_update(
    program: Program,
    owners: tuple[Sequence[int | None], Sequence[int | None]],
    layouts: Sequence[Layout],
    pipe: tuple[str, ...] = (),
) -> ShardedProgram:
    """Reads the traced update into a program over shards.

    Args:
      program: the update of whole arrays, with calls in it.
      owners: for every leaf of the arguments and the result, the parameter that it holds elements of, or None.
      layouts: the layout of every parameter.
      pipe: axes along which ranks hold different parameters.

    Raises:
      Mixing: when ranks cannot run it on what they hold.
    """
    reader = _Reader(layouts, piped=bool(pipe))
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


class _Reader(UpdateSteps):
    """Reads the equations of a traced update into steps."""

    def read(self, program: Program, given: Sequence[Value], frames: Sequence[str]) -> list[Value]:
        """Reads a program's equations, and returns the values of its results."""
        env: dict[int, Value] = dict(zip(program.inputs, given, strict=True))
        for number, constant in program.constants.items():
            env[number] = self.constant(constant, program.avals[number])
        constant = lambda atom: self.constant(atom.val, atom.aval)
        for equation in program.equations:
            read = [env[atom] if isinstance(atom, int) else constant(atom) for atom in equation.inputs]
            if (plain := self._plainly(equation, read)) is not None:
                env[equation.outputs[0]] = plain
            else:
                env.update(zip(equation.outputs, self._equation(equation, read, frames), strict=True))
        return [env[atom] if isinstance(atom, int) else constant(atom) for atom in program.outputs]

    def _plainly(self, equation: Equation, given: list[Value]) -> Value | None:
        """The result of an operation on each element of one parameter and numbers, the usual kind; None: it is of another kind.

        `_equation` would say the same, but it asks everything else first, and most optimizers consist of these.
        """
        op, spread, noted = equation.op, equation.name == _SPREAD, self.whole_work.noted
        if not spread and equation.name not in ELEMENTWISE:
            return None
        owner, aval, uniform, inputs = None, op.results[0].aval, False, ()
        for value in given:
            if value.level or value.number in noted:
                return None
            if value.owner is not None and (
                spread or value.aval.shape != aval.shape or owner not in (None, value.owner)
            ):
                return None
            if value.owner is None and value.aval.shape and not value.uniform:
                return None
            owner, uniform = owner if value.owner is None else value.owner, uniform or value.uniform
            inputs += (value.number,)
        made, run = Value(next(self._count), aval, owner, owner is None, 0), _given if spread else op.bind
        run = _spreading(run, given, split=True) if uniform and owner is not None else run
        self.steps.append(UpdateStep(run, inputs, (made.number,), owner, 0, by_element=ByElement(op, given)))
        return made

    def returned(self, value: Value, owner: int | None) -> Value:
        """A result, which must hold elements of the parameter that it belongs to, or be the same on all ranks."""
        if owner is not None and value.owner == owner and not self.whole_work.has(value):
            return value
        if value.owner != owner and self.is_small(value):
            value = self.everywhere(value)
        if self.whole_work.has(value) and owner in (None, value.owner):
            value = self.part(value) if owner is not None else self.work(value, part=False)
        if value.owner is None and (owner is None or value.is_number or self.is_whole(owner)):
            part = None if owner is None or self.is_whole(owner) else self.layouts[owner]
            shape = value.aval.shape if part is None or not part.shape else part.shard
            spread = lambda values: [jnp.broadcast_to(values[0], shape)]
            return self.emit(spread, [value], [value.aval], owner, raw=True)[0] if value.uniform else value
        if value.owner == owner:
            return value
        raise Mixing("what it returns for one parameter, or for none, holds elements of another")

    def _equation(self, equation: Equation, given: list[Value], outer: Sequence[str]) -> list[Value]:
        op, name, avals = equation.op, equation.name, equation.op.made
        frames = frames_of(op, outer)
        if equation.called is not None:
            return self.read(equation.called, given, frames)
        if name == "random_bits" and any(each.axes for each in self.layouts) and any(aval.size > 1 for aval in avals):
            raise Mixing("random numbers of a parameter's shape", frames)
        chooses = bool(equation.branches) and self._must_split(given) and not op.acts
        if chooses and self.is_small(given[0]):
            given = [self.everywhere(given[0]), *given[1:]]
        if chooses and given[0].owner is None:
            cases = [self.read(branch, given[1:], frames) for branch in equation.branches]
            return [self._chosen(given[0], list(each), frames) for each in zip(*cases, strict=True)]
        given = self._met(op, given)
        if any(map(self.whole_work.has, given)):
            return self.note(equation, given, frames)
        try:
            given, owner = self._settled(op, given, frames)
        except Mixing:
            if not self.may_gather(op, given):
                raise
            return self.note(equation, given, frames)
        if owner is None:
            spread = name == _SPREAD
            uniform = (is_elementwise(name) or spread) and all(value.is_number for value in given)
            run = _given if uniform and spread else op.bind
            same = by_element(op, given) if uniform else None
            return self.emit(run, given, avals, None, uniform=uniform, by_element=same)
        if not self.is_whole(owner) and name in _STILL:
            return [given[0]._replace(aval=avals[0])]
        if not self.is_whole(owner) and name == "dot_general":  # of all dims: a sum of products
            kinds = [jax.ShapeDtypeStruct(given[0].aval.shape, avals[0].dtype)]
            product = lambda values: [jnp.asarray(values[0] * values[1], avals[0].dtype)]
            given = self.emit(product, given, kinds, owner)
            return [self.total(jnp.sum, given[0], "sum", avals[0].dtype)]
        if (total := rule_of(name).total) and given[0].aval.shape and not self.is_whole(owner):
            # A shard keeps its dims when it is flattened.
            over_all = lambda x: op.bind([x], axes=tuple(range(x.ndim)))[0]
            return [self.total(over_all, given[0], total, avals[0].dtype)]
        return self.emit(op.bind, given, avals, owner, by_element=by_element(op, given))

    def _met(self, op: Operation, given: list[Value]) -> list[Value]:
        """Scatters or spreads operands that one rank holds in full, unless all are one parameter's and the work stays there."""
        whole, owned = [each for each in given if self.whole_work.has(each)], [v for v in given if v.owner is not None]
        if not whole:
            return given
        if len({value.owner for value in owned}) == 1:
            shape = self.layouts[whole[0].owner or 0].shape
            alike = all(value.aval.shape == shape for value in owned) and op.made[0].shape == shape
            if len(whole) == len(owned) or not (alike and is_elementwise(op.name)):
                return given
        return [self.everywhere(each) if self.is_small(each) else self.part(each) for each in given]

    def _chosen(self, index: Value, cases: list[Value], frames: Sequence[str]) -> Value:
        """Runs all branches of a conditional and selects the result: sums over ranks inside a branch need all ranks."""
        if len({case.number for case in cases}) == 1:
            return cases[0]
        given, owner = self._together([index, *cases], cases[0].aval.shape, "cond", frames)
        uniform = owner is None and all(value.is_number for value in given)
        choose = lambda values: [jax.lax.select_n(values[0], *map(jnp.asarray, values[1:]))]
        return self.emit(choose, given, [cases[0].aval], owner, uniform=uniform)[0]

    def _settled(self, op: Operation, given: list[Value], frames: Sequence[str]) -> tuple[list[Value], int | None]:
        """The operands that an operation acts on, and the parameter whose elements they hold; None: the same on all ranks."""
        name, owned = op.name, [value for value in given if value.owner is not None]
        if name in _JOINING and any(value.owner is None and value.level for value in given):
            given = [self.everywhere(value) if self.is_small(value) else value for value in given]
            owned = [value for value in given if value.owner is not None]
        if not owned:
            return given, None
        if len({value.owner for value in owned}) == 1 and self.is_local(owned[0]) and not op.acts:
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
        given = [self.everywhere(value) if self.is_small(value) else value for value in given]
        if any(value.owner is not None for value in given):
            raise Mixing(name, frames)
        return given, None

    def _together(
        self, given: list[Value], shape: tuple[int, ...], name: str, frames: Sequence[str]
    ) -> tuple[list[Value], int | None]:
        """Checks operands of an elementwise operation: shards of one parameter, or values that are the same on all ranks."""
        given = [value if self.is_small(value) else self.part(value) for value in given]
        owned = [value for value in given if value.owner is not None]
        several = len({value.owner for value in owned}) > 1
        if owned and not several and self.is_local(owned[0]):
            return given, owned[0].owner
        if several or any(value.aval.shape != shape for value in owned):
            if not any(map(self.is_small, given)):
                raise Mixing(f"{name} of several parameters", frames)
            given = [self.everywhere(value) if self.is_small(value) else value for value in given]
            return self._together(given, shape, name, frames)
        if owned and not all(value.owner is not None or value.is_number for value in given):
            raise Mixing(f"{name} with an array that is not a parameter's own", frames)
        return given, owned[0].owner if owned else None

    def _must_split(self, given: Sequence[Value]) -> bool:
        """Whether values belong to several parameters, or to one that is split."""
        owned = [value for value in given if value.owner is not None]
        return len({value.owner for value in owned}) > 1 or not all(map(self.is_local, owned))

    def _still(self, value: Value) -> set[tuple[int, ...]]:
        """The shapes in which a part of a parameter has the same elements in the same order."""
        assert value.owner is not None
        rows = {(value.aval.size,), self.layouts[value.owner].shape} if value.aval.shape else set()
        return {value.aval.shape} | rows


def _given(values: Sequence[Any]) -> Sequence[Any]:
    """Returns scalars as they are, in the place of the arrays to which they would be broadcast."""
    return values


def _contracts_all(op: Operation) -> bool:
    """Whether a product contracts all dims of both operands, element with like element."""
    left, right = op.contraction.contracted
    return left == right == tuple(range(op.given[0].ndim)) == tuple(range(op.given[1].ndim))


# --------------------------------------------------------------------------------------------------
# An optimizer's update of what ranks hold: it sees its own part of every parameter, and is right, or is refused.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OnShards:
    """An optimizer's update on ranks that hold parts of the parameters.

    Attributes:
      tx: the optimizer.
      placement: the plan on its mesh.
      state: the layout of every leaf of its state.
      owners: the parameter that each belongs to, or None.
    """

    tx: optax.GradientTransformation
    placement: Placement
    state: PyTree
    owners: tuple[int | None, ...]

    @classmethod
    def of(
        cls, tx: optax.GradientTransformation, placement: Placement, state: PyTree, owners: Sequence[int | None]
    ) -> "OnShards | None":
        """Reads the optimizer's update for shards; None where every rank updates full leaves.

        Args:
          tx, placement: the optimizer, and the plan on its mesh.
          state, owners: see `opt_owners`.

        Raises:
          ValueError: when the update of shards would not be the update of the whole; says why.
        """
        layouts, plan = jax.tree.leaves(placement.params, is_leaf=is_layout), placement.plan
        held = placement.stages is not None or any(layout.axes for layout in layouts)
        if plan.update == "whole" or not held:
            return None
        on_shards = cls(tx, placement, state, tuple(owners))
        on_shards.program(jax.ShapeDtypeStruct((), jnp.float32))  # refuses what shards cannot do
        return on_shards

    def program(self, loss: Any) -> ShardedProgram:
        """The update (gradients, state, parameters, loss) -> (parameters, state), for a loss of this dtype."""
        return self._program(jnp.dtype(loss.dtype))

    @functools.cached_property
    def first(self) -> ShardedProgram:
        """The program of the optimizer's first state, from the parameters."""
        return self._read(_traced(self.tx.init, _whole_shapes(self.placement.params))[0], self._owners)

    @functools.cached_property
    def _program(self) -> Callable[[Any], ShardedProgram]:
        params, state = self._owners
        owners = ((*params, *state, *params, None), (*params, *state))
        return functools.cache(lambda loss: self._read(self._whole(loss), owners))

    @functools.cached_property
    def _whole(self) -> Callable[[Any], Program]:
        """The traced update of full arrays, for a loss of a dtype; traced once per dtype."""
        trees = (self.placement.params, self.state, self.placement.params)
        shapes = [_whole_shapes(tree) for tree in trees]
        return functools.cache(lambda loss: _traced(self._apply, *shapes, jax.ShapeDtypeStruct((), loss))[0])

    def _apply(self, grads: PyTree, opt_state: PyTree, params: PyTree, loss: Any) -> tuple[PyTree, PyTree]:
        return apply(self.tx, grads, opt_state, params, loss)

    def _read(self, program: Program, owners: Any) -> ShardedProgram:
        pipe = (AXIS,) if self.placement.stages is not None else ()
        try:
            return read_update(program, owners, self._layouts, pipe)
        except Mixing as mixing:
            raise ValueError(
                f"{culprit(self.tx, mixing.frames)} does not act element by element ({mixing.what}), so on the "
                f"shards that devices hold it would be silently wrong: {_remedy(self.placement)} updates gathered leaves, "
                "or choose an optimizer that acts element by element or on sums over all elements (adam, lion, lamb, "
                "optax.clip_by_global_norm)"
            ) from mixing

    def update(self, grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array) -> tuple[PyTree, PyTree]:
        """The update of this rank's shards, inside `shard_map`. Communicates: see `ShardedProgram.run`."""
        layouts = (self.placement.params, self.state)
        grads, params = (map_layouts(seen_shard, tree, layouts[0]) for tree in (grads, params))
        opt_state = map_layouts(seen_shard, opt_state, layouts[1])
        results = self._own(grads, opt_state, params, loss)
        if results is None:
            program = self.program(loss)
            values, structure = (
                jax.tree.leaves((grads, opt_state, params, loss)),
                jax.tree.structure((params, opt_state)),
            )
            parts = {i: value for i, value in enumerate(values) if program.owners[0][i] is not None}
            whole = {i: value for i, value in enumerate(values) if i not in parts}
            mine, loose = program.run(whole, lambda work: work(parts), dict)
            results = structure.unflatten([(mine | loose)[i] for i in range(structure.num_leaves)])
        new, state = (map_layouts(_stored_anew, *each) for each in zip(results, layouts, strict=True))
        return new, state

    def _own(self, *parts: PyTree) -> tuple[PyTree, PyTree] | None:
        """Runs the optimizer's own code on shards; None where it would do something else to a shard than to the full array.

        The program that is compared is the one that is run: it is traced once.
        """
        loss = parts[-1]
        if self.program(loss).communicates:
            return None
        try:
            program, tree = _traced(self._apply, *parts)
            same = alike(self._whole(jnp.dtype(loss.dtype)), program)
        except (TypeError, ValueError):
            return None
        if not same:
            return None
        return tree.unflatten(run_program(program, jax.tree.leaves(parts)))

    @property
    def _layouts(self) -> list[Layout]:
        return jax.tree.leaves(self.placement.params, is_leaf=is_layout)

    @property
    def _owners(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """Returns for every parameter and every leaf of the state the parameter it belongs to; None: all ranks hold it."""
        layouts, staged = self._layouts, self.placement.stages is not None
        split = [staged or bool(layout.axes) for layout in layouts]
        params = tuple(i if own else None for i, own in enumerate(split))
        return params, tuple(None if owner is None else params[owner] for owner in self.owners)


def seen_shard(shard: jax.Array, layout: Layout) -> jax.Array:
    """Returns a shard as the optimizer sees it: a scalar, which rests as one element per rank, is a scalar again.

    So are the scalars in a stack of them.
    """
    return jnp.reshape(shard, shard.shape[: len(layout.shape)]) if shard.ndim > len(layout.shape) else shard


def stored_shard(seen: Any, layout: Layout) -> Any:
    """The inverse of `seen_shard`."""
    return jnp.reshape(seen, layout.shard) if len(layout.shape) < len(layout.stored) else seen


def _stored_anew(seen: Any, layout: Layout) -> Any:
    """`stored_shard` with the padding zeroed, in which an update may have written anything."""
    return within(stored_shard(seen, layout), layout)


def alike(whole: Program, shards: Program) -> bool:
    """Whether a program traced on shards does to them what `whole` does to full arrays.

    Equation by equation: the same operation with the same options on the same values and constants. Where a shape differs, it
    acts on each element or spreads a number. Casts of varying types, which are no operations, stand for what they cast.
    """
    pairs = list(zip(shards.constants.values(), whole.constants.values(), strict=True))
    if not all(one is other or _bits(one) == _bits(other) for one, other in pairs):
        return False
    given = (*shards.inputs, *shards.constants), (*whole.inputs, *whole.constants)
    ours, left = dict[int, Any](zip(*given, strict=True)), iter(whole.equations)
    for theirs in shards.equations:
        inputs = [entry_of(atom, ours, atom) for atom in theirs.inputs]
        if theirs.name in CASTS:
            ours[theirs.outputs[0]] = inputs[0]
            continue
        equation = next(left, None)
        if equation is None or _told(inputs) != _told(equation.inputs) or not _does_the_same(equation, theirs):
            return False
        ours.update(zip(theirs.outputs, equation.outputs, strict=True))
    outputs = [entry_of(atom, ours, atom) for atom in shards.outputs]
    return next(left, None) is None and _told(outputs) == _told(whole.outputs)


def _does_the_same(ours: Equation, theirs: Equation) -> bool:
    """Whether two equations do the same, where the second one reads shards."""
    if not ours.op.is_alike(theirs.op) or len(ours.bodies) != len(theirs.bodies):
        return False
    if ours.bodies:
        plain = [{k: v for k, v in each.op.options.items() if isinstance(v, int | str)} for each in (ours, theirs)]
        return plain[0] == plain[1] and all(map(alike, ours.bodies, theirs.bodies))
    shapes = [[aval.shape for aval in (*each.op.given, *each.op.made)] for each in (ours, theirs)]
    if shapes[0] != shapes[1] and ours.name == _SPREAD:
        return shapes[0][0] == shapes[1][0] == ()
    return (shapes[0] == shapes[1] or is_elementwise(ours.name)) and ours.op.does_the_same(theirs.op)


def _told(atoms: Iterable[Any]) -> list[Any]:
    """Atoms as comparable values: constants by their text, variables by number."""
    return [str(atom.val) if is_constant(atom) else atom for atom in atoms]


def _traced(fun: Callable[..., PyTree], *args: PyTree) -> tuple[Program, Any]:
    """Traces a function into a program that keeps its calls, and returns the structure of its result."""
    traced = trace(fun, *args)
    return read_program(traced.jaxpr, no_calls), traced.out_tree


def _whole_shapes(layouts: PyTree) -> PyTree:
    return jax.tree.map(whole_shape, layouts, is_leaf=is_layout)


def _remedy(placement: Placement) -> str:
    """How a user asks for `update="whole"`."""
    if placement.stages is not None:
        return 'ax.Pipeline(..., update="whole")'
    if placement.degrees.get("fsdp", 1) > 1:
        return 'ax.FSDP(..., update="whole")'
    return 'ax.parallelize(model, mesh, ax.Plan(update="whole"))'
