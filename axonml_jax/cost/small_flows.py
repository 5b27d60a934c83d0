"""What a step sends beside weights and activations: the loss's sum, and the gradient norm's."""

import math
from collections.abc import Iterator, Mapping

from axonml_jax.cost.amounts import Many, either, most
from axonml_jax.cost.flow import Flow
from axonml_jax.cost.rounds import Run, ShardCounts, splitting
from axonml_jax.cost.weight_groups import Weights
from axonml_jax.parallel.pipeline.policy import AXIS

LOSS_VALUES = 2
"""A weighted mean: the total and its weight."""


def small_flows(
    weights: Weights, parts: ShardCounts, run: Run, degrees: Mapping[str, Many], metrics: int = 0
) -> Iterator[Flow]:
    """The sum of the loss and of other metrics over the batch shards, and the gradient norm's over what splits gradients."""
    values = LOSS_VALUES * (1 + metrics)
    scalar = {"kind": "all_reduce", "dtype": "float32", "itemsize": 4}
    ranks = lambda axes: math.prod(degrees[axis] for axis in axes)
    roles = {axis: role for axis, role in run.roles.items() if role.reduces != "never"}
    if axes := splitting(roles, "rows", "positions"):
        yield Flow(label="metrics", axes=axes, group_size=ranks(axes), elements=values, **scalar)
    piped = (AXIS,) if run.pipelined else ()
    if piped:  # every stage but the last has none to add
        yield Flow(label="", axes=piped, group_size=ranks(piped), elements=values, launches=values, **scalar)
    groups: dict[tuple[str, ...], Many] = {}
    for group in weights.groups:
        if group.trained:  # by what splits them; along a pipeline in any order
            axes = tuple(axis for axis in degrees if axis in (*piped, *group.axes)) if piped else group.axes
            here = either(parts.number(group.place, group.count) > 0, 1, 0)
            groups[axes] = most(groups.get(axes, 0), here)
    for axes, here in groups.items():
        if axes:
            yield Flow(label="norm", axes=axes, group_size=ranks(axes), elements=here, **scalar)
