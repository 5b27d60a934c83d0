"""Gradients of a step, whole or accumulated over microbatches: gather, differentiate, sync."""

from typing import NamedTuple

import jax

from axonml_jax._types import PyTree
from axonml_jax.collectives.bucketed import all_reduce_leaves
from axonml_jax.collectives.primitives import axis_index
from axonml_jax.model.functional import Variables
from axonml_jax.model.loss import Loss
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout
from axonml_jax.training.accumulate import accumulate
from axonml_jax.training.loss_scale import unscaled
from axonml_jax.training.objective import Objective, Parts, shard_key
from axonml_jax.training.pipelined import pipelined_gradients
from axonml_jax.training.ways import AtOnce, ByUnit, Way


class Gradients(NamedTuple):
    """What one step's differentiation gives on one rank.

    Attributes:
      grads: synchronized gradients of the resting parameters.
      loss: the mean over the global batch.
      metrics: means over the global batch, by name.
      state: the model's state after the last microbatch, before ranks are made equal.
    """

    grads: PyTree
    loss: jax.Array
    metrics: dict[str, jax.Array]
    state: PyTree


def gradients(
    objective: Objective,
    placement: Placement,
    variables: Variables,
    key: jax.Array,
    batch: PyTree,
    *,
    sync: bool = True,
    scale: jax.Array | None = None,
) -> Gradients:
    """Differentiate the loss of the global batch, inside `shard_map`.

    Args:
      objective: the loss on one microbatch.
      placement: how parameters are read and gradients reduced.
      variables: resting variables.
      key: the step's randomness.
      batch: this rank's rows, [b, ...] on every leaf that is not a scalar; b divides by the plan's `accumulate`.
      scale: differentiate the loss times this factor, and divide it out of the gradients.
      sync: False leaves gradients and loss each rank's own (means over its rows).

    Communicates: what the plan's strategies do, once, and one small all-reduce for loss and metrics.
    """
    count = placement.plan.microbatches
    parts = Parts(count * (placement.joined_degree if sync else 1), scale)
    if placement.stages is not None:
        summed, loss, state = pipelined_gradients(objective, placement, variables, key, batch, parts)
        losses = jax.tree.map(lambda x: x[None], loss)
        layouts = [jax.ShapeDtypeStruct((), dtype) for _, dtype, _ in placement.stages.parts(summed)]
        return _finished(placement, summed, jax.tree.leaves(summed), layouts, losses, count, sync, scale, state)
    keys = [shard_key(key, a, axis_index(placement.batch_axes)) for a in range(count)]
    if sync and placement.gathers_when_used:
        way: Way = ByUnit(objective, placement, variables, parts)
    else:
        way = AtOnce(objective, placement, variables, parts, sync)
    grads, losses, state = accumulate(way, placement, variables.state, keys, batch, sync)
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    return _finished(placement, variables.params, grads, layouts, losses, count, sync, scale, state)


def _finished(placement, like, grads, layouts, losses, count, sync, scale, state) -> Gradients:
    """Means over the global batch, and gradients of the mean loss in the parameters' dtype, in the structure of `like`."""
    loss, metrics, weight = means(losses, placement, count, sync)
    treedef = jax.tree.structure(like)
    grads = [grad.astype(layout.dtype) for grad, layout in zip(grads, layouts, strict=True)]
    if weight is not None:
        grads = [grad / weight.astype(grad.dtype) for grad in grads]
    if scale is not None:
        grads = unscaled(grads, scale)
    return Gradients(treedef.unflatten(grads), loss, metrics, state)


def means(losses: Loss, placement: Placement, count: int, sync: bool):
    """Losses stacked by microbatch -> (mean loss, mean metrics, total weight or None), over ranks too with `sync`."""
    sums = jax.tree.map(lambda x: x.sum(0), losses)
    leaves, treedef = jax.tree.flatten(sums)
    if sync:
        with jax.named_scope("axonml.metrics"):
            leaves = all_reduce_leaves(leaves, placement.joined_axes, flat=len(leaves) > 1)
    total, weight, metrics = treedef.unflatten(leaves)
    parts = count * (placement.joined_degree if sync else 1)
    loss = total / (parts if weight is None else weight)
    return loss, {name: metric.value for name, metric in metrics.items()}, weight
