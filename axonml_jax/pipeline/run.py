"""Runs a timetable of stages inside `shard_map`: a scan over ticks, buffers between stages, and the weights of each tick."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.collectives.primitives import axis_index, axis_size, shift, sum_over, vary, vary_like
from axonml_jax.compat.jaxpr import is_jaxpr, trace
from axonml_jax.compat.order import platform_around
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.compat.versions import BRANCHES_WRITE_IN_PLACE
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.model.loss import cast_floating
from axonml_jax.model.view import Variables
from axonml_jax.parallel.placement import Placement, lacking, parts_of, read_shape
from axonml_jax.parallel.plan import Remat
from axonml_jax.parallel.units import transform_of
from axonml_jax.pipeline.cut import (
    Form,
    Inputs,
    Piece,
    Pieces,
    Stage,
    StageFunction,
    StageOutput,
    TracedForward,
    TracedStage,
    cut_pieces,
    trace_stage,
)
from axonml_jax.pipeline.pack import (
    BufferGroup,
    Buffers,
    Named,
    Packing,
    PositionParts,
    Sizes,
    Slot,
    StageBuffers,
    Staging,
    Stored,
    largest,
    on_every_rank,
    on_own_rank,
    slot_value,
    sum_shared,
)
from axonml_jax.pipeline.schedules import AXIS, Table, Work, make_table
from axonml_jax.pipeline.timetable import Timetable
from axonml_jax.program.program import (
    Atom,
    Equation,
    Program,
    aval_of,
    is_constant,
    read_program,
    result_of,
    results_of,
    run,
    run_program,
)
from axonml_jax.sharding.layout import Layout, to_device_memory

# --------------------------------------------------------------------------------------------------
# What the last stage returns, microbatch by microbatch, brought to every rank of the pipeline.
# --------------------------------------------------------------------------------------------------


def outputs_of(packing: Packing, buffers: Buffers, axis: str) -> list[jax.Array]:
    """The last stage's outputs of all microbatches, [M, ...], on every rank of the pipeline.

    Args:
      packing: how one microbatch's lie.
      buffers: [M + 1, n] (see `Buffers`), a row per microbatch and the trash; zeros in all but the trash where the last
        stage is not.
      axis: the pipeline's mesh axis.

    Communicates: one all-reduce over `axis` per group.
    """
    everywhere = {group: _summed_outputs(buffer[:-1], axis) for group, buffer in buffers.items()}
    leaves = []
    for slot in packing.slots:
        rows = everywhere[slot.group][..., slot.offset : slot.offset + slot.size]
        data = jax.vmap(slot.opened)(rows) if slot.group.parts else rows.reshape(rows.shape[0], *slot.shape)
        leaves.append(data if slot.key_impl is None else jax.random.wrap_key_data(data, impl=slot.key_impl))
    return leaves


def _summed_outputs(rows: jax.Array, axis: str) -> jax.Array:
    if rows.dtype == jnp.bool_:
        return sum_over(rows.astype(jnp.int8), axis).astype(jnp.bool_)
    return sum_over(rows, axis)


# --------------------------------------------------------------------------------------------------
# Buffers with slots that ticks write and read in turn, and the shift of a buffer to the neighbouring rank.
# --------------------------------------------------------------------------------------------------


def nothing(sizes: Sizes) -> Buffers:
    """Zero buffers, which an idle rank writes and sends; they go to the trash slot and are never read."""
    return {group: vary(jnp.zeros(group.shape(size), group.dtype), group.axes) for group, size in sizes.items()}


def slots(sizes: Sizes, count: int) -> Buffers:
    """Empty buffers of `count` slots, [count, n]; where idle ranks write, the last one is for trash."""
    empty = lambda group, size: jnp.zeros((count, *group.shape(size)), group.dtype)
    return {group: vary(empty(group, size), group.axes) for group, size in sizes.items()}


def store(buffers: Buffers, values: Buffers, slot: ArrayLike) -> Buffers:
    """Replaces one slot of the buffers."""
    put = partial(jax.lax.dynamic_update_index_in_dim, axis=0, allow_negative_indices=False)
    return {group: put(buffer, values[group], slot) for group, buffer in buffers.items()}


def lend(buffers: Buffers, slot: ArrayLike) -> tuple[Buffers, ArrayLike]:
    """The buffers and the slot that a branch writes to: the buffers themselves, or one empty slot that is copied back."""
    if BRANCHES_WRITE_IN_PLACE:
        return buffers, slot
    return slots({group: buffer.shape[-1] for group, buffer in buffers.items()}, 1), jnp.zeros_like(slot)


def take_back(buffers: Buffers, written: Buffers, slot: ArrayLike) -> Buffers:
    """The buffers after a branch wrote to those lent to it (`lend`)."""
    return (
        written if BRANCHES_WRITE_IN_PLACE else store(buffers, {group: one[0] for group, one in written.items()}, slot)
    )


def shift_ring(values: Buffers, axis: str, num_ranks: int, step: int, wraps: bool) -> Buffers:
    """Sends buffers to the next rank (`step` 1) or the previous one (-1).

    Args:
      values: this rank's.
      axis: the pipeline's mesh axis.
      num_ranks: its size.
      step: the direction.
      wraps: whether the last rank sends to the first one and back, as it does with several chunks.

    Communicates: one collective-permute per group.
    """
    if num_ranks == 1:
        return values
    ring = [(rank, (rank + step) % num_ranks) for rank in range(num_ranks)]
    pairs = [(a, b) for a, b in ring if wraps or b - a == step]
    with jax.named_scope("axonml.activations" if step == 1 else "axonml.cotangents"):
        return {group: shift(value, axis, pairs) for group, value in values.items()}


# --------------------------------------------------------------------------------------------------
# Whether stages, timetable, buffers and microbatches that are to run together have sizes that agree.
# --------------------------------------------------------------------------------------------------


def refuse_disagreement(
    timetable: Timetable,
    num_stages: int,
    num_ranks: int,
    buffers: Mapping[str, tuple[StageBuffers, Buffers]],
    microbatches: Mapping[str, PyTree],
    keep_read: bool,
) -> None:
    """Refuse stages, buffers and microbatches that do not fit the timetable.

    Args:
      timetable: what is to run.
      num_stages: how many stages were given.
      num_ranks: size of the pipeline's axis.
      buffers: by name a layout and this rank's buffers.
      microbatches: by name a tree whose leaves are [M, ...].
      keep_read: whether weights are kept while a rank stays with a stage.

    Raises:
      ValueError: with all of it.
    """
    found = []
    if num_stages != timetable.num_stages:
        found.append(f"{num_stages} stages were given, and the timetable has {timetable.num_stages}")
    if num_ranks != timetable.num_ranks:
        found.append(f"the axis has {num_ranks} ranks, and the timetable {timetable.num_ranks}")
    for name, (layout, given) in buffers.items():
        found += _wrong_layout(name, layout, given, timetable)
    for name, tree in microbatches.items():
        count = timetable.num_microbatches
        wrong = {path: jnp.shape(leaf) for path, leaf in named_leaves(tree).items() if jnp.shape(leaf)[:1] != (count,)}
        found += [
            f"{name} {path or 'leaf'} of shape {shape} must begin with M = {count}" for path, shape in wrong.items()
        ]
    if keep_read and timetable.weight is not None:
        found.append("keep_read=True takes whole backwards, and the timetable splits them: read in every tick")
    if found:
        raise ValueError("the pipeline does not fit its timetable: " + "; ".join(found))


def _wrong_layout(name: str, layout: StageBuffers, given: Buffers, timetable: Timetable) -> list[str]:
    ours, theirs = (layout.num_ranks, len(layout.packings)), (timetable.num_ranks, timetable.num_stages)
    found = [] if ours == theirs else [f"the layout of {name} is of (ranks, stages) {ours}, the timetable of {theirs}"]
    shapes = {tuple(group): jnp.shape(buffer) for group, buffer in given.items()}
    wanted = {tuple(group): (size,) for group, size in layout.sizes.items()}
    if shapes != wanted:
        found.append(f"the buffers of {name} are {shapes}, and their layout has {wanted}: pack them with pack_rank")
    return found


# --------------------------------------------------------------------------------------------------
# Running one of several functions, chosen while the program runs, in which functions of one program are compiled once.
# --------------------------------------------------------------------------------------------------


def one_of(index: Any, functions: Sequence[Callable[[], Any]], looks: Sequence[Hashable]) -> Any:
    """`jax.lax.switch(index, functions)`, in which functions of equal programs are compiled once.

    Args:
      index: which function. Ranks may choose differently.
      functions: without arguments, returning the same types. Nobody differentiates through them. One that is there several
        times is compiled once.
      looks: what every function looks like. Only those that look the same are traced here and compared.

    >>> x = jnp.arange(3.0)
    >>> one_of(2, [lambda: x + 1, lambda: x * 2, lambda: x + 1], "aba").tolist()
    [1.0, 2.0, 3.0]
    """
    kept: list[Callable[[], Any]] = []
    known: list[tuple[Hashable, int, Any, Program]] = []
    branches: list[int] = []
    alone = Counter(dict(zip(functions, looks, strict=True)).values())
    for place, (function, look) in enumerate(zip(functions, looks, strict=True)):
        if (first := functions.index(function)) < place:
            branches.append(branches[first])
            continue
        if alone[look] == 1:
            branches.append(len(kept))
            kept.append(function)
            continue
        traced = trace(function)
        program = read_program(traced.jaxpr)
        same = (
            at for other, at, tree, made in known if other == look and tree == traced.out_tree and alike(made, program)
        )
        if (at := next(same, None)) is None:
            at = len(kept)
            known.append((look, at, traced.out_tree, program))
            kept.append(lambda program=program, tree=traced.out_tree: tree.unflatten(run_program(program, [])))
        branches.append(at)
    if len(kept) < len(functions):
        at = jnp.asarray(index)
        index = _entry(vary_like(jnp.asarray(branches, jnp.int32), at), at)
    return jax.lax.switch(jnp.asarray(index), kept)


def _entry(table: jax.Array, at: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(table, at, keepdims=False, allow_negative_indices=False)


def alike(one: Program, other: Program) -> bool:
    """Tells whether two programs are the same, equation by equation, with the same constants.

    >>> first, second, third = (read_program(trace(f, 1.0).jaxpr) for f in (jnp.sin, lambda x: jnp.sin(x), jnp.cos))
    >>> alike(first, second), alike(first, third)
    (True, False)
    """
    if one is other:
        return True
    if (one.inputs, len(one.equations), one.avals) != (other.inputs, len(other.equations), other.avals):
        return False
    if not _same_values(one.constants, other.constants) or not _same_atoms(one.outputs, other.outputs):
        return False
    return all(_same_equation(a, b) for a, b in zip(one.equations, other.equations, strict=True))


def _same_values(one: Mapping[int, Any], other: Mapping[int, Any]) -> bool:
    return one.keys() == other.keys() and all(_same_value(value, other[number]) for number, value in one.items())


def _same_value(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, np.ndarray | np.generic | bool | int | float | complex):
        return False
    first, second = np.asarray(one), np.asarray(other)
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def _same_atoms(one: Sequence[Atom], other: Sequence[Atom]) -> bool:
    return len(one) == len(other) and all(_same_atom(a, b) for a, b in zip(one, other, strict=True))


def _same_atom(one: Atom, other: Atom) -> bool:
    if is_constant(one) and is_constant(other):
        return one.aval == other.aval and _same_value(one.val, other.val)
    return is_constant(one) == is_constant(other) and one == other


def _same_equation(one: Equation, other: Equation) -> bool:
    if one.outputs != other.outputs or not one.op.is_alike(other.op) or not _same_atoms(one.inputs, other.inputs):
        return False
    if len(one.bodies) != len(other.bodies) or not all(map(alike, one.bodies, other.bodies)):
        return False
    return one.name.startswith("custom_") or _same_options(one.op.options, other.op.options)


def _same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the options of two equations are equal, apart from programs among them."""
    if one.keys() != other.keys():
        return False
    return all((_is_body(one[key]) and _is_body(other[key])) or _same_option(one[key], other[key]) for key in one)


def _same_option(one: Any, other: Any) -> bool:
    arrays = isinstance(one, np.ndarray | jax.Array) or isinstance(other, np.ndarray | jax.Array)
    return _same_value(one, other) if arrays else bool(one == other)


def _is_body(option: Any) -> bool:
    return is_jaxpr(option) or (isinstance(option, tuple) and bool(option) and all(map(is_jaxpr, option)))


# --------------------------------------------------------------------------------------------------
# From parameters as they rest to what the stages of one program read, once per step, and their gradients back.
#
# A parameter lives on one rank. Stages on other ranks that read it too (a tied embedding) get a copy for the step.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """Reads the parameters of one program on one rank, and reduces their gradients, inside `shard_map`.

    Attributes:
      placement: how parameters are read and gradients reduced.
      pieces: what the stages do.
      blocks: the weights (positions) of every block of the model, by its path.
    """

    placement: "Placement"
    pieces: Sequence[Piece]
    blocks: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def staging(self) -> Staging:
        """The buffers in which parameters rest, and their stages."""
        assert self.placement.stages is not None
        return self.placement.stages

    @property
    def in_ticks(self) -> bool:
        """Whether parameters are gathered in ticks, not once before all."""
        return self.staging.policy.in_ticks

    @cached_property
    def held(self) -> list[list[int]]:
        """The weights (positions) of every stage: those that live on it and those that it reads."""
        own: list[set[int]] = [set() for _ in self.pieces]
        for i, weight in enumerate(self.staging.weights):
            own[weight.stage].add(i)
        return [sorted(leaves.union(piece.weights)) for leaves, piece in zip(own, self.pieces, strict=True)]

    @cached_property
    def layout(self) -> StageBuffers:
        """The buffers of the stages' parameters during the step."""
        counts = Counter(i for leaves in self.held for i in leaves)
        shared = {i: self.staging.weights[i].name for i, count in counts.items() if count > 1}
        stored = [[self._stored(i, shared.get(i)) for i in leaves] for leaves in self.held]
        made = StageBuffers.of(stored, self.staging.num_ranks)
        return made if shared or self.staging.stack is None else self._where_they_rest(made)

    def _where_they_rest(self, made: StageBuffers) -> StageBuffers:
        """The same buffers with every weight where it rests, if none is cast, gathered or copied: then nothing is moved."""
        rests = [self.staging.slots(rank) for rank in range(made.num_ranks)]
        packings = []
        for stage, (leaves, packing) in enumerate(zip(self.held, made.packings, strict=True)):
            slots = [rests[stage % made.num_ranks][i] for i in leaves]
            if any(a != b._replace(offset=a.offset) for a, b in zip(slots, packing.slots, strict=True)):
                return made
            packings.append(Packing(tuple(slots)))
        return replace(made, packings=tuple(packings))

    def read(self, params: Named, frozen: Named) -> Buffers:
        """Reads the parameters of this rank's stages from its resting buffers.

        Communicates: what the plan's strategies do to gather, and one all-reduce over `pipe` per copied parameter.
        """
        params, frozen = to_device_memory((params, frozen), self.placement.plan.offload.params)
        resting = self.staging.resting(params, frozen)
        if self._as_they_rest:
            return self._varied(resting)

        def own(rank: int) -> Buffers:
            values = self._resting_leaves(resting, rank)
            if not self.in_ticks and values:
                layouts = [self.staging.weights[i].layout for i in values]
                values = dict(zip(values, self.placement.read(list(values.values()), layouts), strict=True))
            slots = self._slots(rank)
            packing = Packing(tuple(slots[i] for i in values))
            return self._varied(packing.pack(list(values.values()), self.layout.sizes))

        buffers = on_own_rank(axis_index(AXIS), self.staging.num_ranks, own)
        with jax.named_scope("axonml.parameters"):
            return self._varied(sum_shared(self.layout, buffers, AXIS))

    def stage(self, number: int, apply: StageFunction) -> Stage:
        """A stage of the program; its gathers are in its ticks if the plan gathers there."""
        place = {leaf: i for i, leaf in enumerate(self.held[number])}
        blocks = {path: [place[leaf] for leaf in leaves if leaf in place] for path, leaves in self.blocks.items()}
        blocks = {path: leaves for path, leaves in blocks.items() if leaves}
        stage = Stage(apply, names=[self.staging.weights[leaf].name for leaf in place], blocks=blocks)
        if not self.in_ticks:
            return stage
        layouts = [self.staging.weights[i].layout for i in self.held[number]]

        def read(leaves: Sequence[jax.Array]) -> list[jax.Array]:
            return self.placement.read(leaves, layouts)

        def sync(grads: Sequence[Any]) -> list[Any]:
            there = [i for i, grad in enumerate(grads) if grad is not None]
            given = [grads[i] for i in there], [layouts[i] for i in there]
            synced = dict(zip(there, self._over_inner(*given, number), strict=True))
            return [synced.get(i) for i in range(len(grads))]

        return replace(stage, read=read, sync=sync)

    def grad_dtype(self, dtype: str) -> Any:
        """Returns the dtype in which the gradients of parameters accumulate that are read in `dtype`."""
        accumulate = self.placement.plan.precision.accumulate_dtype
        weights = enumerate(self.staging.weights)
        kinds = [weight.layout.dtype for i, weight in weights if self._read_dtype(i) == dtype]
        return jnp.result_type(*(accumulate(kind) for kind in kinds)) if kinds else jnp.dtype(dtype)

    def grads_at_rest(self, grads: Buffers) -> Named:
        """Reduces the gradients of what the stages read to those of the resting parameters, summed over all ranks.

        Communicates: what the plan's strategies do to synchronize; over `data` one all-reduce per group and bucket.
        """
        store = self.staging.params
        done = self.in_ticks or all(self.placement.ranks(axis) == 1 for axis in self._inner_axes)
        if done and (groups := self._resting_groups) is not None:
            own = self._accumulated({rests: grads[read] for read, rests in groups.items()})
        else:
            own = on_own_rank(axis_index(AXIS), self.staging.num_ranks, lambda rank: self._own_grads(grads, rank))
        return store.named(self._over_outermost(own))

    def _own_grads(self, grads: Buffers, rank: int) -> Buffers:
        slots, rests = self._slots(rank), self.staging.slots(rank)
        own = [i for i in rests if not self.staging.weights[i].frozen]
        values = Packing(tuple(slots[i] for i in own)).unpack(grads)
        if not self.in_ticks and own:
            layouts = [self.staging.weights[i].layout for i in own]
            values = self._over_inner(values, layouts, rank)
        packing = Packing(tuple(rests[i] for i in own))
        packed = self._accumulated(packing.pack(values, self.staging.params.buffers.sizes))
        outermost = as_axes(self._outermost or ())
        return {group: vary(buffer, (AXIS, *outermost, *group.axes)) for group, buffer in packed.items()}

    def _over_inner(self, grads: Sequence[Any], layouts: Sequence[Layout], bucket: int) -> list[jax.Array]:
        """Sums gradients over all axes but the outermost, if that one reduces buffers."""
        placement, inner = self.placement, self._inner_axes
        synced = placement.sync(parts_of(placement, grads), layouts, bucket, axes=inner)
        return [grad.taken(lacking(placement, inner)) for grad in synced]

    def _accumulated(self, grads: Buffers) -> Buffers:
        accumulate = self.placement.plan.precision.accumulate_dtype
        return {group: buffer.astype(accumulate(group.dtype)) for group, buffer in grads.items()}

    def _over_outermost(self, grads: Buffers) -> Buffers:
        if self._outermost is None or not grads:
            return grads
        layouts = [
            Layout.replicated(jax.ShapeDtypeStruct(buffer.shape, group.dtype)) for group, buffer in grads.items()
        ]
        with jax.named_scope("axonml.gradients"):
            inner = [axis for axis in self.placement.strategies if axis != self._outermost]
            parts = parts_of(self.placement, grads.values(), inner)
            synced = [grad.taken() for grad in self.placement.reduced(parts, layouts, self._outermost)]
        return self._accumulated(dict(zip(grads, synced, strict=True)))

    @cached_property
    def _outermost(self) -> AxisNames | None:
        """The outermost axis if it keeps parameters replicated: over it a rank's buffers are reduced as they are."""
        axis = next(iter(self.placement.strategies), None)
        whole = axis is not None and self.placement.strategies[axis].role.parameters == "whole"
        return axis if whole else None

    @cached_property
    def _inner_axes(self) -> list[AxisNames]:
        """The axes over which gradients are synchronized leaf by leaf."""
        split = [axis for axis, each in self.placement.strategies.items() if each.role.batch is not None]
        return [axis for axis in split if axis != self._outermost]

    @cached_property
    def _as_they_rest(self) -> bool:
        """Tells whether the stages read parameters as they rest: nothing is cast, gathered or copied."""
        resting = {**self.staging.params.buffers.sizes, **self.staging.frozen.buffers.sizes}
        if dict(self.layout.sizes) != resting:
            return False
        return all(self._slots(rank) == self.staging.slots(rank) for rank in range(self.staging.num_ranks))

    @cached_property
    def _resting_groups(self) -> dict[BufferGroup, BufferGroup] | None:
        """The resting buffer of every buffer that is read, if trained leaves lie at the same places in both; else None.

        Where ranks differ in what they move, XLA makes new buffers beside the old ones.
        """
        sizes, found = self.staging.params.buffers.sizes, {}
        for rank in range(self.staging.num_ranks):
            resting = self.staging.slots(rank)
            for leaf, slot in self._slots(rank).items():
                rests = slot if slot.group.frozen else resting.get(leaf)
                if rests is None or slot != rests._replace(group=slot.group):
                    return None
                if not slot.group.frozen and found.setdefault(slot.group, rests.group) != rests.group:
                    return None
        alike = len({*found.values()}) == len(found) == len(sizes)
        return found if alike and all(self.layout.sizes[a] == sizes[b] for a, b in found.items()) else None

    def _slots(self, rank: int) -> dict[int, Slot]:
        """The slots of the leaves that a rank holds during the step."""
        found: dict[int, Slot] = {}
        for stage in self.layout.stages(rank):
            found |= zip(self.held[stage], self.layout.packings[stage].slots, strict=True)
        return found

    def _resting_leaves(self, resting: Buffers, rank: int) -> dict[int, jax.Array]:
        slots = self.staging.slots(rank)
        return dict(zip(slots, Packing(tuple(slots.values())).unpack(resting), strict=True))

    def _stored(self, leaf: int, shared: str | None) -> Stored:
        weight = self.staging.weights[leaf]
        layout, frozen, rows = weight.layout, weight.frozen, weight.row is not None
        if self.in_ticks:
            return Stored(layout.shard, layout.dtype, layout.axes, frozen, shared, rows=rows)
        axes = tuple(axis for axis in layout.axes if axis in self.placement.axes.layers)
        return Stored(read_shape(self.placement, layout), self._read_dtype(leaf), axes, frozen, shared, rows=rows)

    def _read_dtype(self, leaf: int) -> Any:
        layout = self.staging.weights[leaf].layout
        compute = None if self.in_ticks else self.placement.plan.precision.compute
        return cast_floating(jnp.zeros((), layout.dtype), compute).dtype

    def _varied(self, buffers: Buffers) -> Buffers:
        axes = (AXIS, *self.placement.axes.batch)
        return {group: vary(buffer, (*axes, *group.axes)) for group, buffer in buffers.items()}


# --------------------------------------------------------------------------------------------------
# Values that a stage computes from its microbatch alone are replicated over an axis that is left to XLA's partitioner.
#
# If labels were split, the partitioner would shift them by a permute inside one stage's branch.
# --------------------------------------------------------------------------------------------------


class ReplicatedBatch:
    """Runs the equations of one stage (see `run`), and replicates results of the microbatch alone over the automatic axis.

    Args:
      batch: numbers of the microbatch's leaves.
      constants: numbers of the program's constants.
    """

    def __init__(self, batch: Collection[int], constants: Collection[int]):
        self._replicated, self._constants = set(batch), set(constants)

    def __call__(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        """The results of an equation on the microbatch and constants alone, replicated unless they grow; None: of others."""
        read = set(equation.read) - self._constants
        if not read:
            self._constants.update(equation.outputs)
        if not read or not read <= self._replicated:
            return None
        made = equation.op.bind(operands)
        if max((x.size for x in made), default=0) > max(given.size for given in equation.op.given):
            return made
        self._replicated.update(equation.outputs)
        return [on_every_rank(x) for x in made]


# --------------------------------------------------------------------------------------------------
# The stages of a pipeline traced one after the other: what each sends, keeps and returns, and how all of it is packed.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """One stage with its program, and how its arrays are packed.

    Attributes:
      stage: the stage as given.
      traced: its program.
      weights, state: where its leaves lie on its rank.
      read: how the weights that it reads are packed.
      x: how the activations it receives are packed; empty on the first stage.
      y: how those that it sends are packed.
      residuals: how what it keeps for its backward is packed; None when nothing is differentiated.
      forward: makes that, and the results; None likewise.
      places: offsets as values of the running program, by offset; those not in it are constants.
    """

    stage: Stage
    traced: TracedStage
    weights: Packing
    state: Packing
    read: Packing
    x: Packing
    y: Packing
    residuals: Packing | None = None
    forward: TracedForward | None = None
    places: Mapping[int, jax.Array] = field(default_factory=dict)

    @property
    def looks(self) -> tuple:
        """A key of what stages that run the same program have in common: equations and shapes."""
        arrays = tuple(tuple((slot.group, slot.shape) for slot in packing.slots) for packing in self._packings)
        return len(self.traced.body.equations), arrays

    @property
    def runs(self) -> tuple:
        """A key that is equal only for stages that were traced as one, read alike, and lie at the same places."""
        placed = lambda slot: slot._replace(place=None, offset=slot.offset if slot.place is None else id(slot.place))
        arrays = tuple(tuple(map(placed, packing.slots)) for packing in (*self._packings, self.dy))
        return id(self.forward or self.traced), id(self.stage.read), id(self.stage.sync), arrays

    @property
    def _packings(self) -> tuple[Packing, ...]:
        return self.weights, self.state, self.read, self.x, self.y, self.residuals or Packing(())

    @property
    def dx(self) -> Packing:
        """The packing of the gradients of what it receives."""
        return _part(self.x, self.traced.varied_x)

    @property
    def dy(self) -> Packing:
        """The packing of the gradients of what it sends."""
        return _part(self.y, self.traced.varied_y).at(self.places)


@dataclass(frozen=True)
class TracedLine:
    """All stages as traced, and the sizes of the buffers that every rank needs.

    Attributes:
      members: the stages in order.
      loss_like, aux_like: zeros, typed like the loss and the last stage's metrics.
    """

    members: tuple[Member, ...]
    loss_like: jax.Array
    aux_like: tuple[jax.Array, ...]

    @property
    def activations(self) -> Sizes:
        """The buffer sizes that hold any stage's input activations."""
        return largest(member.x.sizes for member in self.members)

    @property
    def cotangents(self) -> Sizes:
        """The buffer sizes that hold the gradients of any stage's input activations."""
        return largest(member.dx.sizes for member in self.members)

    @property
    def residuals(self) -> Sizes:
        """The buffer sizes that hold the residuals that any stage keeps for its backward."""
        return largest(member.residuals.sizes for member in self.members if member.residuals is not None)

    @property
    def read(self) -> Sizes:
        """The buffer sizes that hold the weights that any stage reads."""
        return largest(member.read.sizes for member in self.members)

    @property
    def outputs(self) -> Sizes:
        """The buffer sizes that hold the last stage's outputs."""
        return self.members[-1].y.sizes


@dataclass(frozen=True)
class Held:
    """The weights, states and microbatches that a rank has when stages are traced or run, inside `shard_map`.

    Attributes:
      layout, states_layout: where parameters and states lie.
      weights, states: this rank's buffers.
      given: leaves of the microbatches and their keys, each [M, ...].
      given_tree: the structure of (batch, keys).
      axis: the pipeline's mesh axis.
      positions: which of what stages send and keep XLA's partitioner splits; None: none of it.
    """

    layout: StageBuffers
    states_layout: StageBuffers
    weights: Buffers
    states: Buffers
    given: Sequence[jax.Array]
    given_tree: Any
    axis: str
    positions: PositionParts | None = None

    def microbatch(self, index: ArrayLike) -> list[jax.Array]:
        """One microbatch and its key, typed as varying over the pipeline too: a cast inside a stage would be kept.

        Where positions are split, every rank has the whole microbatch: of a shift of split labels the partitioner would make a
        permute in one stage's branch.
        """
        row = partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False, allow_negative_indices=False)
        rows = [vary(row(x), self.axis) for x in self.given]
        return rows if self.positions is None else [on_every_rank(x) for x in rows]

    def packing(self, arrays: Sequence[Any], known: Sequence[int | None] = ()) -> Packing:
        """The packing of arrays that a stage sends or keeps; `known` are dims of them that are split."""
        if self.positions is None:
            return Packing.of(arrays, self.axis)
        dims = [self.positions.dim_of(array.shape) for array in arrays]
        for i, dim in enumerate(known):
            dims[i] = dims[i] if dim is None else dim
        return Packing.of(arrays, self.axis, (self.positions.parts, dims))


Forms = Callable[[TracedLine], Sequence[Form]]
"""The form of every stage's forward, from the line without residuals."""


def trace_line(stages: Sequence[Stage], held: Held, forms: Forms | None) -> TracedLine:
    """Traces every stage on the outputs of the one before.

    Args:
      stages: the stages, in order.
      held: what this rank has.
      forms: how forwards are traced; None: nothing is differentiated.

    Raises:
      ValueError: when a loss is no floating scalar, or a state comes back otherwise than it was given.
    """
    members: list[Member] = []
    given: list[Inputs] = []
    for stage in stages:
        member, inputs = _member(stage, held, members)
        members.append(member)
        given.append(inputs)
    line = _line(members, held)
    return line if forms is None else replace(line, members=_differentiated(forms(line), members, given, held))


def _line(members: Sequence[Member], held: Held) -> TracedLine:
    losses = [member.traced.aval(member.traced.places.loss) for member in members]
    wrong = [f"stage {i}: {loss.str_short()}" for i, loss in enumerate(losses) if loss.shape or not _is_float(loss)]
    if wrong:
        raise ValueError(f"the loss of a stage must be a floating scalar, not {'; '.join(wrong)}")
    axes = frozenset({held.axis}).union(*map(varying_axes, losses))
    last = members[-1].traced
    metrics = [last.aval(atom) for atom in last.places.aux]
    return TracedLine(
        tuple(members),
        vary(jnp.zeros((), losses[-1].dtype), tuple(axes)),
        tuple(vary(jnp.zeros(x.shape, _summed_losses(x.dtype)), (held.axis, *varying_axes(x))) for x in metrics),
    )


def _differentiated(
    forms: Sequence[Form], members: Sequence[Member], given: Sequence[Inputs], held: Held
) -> tuple[Member, ...]:
    """The members with their forwards; stages that run the same program and keep alike share one."""
    known: dict[tuple, tuple[TracedForward, Packing]] = {}
    found: list[Member] = []
    for member, inputs, form in zip(members, given, forms, strict=True):
        look = id(member.traced), form.kept
        if look not in known:
            forward = TracedForward.of(form.traced, inputs, form.transform)
            split = () if held.positions is None else forward.split_dims(held.positions.parts.axis)
            known[look] = forward, held.packing(forward.residuals, split)
        found.append(replace(member, forward=known[look][0], residuals=known[look][1]))
    return tuple(found)


def _member(stage: Stage, held: Held, members: Sequence[Member]) -> tuple[Member, Inputs]:
    """The next member and its inputs; it shares the program of an earlier stage that does the same."""
    number, before = len(members), members[-1] if members else None
    weights, state = held.layout.packings[number], held.states_layout.packings[number]
    x = Packing(()) if before is None else before.y
    read = list(stage.read(weights.unpack(held.weights)))
    inputs = Inputs(read, held.microbatch(0), x.unpack(nothing(x.sizes)), state.unpack(held.states))
    trained = [not slot.group.frozen for slot in weights.slots]
    varied = [] if before is None else before.traced.varied_y
    traced = trace_stage(stage, inputs, _arguments(number, held, before), trained, varied)
    _check_state(number, traced, inputs.state)
    twin = next((each for each in members if _does_the_same(each.traced, traced)), None)
    traced = traced if twin is None else twin.traced
    y = held.packing([traced.aval(atom) for atom in traced.places.y])
    return Member(stage, traced, weights, state, Packing.of(read, held.axis), x, y), inputs


def _does_the_same(one: TracedStage, other: TracedStage) -> bool:
    """Whether two stages run equal programs on equally packed inputs and outputs."""
    trees = [(each.y_tree, each.aux_tree, each.state_tree) for each in (one, other)]
    read = [(each.numbers, each.body.prelude.varied) for each in (one, other)]
    return trees[0] == trees[1] and read[0] == read[1] and alike(one.program, other.program)


def _arguments(number: int, held: Held, before: Member | None) -> Callable[[Inputs], tuple]:
    """A function from the leaves of a stage's inputs to the arguments of its `apply`."""

    def arguments(leaves: Inputs) -> tuple:
        batch, key = held.given_tree.unflatten(leaves.given)
        x = None if before is None else before.traced.y_tree.unflatten(leaves.x)
        state = held.states_layout.treedefs[number].unflatten(leaves.state)
        return held.layout.treedefs[number].unflatten(leaves.weights), x, batch, key, state

    return arguments


def _check_state(number: int, traced: TracedStage, given: Sequence[jax.Array]) -> None:
    """Refuse a stage that changes more of its state than values: a rank's states lie in one buffer all the time."""
    avals = [traced.aval(atom) for atom in traced.places.state]
    before = [f"{x.dtype}{list(x.shape)}" for x in given]
    after = [f"{x.dtype}{list(x.shape)}" for x in avals]
    if before != after:
        raise ValueError(f"stage {number} was given a state of leaves {before} and returned {after}: return them alike")
    for new, old in zip(avals, given, strict=True):
        if more := varying_axes(new) - varying_axes(old):
            raise ValueError(
                f"stage {number}: a state of shape {old.shape} comes back varying over {sorted(more)}, over which it was the "
                "same on all ranks: average it there, or give states that vary over these axes"
            )


def _part(packing: Packing, places: Sequence[int]) -> Packing:
    """The packing of some of the arrays alone, from offset 0."""
    ends: dict = {}
    slots = []
    for slot in (packing.slots[i] for i in places):
        slots.append(slot._replace(offset=ends.get(slot.group, 0), place=None))
        ends[slot.group] = slots[-1].offset + slot.size
    return Packing(tuple(slots))


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _summed_losses(dtype: Any) -> Any:
    """The dtype of the sum of a metric over microbatches: of booleans a count."""
    return jnp.int32 if dtype == jnp.bool_ else dtype


# --------------------------------------------------------------------------------------------------
# Where a stage's arrays begin in their buffers, as values of the running program instead of constants.
#
# XLA:CPU compiles a kernel for every operation that differs, and a constant is part of one: blocks of one kind that
# read, write and add at places of their own share no kernel. The places are those of the rank's own stages. Each of
# them comes out of a conditional between ranks: an array of places would be read at constant indices.
# --------------------------------------------------------------------------------------------------

LIMIT = 2**31
"""Buffer elements from which on an index of 32 bits does not reach."""


def with_places(line: TracedLine, rank: jax.Array, num_ranks: int, axis: str) -> TracedLine:
    """The line with the offsets of its members' arrays as values of the running program, on CPUs.

    Args:
      line: the stages; stage p is one of rank p mod S.
      rank: this rank, inside `shard_map`.
      num_ranks: S.
      axis: the pipeline's mesh axis.
    """
    slots = [_slots(member) for member in line.members]
    if platform_around() != "cpu" or any(slot.offset + slot.size >= LIMIT for found in slots for slot in found):
        return line
    offsets, members = [sorted({slot.offset for slot in found}) for found in slots], []
    for first in range(0, len(offsets), num_ranks):
        chunk = offsets[first : first + num_ranks]
        values = _values(chunk, rank, axis)
        for member, found in zip(line.members[first:], chunk, strict=False):
            members.append(_placed(member, dict(zip(found, values, strict=False))))
    return replace(line, members=tuple(members))


def _values(chunk: Sequence[Sequence[int]], rank: jax.Array, axis: str) -> list[jax.Array]:
    """The offsets of this rank's own stage, among one stage per rank; padded to the stage with most of them."""
    count = max(map(len, chunk))

    def own(rank: int) -> list[jax.Array]:
        return [vary(jnp.asarray(offset, jnp.int32), axis) for offset in (*chunk[rank], *[0] * count)[:count]]

    return on_own_rank(rank, len(chunk), own)


def _slots(member: Member) -> list[Slot]:
    packings = [member.weights, member.state, member.read, member.x, member.dy, member.residuals]
    return [slot for packing in packings if packing is not None for slot in packing.slots]


def _placed(member: Member, places: dict[int, jax.Array]) -> Member:
    return replace(
        member,
        weights=member.weights.at(places),
        state=member.state.at(places),
        read=member.read.at(places),
        x=member.x.at(places),
        residuals=None if member.residuals is None else member.residuals.at(places),
        places=places,
    )


# --------------------------------------------------------------------------------------------------
# What a rank does in one tick: one of the stages' forwards, one of their backwards, or nothing.
# --------------------------------------------------------------------------------------------------

Read = Callable[[Member], Sequence[jax.Array]]
"""Gives the weights that a stage reads, in its own branch."""

Accumulate = Callable[[Member, Buffers, Sequence[Any]], Buffers]
"""`accumulate(member, grads, gradients of what it read) -> grads`, in its own branch."""

Part = Literal["both", "input", "weight"]
"""Which gradients a backward computes: both, those of the inputs alone, or those of the weights alone."""


class Made(NamedTuple):
    """The results of a tick's forward.

    Attributes:
      y: for the next stage.
      output: what the last stage returns.
      residuals: the slots for backwards, with this forward's stored.
      states: the rank's states.
      loss, aux: those of this microbatch.
    """

    y: Buffers
    output: Buffers
    residuals: Buffers
    states: Buffers
    loss: jax.Array
    aux: Sequence[jax.Array]


def forward(
    line: TracedLine,
    held: Held,
    activations: Buffers,
    residuals: Buffers,
    slot: ArrayLike,
    states: Buffers,
    work: Work,
    read: Read,
) -> Made:
    """Runs one forward, of the stage that `work` names.

    Args:
      line: the stages.
      held: this rank's weights and batch.
      activations: received, by slot.
      residuals: what forwards keep for backwards, by slot. A stage writes there itself: nothing is packed and copied.
      slot: where it writes.
      states: the rank's.
      work: what to do, a number in each field.
      read: gives its weights.
    """

    def idle() -> Made:
        sent, output = nothing(line.activations), nothing(line.outputs)
        return Made(sent, output, residuals, states, line.loss_like, line.aux_like)

    def run(member: Member) -> Made:
        inputs = Inputs(
            list(read(member)),
            held.microbatch(work.microbatch),
            member.x.unpack(activations, work.source),
            member.state.unpack(states),
        )
        if member.forward is None or member.residuals is None:
            result, kept = member.traced.apply(inputs), residuals
        else:
            result, values = member.forward.apply(inputs)
            kept = member.residuals.store(residuals, values, slot)
        last = member is line.members[-1]
        aux = line.aux_like
        if last:
            aux = [vary_like(x.astype(like.dtype), like) for x, like in zip(result.aux, aux, strict=True)]
        return Made(
            nothing(line.activations) if last else member.y.pack(result.y, line.activations),
            member.y.pack(result.y, line.outputs) if last else nothing(line.outputs),
            kept,
            member.state.write(states, result.state),
            vary_like(result.loss.astype(line.loss_like.dtype), line.loss_like),
            tuple(aux),
        )

    return _switch(line, work, run, idle)


def backward(
    line: TracedLine,
    held: Held,
    residuals: Buffers,
    cotangents: Buffers,
    grads: Buffers,
    work: Work,
    seed: Any,
    part: Part,
    read: Read,
    accumulate: Accumulate,
) -> tuple[Buffers, Buffers]:
    """Runs one backward, of the stage that `work` names.

    Args:
      line: the stages.
      held: this rank's weights and batch.
      residuals: what forwards kept, by slot.
      cotangents: received, by slot.
      grads: gradients so far.
      work: what to do, a number in each field.
      seed: the gradient of every microbatch's loss.
      part: which gradients.
      read: gives its weights.
      accumulate: adds their gradients.

    Returns:
      The gradient of the stage's input for the stage before, and the gradients so far with this one's added.
    """

    def idle() -> tuple[Buffers, Buffers]:
        return nothing(line.cotangents), grads

    def run(member: Member) -> tuple[Buffers, Buffers]:
        assert member.residuals is not None and member.forward is not None
        inputs = Inputs(list(read(member)), held.microbatch(work.microbatch), (), ())
        saved = replace(member.forward.saved, residuals=member.residuals.unpack(residuals, work.slot))
        last = member is line.members[-1]
        dy = [_zero(member, i) for i in member.traced.varied_y] if last else member.dy.unpack(cotangents, work.source)
        dx, of_weights = member.traced.backward(saved, inputs, dy, seed)
        sent = nothing(line.cotangents) if part == "weight" else member.dx.pack(dx, line.cotangents)
        return sent, grads if part == "input" else accumulate(member, grads, of_weights)

    return _switch(line, work, run, idle)


def _zero(member: Member, place: int) -> jax.Array:
    """Zeros as the gradients of the last stage's outputs, which are not differentiated."""
    return member.traced.body.cotangent(member.traced.places.y[place])  # pyright: ignore[reportArgumentType]


def _switch(line: TracedLine, work: Work, run: Callable[[Member], Any], idle: Callable[[], Any]) -> Any:
    last = line.members[-1]  # it alone returns what it makes
    kinds = [(member is last, member.runs) for member in line.members]
    branches = {kind: lambda member=member: run(member) for kind, member in zip(kinds, line.members, strict=True)}
    functions = [branches[kind] for kind in kinds]
    return one_of(work.stage, [*functions, idle], [*(member.looks for member in line.members), None])


# --------------------------------------------------------------------------------------------------
# How a tick gets the weights of its stage and adds their gradients: read in every tick, or kept from turn to turn.
#
# A rank turns to another of its stages rarely (in an interleaved schedule every S ticks). What `Stage.read` gives may
# be kept until then, and `Stage.sync` called once when the rank leaves the stage.
# --------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The weights and gradients that a rank keeps of the stages that it is at.

    Attributes:
      forward, backward: weights as read, of the last forward's stage and of the last backward's.
      grads: gradients of the latter since the rank turned to it.
    """

    forward: Buffers
    backward: Buffers
    grads: Buffers


@dataclass(frozen=True)
class EachTick:
    """Gathers parameters in every forward and backward of a stage, and reduces gradients right after.

    Attributes:
      held: this rank's weights.
    """

    held: Held

    def start(self) -> Kept | None:
        """Nothing is kept from tick to tick."""
        return None

    def turned(self, kept: Any, table: Table) -> Any:
        """The value that is kept while this tick works."""
        return kept

    def forward(self, kept: Any) -> Read:
        """The reader of a forward's weights."""
        return lambda member: _read(member, self.held)

    def backward(self, kept: Any) -> Read:
        """The reader of a backward's weights."""
        return self.forward(kept)

    def adding(self, kept: Any, grads: Buffers) -> Buffers:
        """The buffers to which this tick's backward adds gradients."""
        return grads

    def accumulate(self, member: Member, grads: Buffers, of_weights: Sequence[Any]) -> Buffers:
        """Adds the gradients of a stage's weights."""
        return _accumulated(member, grads, of_weights)

    def added(self, kept: Any, grads: Buffers, added: Buffers, table: Table) -> tuple[Buffers, Any]:
        """The rank's gradients, and the value that is kept, after this tick's backward."""
        return added, kept


@dataclass(frozen=True)
class EachTurn:
    """Gathers parameters when a rank turns to a stage, and reduces gradients when it leaves it; methods as `EachTick`'s.

    Attributes:
      line: the stages.
      held: this rank's weights.
      grads: the rank's gradients, of which only groups and dtypes are read; empty: nothing is differentiated.
    """

    line: TracedLine
    held: Held
    grads: Buffers

    def start(self) -> Kept:
        """Empty buffers of weights and gradients."""
        sizes = largest(self._packing(member).sizes for member in self.line.members)
        return Kept(nothing(self.line.read), nothing(self.line.read) if self.grads else {}, nothing(sizes))

    def turned(self, kept: Any, table: Table) -> Any:
        """Gathers the weights of a stage that begins. Communicates: what `Stage.read` does, in that stage's branch."""
        assert table.turns is not None
        forward = self._begun(kept.forward, table.turns.forward)
        return kept._replace(
            forward=forward, backward=self._begun(kept.backward, table.turns.backward) if self.grads else {}
        )

    def forward(self, kept: Any) -> Read:
        """Unpacks the weights that are kept."""
        return lambda member: member.read.unpack(kept.forward)

    def backward(self, kept: Any) -> Read:
        """Unpacks the weights that are kept."""
        return lambda member: member.read.unpack(kept.backward)

    def adding(self, kept: Any, grads: Buffers) -> Buffers:
        """The gradients that are kept since the rank turned to the stage."""
        return kept.grads

    def accumulate(self, member: Member, grads: Buffers, of_weights: Sequence[Any]) -> Buffers:
        """Adds gradients in the form in which weights were read."""
        return self._packing(member).add(grads, [of_weights[i] for i in self._trained(member)])

    def added(self, kept: Any, grads: Buffers, added: Buffers, table: Table) -> tuple[Buffers, Any]:
        """Reduces the gradients of a stage that the rank leaves. Communicates: what `Stage.sync` does, in its branch."""
        if table.turns is None or table.turns.left is None:
            return grads, kept

        def sync(member: Member) -> tuple[Buffers, Buffers]:
            of_weights: list[Any] = [None] * len(member.weights.slots)
            for i, value in zip(self._trained(member), self._packing(member).unpack(added), strict=True):
                of_weights[i] = value
            zeros = {group: vary_like(jnp.zeros_like(buffer), buffer) for group, buffer in added.items()}
            return _accumulated(member, grads, of_weights), zeros

        new, begun = self._switch(table.turns.left, sync, (grads, added))
        return new, kept._replace(grads=begun)

    def _begun(self, kept: Buffers, begins: Any) -> Buffers:
        def read(member: Member) -> Buffers:
            return member.read.pack(list(_read(member, self.held)), self.line.read)

        return self._switch(begins, read, kept)

    def _switch(self, stage: Any, run: Callable[[Member], Any], otherwise: Any) -> Any:
        branches = [lambda member=member: run(member) for member in self.line.members]
        looks = [*(member.looks for member in self.line.members), None]
        return one_of(stage, [*branches, lambda: otherwise], looks)

    def _trained(self, member: Member) -> list[int]:
        return [i for i, slot in enumerate(member.weights.slots) if slot.group in self.grads]

    def _packing(self, member: Member) -> Packing:
        """The packing of the gradients of read weights, in the dtype in which they accumulate."""
        ends: dict = {}
        slots: list[Slot] = []
        for i in self._trained(member):
            slot, dtype = member.read.slots[i], self.grads[member.weights.slots[i].group].dtype
            group = slot.group._replace(dtype=jnp.dtype(dtype).name)
            slots.append(slot._replace(group=group, offset=ends.get(group, 0), place=None))
            ends[group] = slots[-1].offset + slot.size
        return Packing(tuple(slots)).at(member.places)


def _read(member: Member, held: Held) -> Sequence[jax.Array]:
    return member.stage.read(member.weights.unpack(held.weights))


def _accumulated(member: Member, grads: Buffers, of_weights: Sequence[Any]) -> Buffers:
    stored = member.stage.sync(of_weights)
    trained = [i for i, slot in enumerate(member.weights.slots) if slot.group in grads and stored[i] is not None]
    packing = replace(member.weights, slots=tuple(member.weights.slots[i] for i in trained))
    return packing.add(grads, [stored[i] for i in trained])


# --------------------------------------------------------------------------------------------------
# Runs any timetable: a scan over ticks with one forward and one backward in each, and two shifts (docs/adr/0008).
# --------------------------------------------------------------------------------------------------


class PipelineResult(NamedTuple):
    """The results of a pipeline on one rank.

    Attributes:
      loss: seed times the sum over stages and microbatches, the same on every rank of the pipeline.
      aux: the last stage's metrics summed over microbatches, the same on every rank of the pipeline.
      outputs: what the last stage returned, [M, ...], the same on every rank of the pipeline.
      grads: gradients of `loss` by the rank's trained parameters, one buffer per group that is not frozen; not reduced over
        other axes. Empty for a timetable of forwards alone.
      states: the rank's states after the last microbatch.
    """

    loss: jax.Array
    aux: PyTree
    outputs: PyTree
    grads: Buffers
    states: Buffers


class _Carry(NamedTuple):
    """The state that a tick hands to the next one."""

    activations: Buffers
    cotangents: Buffers
    residuals: Buffers
    grads: Buffers
    states: Buffers
    outputs: Buffers
    loss: jax.Array
    aux: tuple[jax.Array, ...]
    kept: Kept | None


def run_pipeline(
    stages: Sequence[Stage],
    timetable: Timetable,
    layout: StageBuffers,
    weights: Buffers,
    batch: PyTree,
    *,
    keys: PyTree = None,
    states_layout: StageBuffers | None = None,
    states: Buffers | None = None,
    axis: str = "pipe",
    seed: Any = None,
    remat: Remat = None,
    grad_dtype: Callable[[str], Any] | None = None,
    keep_read: bool = False,
    positions: PositionParts | None = None,
) -> PipelineResult:
    """Runs all microbatches through all stages, inside `shard_map` with `axis` bound.

    Args:
      stages: S*V stages, in order.
      timetable: when each does what; of forwards alone (`timetable.forward_only`) for evaluation and inference.
      layout: where the stages' parameters lie.
      weights: this rank's parameters, one flat buffer per group of `layout`; types checked, they must vary over the
        batch axes already, or their gradients are reduced in every tick.
      batch: the microbatches, [M, ...] on every leaf, the same on all ranks of `axis`.
      keys: one key (or tree of keys) per microbatch, [M], the same on all ranks of `axis`; None: stages are given None.
      states_layout: where the stages' states lie; None: they have none.
      states: this rank's states.
      axis: the pipeline's mesh axis, of S ranks.
      seed: the factor of each microbatch's loss in `loss`; None: 1/M.
      remat: what a backward recomputes of its stage: None, what is elementwise; else, block by block, as of a plan.
      grad_dtype: the dtype of accumulated gradients, from a parameter's dtype; None: the parameter's.
      keep_read: keep what `Stage.read` gives until the rank turns to another of its stages, and call `Stage.sync` when it
        leaves one; False: both in every tick.
      positions: which arrays of stages have positions that an axis left to XLA's partitioner splits; None: there is none.

    Raises:
      ValueError: when sizes do not agree; everything that does not is named.

    Communicates: per tick one collective-permute of activations and one of their gradients (per group of each); at the end
    one all-reduce over `axis` of the loss, one per metric and group of outputs, and one per shared leaf.
    """
    states_layout = states_layout or StageBuffers.of([None] * len(stages), layout.num_ranks)
    states = {} if states is None else states
    buffers = {"weights": (layout, weights), "states": (states_layout, states)}
    refuse_disagreement(timetable, len(stages), axis_size(axis), buffers, {"batch": batch, "keys": keys}, keep_read)
    given, given_tree = jax.tree.flatten((batch, keys))
    held = Held(layout, states_layout, vary(weights, axis), vary(states, axis), given, given_tree, axis, positions)
    dtype_of = grad_dtype or (lambda dtype: dtype)
    forms = None if timetable.backward is None else partial(_forms, remat, timetable, held, dtype_of)
    line = with_places(trace_line(stages, held, forms), axis_index(axis), timetable.num_ranks, axis)
    return _Run(timetable, line, held, seed, dtype_of, keep_read).all_ticks()


def _forms(
    remat: Remat, timetable: Timetable, held: Held, grad_dtype: Callable[[str], Any], line: TracedLine
) -> Sequence[Form]:
    """The forms of the stages' forwards: without `remat` they keep all but elementwise results, else what it says of blocks."""
    if remat is None:
        return [Form(member.traced, transform_of(None, apart=True)) for member in line.members]
    from axonml_jax.pipeline.keep import Keeping, forms

    def carried() -> Any:  # and what is on its way
        passing = (line.activations, timetable.activations), (line.cotangents, timetable.cotangents)
        there = [slots(sizes, buffer.size + 2) for sizes, buffer in passing]
        return no_gradients(held, grad_dtype), there, slots(line.outputs, timetable.num_microbatches + 1)

    fixed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(carried)))
    trips = timetable.num_microbatches * (1 if timetable.weight is None else 2)
    count = timetable.residuals.size + 1  # and what a backward took out of its slot
    return forms(Keeping(remat, count, trips, fixed), [(member.stage, member.traced) for member in line.members])


def no_gradients(held: Held, grad_dtype: Callable[[str], Any]) -> Buffers:
    """Zeros for a rank's gradients, before the first backward."""
    found = {}
    for group, buffer in held.weights.items():
        if not group.frozen and jnp.issubdtype(group.dtype, jnp.inexact):
            found[group] = vary_like(jnp.zeros(buffer.shape, grad_dtype(group.dtype)), buffer)
    return found


class _Run:
    """The run of one pipeline on one rank."""

    def __init__(
        self,
        timetable: Timetable,
        line: TracedLine,
        held: Held,
        seed: Any,
        grad_dtype: Callable[[str], Any],
        keep_read: bool,
    ):
        self.timetable, self.line, self.held = timetable, line, held
        self.seed = 1 / timetable.num_microbatches if seed is None else seed
        self.no_gradients = {} if timetable.backward is None else no_gradients(held, grad_dtype)
        self.reading = EachTurn(line, held, self.no_gradients) if keep_read else EachTick(held)
        self.table = make_table(timetable, keep_read)

    def all_ticks(self) -> PipelineResult:
        """Scans over all ticks, and reduces the results over the pipeline."""
        rank = axis_index(self.held.axis)
        own = partial(jax.lax.dynamic_index_in_dim, index=rank, axis=1, keepdims=False, allow_negative_indices=False)
        mine = jax.tree.map(lambda grid: own(jnp.asarray(grid)), self.table)
        end, _ = jax.lax.scan(lambda carry, table: (self._tick(carry, table), None), self._start(), mine)
        last, axis = self.line.members[-1], self.held.axis
        seed = vary_like(jnp.asarray(self.seed, end.loss.dtype), end.loss)
        return PipelineResult(
            sum_over(end.loss * seed, axis),
            last.traced.aux_tree.unflatten([sum_over(x, axis) for x in end.aux]),
            last.traced.y_tree.unflatten(outputs_of(last.y, end.outputs, axis)),
            sum_shared(self.held.layout, end.grads, axis),
            end.states,
        )

    def _start(self) -> _Carry:
        line, timetable = self.line, self.timetable
        differentiates = timetable.backward is not None
        return _Carry(
            slots(line.activations, timetable.activations.size + 1),
            slots(line.cotangents, timetable.cotangents.size + 1) if differentiates else {},
            slots(line.residuals, timetable.residuals.size + (not BRANCHES_WRITE_IN_PLACE)) if differentiates else {},
            self.no_gradients,
            self.held.states,
            slots(line.outputs, timetable.num_microbatches + 1),
            line.loss_like,
            line.aux_like,
            self.reading.start(),
        )

    def _tick(self, carry: _Carry, table: Table) -> _Carry:
        """Does the five steps of a tick that `Table` lists."""
        line, timetable, held, reading = self.line, self.timetable, self.held, self.reading
        kept = reading.turned(carry.kept, table)
        read = reading.forward(kept)
        residuals, slot = lend(carry.residuals, table.forward.slot)
        made = forward(line, held, carry.activations, residuals, slot, carry.states, table.forward, read)
        residuals = take_back(carry.residuals, made.residuals, table.forward.slot)
        is_output = table.forward.stage == timetable.num_stages - 1
        row = jnp.where(is_output, table.forward.microbatch, timetable.num_microbatches)
        sent, grads, kept = self._backwards(carry._replace(residuals=residuals, kept=kept), table)
        wraps = timetable.num_stages > timetable.num_ranks
        came = shift_ring(made.y, held.axis, timetable.num_ranks, 1, wraps)
        cotangents = carry.cotangents
        if table.cotangent_arrival is not None:
            back = shift_ring(sent, held.axis, timetable.num_ranks, -1, wraps)
            cotangents = store(cotangents, back, table.cotangent_arrival)
        return _Carry(
            store(carry.activations, came, table.activation_arrival),
            cotangents,
            residuals,
            grads,
            made.states,
            store(carry.outputs, made.output, row),
            carry.loss + made.loss,
            tuple(total + one for total, one in zip(carry.aux, made.aux, strict=True)),
            kept,
        )

    def _backwards(self, carry: _Carry, table: Table) -> tuple[Buffers, Buffers, Any]:
        """Runs the tick's backward, or both its parts: the gradient to send, the rank's gradients, and the kept value."""
        if table.backward is None:
            return nothing({}), carry.grads, carry.kept
        reading, kept = self.reading, carry.kept

        def run(grads: Buffers, work: Work, part: Part) -> tuple[Buffers, Buffers]:
            received, ways = (carry.residuals, carry.cotangents), (reading.backward(kept), reading.accumulate)
            return backward(self.line, self.held, *received, grads, work, self.seed, part, *ways)

        sent, added = run(
            reading.adding(kept, carry.grads), table.backward, "both" if table.weight is None else "input"
        )
        if table.weight is not None:
            _, added = run(added, table.weight, "weight")
        grads, kept = reading.added(kept, carry.grads, added, table)
        return sent, grads, kept


# --------------------------------------------------------------------------------------------------
# Running the pieces of a traced microbatch as the stages of a pipeline, inside `shard_map`.
# --------------------------------------------------------------------------------------------------

Microbatch = Callable[[PyTree, PyTree, PyTree, jax.Array, PyTree], tuple[Any, PyTree, PyTree, PyTree]]
"""`fun(params, frozen, state, key, batch) -> (loss, aux, y, state)`: the loss is differentiated, aux is summed over
microbatches, y comes back stacked by microbatch."""


@dataclass(frozen=True)
class Piped:
    """The results of a pipelined microbatch function on one rank.

    Attributes:
      aux: summed over microbatches, the same on every rank of the pipeline.
      outputs: y, stacked by microbatch, the same on every rank of the pipeline.
      grads: the gradients of the resting trained parameters, summed over all ranks; empty for forwards alone.
      state: the model's state after the last microbatch, the same on every rank of the pipeline.
    """

    aux: PyTree
    outputs: PyTree
    grads: Named
    state: PyTree


def run_pieces(
    fun: Microbatch, placement: "Placement", variables: Variables, keys: jax.Array, batch: PyTree, timetable: Timetable,
    blocks: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Piped:  # fmt: skip
    """Cuts `fun` at the plan's stages and runs it on all microbatches.

    Args:
      fun: the function of one microbatch.
      placement: a pipelined plan on its mesh.
      variables: resting variables of this rank; the state is whole.
      keys: one per microbatch, [M].
      batch: microbatches, [M, ...] on every leaf.
      timetable: when each stage does what.
      blocks: those of `Running`.

    Raises:
      ValueError: when the program cannot be cut there.
    """
    return _PiecesRun(fun, placement, variables, keys, batch, blocks).run(timetable)


class _PiecesRun:
    def __init__(
        self,
        fun: Microbatch,
        placement: "Placement",
        variables: Variables,
        keys: jax.Array,
        batch: PyTree,
        blocks: Mapping[str, Sequence[int]],
    ):
        assert placement.stages is not None
        self.fun = fun
        self.placement = placement
        self.staging = placement.stages
        self.variables = variables
        self.keys, (self.batch, self.batch_tree) = keys, jax.tree.flatten(batch)
        wide = (AXIS, *placement.axes.batch)
        shapes = {name: x.shape[1:] for name, x in named_leaves(batch).items()}
        self.positions = PositionParts.of(placement.batch_layout, shapes)
        self.batch = [vary(x, wide) for x in self.batch]
        if self.positions is not None:
            self.batch = [on_every_rank(x) for x in self.batch]
        leaves, self.state_tree = jax.tree.flatten(variables.state)
        self.rows = None
        if (stack := self.staging.stack) is not None:
            from axonml_jax.pipeline.stack import StateRows

            self.rows = StateRows.of(stack, named_leaves(variables.state))
            leaves = self.rows.divided(leaves)
        self.pieces, self.states = self._cut(leaves)
        self.running = Running(placement, self.pieces.pieces, blocks)

    def run(self, timetable: Timetable) -> Piped:
        """Runs all ticks; reads the parameters before, and reduces their gradients after."""
        stages = [self.running.stage(p, self._stage(p)) for p in range(self.staging.num_stages)]
        layout = self._states_layout()
        result = run_pipeline(
            stages,
            timetable,
            self.running.layout,
            self.running.read(self.variables.params, self.variables.frozen),
            self.batch,
            keys=self.keys,
            states_layout=layout,
            states=self._states_of_rank(layout),
            axis=AXIS,
            seed=1.0,
            remat=self.placement.plan.remat,
            grad_dtype=self.running.grad_dtype,
            keep_read=self.staging.policy.turns,
            positions=self.positions,
        )
        grads = {} if timetable.backward is None else self.running.grads_at_rest(result.grads)
        return Piped(result.aux, result.outputs, grads, self._new_state(layout, result))

    def _cut(self, states: list[jax.Array]) -> tuple[Pieces, list[jax.Array]]:
        """Cuts the microbatch; its states are typed as varying over the axes over which they vary after a microbatch."""
        names = list(named_leaves(self.variables.state)) if self.rows is None else self.rows.names
        given = [x[0] for x in (*self.batch, vary(self.keys, (AXIS, *self.placement.axes.batch)))]
        for _ in range(len(states) + 1):
            pieces = cut_pieces(
                self._flat,
                self._examples(),
                given,
                [vary(x, AXIS) for x in states],
                num_stages=self.staging.num_stages,
                begins=self.staging.begins,
                state_names=names,
                weight_names=[weight.name for weight in self.staging.weights],
            )
            after = [aval_of(atom, pieces.program.avals) for atom in pieces.new_states]
            wider = [vary(x, tuple(varying_axes(new) - {AXIS})) for x, new in zip(states, after, strict=True)]
            if all(a is b for a, b in zip(wider, states, strict=True)):
                break
            states = wider
        return pieces, states

    def _flat(self, weights: list, given: list, states: list) -> tuple[Any, list]:
        *batch, key = given
        if self.rows is not None:
            from axonml_jax.pipeline.stack import stacked, unrolled

            leaves, states = stacked(self.staging.weights, weights), self.rows.joined(states)
            results, state = unrolled(self._whole, leaves, states, (key, batch), self.rows.stack)
            return results, self.rows.divided(state)
        return self._whole(weights, states, key, batch)

    def _whole(self, leaves: list, states: list, key: Any, batch: list) -> tuple[Any, list]:
        """Runs the microbatch function on leaves."""
        count = len(self.staging.params.layouts)
        params, frozen = leaves[:count], leaves[count:]
        trees = self.staging.treedefs[0].unflatten(params), self.staging.treedefs[1].unflatten(frozen)
        *results, state = self.fun(*trees, self.state_tree.unflatten(states), key, self.batch_tree.unflatten(batch))
        return tuple(results), jax.tree.leaves(state)

    def _examples(self) -> list[jax.Array]:
        """Stand-ins for the parameters that the model reads: only shapes, dtypes and varying axes of them are used."""
        placement, found = self.placement, []
        for layout in (weight.layout for weight in self.staging.weights):
            whole = cast_floating(
                jnp.zeros(read_shape(placement, layout), layout.dtype), placement.plan.precision.compute
            )
            split = [axis for axis in layout.axes if axis in placement.axes.layers]
            found.append(vary(whole, (AXIS, *placement.axes.batch, *split)))
        return found

    def _stage(self, number: int) -> Callable:
        pieces, piece = self.pieces, self.pieces.pieces[number]
        held = self.running.held[number]
        fixed = {pieces.states[i]: vary(self.states[i], AXIS) for i in pieces.unchanged}
        last = number == len(pieces.pieces) - 1

        def apply(weights: Sequence[Any], x: Any, batch: Sequence[Any], key: Any, state: Sequence[Any]) -> StageOutput:
            env = dict(pieces.program.constants) | fixed
            env |= zip((pieces.weights[i] for i in held), weights, strict=True)
            env |= zip(pieces.given, (*batch, key), strict=True)
            env |= zip(piece.received, x or (), strict=True)
            env |= zip((pieces.states[i] for i in piece.states), state, strict=True)
            replicated = ReplicatedBatch(pieces.given[:-1], pieces.program.constants)
            run(piece.equations, env, None if self.positions is None else replicated)
            state = [result_of(pieces.new_states[i], env) for i in piece.states]
            if not last:
                return StageOutput([env[n] for n in piece.sent], state=state)
            loss, aux, y = pieces.results_tree.unflatten(results_of(pieces.results, env))
            return StageOutput(y, loss, aux, state)

        return apply

    # The model's state: whole on every rank between steps, on its own stage during one

    def _states_layout(self) -> StageBuffers:
        stored = [Stored(x.shape, x.dtype, tuple(sorted(varying_axes(x) - {AXIS}))) for x in self.states]
        trees = [[stored[i] for i in piece.states] for piece in self.pieces.pieces]
        return StageBuffers.of(trees, self.staging.num_ranks)

    def _states_of_rank(self, layout: StageBuffers) -> dict:
        def own(rank: int) -> dict:
            trees = [[self.states[i] for i in self._piece(p).states] for p in layout.stages(rank)]
            buffers = layout.pack_rank(rank, trees)
            return {group: vary(buffer, (AXIS, *group.axes)) for group, buffer in buffers.items()}

        return on_own_rank(axis_index(AXIS), layout.num_ranks, own) if layout.sizes else {}

    def _piece(self, number: int) -> Piece:
        return self.pieces.pieces[number]

    def _new_state(self, layout: StageBuffers, result: PipelineResult) -> PyTree:
        """The model's state after the run. Communicates: one all-reduce over `pipe` per changed leaf."""
        leaves = list(self.states)
        for number, piece in enumerate(self.pieces.pieces):
            for i, slot in zip(piece.states, layout.packings[number].slots, strict=True):
                own = slot_value(slot, result.states[slot.group])
                leaves[i] = _from_rank(own, number % layout.num_ranks)
        return self.state_tree.unflatten(leaves if self.rows is None else self.rows.whole(leaves))


def _from_rank(x: jax.Array, rank: int) -> jax.Array:
    """Gives the value of one rank of the pipeline to all of them."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_from_rank(jax.random.key_data(x), rank), impl=jax.random.key_impl(x))
    with jax.named_scope("axonml.buffers"):
        mine = axis_index(AXIS) == rank
        sent = jnp.where(mine, x, vary_like(jnp.zeros_like(x), x))
        wire = sent.astype(jnp.int8) if x.dtype == jnp.bool_ else sent
        return sum_over(wire, AXIS).astype(x.dtype)
