"""A placement that leaves axes to XLA's partitioner: those that a plan's path rules name, or what splits positions."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from axonml_jax.mesh.axes import as_axes
from axonml_jax.model.functional import Variables
from axonml_jax.model.trainable import merge
from axonml_jax.parallel.partition import PARTITIONED, Partition
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Layout, is_layout


def by_rules(
    partition: Partition, variables: Variables, degrees: Mapping[str, int], in_layers: Mapping[str, Any]
) -> dict[str, PartitionSpec]:
    """The splits that a plan's rules ask for, by path name.

    Raises:
      ValueError: for a mesh with other axes than data and those of the rules, a model whose layers split themselves, and rules
        that do not fit.
    """
    split = [name for name, spec in in_layers.items() if any(spec)]
    if split:
        raise ValueError(
            f"rules split models whose layers do not split themselves, but these do: {', '.join(split[:8])}"
        )
    there = {axis: size for axis, size in degrees.items() if size > 1 and axis != "data"}
    if unnamed := {axis: size for axis, size in there.items() if axis in PARTITIONED and axis not in partition.axes}:
        raise ValueError(
            f"the mesh has {unnamed}, and no rule names {' or '.join(unnamed)}: these devices would all do the same work. Give "
            "a rule that splits parameters over it, or a mesh without it"
        )
    if others := {axis: size for axis, size in there.items() if axis not in PARTITIONED}:
        raise ValueError(
            f"with path rules the mesh has data, tensor and expert, but this one has {others} too: build the model with "
            "parallel layers, or swap its layers by ax.auto_parallelize"
        )
    return partition.specs(merge(variables.params, variables.frozen), degrees)


def left_to_partitioner(placement: Placement, axes: Collection[str]) -> Placement:
    """A placement that leaves axes to the partitioner: leaves look whole along them inside a step, and rest as they did."""

    def whole(layout: Layout) -> Layout:
        entries = [tuple(axis for axis in as_axes(entry or ()) if axis not in axes) for entry in layout.spec]
        spec = PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))
        parts = [math.prod(placement.degrees[axis] for axis in entry) for entry in entries]
        parts += [1] * (len(layout.stored) - len(parts))
        return replace(layout, spec=spec, parts=tuple(parts))

    seen = (jax.tree.map(whole, tree, is_leaf=is_layout) for tree in (placement.params, placement.frozen))
    params, frozen = seen
    resting = replace(placement, left=frozenset(axes))
    return replace(resting, params=params, frozen=frozen, at_rest=resting)
