"""Runs any timetable of stages inside `shard_map`: a scan over ticks (docs/adr/0008)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.collectives.primitives import axis_index, axis_size, sum_over, vary, vary_like
from axonml_jax.compat.versions import BRANCHES_WRITE_IN_PLACE
from axonml_jax.executor.cut import Form, Stage
from axonml_jax.executor.line import Held, TracedLine, trace_line, with_places
from axonml_jax.executor.tick import (
    EachTick,
    EachTurn,
    Kept,
    Part,
    backward,
    forward,
    lend,
    shift_ring,
    slots,
    store,
    take_back,
)
from axonml_jax.parallel.plan import Remat
from axonml_jax.parallel.units import transform_of
from axonml_jax.pipeline.pack import Buffers, Packing, PositionParts, StageBuffers, nothing, sum_shared
from axonml_jax.pipeline.schedules import Table, Work, make_table
from axonml_jax.pipeline.timetable import Timetable

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
    from axonml_jax.executor.keep import Keeping, forms

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
