"""The first state of a run, created where it will live."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.model.functional import Functional, Variables
from axonml_jax.parallel.in_round import in_round
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.memory import HOST, movable
from axonml_jax.sharding.place import place
from axonml_jax.training.finite.guard import NonFinite
from axonml_jax.training.finite.loss_scale import LossScale
from axonml_jax.training.rest.choose import rest_of
from axonml_jax.training.rest.rest import Rest
from axonml_jax.training.state.left_out import first_left_out, nothing_left_out
from axonml_jax.training.state.strategy_state import keeping
from axonml_jax.training.state.train_state import TrainState


def first_variables(model: Functional, given: Variables, rest: Rest, mesh: Mesh) -> Variables:
    """A model's variables where they rest: those given, or made there by `model.create`."""
    return rest.place(given, mesh) if model.create is None else rest.create(model, mesh)


def init_state(
    variables: Variables, tx: optax.GradientTransformation, rest: Rest, mesh: Mesh, key: jax.Array
) -> TrainState:
    """A run's first state from variables that already rest on the mesh."""
    step = place(jnp.zeros((), jnp.int32), PartitionSpec(), mesh)
    opt_state = rest.first_opt_state(tx, variables.params, mesh)
    scale = LossScale.first() if rest.placement.plan.precision.scales_loss else None
    scale = place(scale, jax.tree.map(lambda _: PartitionSpec(), scale), mesh)
    kept = keeping(rest.placement)
    strategies = None if kept is None else rest.first_opt_state(kept, variables.params, mesh)
    rounds, key = rest.first_round(variables.params, mesh), place(key, PartitionSpec(), mesh)
    left_out = first_left_out(rest.placement, mesh)
    return TrainState(step, variables, opt_state, key, scale, strategies=strategies, rounds=rounds, left_out=left_out)


def first_guard(rest: Rest, mesh: Mesh) -> NonFinite:
    """The first counts of skipped updates: one for each model that is trained."""
    axes = rest.placement.own_axes
    shape = (rest.placement.ranks(axes),) if axes else ()
    counts = jax.tree.map(lambda count: jnp.broadcast_to(count, shape), NonFinite.first())
    return place(counts, jax.tree.map(lambda _: rest.means, counts), mesh)


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
        rest, kept = rest_of(in_round(placement)), keeping(placement)
        variables, opt_state = rest.shapes(shapes, tx)
        strategies = None if kept is None else rest.shapes(shapes, kept)[1]
        scale = LossScale.first() if placement.plan.precision.scales_loss else None
        key = jax.random.key(0)
        step, rounds, left_out = jnp.zeros((), jnp.int32), rest.round_shapes(shapes), nothing_left_out(placement)
        return TrainState(
            step, variables, opt_state, key, scale, strategies=strategies, rounds=rounds, left_out=left_out
        )

    return jax.eval_shape(build)


def resting_shapes(state: TrainState, placement: Placement, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes of a state with their shardings and memory kinds: what is offloaded rests in host memory."""
    offload, specs = placement.plan.offload, rest_of(in_round(placement)).state_specs(tx, state)

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
