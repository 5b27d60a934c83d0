"""Running the pieces of a traced microbatch as the stages of a pipeline, inside `shard_map`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.collectives.primitives import axis_index, sum_over
from axonml_jax.collectives.varying import vary, vary_like, varying_axes
from axonml_jax.model.functional import Variables
from axonml_jax.model.precision import cast_floating
from axonml_jax.parallel.pipeline.cutting.pieces import Piece, Pieces, cut_pieces
from axonml_jax.parallel.pipeline.cutting.stage import StageOutput
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.pipeline.resting.packing import slot_value
from axonml_jax.parallel.pipeline.resting.position_parts import PositionParts, on_every_rank
from axonml_jax.parallel.pipeline.resting.stage_buffers import StageBuffers, Stored
from axonml_jax.parallel.pipeline.resting.stage_store import Named, on_own_rank
from axonml_jax.parallel.pipeline.running.executor import PipelineResult, run_pipeline
from axonml_jax.parallel.pipeline.running.stage_parameters import Running
from axonml_jax.parallel.pipeline.running.whole_batch import WholeBatch
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable
from axonml_jax.program.atoms import aval_of, result_of, results_of
from axonml_jax.program.run import run

if TYPE_CHECKING:
    from axonml_jax.parallel.placement import Placement

Microbatch = Callable[[PyTree, PyTree, PyTree, jax.Array, PyTree], tuple[Any, PyTree, PyTree, PyTree]]
"""`fun(params, frozen, state, key, batch) -> (loss, aux, y, state)`: the loss is differentiated, aux is summed over
microbatches, y comes back stacked by microbatch."""


@dataclass(frozen=True)
class Piped:
    """What a pipeline gives on one rank.

    Attributes:
      aux: summed over microbatches, the same on every rank of the pipeline.
      outputs: y, stacked by microbatch, the same on every rank of the pipeline.
      grads: of the resting trained parameters, summed over all ranks; empty for forwards alone.
      state: the model's state after the last microbatch, the same on every rank of the pipeline.
    """

    aux: PyTree
    outputs: PyTree
    grads: Named
    state: PyTree


def run_pieces(
    fun: Microbatch, placement: "Placement", variables: Variables, keys: jax.Array, batch: PyTree, timetable: Timetable
) -> Piped:
    """Cut `fun` at the plan's stages and run it on all microbatches.

    Args:
      fun: of one microbatch.
      placement: a pipelined plan on its mesh.
      variables: resting variables of this rank; the state is whole.
      keys: one per microbatch, [M].
      batch: microbatches, [M, ...] on every leaf.
      timetable: when each stage does what.

    Raises:
      ValueError: when the program cannot be cut there.
    """
    return _Run(fun, placement, variables, keys, batch).run(timetable)


class _Run:
    def __init__(self, fun: Microbatch, placement: "Placement", variables: Variables, keys: jax.Array, batch: PyTree):
        assert placement.stages is not None
        self.fun, self.placement, self.staging, self.variables = fun, placement, placement.stages, variables
        self.keys, (self.batch, self.batch_tree) = keys, jax.tree.flatten(batch)
        wide = (AXIS, *placement.batch_axes)
        shapes = {name: x.shape[1:] for name, x in named_leaves(batch).items()}
        self.positions = PositionParts.of(placement.batch_layout, shapes)
        self.batch = [vary(x, wide) for x in self.batch]
        if self.positions is not None:
            self.batch = [on_every_rank(x) for x in self.batch]
        leaves, self.state_tree = jax.tree.flatten(variables.state)
        self.pieces, self.states = self._cut(leaves)
        self.running = Running(placement, self.pieces.pieces)

    def run(self, timetable: Timetable) -> Piped:
        """All ticks, and what is done once around them."""
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
        """The pieces; states are typed as varying over what they vary over after a microbatch."""
        names = list(named_leaves(self.variables.state))
        given = [x[0] for x in (*self.batch, vary(self.keys, (AXIS, *self.placement.batch_axes)))]
        for _ in range(len(states) + 1):
            pieces = cut_pieces(
                self._flat,
                self._examples(),
                given,
                [vary(x, AXIS) for x in states],
                num_stages=self.staging.num_stages,
                begins=self.staging.begins,
                state_names=names,
                weight_names=self.staging.names,
            )
            after = [aval_of(atom, pieces.program.avals) for atom in pieces.new_states]
            wider = [vary(x, tuple(varying_axes(new) - {AXIS})) for x, new in zip(states, after, strict=True)]
            if all(a is b for a, b in zip(wider, states, strict=True)):
                break
            states = wider
        return pieces, states

    def _flat(self, weights: list, given: list, states: list) -> tuple[Any, list]:
        count = len(self.staging.params.layouts)
        params, frozen = weights[:count], weights[count:]
        trees = self.staging.treedefs[0].unflatten(params), self.staging.treedefs[1].unflatten(frozen)
        *batch, key = given
        state = self.state_tree.unflatten(states)
        *results, state = self.fun(*trees, state, key, self.batch_tree.unflatten(batch))
        return tuple(results), jax.tree.leaves(state)

    def _examples(self) -> list[jax.Array]:
        """Stand-ins of what the model reads: nothing but shapes, dtypes and varying axes of them is used."""
        placement, found = self.placement, []
        for layout in self.staging.layouts:
            whole = cast_floating(
                jnp.zeros(placement.read_shape(layout), layout.dtype), placement.plan.precision.compute
            )
            split = [axis for axis in layout.axes if axis in placement.layer_axes]
            found.append(vary(whole, (AXIS, *placement.batch_axes, *split)))
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
            whole = WholeBatch(pieces.given[:-1], pieces.program.constants)
            run(piece.equations, env, None if self.positions is None else whole)
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
        """Communicates: one all-reduce over `pipe` per changed leaf."""
        leaves = list(self.states)
        for number, piece in enumerate(self.pieces.pieces):
            for i, slot in zip(piece.states, layout.packings[number].slots, strict=True):
                own = slot_value(slot, result.states[slot.group])
                leaves[i] = _from_rank(own, number % layout.num_ranks)
        return self.state_tree.unflatten(leaves)


def _from_rank(x: jax.Array, rank: int) -> jax.Array:
    """The value of one rank of the pipeline on all of them."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_from_rank(jax.random.key_data(x), rank), impl=jax.random.key_impl(x))
    with jax.named_scope("axonml.buffers"):
        mine = axis_index(AXIS) == rank
        sent = jnp.where(mine, x, vary_like(jnp.zeros_like(x), x))
        wire = sent.astype(jnp.int8) if x.dtype == jnp.bool_ else sent
        return sum_over(wire, AXIS).astype(x.dtype)
