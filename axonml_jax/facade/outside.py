"""Parameters and gradients as users see them: whole trees without padding, whatever rests on the devices."""

from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax._types import PyTree
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import shardings
from axonml_jax.sharding.place import move
from axonml_jax.sharding.stored import padded, unpadded
from axonml_jax.training.staged_init import place_staged_params


def outside(params: PyTree, placement: Placement, mesh: Mesh, *, frozen: bool = False) -> PyTree:
    """Resting parameters (or gradients of trained ones) as the model's tree; of a pipelined plan spread over devices."""
    if placement.plan.independent and not frozen:
        return params
    if placement.stages is None:
        return unpadded(params, placement.frozen if frozen else placement.params, mesh)
    stages = placement.stages
    return stages.spread_frozen(params, mesh) if frozen else stages.spread_params(params, mesh)


def inside(params: PyTree, placement: Placement, mesh: Mesh, specs: Any) -> PyTree:
    """The inverse of `outside` for trained parameters: placed as they rest; an array already there stays the caller's own."""
    if placement.stages is not None:
        return place_staged_params(params, placement, mesh)
    fitting = params if placement.plan.independent else padded(params, placement.params)
    return jax.tree.map(move, fitting, shardings(specs, mesh))
