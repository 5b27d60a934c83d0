"""Which of a layer's mesh axes are bound here: inside `shard_map` over them a layer sees shards, elsewhere whole arrays."""

import jax

from axonml_jax.collectives.primitives import axis_size
from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.compat.around import manual_axes
from axonml_jax.mesh.axes import AxisNames, as_axes


def bound(axes: AxisNames) -> tuple[str, ...]:
    """Those of `axes` over which this code runs inside `shard_map`.

    An axis that `shard_map` leaves to the partitioner (partial-manual) is not bound, nor is one that only `vmap` names.

    >>> bound("tensor")
    ()
    """
    manual = manual_axes()
    return tuple(axis for axis in as_axes(axes) if axis in manual)


def degree(axes: AxisNames) -> int:
    """Into how many parts `axes` split something here: the product of the sizes of those that are bound."""
    names = bound(axes)
    return axis_size(names) if names else 1


def vary_alike(tree):
    """`tree` with every leaf typed as varying over the axes that any leaf varies over (nothing with `check_vma=False`)."""
    axes = frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(tree)))
    return vary(tree, tuple(sorted(axes)))
