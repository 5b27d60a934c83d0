"""Reducing gradients where they are ready: each bucket's gather and sync become one hook at its first use in the loss."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.collectives.gradients.buckets import assign_buckets
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.strategies.feedback import Feedback
from axonml_jax.program.sink import sink
from axonml_jax.sharding.layout import Layout, is_layout


def overlapped(
    loss: Callable,
    placement: Placement,
    params: PyTree,
    read: PyTree | None,
    args: tuple,
    axes: Collection[AxisNames] | None,
    feedback: Feedback | None = None,
) -> Callable:
    """A loss whose gradients for resting parameters come out reduced.

    Args:
      loss: `loss(read_params, *args) -> (scalar, aux)`, inside `shard_map`.
      placement: how parameters are read and gradients reduced.
      params: the resting parameters.
      read: the parameters as read, where they were gathered before; None: each bucket is gathered at its first use.
      args: the loss's other arguments.
      axes: synchronize over these only; None: all.
      feedback: differentiated for `accumulated`, the result gives what sums leave out; None: nothing.

    Returns:
      `hooked(carriers, accumulated, *args) -> (scalar, aux)`: differentiated for `carriers`, trees like the resting
      parameters in the dtype in which gradients accumulate, whose values do not count, it gives synchronized gradients, each
      bucket reduced as soon as the backward is past its first use. `accumulated` is a tree (or None) of gradients
      synchronized over the plan's inner axes that join before the rest of the reduction.
    """
    leaves, treedef = jax.tree.flatten(params)
    wholes = None if read is None else treedef.flatten_up_to(read)
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    # What is rounded on its way must be the same in every step and in evaluation, which gather stacks whole.
    rounded = any(
        not each.reads_exactly and each.role.parameters == "sharded" for each in placement.strategies.values()
    )

    def flat_loss(read: Sequence[jax.Array], *args):
        return loss(treedef.unflatten(read), *args)

    def group(indices: Sequence[int], values: Sequence) -> list[list[int]]:
        sizes = [value.size * placement.wire_itemsize(layouts[i]) for i, value in zip(indices, values, strict=True)]
        return assign_buckets(sizes, placement.reducer.bucket_bytes)

    def hook(indices: Sequence[int], carriers: Sequence[jax.Array], extras: Sequence) -> Sequence[jax.Array]:
        own = tuple(layouts[i].sliced(carrier.ndim) for i, carrier in zip(indices, carriers, strict=True))
        sources, accumulated = zip(*extras, strict=True)
        bucket = _bucket(placement, own, min(indices), axes, read is not None, feedback)
        return bucket(list(carriers), sources, accumulated)

    def sliceable(leaf: int, depth: int) -> bool:
        return not rounded and all(parts == 1 for parts in layouts[leaf].parts[:depth])

    seen = placement.read(leaves, layouts) if wholes is None else wholes
    hooked = sink(flat_loss, seen, args, group=group, hook=hook, sliceable=sliceable)

    def run(carriers: PyTree, accumulated: PyTree | None, *args):
        more = [None] * len(leaves) if accumulated is None else jax.tree.leaves(accumulated)
        sources = leaves if wholes is None else wholes
        return hooked(jax.tree.leaves(carriers), list(zip(sources, more, strict=True)), *args)

    return run


def _bucket(
    placement: Placement,
    layouts: tuple[Layout, ...],
    name: int,
    axes: Collection[AxisNames] | None,
    gathered: bool,
    feedback: Feedback | None,
) -> Callable:
    def gather(sources: Any) -> list[jax.Array]:
        return list(sources) if gathered else placement.read(sources, layouts)

    @jax.custom_vjp
    def read(carriers, sources, accumulated):
        return gather(sources)

    def forward(carriers, sources, accumulated):
        return gather(sources), accumulated

    def backward(accumulated, grads):
        more = accumulated if any(each is not None for each in accumulated) else None
        left = None
        if feedback is not None:
            wholes = map(placement.to_accumulate, grads, layouts)
            left = tuple(feedback.left_out([a + b for a, b in zip(wholes, accumulated, strict=True)], layouts))
        return placement.sync(grads, layouts, name, axes=axes, accumulated=more), None, left

    read.defvjp(forward, backward)
    return read
