"""The PartitionSpec of everything in a `TrainState`."""

from dataclasses import replace
from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax.model.functional import Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import shardings
from axonml_jax.training.opt_state import opt_state_specs
from axonml_jax.training.stacked import stacked_specs
from axonml_jax.training.staged import StagedOptimizer
from axonml_jax.training.state import TrainState


def variable_specs(placement: Placement, variables: Variables) -> Variables:
    """Specs of a model's variables; ranks that keep different ones have them stacked along dim 0."""
    plan, stacked = placement.plan, placement.rank_spec
    params = placement.param_specs()
    if plan.independent:
        params = stacked_specs(placement, placement.params)
    state = jax.tree.map(lambda _: stacked if plan.local_buffers else PartitionSpec(), variables.state)
    return Variables(params, placement.frozen_specs(), state)


def state_specs(placement: Placement, tx: optax.GradientTransformation, state: TrainState) -> Any:
    """Specs of a whole `TrainState`."""
    if placement.stages is None:
        opt_specs = opt_state_specs(placement, tx, state.opt_state)
    else:
        opt_specs = StagedOptimizer.of(tx, placement).specs()
    return replace(
        state,
        step=PartitionSpec(),
        variables=variable_specs(placement, state.variables),
        opt_state=opt_specs,
        key=PartitionSpec(),
        loss_scale=jax.tree.map(lambda _: PartitionSpec(), state.loss_scale),
        guard=jax.tree.map(lambda _: PartitionSpec(), state.guard),
    )


def at_rest(state: TrainState, placement: Placement, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A step's new state where the next one wants it: the partitioner is told what it would be free to choose."""
    if placement.at_rest is None:
        return state
    return jax.lax.with_sharding_constraint(state, shardings(state_specs(placement.resting, tx, state), mesh))
