"""Binding a plan to a mesh and a model: every default decided, a layout for every parameter, and what cannot be refused."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax._types import PyTree, named_leaves, path_name
from axonml_jax.compat.canaries.typed import require_types
from axonml_jax.mesh.axes import as_axes
from axonml_jax.model.functional import Variables
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.fits import check_axes
from axonml_jax.parallel.partitioned_placement import by_rules, left_to_partitioner
from axonml_jax.parallel.pipeline.cutting.assign import Assignment
from axonml_jax.parallel.pipeline.cutting.assign import assign as by_names
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.pipeline.resting.staging import Staging
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.layout import Layout


def bind_plan(
    plan: Plan,
    variables: Variables,
    mesh: Mesh,
    split: PyTree | None = None,
    assign: Callable[[Mapping[str, Any], int], Assignment] | None = None,
    stacks: Mapping[str, int] = MappingProxyType({}),
) -> Placement:
    """Bind a plan to a mesh and a model's variables (shapes suffice).

    Args:
      plan: the plan.
      variables: the model's.
      mesh: where.
      split: how the model's own layers split its parameters: a nest of PartitionSpecs (`tensor_specs`); None: not at all.
      assign: of a pipelined plan: the stages of parameters, from their shapes by path and the number of stages; None: by
        their names.
      stacks: how many first dims of parameters number layers or experts, by path (`Functional.stacked_dims`).

    Raises:
      ValueError: when the plan's degrees are not the mesh's, or when the mesh has axes the plan gives no meaning to.
      CanaryError: when the JAX that is installed tells varying types in another way than the library reads them.
    """
    degrees = dict(mesh.shape)
    if plan.mesh is not None and (wanted := plan.mesh.resolve(mesh.size).degrees) != {
        **dict.fromkeys(wanted, 1),
        **{axis: size for axis, size in degrees.items() if size > 1 or axis in wanted},
    }:
        raise ValueError(f"the plan asks for degrees {dict(wanted)} but the mesh has {degrees}: give one or the other")
    in_layers = named_leaves(split)
    if plan.partition is not None:
        in_layers = by_rules(plan.partition, variables, degrees, in_layers)
    check_axes(plan, degrees, in_layers)
    alone = any(strategy.role.reduces == "never" for strategy in plan.on(degrees).values())
    if alone and plan.precision.scales_loss:
        raise ValueError(
            "sync_strategy=NO_SYNC with float16 would need a loss scale per rank: use bf16, or synchronize"
        )
    plan = plan.decided(Fabric.of(list(mesh.devices.flat)), degrees)
    strategies = plan.on(degrees)
    require_types(plan.check_vma)

    def layout(path: tuple, like: jax.ShapeDtypeStruct) -> Layout:
        leaf = Layout.whole(like, stacks.get(path_name(path), 0))
        for dim, entry in enumerate(in_layers.get(path_name(path), PartitionSpec())):
            for axis in as_axes(entry or ()):
                leaf = leaf.on(axis, dim, degrees[axis]) if degrees[axis] > 1 else leaf
        for axis, strategy in strategies.items():
            leaf = strategy.spec(leaf, axis, math.prod(degrees[name] for name in as_axes(axis)))
        return leaf

    def lay_out(tree: PyTree) -> PyTree:
        resting = jax.eval_shape(plan.precision.cast_param, tree)
        return jax.tree_util.tree_map_with_path(layout, resting)

    placement = Placement(plan, degrees, lay_out(variables.params), lay_out(variables.frozen))
    if left := _left(plan, degrees):
        placement = left_to_partitioner(placement, left)
    if plan.pipe is None:
        return placement
    shapes = named_leaves(variables.params) | named_leaves(variables.frozen)
    return replace(placement, stages=_staged(placement, shapes, assign))


def _left(plan: Plan, degrees: Mapping[str, int]) -> frozenset[str]:
    """The axes left to the partitioner; of a pipeline, and with rounds, none of one rank: their program is that without it."""
    left = plan.left(degrees)
    return frozenset(axis for axis in left if degrees[axis] > 1) if plan.pipe or plan.rounds else left


def _staged(placement: Placement, shapes: Mapping[str, Any], assign: Callable | None) -> Staging:
    plan, degrees = placement.plan, placement.degrees
    assert plan.pipe is not None
    plan.pipe.timetable(degrees[AXIS], plan.microbatches)  # refuses what the schedule does not take
    count = plan.pipe.num_stages(degrees[AXIS])
    found = by_names(shapes, count, split=plan.pipe.split) if assign is None else assign(shapes, count)
    return Staging.of(plan.pipe, found, placement.params, placement.frozen, degrees)
