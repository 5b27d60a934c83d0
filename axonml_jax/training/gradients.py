"""Gradients of a step, whole or accumulated over microbatches: gather, differentiate, sync."""

from typing import NamedTuple

import jax

from axonml_jax._types import PyTree
from axonml_jax.collectives.gradients.bucketed import all_reduce_leaves
from axonml_jax.model.functional import Variables
from axonml_jax.model.loss import Loss
from axonml_jax.parallel.placement import Placement
from axonml_jax.training.engine.at_once import AtOnce
from axonml_jax.training.engine.by_unit import ByUnit
from axonml_jax.training.engine.engine import GradientEngine
from axonml_jax.training.engine.pipelined import ByStage
from axonml_jax.training.finite.loss_scale import unscaled
from axonml_jax.training.objective import Objective, Parts
from axonml_jax.training.rest.choose import rest_of


class Gradients(NamedTuple):
    """What one step's differentiation gives on one rank.

    Attributes:
      grads: synchronized gradients of the resting parameters.
      loss: the mean over the global batch.
      metrics: means over the global batch, by name.
      state: the model's state after the last microbatch, before ranks are made equal.
      left_out: what the sums lack of this rank's gradients, where the plan feeds it back.
    """

    grads: PyTree
    loss: jax.Array
    metrics: dict[str, jax.Array]
    state: PyTree
    left_out: PyTree = None


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
      scale: differentiate the loss times this factor, and divide it out of the gradients.
      sync: False leaves gradients and loss each rank's own (means over its rows).
      left_out: what the last step's sums lacked of this rank's gradients; None: nothing is fed back.

    Communicates: what the plan's strategies do, once, and one small all-reduce for loss and metrics.
    """
    count = placement.plan.microbatches
    parts = Parts(count * (placement.joined_rows if sync else 1), scale)
    engine = engine_of(placement, sync)(objective, placement, parts, sync, left_out)
    found = engine.differentiate(variables, key, batch)
    loss, metrics, weight = means(found.losses, placement, count, sync)
    leaves, treedef = jax.tree.flatten(found.grads)
    dtypes = [dtype for _, dtype, _ in rest_of(placement).parts(found.grads)]
    grads = [grad.astype(dtype) for grad, dtype in zip(leaves, dtypes, strict=True)]
    if weight is not None:
        grads = [grad / weight.astype(grad.dtype) for grad in grads]
    if scale is not None:
        grads = unscaled(grads, scale)
    return Gradients(treedef.unflatten(grads), loss, metrics, found.state, found.left_out)


def engine_of(placement: Placement, sync: bool) -> type[GradientEngine]:
    """The engine of a plan; ranks that keep whole gradients of their own (`no_sync`) have whole parameters."""
    if placement.stages is not None:
        return ByStage
    return ByUnit if sync and placement.gathers_when_used else AtOnce


def means(losses: Loss, placement: Placement, count: int, sync: bool):
    """Losses stacked by microbatch -> (mean loss, mean metrics, total weight or None), over ranks too with `sync`."""
    sums = jax.tree.map(lambda x: x.sum(0), losses)
    leaves, treedef = jax.tree.flatten(sums)
    if sync:
        with jax.named_scope("axonml.metrics"):
            leaves = all_reduce_leaves(leaves, placement.joined_axes, flat=len(leaves) > 1)
    total, weight, metrics = treedef.unflatten(leaves)
    parts = count * (placement.joined_rows if sync else 1)
    loss = total / (parts if weight is None else weight)
    return loss, {name: metric.value for name, metric in metrics.items()}, weight
