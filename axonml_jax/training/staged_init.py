"""The first variables and optimizer state of a pipelined model, made where they will rest."""

import functools
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from axonml_jax._types import PyTree
from axonml_jax.collectives.primitives import axis_index
from axonml_jax.collectives.varying import vary
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.parallel.pipeline.packing import Buffers
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.pipeline.staging import Staging
from axonml_jax.parallel.pipeline.store import StageStore, on_own_rank
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import shardings
from axonml_jax.sharding.memory import offloaded, to_device_memory
from axonml_jax.sharding.place import replicated
from axonml_jax.training.on_shards import OnShards
from axonml_jax.training.staged import StagedOptimizer


def place_staged(variables: Variables, placement: Placement, mesh: Mesh) -> Variables:
    """Whole variables (the same in every process, or split over devices) as they rest; see `StageStore.place`."""
    frozen = placement.plan.precision.cast_param(variables.frozen)
    params = place_staged_params(variables.params, placement, mesh)
    kept = offloaded(staging_of(placement).place_frozen(frozen, mesh), placement.plan.offload.params)
    return Variables(params, kept, replicated(variables.state, mesh))


def place_staged_params(params: PyTree, placement: Placement, mesh: Mesh) -> PyTree:
    """The same of trained parameters alone."""
    placed = staging_of(placement).place_params(placement.plan.precision.cast_param(params), mesh)
    return offloaded(placed, placement.plan.offload.params)


def create_staged(model: Functional, placement: Placement, mesh: Mesh) -> Variables:
    """A model's variables made where they rest: every rank makes the parameters of its own stages."""
    create, staging = model.create, staging_of(placement)
    assert create is not None

    def own(store: StageStore, tree: Any, rank: int) -> Buffers:
        leaves = jax.tree.leaves(placement.plan.precision.cast_param(tree))
        cut = {i: placement.own_part(leaves[i], store.layouts[i]) for i in store.leaves_of_rank(rank)}
        return {group: vary(buffer, (AXIS, *group.axes)) for group, buffer in store.pack(cut).items()}

    def local() -> tuple[Any, Any]:
        def of_rank(rank: int) -> tuple[Buffers, Buffers]:
            made = create()
            return own(staging.params, made.params, rank), own(staging.frozen, made.frozen, rank)

        params, frozen = on_own_rank(axis_index(AXIS), staging.num_ranks, of_rank)
        return staging.params.named(params), staging.frozen.named(frozen)

    specs = (staging.params.specs(), staging.frozen.specs())
    made = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))()
    params, frozen = offloaded(made, placement.plan.offload.params)
    state = jax.jit(lambda: create().state)()
    return Variables(params, frozen, replicated(state, mesh))


def first_staged_opt_state(
    tx: optax.GradientTransformation, params: PyTree, placement: Placement, mesh: Mesh
) -> PyTree:
    """The optimizer's first state at rest."""
    staged, on_shards = StagedOptimizer.of(tx, placement), OnShards.of(tx, placement)
    specs, kept = staged.specs(), placement.plan.offload
    first = staged.first_whole if on_shards is None else functools.partial(staged.first, on_shards.first)
    mapped = jax.shard_map(
        lambda params: first(to_device_memory(params, kept.params)),
        mesh=mesh,
        in_specs=(placement.param_specs(),),
        out_specs=specs,
        check_vma=placement.plan.check_vma,
    )
    return offloaded(jax.jit(mapped, out_shardings=shardings(specs, mesh))(params), kept.optimizer)


def abstract_staged(
    shapes: Variables, tx: optax.GradientTransformation, placement: Placement
) -> tuple[Variables, PyTree]:
    """The shapes of both."""
    staging, staged = staging_of(placement), StagedOptimizer.of(tx, placement)
    loose = staged.at_rest(
        jax.eval_shape(lambda params: tx.init(placement.plan.precision.cast_param(params)), shapes.params), None
    )
    variables = Variables(staging.params.shapes(), staging.frozen.shapes(), shapes.state)
    return variables, {**loose, "stages": staged.store.shapes()}


def staging_of(placement: Placement) -> Staging:
    """The stages of a pipelined plan."""
    assert placement.stages is not None
    return placement.stages
