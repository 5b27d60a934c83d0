"""Reducing gradients where they are ready: each bucket's gather and sync become one hook at its first use in the loss."""

from collections.abc import Callable, Sequence

import jax

from axonml_jax._types import PyTree
from axonml_jax.collectives.buckets import assign_buckets
from axonml_jax.model.sink import sink
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Layout, is_layout


def overlapped(loss: Callable, placement: Placement, params: PyTree, args: tuple) -> Callable:
    """A loss of resting parameters whose gradients come out reduced.

    Args:
      loss: `loss(read_params, *args) -> (scalar, aux)`, inside `shard_map`.
      placement: how parameters are read and gradients reduced.
      params: the resting parameters.
      args: the loss's other arguments.

    Returns:
      `hooked(params, accumulated, *args) -> (scalar, aux)`: differentiated for `params` it gives their synchronized
      gradients, each bucket reduced as soon as the backward is past its first use. `accumulated` is a tree like params
      (or None) of local gradients that join before the reduction.
    """
    leaves, treedef = jax.tree.flatten(params)
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)

    def flat_loss(read: Sequence[jax.Array], *args):
        return loss(treedef.unflatten(read), *args)

    def group(indices: Sequence[int], values: Sequence) -> list[list[int]]:
        sizes = [value.size * placement.wire_itemsize(layouts[i]) for i, value in zip(indices, values, strict=True)]
        return assign_buckets(sizes, placement.plan.data.bucket_bytes)

    def hook(indices: Sequence[int], shards: Sequence[jax.Array], extras: Sequence) -> Sequence[jax.Array]:
        return _bucket(placement, tuple(layouts[i] for i in indices), min(indices))(list(shards), list(extras))

    hooked = sink(flat_loss, placement.read(leaves, layouts), args, group=group, hook=hook)

    def run(params: PyTree, accumulated: PyTree | None, *args):
        extras = [None] * len(leaves) if accumulated is None else jax.tree.leaves(accumulated)
        return hooked(jax.tree.leaves(params), extras, *args)

    return run


def _bucket(placement: Placement, layouts: tuple[Layout, ...], name: int) -> Callable:
    @jax.custom_vjp
    def read(shards, accumulated):
        return placement.read(shards, layouts)

    def forward(shards, accumulated):
        return placement.read(shards, layouts), accumulated

    def backward(accumulated, grads):
        local = [
            placement.to_reduce(grad, layout) if more is None else placement.to_reduce(grad, layout) + more
            for grad, more, layout in zip(grads, accumulated, layouts, strict=True)
        ]
        return placement.sync(local, layouts, name), None

    read.defvjp(forward, backward)
    return read
