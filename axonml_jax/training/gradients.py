"""Gradients of a step, whole or accumulated over microbatches: gather, differentiate, sync."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree
from axonml_jax.collectives.bucketed import all_reduce_leaves
from axonml_jax.collectives.pairs import zeros_like_varying
from axonml_jax.collectives.primitives import axis_index
from axonml_jax.collectives.varying import vary_like
from axonml_jax.model.functional import Variables
from axonml_jax.model.loss import Loss
from axonml_jax.model.trace import trace
from axonml_jax.parallel.overlap import overlapped
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout
from axonml_jax.training.objective import Objective, shard_key


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
) -> Gradients:
    """Differentiate the loss of the global batch, inside `shard_map`.

    Args:
      objective: the loss on one microbatch.
      placement: how parameters are read and gradients reduced.
      variables: resting variables.
      key: the step's randomness.
      batch: this rank's rows, [b, ...] on every leaf that is not a scalar; b divides by the plan's `accumulate`.
      sync: False leaves gradients and loss each rank's own (means over its rows).

    Communicates: what the plan's strategies do, once, and one small all-reduce for loss and metrics.
    """
    count, sync = placement.plan.accumulate, sync and not placement.plan.independent
    with jax.named_scope("axonml.parameters"):
        frozen = placement.read_tree(variables.frozen, placement.frozen)
    f = objective.differentiable(count * (placement.batch_degree if sync else 1), frozen)
    keys = [shard_key(key, a, axis_index(placement.batch_axes)) for a in range(count)]
    if sync and placement.plan.overlapped:
        grads, losses, state = _overlapped(f, placement, variables, keys, batch)
    else:
        grads, losses, state = _afterwards(f, placement, variables, keys, batch, sync)
    loss, metrics, weight = means(losses, placement, count, sync)
    if weight is not None:
        grads = jax.tree.map(lambda g: g / weight.astype(g.dtype), grads)
    return Gradients(grads, loss, metrics, state)


def _afterwards(f, placement: Placement, variables: Variables, keys: list, batch: PyTree, sync: bool):
    """Accumulate whole local gradients over all microbatches, then reduce them."""
    read = placement.read_tree(variables.params, placement.params)
    if len(keys) == 1:
        (_, (loss, state)), grads = jax.value_and_grad(f, has_aux=True)(read, variables.state, keys[0], batch)
        losses = jax.tree.map(lambda x: x[None], loss)
    else:
        grads, losses, state = _accumulate(f, placement, read, variables.state, keys, _microbatches(batch, len(keys)))
    leaves, treedef = jax.tree.flatten(grads)
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    if sync:
        leaves = placement.sync_buckets(leaves, layouts)
    else:
        leaves = [leaf.astype(layout.dtype) for leaf, layout in zip(leaves, layouts, strict=True)]
    return treedef.unflatten(leaves), losses, state


def _overlapped(f, placement: Placement, variables: Variables, keys: list, batch: PyTree):
    """Accumulate over all microbatches but the last, whose backward adds the rest and reduces bucket by bucket."""
    accumulated, state, first = None, variables.state, None
    if len(keys) > 1:
        batch = _microbatches(batch, len(keys))
        read = placement.read_tree(variables.params, placement.params)
        head, batch = jax.tree.map(lambda x: x[:-1], batch), jax.tree.map(lambda x: x[-1], batch)
        accumulated, first, state = _accumulate(f, placement, read, state, keys[:-1], head)
    args = (state, keys[-1], batch)
    hooked = overlapped(f, placement, variables.params, args)
    (_, (loss, state)), grads = jax.value_and_grad(hooked, has_aux=True)(variables.params, accumulated, *args)
    losses = jax.tree.map(lambda x: x[None], loss)
    if first is not None:
        losses = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, losses)
    return grads, losses, state


def _accumulate(f, placement: Placement, read: PyTree, state: PyTree, keys: list, batches: PyTree):
    """Sum local gradients of read parameters over microbatches, in the reduce dtype; losses are stacked."""
    layouts = jax.tree.unflatten(jax.tree.structure(read), jax.tree.leaves(placement.params, is_leaf=is_layout))
    zeros = jax.tree.map(
        lambda x, lay: zeros_like_varying(x, placement.plan.precision.reduce_dtype(lay.dtype)), read, layouts
    )
    if placement.plan.check_vma:
        state = _typed_carry(f, read, state, keys[0], jax.tree.map(lambda x: x[0], batches))

    def body(carry, xs):
        grads, state = carry
        (_, (loss, state)), more = jax.value_and_grad(f, has_aux=True)(read, state, *xs)
        return (jax.tree.map(lambda g, m: g + m.astype(g.dtype), grads, more), state), loss

    (grads, state), losses = jax.lax.scan(body, (zeros, state), (jnp.stack(keys), batches))
    return grads, losses, state


def _typed_carry(f, read: PyTree, state: PyTree, key: jax.Array, batch: PyTree) -> PyTree:
    """The state typed as varying over what it will vary over after a microbatch, so that a scan may carry it."""
    leaves, treedef = jax.tree.flatten(state)
    for _ in leaves:
        traced = trace(lambda s: jax.tree.leaves(f(read, treedef.unflatten(s), key, batch)[1][1]), leaves)
        wider = [vary_like(leaf, var.aval) for leaf, var in zip(leaves, traced.jaxpr.outvars, strict=True)]
        if all(new is old for new, old in zip(wider, leaves, strict=True)):
            break
        leaves = wider
    return treedef.unflatten(leaves)


def _microbatches(batch: PyTree, count: int) -> PyTree:
    """Rows [b, ...] -> [count, b/count, ...]; scalars are repeated."""

    def split(x):
        x = jnp.asarray(x)
        return x.reshape(count, x.shape[0] // count, *x.shape[1:]) if x.ndim else jnp.broadcast_to(x, (count,))

    return jax.tree.map(split, batch)


def means(losses: Loss, placement: Placement, count: int, sync: bool):
    """Losses stacked by microbatch -> (mean loss, mean metrics, total weight or None), over ranks too with `sync`."""
    sums = jax.tree.map(lambda x: x.sum(0), losses)
    leaves, treedef = jax.tree.flatten(sums)
    if sync:
        with jax.named_scope("axonml.metrics"):
            leaves = all_reduce_leaves(leaves, placement.batch_axes, flat=len(leaves) > 1)
    total, weight, metrics = treedef.unflatten(leaves)
    parts = count * (placement.batch_degree if sync else 1)
    loss = total / (parts if weight is None else weight)
    return loss, {name: metric.value for name, metric in metrics.items()}, weight
