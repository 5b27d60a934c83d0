"""The first state of a run, created where it will live."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax._types import PyTree
from axonml_jax.model.functional import Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import shardings
from axonml_jax.sharding.place import place
from axonml_jax.training.specs import opt_state_specs, variable_specs
from axonml_jax.training.state import TrainState


def place_variables(variables: Variables, placement: Placement, mesh: Mesh) -> Variables:
    """Whole variables (the same in every process) as they rest under a plan; copies, never the arrays given."""
    precision = placement.plan.precision
    variables = Variables(
        precision.cast_param(variables.params), precision.cast_param(variables.frozen), variables.state
    )
    specs = variable_specs(placement, variables)
    if placement.plan.independent:
        variables = Variables(_stacked(variables.params, placement), variables.frozen, variables.state)
    if placement.plan.local_buffers:
        variables = Variables(variables.params, variables.frozen, _stacked(variables.state, placement))
    return place(variables, specs, mesh)


def _stacked(tree: PyTree, placement: Placement) -> PyTree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (placement.batch_degree, *jnp.shape(x))), tree)


def init_opt_state(tx: optax.GradientTransformation, params: PyTree, placement: Placement, mesh: Mesh) -> PyTree:
    """The optimizer's first state, each leaf created where it will live."""
    init = jax.vmap(tx.init) if placement.plan.independent else tx.init
    specs = opt_state_specs(placement, tx, jax.eval_shape(init, params))
    return jax.jit(init, out_shardings=shardings(specs, mesh))(params)


def init_state(
    variables: Variables, tx: optax.GradientTransformation, placement: Placement, mesh: Mesh, key: jax.Array
) -> TrainState:
    """A run's first state from variables that already rest on the mesh."""
    step = place(jnp.zeros((), jnp.int32), PartitionSpec(), mesh)
    opt_state = init_opt_state(tx, variables.params, placement, mesh)
    return TrainState(step, variables, opt_state, place(key, PartitionSpec(), mesh))
