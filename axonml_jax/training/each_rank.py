"""Gradients of every batch shard by itself (`no_sync`): stacked by rank along dim 0, whole but for what layers split."""

import jax
from jax.sharding import PartitionSpec

from axonml_jax._types import PyTree, path_name
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Layout, is_layout


def each_ranks_specs(placement: Placement) -> PyTree:
    """The specs of gradients stacked by rank: dim 0 over the batch axes, the others as the model's layers split them.

    Raises:
      ValueError: listing parameters that are split over an axis that splits the batch too (`depth`, `expert`), whose ranks
        share one.
    """
    both = set(placement.batch_axes) & set(placement.layer_axes)
    shared = [
        path_name(path)
        for path, layout in jax.tree_util.tree_leaves_with_path(placement.params, is_leaf=is_layout)
        if both.intersection(layout.axes)
    ]
    if shared:
        more = ", ..." if len(shared) > 8 else ""
        raise ValueError(
            "every rank's own values are stacked along the batch axes, but ranks along "
            f"{', '.join(sorted(both))}, which split the batch, share these parameters: {', '.join(shared[:8])}{more}. "
            "Accumulate inside the step (accumulate=) instead"
        )

    def spec(layout: Layout) -> PartitionSpec:
        axes = [
            tuple(axis for axis in layout.axes_of(dim) if axis in placement.layer_axes)
            for dim in range(min(len(layout.spec), len(layout.shape)))
        ]
        return PartitionSpec(placement.batch_axes, *(entry[0] if len(entry) == 1 else entry or None for entry in axes))

    return jax.tree.map(spec, placement.params, is_leaf=is_layout)
