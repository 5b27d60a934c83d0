"""Gradients summed over microbatches: what accumulates, and which reduction waits for the last one."""

import abc
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree
from axonml_jax.collectives.varying import vary, vary_like
from axonml_jax.compat.jaxpr import trace
from axonml_jax.mesh.axes import AxisNames, flat_axes
from axonml_jax.model.functional import Variables
from axonml_jax.sharding.layout import is_layout
from axonml_jax.training.engine.engine import Differentiated, GradientEngine
from axonml_jax.training.objective import shard_key

OneMicrobatch = Callable[
    [PyTree, jax.Array, PyTree, Collection[AxisNames] | None, Any],
    tuple[list[jax.Array], Any, PyTree, list[jax.Array] | None],
]
"""`run(state, key, batch, axes, accumulated) -> (gradients by leaf, loss, state, left out)` of one microbatch on one rank.

Gradients are in the dtype in which they accumulate, synchronized over `axes` (None: all). `accumulated`, or None, are
gradients synchronized over the plan's inner axes that join before the rest of the reduction. What sums of the last
microbatch lack is left out; None: nothing is fed back.
"""


class OneByOne(GradientEngine):
    """One microbatch after the other.

    What is synchronized after every microbatch (ZeRO-2 and 3) accumulates as shards. The rest is reduced once: where
    reductions overlap the backward, the last microbatch is peeled off the loop, and its hooks add what accumulated.
    """

    @abc.abstractmethod
    def one(self, variables: Variables) -> OneMicrobatch:
        """What differentiates one microbatch."""

    def differentiate(self, variables: Variables, key: jax.Array, batch: PyTree) -> Differentiated:
        """Accumulate."""
        placement = self.placement
        rank = placement.key_number()
        keys = [shard_key(key, a, rank) for a in range(placement.plan.microbatches)]
        grads, losses, state, left = self._accumulated(self.one(variables), variables.state, keys, batch)
        tree = lambda leaves: jax.tree.unflatten(jax.tree.structure(variables.params), leaves)
        return Differentiated(tree(grads), losses, state, None if left is None else tree(left))

    def _accumulated(self, run: OneMicrobatch, state: PyTree, keys: list, batch: PyTree):
        placement, sync = self.placement, self.sync
        inner = placement.inner_axes if sync else ()
        outer = [axis for axis in placement.axes if axis not in inner] if sync else []
        feedback, left = self.feedback, None if self.left_out is None else jax.tree.leaves(self.left_out)
        if len(keys) == 1:
            grads, loss, state, left = run(state, keys[0], batch, None if sync else (), left)
            return grads, jax.tree.map(lambda x: x[None], loss), state, left
        batches = placement.batch_layout.microbatches(batch, len(keys))
        waits = [axis for axis in flat_axes(outer) if axis in placement.batch_axes and placement.ranks(axis) > 1]
        if not (placement.reducer.overlaps and waits):
            grads, losses, state = self._loop(run, state, keys, batches, inner, left)
            layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
            left = None if feedback is None else feedback.left_out(grads, layouts)
            return placement.sync_buckets(grads, layouts, axes=outer) if outer else grads, losses, state, left
        head, last = jax.tree.map(lambda x: x[:-1], batches), jax.tree.map(lambda x: x[-1], batches)
        grads, losses, state = self._loop(run, state, keys[:-1], head, inner, left)
        grads, loss, state, left = run(state, keys[-1], last, None, grads)
        return grads, jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), losses, loss), state, left

    def _loop(
        self, run: OneMicrobatch, state: PyTree, keys: list, batches: PyTree, inner: tuple[AxisNames, ...], first: Any
    ):
        """`first`: what gradients begin with; None: zeros."""
        placement = self.placement
        layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
        reduced = flat_axes(inner)
        left = [axis for axis in placement.batch_axes if axis not in reduced]
        axes = [(*left, *layout.axes) for layout in layouts]
        shapes = [layout.shard if inner else placement.read_shape(layout) for layout in layouts]
        kinds = [placement.plan.precision.accumulate_dtype(layout.dtype) for layout in layouts]
        if first is None:
            first = map(jnp.zeros, shapes, kinds)
        first = [vary(each, own) for each, own in zip(first, axes, strict=True)]
        if placement.plan.check_vma:
            state = _typed_carry(run, state, keys[0], jax.tree.map(lambda x: x[0], batches), inner)

        def body(carry, xs):
            grads, state = carry
            key, batch = xs
            more, loss, state, _ = run(state, key, batch, inner, None)
            more = [vary(m.astype(g.dtype), own) for g, m, own in zip(grads, more, axes, strict=True)]
            return ([g + m for g, m in zip(grads, more, strict=True)], state), loss

        (grads, state), losses = jax.lax.scan(body, (first, state), (jnp.stack(keys), batches))
        return grads, losses, state


def _typed_carry(run: OneMicrobatch, state: PyTree, key: jax.Array, batch: PyTree, inner: Any) -> PyTree:
    """The state typed as varying over what it will vary over after a microbatch, so that a scan may carry it."""
    leaves, treedef = jax.tree.flatten(state)
    for _ in leaves:
        traced = trace(lambda s: jax.tree.leaves(run(treedef.unflatten(s), key, batch, inner, None)[2]), leaves)
        wider = [vary_like(leaf, aval) for leaf, aval in zip(leaves, traced.made, strict=True)]
        if all(new is old for new, old in zip(wider, leaves, strict=True)):
            break
        leaves = wider
    return treedef.unflatten(leaves)
