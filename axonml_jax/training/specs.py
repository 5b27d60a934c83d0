"""The PartitionSpec of everything in a `TrainState`."""

from dataclasses import replace
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.model.functional import Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import shardings
from axonml_jax.sharding.memory import HOST, movable
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


def resting_shapes(state: TrainState, placement: Placement, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes of a state with their shardings and memory kinds: what is offloaded rests in host memory."""
    offload, specs = placement.plan.offload, state_specs(placement, tx, state)

    def on(host: bool):
        def shape(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, spec, memory_kind=HOST if host and movable(leaf) else "device")
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return shape

    placed = jax.tree.map(on(False), state, specs)
    own, theirs = state.variables, specs.variables
    params, frozen = jax.tree.map(on(offload.params), (own.params, own.frozen), (theirs.params, theirs.frozen))
    opt_state = jax.tree.map(on(offload.optimizer), state.opt_state, specs.opt_state)
    return replace(placed, variables=Variables(params, frozen, placed.variables.state), opt_state=opt_state)
