"""Gradients of a step: the engines that read all parameters at once or unit by unit, accumulate, and sum over ranks."""

import abc
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from axonml_jax.base import PyTree, warn
from axonml_jax.collectives.gradients import Partial, all_reduce_leaves
from axonml_jax.collectives.primitives import vary, vary_like
from axonml_jax.compat.jaxpr import trace
from axonml_jax.mesh.axes import AxisNames, flat_axes
from axonml_jax.model.loss import Loss, per_weight
from axonml_jax.model.view import Variables
from axonml_jax.parallel.placement import (
    Placement,
    accumulating,
    key_number,
    lacking,
    parts_of,
    read_shape,
    read_shapes,
    read_tree,
)
from axonml_jax.sharding.layout import Layout, is_layout, to_device_memory
from axonml_jax.strategies.shard import Feedback
from axonml_jax.training.compose import Gradients, rest_of
from axonml_jax.training.objective import (
    NO_SCALE,
    Differentiated,
    GradientEngine,
    Objective,
    Parts,
    begun_anew,
    part_keys,
    shard_key,
    with_leaves,
)

# --------------------------------------------------------------------------------------------------
# Gradients summed over microbatches: what accumulates, and which reduction waits for the last one.
# --------------------------------------------------------------------------------------------------

SyncAxes = Collection[AxisNames] | None
"""The axes over which gradients of a microbatch are to be synchronized; None: all of the plan's."""


class MicrobatchGradients(NamedTuple):
    """The gradients, loss and state of one microbatch on one rank.

    Attributes:
      grads: by leaf, in the dtype in which they accumulate, synchronized over the axes that were asked for.
      loss: this rank's.
      state: the model's state after the microbatch.
      residual: the rounding error that quantized sums leave out of the gradients, by leaf; None: nothing is fed back.
    """

    grads: list[Partial]
    loss: Any
    state: PyTree
    residual: list[jax.Array] | None


class OneMicrobatch(Protocol):
    """A function that differentiates the loss of one microbatch on one rank."""

    def __call__(
        self, state: PyTree, key: jax.Array, batch: PyTree, *, axes: SyncAxes, accumulated: list[Any] | None
    ) -> MicrobatchGradients:
        """Differentiates the loss of one microbatch.

        Args:
          state: the model's state before the microbatch.
          key: the microbatch's randomness.
          batch: this rank's rows of the microbatch.
          axes: the mesh axes over which gradients are synchronized.
          accumulated: gradients that are synchronized over `Axes.each_microbatch` already, added before the rest of the
            reduction; with feedback and one microbatch, the last step's residual. None: nothing is added.
        """
        ...


class OneByOne(GradientEngine):
    """Differentiates one microbatch after the other.

    What is synchronized after every microbatch (ZeRO-2 and 3) accumulates as shards. The rest is reduced once: where
    reductions overlap the backward, the last microbatch is peeled off the loop, and its hooks add what accumulated.
    """

    @abc.abstractmethod
    def one(self, variables: Variables) -> OneMicrobatch:
        """The function that differentiates one microbatch, with parameters read as the engine reads them."""

    def differentiate(self, variables: Variables, key: jax.Array, batch: PyTree) -> Differentiated:
        """Sums gradients over the microbatches of a step, and over ranks."""
        placement = self.placement
        count, rank = placement.plan.microbatches, key_number(placement)
        by_rows = placement.plan.draws == "rows"
        keys = part_keys(placement, key, batch, count) if by_rows else [shard_key(key, a, rank) for a in range(count)]
        batches, once, changed = (None, (), {}) if count == 1 else self._batches(variables, keys, batch)
        one, first = self.one(variables), None
        anew = lambda state, *part, **how: one(begun_anew(state, variables.state, once), *part, **how)
        run = anew if once else one
        if self.left_out is not None:
            first = parts_of(placement, jax.tree.leaves(self.left_out))
        axes = None if self.sync else ()
        if count == 1:
            made = run(variables.state, keys[0], batch, axes=axes, accumulated=first)
            made = made._replace(loss=jax.tree.map(lambda x: x[None], made.loss))
        else:
            made = self._accumulated(run, variables.state, keys, batches, first)
        tree = lambda leaves: jax.tree.unflatten(jax.tree.structure(variables.params), leaves)
        unreduced = lacking(placement, axes)
        return Differentiated(
            grads=tree([grad.taken(unreduced) for grad in made.grads]),
            losses=made.loss,
            state=with_leaves(made.state, changed),
            left_out=None if made.residual is None else tree(made.residual),
            finish=self.objective.finish(batches),
        )

    def _batches(
        self, variables: Variables, keys: list, batch: PyTree
    ) -> tuple[PyTree, Collection[str], dict[str, Any]]:
        """This rank's microbatches, stacked, in the form that the loss takes; after a first sweep where it needs one.

        And the names of the model's state with which all of them begin as the step does, and what that sweep makes of state.
        """
        batches = self.placement.batch_layout.microbatches(batch, len(keys))
        read = read_shapes(self.placement, variables.state)
        batches, once = self.objective.microbatches(read, keys[0], batch, batches)
        if self.objective.sweeps(batches) and self.parts.scale is not None:
            raise ValueError(NO_SCALE)
        rest, stacked = rest_of(self.placement), jnp.stack(keys)
        batches, changed = rest.swept(self.objective, variables, stacked, batch, batches, once)
        return batches, once, changed

    def _accumulated(
        self, run: OneMicrobatch, state: PyTree, keys: list, batches: PyTree, first: list[Partial] | None
    ) -> MicrobatchGradients:
        """Sums the gradients of several microbatches; the losses are stacked. `first` is what gradients begin with."""
        placement, sync = self.placement, self.sync
        inner = placement.axes.each_microbatch if sync else ()
        outer = [axis for axis in placement.strategies if axis not in inner] if sync else []
        waits = [axis for axis in flat_axes(outer) if axis in placement.axes.batch and placement.ranks(axis) > 1]
        if not (placement.reducer.overlaps and waits):
            grads, losses, state = self._loop(run, state, keys, batches, inner, first)
            layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
            residual = None if self.feedback is None else _residual(self.feedback, placement, grads, layouts)
            if outer:
                grads = placement.sync_buckets(grads, layouts, axes=outer)
            return MicrobatchGradients(grads, losses, state, residual)
        head, last = jax.tree.map(lambda x: x[:-1], batches), jax.tree.map(lambda x: x[-1], batches)
        grads, losses, state = self._loop(run, state, keys[:-1], head, inner, first)
        made = run(state, keys[-1], last, axes=None, accumulated=grads)
        return made._replace(loss=jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), losses, made.loss))

    def _loop(
        self, run: OneMicrobatch, state: PyTree, keys: list, batches: PyTree, inner: tuple[AxisNames, ...], first: Any
    ):
        """Sums gradients over microbatches in a scan, synchronized over `inner` after each of them.

        Args:
          run: differentiates one microbatch.
          state: the model's state before the first of them.
          keys: the randomness of each.
          batches: this rank's rows, with a dim 0 of microbatches.
          inner: axes over which gradients are synchronized after every microbatch.
          first: what gradients begin with; None: zeros.

        Returns:
          Gradients, losses stacked by microbatch, and the model's state after the last.
        """
        placement = self.placement
        layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
        reduced = flat_axes(inner)
        unreduced = [axis for axis in placement.axes.batch if axis not in reduced]
        axes = [(*unreduced, *layout.axes) for layout in layouts]
        shapes = [layout.shard if inner else read_shape(placement, layout) for layout in layouts]
        kinds = [placement.plan.precision.accumulate_dtype(layout.dtype) for layout in layouts]
        if first is None:
            first = parts_of(placement, map(jnp.zeros, shapes, kinds), inner)
        first = [each.map(partial(vary, axes=own)) for each, own in zip(first, axes, strict=True)]
        if placement.plan.check_vma:
            state = _typed_carry(run, state, keys[0], jax.tree.map(lambda x: x[0], batches), inner)

        def body(carry, xs):
            grads, state = carry
            key, batch = xs
            made = run(state, key, batch, axes=inner, accumulated=None)
            more = [m.astype(g.value.dtype) for g, m in zip(grads, made.grads, strict=True)]
            more = [m.map(partial(vary, axes=own)) for m, own in zip(more, axes, strict=True)]
            return ([g + m for g, m in zip(grads, more, strict=True)], made.state), made.loss

        (grads, state), losses = jax.lax.scan(body, (first, state), (jnp.stack(keys), batches))
        return grads, losses, state


def _residual(feedback: Feedback, placement: Placement, grads: list[Partial], layouts: list[Layout]) -> list[jax.Array]:
    """Returns the rounding error that quantized sums will leave out, of gradients that are summed over no axis yet."""
    return feedback.left_out([grad.taken(lacking(placement, ())) for grad in grads], layouts)


def _typed_carry(run: OneMicrobatch, state: PyTree, key: jax.Array, batch: PyTree, inner: Any) -> PyTree:
    """Types the model's state as varying over the axes over which it varies after a microbatch, so that a scan can carry it."""
    leaves, treedef = jax.tree.flatten(state)
    after = lambda s: jax.tree.leaves(run(treedef.unflatten(s), key, batch, axes=inner, accumulated=None).state)
    for _ in leaves:
        traced = trace(after, leaves)
        wider = [vary_like(leaf, aval) for leaf, aval in zip(leaves, traced.made, strict=True)]
        if all(new is old for new, old in zip(wider, leaves, strict=True)):
            break
        leaves = wider
    return treedef.unflatten(leaves)


# --------------------------------------------------------------------------------------------------
# DDP and ZeRO-1 and 2: parameters are read once for all microbatches, gradients reduced during or after the backward.
# --------------------------------------------------------------------------------------------------


class AtOnce(OneByOne):
    """DDP, ZeRO-1 and 2: all parameters are read at the start of the step, or each bucket where it is first used."""

    def one(self, variables: Variables) -> OneMicrobatch:
        """The function that differentiates one microbatch, with all parameters gathered before, or bucket by bucket."""
        placement = self.placement
        frozen = read_tree(placement, variables.frozen, placement.frozen)
        overlaps = self.sync and placement.reducer.overlaps
        # With one microbatch each bucket is gathered where it is first used.
        once = overlaps and placement.plan.accumulate == 1
        read = None if once else read_tree(placement, variables.params, placement.params)
        return _Once(self, variables.params, frozen, read, overlaps)


class _Once:
    """Differentiates one microbatch (`OneMicrobatch`) by parameters that are read at once (`AtOnce`)."""

    def __init__(self, engine: AtOnce, params: PyTree, frozen: PyTree, read: PyTree | None, overlaps: bool):
        self.placement, self.objective = engine.placement, engine.objective
        self.params, self.frozen = params, frozen
        self.read, self.overlaps = read, overlaps
        self.model, self.whole_loss = engine.objective.model, engine.objective.differentiable(engine.parts, frozen)
        self.layouts = jax.tree.leaves(self.placement.params, is_leaf=is_layout)
        self.feedback = engine.feedback

    def __call__(
        self, state: PyTree, key: jax.Array, batch: PyTree, *, axes: SyncAxes, accumulated: list[Any] | None
    ) -> MicrobatchGradients:
        if self.overlaps and axes != ():
            return self._overlapped(state, key, batch, axes, accumulated)
        loss = self._loss(self.read, (state, key, batch))
        (_, (loss, state)), grads = jax.value_and_grad(loss, has_aux=True)(self.read, state, key, batch)
        leaves, residual = parts_of(self.placement, jax.tree.leaves(grads)), None
        widened = map(partial(accumulating, self.placement), leaves, self.layouts)
        if axes == ():
            return MicrobatchGradients(list(widened), loss, state, None)
        if self.feedback is not None:
            assert accumulated is not None
            leaves = [grad + more for grad, more in zip(widened, accumulated, strict=True)]
            residual = _residual(self.feedback, self.placement, leaves, self.layouts)
        return MicrobatchGradients(self.placement.sync_buckets(leaves, self.layouts, axes), loss, state, residual)

    def _overlapped(self, state, key, batch, axes, accumulated) -> MicrobatchGradients:
        """Reduces each bucket of gradients in the backward, by hooks where its parameters are read."""
        args, placement = (state, key, batch), self.placement
        seen = read_tree(placement, self.params, placement.params) if self.read is None else self.read
        from axonml_jax.parallel.units import overlapped

        reduced_loss = overlapped(self._loss(seen, args), placement, self.params, self.read, args, axes, self.feedback)

        def hooked(carriers: PyTree, more: Any, *args: Any) -> tuple[jax.Array, Any]:
            total, aux = reduced_loss(carriers, more, *args)
            self.objective.refuse_unread(total, carriers, Variables(seen, self.frozen, state), key, batch)
            return total, aux

        leaves, treedef = jax.tree.flatten(to_device_memory(self.params, placement.plan.offload.params))
        reduced = tuple(placement.strategies) if axes is None else axes
        unreduced = [axis for axis in placement.axes.batch if axis not in flat_axes(reduced)]
        carriers = vary(treedef.unflatten(map(partial(accumulating, placement), leaves, self.layouts)), unreduced)
        inner = lacking(placement, placement.axes.each_microbatch)
        more = None if accumulated is None else treedef.unflatten([each.taken(inner) for each in accumulated])
        if self.feedback is None:
            (_, (loss, state)), grads = jax.value_and_grad(hooked, has_aux=True)(carriers, more, *args)
            return MicrobatchGradients(parts_of(placement, jax.tree.leaves(grads), reduced), loss, state, None)
        both = jax.value_and_grad(hooked, argnums=(0, 1), has_aux=True)
        (_, (loss, state)), (grads, residual) = both(carriers, more, *args)
        summed = parts_of(placement, jax.tree.leaves(grads), reduced)
        return MicrobatchGradients(summed, loss, state, jax.tree.leaves(residual))

    def _loss(self, read: PyTree, args: tuple) -> Callable:
        strategies, remat = self.placement.strategies.values(), self.placement.plan.remat
        wrap = next((each.wrap for each in strategies if each.wrap is not None), None)  # of the first that says it
        from axonml_jax.parallel.units import recomputed

        return recomputed(self.whole_loss, self.model, wrap, remat, read, args)


# --------------------------------------------------------------------------------------------------
# ZeRO-3: each unit's parameters are gathered when they are used, in the forward and again in the backward.
# --------------------------------------------------------------------------------------------------


class ByUnit(OneByOne):
    """ZeRO-3: only the units at work, and those that are prefetched, are gathered."""

    def one(self, variables: Variables) -> OneMicrobatch:
        """The function that differentiates one microbatch, gathering the parameters of each unit where it is used."""
        loss = self.objective.differentiable_with_frozen(self.parts)
        from axonml_jax.parallel.units import Replayed

        replayed, given = Replayed(self.placement, self.objective.model), (variables.params, variables.frozen)

        def run(state, key, batch, *, axes, accumulated) -> MicrobatchGradients:
            (loss_, state), grads = replayed.value_and_grad(loss, *given, (state, key, batch), axes, accumulated)
            return MicrobatchGradients(grads, loss_, state, None)

        return run


# --------------------------------------------------------------------------------------------------
# Gradients of a step, whole or accumulated over microbatches: gather, differentiate, sync.
# --------------------------------------------------------------------------------------------------


def gradients(
    objective: Objective,
    placement: Placement,
    variables: Variables,
    key: jax.Array,
    batch: PyTree,
    *,
    sync: bool = True,
    scale: jax.Array | None = None,
    left_out: PyTree = None,
) -> Gradients:
    """Differentiate the loss of the global batch, inside `shard_map`.

    Args:
      objective: the loss on one microbatch.
      placement: how parameters are read and gradients reduced.
      variables: resting variables.
      key: the step's randomness.
      batch: this rank's rows, [b, ...] on every leaf that is not a scalar; b divides by the plan's `accumulate`.
      sync: False leaves gradients and loss each rank's own (means over its rows).
      scale: differentiate the loss times this factor, which the caller divides out of the gradients.
      left_out: the residual of this rank's gradients from the last step's sums; None: nothing is fed back.

    Communicates: what the plan's strategies do, once, and one small all-reduce for loss and metrics.
    """
    if placement.plan.memory is not None:
        raise ValueError(
            f"memory={placement.plan.memory!r} works only with trainer.step and ax.make_train_step, whose compiled step is "
            "measured. In a loop of your own give remat=trainer.recompute instead"
        )
    count = placement.plan.microbatches
    _warn_of_rounding(placement, count)
    parts = Parts(count * (placement.ranks(placement.axes.rows) if sync else 1), scale)
    engine = engine_of(placement, sync)(objective, placement, parts, sync, left_out)
    found = engine.differentiate(variables, key, batch)
    loss, metrics, weight = means(found.losses, placement, count, sync)
    loss, metrics, slope = (loss, metrics, None) if found.finish is None else found.finish(loss, metrics)
    leaves, treedef = jax.tree.flatten(found.grads)
    if (
        slope is not None or weight is not None
    ):  # in at least float32: float16 ends at 65504, fewer than a batch has tokens
        leaves = [grad.astype(jnp.promote_types(grad.dtype, jnp.float32)) for grad in leaves]
    if slope is not None:
        leaves = [grad * slope.astype(grad.dtype) for grad in leaves]
    if weight is not None:
        leaves = [per_weight(grad, weight.astype(grad.dtype)) for grad in leaves]
    dtypes = [dtype for _, dtype, _ in rest_of(placement).parts(found.grads)]
    grads = [grad.astype(dtype) for grad, dtype in zip(leaves, dtypes, strict=True)]
    return Gradients(treedef.unflatten(grads), loss, metrics, found.state, found.left_out)


def _warn_of_rounding(placement: Placement, count: int) -> None:
    """Warns where so many gradients are summed in 16 bits that the last are rounded away for a good part."""
    of = placement.plan.precision.accumulate_dtype
    kinds = {of(layout.dtype) for layout in jax.tree.leaves(placement.params, is_leaf=is_layout)}
    short = [kind for kind in kinds if kind.itemsize == 2 and count > 2 ** (jnp.finfo(kind).nmant - 1)]
    if short:
        warn(
            f"gradients of {count} microbatches are summed in {short[0].name}, which rounds each sum to "
            f"{jnp.finfo(short[0]).nmant + 1} bits: the sum may lose a good part of them. Sum them in float32, "
            'precision=ax.Precision(accumulate="float32"), or take fewer microbatches'
        )


def engine_of(placement: Placement, sync: bool) -> type[GradientEngine]:
    """Chooses the engine of a plan. Ranks that keep unreduced gradients (`no_sync`) gather all parameters at once."""
    if placement.stages is not None:
        from axonml_jax.training.pipelined import ByStage

        return ByStage
    return ByUnit if sync and placement.at_use else AtOnce


def means(losses: Loss, placement: Placement, count: int, sync: bool):
    """Sums and divides losses stacked by microbatch -> (mean loss, metrics, total weight or None); over ranks if `sync`."""
    return means_of(summed(losses, placement, sync), count * (placement.ranks(placement.axes.rows) if sync else 1))


def summed(losses: Loss, placement: Placement, sync: bool) -> Loss:
    """Sums losses stacked by microbatch, over ranks too if `sync`."""
    sums = jax.tree.map(lambda x: x.sum(0), losses)
    leaves, treedef = jax.tree.flatten(sums)
    if sync:
        with jax.named_scope("axonml.metrics"):
            # XLA cannot partition a sum over one rank of what is split along axes left to it.
            alone = (
                bool(placement.automatic)
                and placement.ranks(placement.axes.synced) == 1
                and not placement.plan.check_vma
            )
            leaves = all_reduce_leaves(leaves, () if alone else placement.axes.synced, flat=len(leaves) > 1)
    return treedef.unflatten(leaves)


def means_of(sums: Loss, parts: int):
    """Divides sums over `parts` microbatches and ranks -> (mean loss, mean metrics, total weight or None)."""
    loss = sums.total / parts if sums.weight is None else per_weight(sums.total, sums.weight)
    return loss, {name: metric.value for name, metric in sums.metrics.items()}, sums.weight
