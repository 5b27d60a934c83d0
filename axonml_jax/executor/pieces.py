"""The pieces of a traced microbatch run as the stages of a pipeline, and the parameters that they read."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.collectives.primitives import axis_index, sum_over, vary, vary_like
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.executor.cut import Piece, Pieces, Stage, StageFunction, StageOutput, cut_pieces
from axonml_jax.executor.run import PipelineResult, run_pipeline
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.model.loss import cast_floating
from axonml_jax.model.view import Variables
from axonml_jax.parallel.placement import Placement, lacking, parts_of, read_shape
from axonml_jax.pipeline.branches import on_own_rank
from axonml_jax.pipeline.pack import (
    BufferGroup,
    Buffers,
    Packing,
    PositionParts,
    Slot,
    StageBuffers,
    Stored,
    on_every_rank,
    slot_value,
    sum_shared,
)
from axonml_jax.pipeline.schedules import AXIS
from axonml_jax.pipeline.store import Named, Staging
from axonml_jax.pipeline.timetable import Timetable
from axonml_jax.program.program import Equation, aval_of, result_of, results_of, run
from axonml_jax.sharding.layout import Layout, to_device_memory

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
    once: frozenset[str] = frozenset(), blocks: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Piped:  # fmt: skip
    """Cuts `fun` at the plan's stages and runs it on all microbatches.

    Args:
      fun: the function of one microbatch.
      placement: a pipelined plan on its mesh.
      variables: resting variables of this rank; the state is whole.
      keys: one per microbatch, [M].
      batch: microbatches, [M, ...] on every leaf.
      timetable: when each stage does what.
      once: the names of the state that every microbatch reads as the first one does.
      blocks: those of `Running`.

    Raises:
      ValueError: when the program cannot be cut there.
    """
    return _PiecesRun(fun, placement, variables, keys, batch, once, blocks).run(timetable)


class _PiecesRun:
    def __init__(
        self,
        fun: Microbatch,
        placement: "Placement",
        variables: Variables,
        keys: jax.Array,
        batch: PyTree,
        once: frozenset[str],
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
        self.rows, self.fixed = None, [name in once for name in named_leaves(variables.state)]
        if (stack := self.staging.stack) is not None:
            from axonml_jax.pipeline.stack import StateRows

            self.rows = StateRows.of(stack, named_leaves(variables.state))
            leaves, self.fixed = self.rows.divided(leaves), self.rows.each(self.fixed)
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
                fixed=self.fixed,
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
        same = [i for i, own in enumerate(self.fixed) if own or i in pieces.unchanged]
        fixed = {pieces.states[i]: vary(self.states[i], AXIS) for i in same}
        last = number == len(pieces.pieces) - 1

        def apply(weights: Sequence[Any], x: Any, batch: Sequence[Any], key: Any, state: Sequence[Any]) -> StageOutput:
            env = dict(pieces.program.constants)
            env |= zip((pieces.weights[i] for i in held), weights, strict=True)
            env |= zip(pieces.given, (*batch, key), strict=True)
            env |= zip(piece.received, x or (), strict=True)
            env |= zip((pieces.states[i] for i in piece.states), state, strict=True)
            env |= fixed
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
