"""The PartitionSpec of everything in a `TrainState`."""

from dataclasses import replace
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from axonml_jax._types import PyTree
from axonml_jax.model.functional import Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout
from axonml_jax.training.state import TrainState


def variable_specs(placement: Placement, variables: Variables) -> Variables:
    """Specs of a model's variables; ranks that keep different ones have them stacked along dim 0."""
    plan, stacked = placement.plan, placement.rank_spec
    params = placement.param_specs()
    if plan.independent:
        params = jax.tree.map(lambda _: stacked, variables.params)
    state = jax.tree.map(lambda _: stacked if plan.local_buffers else PartitionSpec(), variables.state)
    return Variables(params, placement.frozen_specs(), state)


def opt_state_specs(placement: Placement, tx: optax.GradientTransformation, opt_state: PyTree) -> PyTree:
    """Specs of the optimizer's state: a leaf that belongs to a parameter lives where the parameter does.

    Optax keeps such leaves in trees shaped like the parameters, so they are known by the end of their path and their shape.
    """
    if placement.plan.independent:
        return jax.tree.map(lambda _: placement.rank_spec, opt_state)
    owners = {path: (spec, shape) for path, spec, shape in _owners(placement)}

    def spec_of(path: tuple, leaf: Any) -> PartitionSpec:
        ends = (path[i:] for i in range(len(path)))
        spec, shape = next((owners[end] for end in ends if end in owners), (PartitionSpec(), None))
        return spec if shape == leaf.shape else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec_of, opt_state)


def _owners(placement: Placement) -> list[tuple]:
    layouts = jax.tree_util.tree_leaves_with_path(placement.params, is_leaf=is_layout)
    return [(path, layout.spec, layout.stored) for path, layout in layouts]


def state_specs(placement: Placement, tx: optax.GradientTransformation, state: TrainState) -> Any:
    """Specs of a whole `TrainState`."""
    return replace(
        state,
        step=PartitionSpec(),
        variables=variable_specs(placement, state.variables),
        opt_state=opt_state_specs(placement, tx, state.opt_state),
        key=PartitionSpec(),
    )
