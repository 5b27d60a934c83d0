"""Gradients summed over microbatches: what accumulates, and which reduction waits for the last one."""

from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree
from axonml_jax.collectives.varying import vary, vary_like
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.model.trace import trace
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout
from axonml_jax.training.ways import Way


def accumulate(way: Way, placement: Placement, state: PyTree, keys: list, batch: PyTree, sync: bool):
    """Differentiate one microbatch per key.

    What is synchronized after every microbatch (ZeRO-2 and 3) accumulates as shards. The rest is reduced once: where
    reductions overlap the backward, the last microbatch is peeled off the loop, and its hooks add what accumulated.

    Returns:
      (gradients by leaf in the reduce dtype, losses stacked by microbatch, the state after the last one).
    """
    inner = placement.inner_axes if sync else ()
    outer = [axis for axis in placement.axes if axis not in inner] if sync else []
    if len(keys) == 1:
        grads, loss, state = way(state, keys[0], batch, None if sync else (), None)
        return grads, jax.tree.map(lambda x: x[None], loss), state
    batches = placement.batch_layout.microbatches(batch, len(keys))
    if not (placement.plan.overlapped and any(placement.ranks(axis) > 1 for axis in outer)):
        grads, losses, state = _loop(way, placement, state, keys, batches, inner)
        if outer:
            layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
            grads = placement.sync_buckets(grads, layouts, axes=outer)
        return grads, losses, state
    head, last = jax.tree.map(lambda x: x[:-1], batches), jax.tree.map(lambda x: x[-1], batches)
    grads, losses, state = _loop(way, placement, state, keys[:-1], head, inner)
    grads, loss, state = way(state, keys[-1], last, None, grads)
    return grads, jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), losses, loss), state


def _loop(way: Way, placement: Placement, state: PyTree, keys: list, batches: PyTree, inner: tuple[AxisNames, ...]):
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    axes = [(*placement.batch_axes, *layout.axes) for layout in layouts]
    shapes = [layout.shard if inner else placement.read_shape(layout) for layout in layouts]
    kinds = [placement.plan.precision.reduce_dtype(layout.dtype) for layout in layouts]
    zeros = [vary(jnp.zeros(shape, kind), own) for shape, kind, own in zip(shapes, kinds, axes, strict=True)]
    if placement.plan.check_vma:
        state = _typed_carry(way, state, keys[0], jax.tree.map(lambda x: x[0], batches), inner)

    def body(carry, xs):
        grads, state = carry
        key, batch = xs
        more, loss, state = way(state, key, batch, inner, None)
        more = [vary(m.astype(g.dtype), own) for g, m, own in zip(grads, more, axes, strict=True)]
        return ([g + m for g, m in zip(grads, more, strict=True)], state), loss

    (grads, state), losses = jax.lax.scan(body, (zeros, state), (jnp.stack(keys), batches))
    return grads, losses, state


def _typed_carry(way: Way, state: PyTree, key: jax.Array, batch: PyTree, inner: Any) -> PyTree:
    """The state typed as varying over what it will vary over after a microbatch, so that a scan may carry it."""
    leaves, treedef = jax.tree.flatten(state)
    for _ in leaves:
        traced = trace(lambda s: jax.tree.leaves(way(treedef.unflatten(s), key, batch, inner, None)[2]), leaves)
        wider = [vary_like(leaf, var.aval) for leaf, var in zip(leaves, traced.jaxpr.outvars, strict=True)]
        if all(new is old for new, old in zip(wider, leaves, strict=True)):
            break
        leaves = wider
    return treedef.unflatten(leaves)
