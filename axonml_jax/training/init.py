"""The first state of a run, created where it will live."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax._types import PyTree
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import shardings
from axonml_jax.sharding.memory import offloaded
from axonml_jax.sharding.place import place
from axonml_jax.sharding.stored import map_layouts, to_stored
from axonml_jax.training.loss_scale import LossScale
from axonml_jax.training.opt_state import first_opt_state, init_opt_state
from axonml_jax.training.specs import variable_specs
from axonml_jax.training.staged_init import abstract_staged, create_staged, first_staged_opt_state, place_staged
from axonml_jax.training.state import TrainState


def place_variables(variables: Variables, placement: Placement, mesh: Mesh) -> Variables:
    """Whole variables (the same in every process) as they rest under a plan; copies, never the arrays given."""
    if placement.stages is not None:
        return place_staged(variables, placement, mesh)
    specs = variable_specs(placement.resting, variables)
    return _kept(place(_resting(variables, placement), specs, mesh), placement)


def first_variables(model: Functional, given: Variables, placement: Placement, mesh: Mesh) -> Variables:
    """A model's variables where they rest: those given, or made there by `model.create`.

    What is made there is never whole on any device: each makes its own part.
    """
    if (create := model.create) is None:
        return place_variables(given, placement, mesh)
    if placement.stages is not None:
        return create_staged(model, placement, mesh)
    wanted = shardings(variable_specs(placement.resting, given), mesh)
    return _kept(jax.jit(lambda: _resting(create(), placement), out_shardings=wanted)(), placement)


def _kept(placed: Variables, placement: Placement) -> Variables:
    """What the plan keeps in host memory, there."""
    kept = placement.plan.offload.params
    return Variables(offloaded(placed.params, kept), offloaded(placed.frozen, kept), placed.state)


def _resting(variables: Variables, placement: Placement) -> Variables:
    plan, cast = placement.plan, placement.plan.precision.cast_param
    params = map_layouts(to_stored, cast(variables.params), placement.params)
    return Variables(
        _stacked(params, placement) if plan.independent else params,
        map_layouts(to_stored, cast(variables.frozen), placement.frozen),
        _stacked(variables.state, placement) if plan.local_buffers else variables.state,
    )


def _stacked(tree: PyTree, placement: Placement) -> PyTree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (placement.batch_degree, *jnp.shape(x))), tree)


def init_state(
    variables: Variables, tx: optax.GradientTransformation, placement: Placement, mesh: Mesh, key: jax.Array
) -> TrainState:
    """A run's first state from variables that already rest on the mesh."""
    step = place(jnp.zeros((), jnp.int32), PartitionSpec(), mesh)
    first = init_opt_state if placement.stages is None else first_staged_opt_state
    opt_state = first(tx, variables.params, placement, mesh)
    scale = LossScale.first() if placement.plan.precision.scales_loss else None
    scale = place(scale, jax.tree.map(lambda _: PartitionSpec(), scale), mesh)
    return TrainState(step, variables, opt_state, place(key, PartitionSpec(), mesh), scale)


def abstract_state(shapes: Variables, tx: optax.GradientTransformation, placement: Placement) -> TrainState:
    """The shapes of a run's first state: enough to trace, lower or compile its step, without devices or memory.

    Args:
      shapes: the model's variables as shapes (`Functional.shapes`).
      tx: the optimizer.
      placement: the plan on a mesh, which may be of devices that are not there.

    Returns:
      A `TrainState` of `jax.ShapeDtypeStruct`s.
    """

    def build() -> TrainState:
        if placement.stages is None:
            variables = _resting(_zeros(shapes), placement)
            opt_state = first_opt_state(tx, variables.params, placement)
        else:
            variables, opt_state = _zeros(abstract_staged(shapes, tx, placement))
        scale = LossScale.first() if placement.plan.precision.scales_loss else None
        return TrainState(jnp.zeros((), jnp.int32), variables, opt_state, jax.random.key(0), scale)

    return jax.eval_shape(build)


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
