"""What sums of gradients lack of every rank's own, kept from step to step: stacked by rank, as no two ranks' are alike."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout, shardings
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.training.each_rank import each_ranks_specs

LEFT_OUT = "left_out/"
"""What the names of these arrays start with in checkpoints; the rest is their parameter's name."""


def left_out_specs(placement: Placement) -> PyTree:
    """Of every parameter, with a dim of ranks in front; None: the plan feeds nothing back."""
    return each_ranks_specs(placement) if _feeds_back(placement) else None


def nothing_left_out(placement: Placement) -> PyTree:
    """Zeros: of a run that begins, [ranks, *shape] for every parameter, in the dtype in which its gradients accumulate."""
    if not _feeds_back(placement):
        return None
    kind = placement.plan.precision.accumulate_dtype
    zeros = lambda layout: jnp.zeros((placement.batch_degree, *layout.shape), kind(layout.dtype))
    return jax.tree.map(zeros, placement.params, is_leaf=is_layout)


def first_left_out(placement: Placement, mesh: Mesh) -> PyTree:
    """The same where they live, made there."""
    if not _feeds_back(placement):
        return None
    wanted = shardings(left_out_specs(placement), mesh)
    return jax.jit(lambda: nothing_left_out(placement), out_shardings=wanted)()


def left_out_leaves(placement: Placement, left_out: PyTree) -> dict[str, Leaf]:
    """By name: what checkpoints hold."""
    entries = f"one entry for each of {placement.batch_degree} ranks"
    return {LEFT_OUT + name: Leaf(array, entries=entries) for name, array in named_leaves(left_out).items()}


def left_out_of(like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
    """The inverse; what is missing begins with nothing."""
    found = [arrays.get(LEFT_OUT + name) for name in named_leaves(like)]
    leaves, treedef = jax.tree.flatten(like)
    zeros = lambda leaf: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)
    return treedef.unflatten([zeros(leaf) if own is None else own for leaf, own in zip(leaves, found, strict=True)])


def _feeds_back(placement: Placement) -> bool:
    return any(strategy.feeds_back for strategy in placement.strategies.values())
