"""Values of which every rank keeps its own: stacked by rank along dim 0 between steps, single inside `shard_map`."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axonml_jax._types import PyTree, path_name
from axonml_jax.collectives.varying import vary
from axonml_jax.model.functional import Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Layout, is_layout
from axonml_jax.training.state import TrainState


def unstack_state(state: TrainState, placement: Placement) -> TrainState:
    """This rank's own state."""
    opt_state = _own(state.opt_state) if placement.plan.independent else state.opt_state
    return replace(state, variables=unstack_variables(state.variables, placement), opt_state=opt_state)


def stack_state(state: TrainState, placement: Placement) -> TrainState:
    """The inverse of `unstack_state`."""
    opt_state = stacked(state.opt_state, placement) if placement.plan.independent else state.opt_state
    return replace(state, variables=stack_variables(state.variables, placement), opt_state=opt_state)


def unstack_variables(variables: Variables, placement: Placement) -> Variables:
    """This rank's own variables."""
    return _change(variables, placement, _own)


def stack_variables(variables: Variables, placement: Placement) -> Variables:
    """The inverse of `unstack_variables`."""
    return _change(variables, placement, lambda tree: stacked(tree, placement))


def stacked(tree: PyTree, placement: Placement) -> PyTree:
    """Every leaf [...] as this rank's entry [1, ...] of a value stacked by rank."""
    return jax.tree.map(lambda x: vary(jnp.asarray(x), placement.batch_axes)[None], tree)


def _own(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], tree)


def _change(variables: Variables, placement: Placement, change: Callable) -> Variables:
    plan = placement.plan
    return Variables(
        change(variables.params) if plan.independent else variables.params,
        variables.frozen,
        change(variables.state) if plan.local_buffers else variables.state,
    )


def stacked_specs(placement: Placement, layouts: PyTree) -> PyTree:
    """The specs of what is stacked by rank: dim 0 over the batch axes, the others as the model's layers split them.

    Raises:
      ValueError: listing parameters that are split over an axis that splits the batch too (`depth`): its ranks share one.
    """
    shared = [
        path_name(path)
        for path, layout in jax.tree_util.tree_leaves_with_path(layouts, is_leaf=is_layout)
        if any(axis in placement.batch_axes for axis in layout.axes if axis in placement.layer_axes)
    ]
    if shared:
        raise ValueError(
            "every rank's own values are stacked along the batch axes, but ranks along depth, which splits the batch, share "
            f"these parameters: {', '.join(shared[:8])}{', ...' if len(shared) > 8 else ''}. Accumulate inside the step "
            "(accumulate=) instead"
        )

    def spec(layout: Layout) -> PartitionSpec:
        axes = [
            tuple(axis for axis in layout.axes_of(dim) if axis in placement.layer_axes)
            for dim in range(len(layout.spec))
        ]
        return PartitionSpec(placement.batch_axes, *(entry[0] if len(entry) == 1 else entry or None for entry in axes))

    return jax.tree.map(spec, layouts, is_leaf=is_layout)
