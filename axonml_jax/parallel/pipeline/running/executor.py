"""Runs any timetable: a scan over ticks with one forward and one backward in each, and two shifts (docs/adr/0008)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree
from axonml_jax.collectives.primitives import axis_index, axis_size, sum_over
from axonml_jax.collectives.varying import vary, vary_like
from axonml_jax.compat.versions import BRANCHES_WRITE_IN_PLACE
from axonml_jax.parallel.pipeline.cutting.stage import Stage
from axonml_jax.parallel.pipeline.resting.packing import Buffers
from axonml_jax.parallel.pipeline.resting.position_parts import PositionParts
from axonml_jax.parallel.pipeline.resting.shared import sum_shared
from axonml_jax.parallel.pipeline.resting.stage_buffers import StageBuffers
from axonml_jax.parallel.pipeline.running.gather_modes import EachTick, EachTurn, Kept
from axonml_jax.parallel.pipeline.running.outputs import outputs_of
from axonml_jax.parallel.pipeline.running.places import with_places
from axonml_jax.parallel.pipeline.running.rings import lend, nothing, shift_ring, slots, store, take_back
from axonml_jax.parallel.pipeline.running.sizes_agree import refuse_disagreement
from axonml_jax.parallel.pipeline.running.tick import Part, backward, forward
from axonml_jax.parallel.pipeline.running.traced_line import Held, TracedLine, trace_line
from axonml_jax.parallel.pipeline.schedules.tick_table import Table, Work, make_table
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable
from axonml_jax.parallel.units.remat import transform_of
from axonml_jax.parallel.units.remat_policy import Remat


class PipelineResult(NamedTuple):
    """What a pipeline gives on one rank.

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
    """What one tick leaves to the next."""

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
    """Run all microbatches through all stages, inside `shard_map` with `axis` bound.

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
      seed: what a microbatch's loss counts in `loss`; None: 1/M.
      remat: what a backward recomputes of its stage: None, what is elementwise; "selective", all but weight multiplications;
        "full", everything from the stage's inputs.
      grad_dtype: of the accumulated gradients, from a parameter's dtype; None: the parameter's.
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
    transform = None if timetable.backward is None else transform_of(remat, apart=True)
    line = with_places(trace_line(stages, held, transform), axis_index(axis), timetable.num_ranks, axis)
    return _Run(timetable, line, held, seed, grad_dtype, keep_read).all_ticks()


class _Run:
    """One pipeline on one rank."""

    def __init__(
        self,
        timetable: Timetable,
        line: TracedLine,
        held: Held,
        seed: Any,
        grad_dtype: Any,
        keep_read: bool,
    ):
        self.timetable, self.line, self.held = timetable, line, held
        self.seed = 1 / timetable.num_microbatches if seed is None else seed
        self.grad_dtype = grad_dtype or (lambda dtype: dtype)
        self.no_gradients = {} if timetable.backward is None else self._no_gradients()
        self.reading = EachTurn(line, held, self.no_gradients) if keep_read else EachTick(held)
        self.table = make_table(timetable, keep_read)

    def all_ticks(self) -> PipelineResult:
        """The scan, and what is done once after it."""
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

    def _no_gradients(self) -> Buffers:
        found = {}
        for group, buffer in self.held.weights.items():
            if not group.frozen and jnp.issubdtype(group.dtype, jnp.inexact):
                found[group] = vary_like(jnp.zeros(buffer.shape, self.grad_dtype(group.dtype)), buffer)
        return found

    def _tick(self, carry: _Carry, table: Table) -> _Carry:
        """The steps that `Table` lists."""
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
        """The gradient to send, the rank's gradients and what is kept, after the tick's backward or both its parts."""
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
