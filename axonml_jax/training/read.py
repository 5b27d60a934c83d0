"""Running a function of a model's whole variables from resting ones, without gradients."""

from collections.abc import Callable
from typing import Any

import jax

from axonml_jax.model.functional import Functional, Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.units.replayed import Replayed
from axonml_jax.training.pipelined import pipelined_call


def with_read(fun: Callable, placement: Placement, model: Functional, variables: Variables, *args: Any) -> Any:
    """`fun(read_variables, *args)` inside `shard_map`; unit by unit where the plan gathers parameters when they are used.

    Args:
      fun: returns a pytree; leaves that are no arrays are handed through.
      placement: how parameters are read.
      model: names its modules.
      variables: resting variables, single on each rank.
      *args: pytrees of arrays.
    """
    if placement.stages is not None:
        return pipelined_call(fun, placement, variables, *args)
    if not placement.gathers_when_used:
        params = placement.read_tree(variables.params, placement.params)
        frozen = placement.read_tree(variables.frozen, placement.frozen)
        return fun(Variables(params, frozen, variables.state), *args)
    seen: dict[str, Any] = {}

    def arrays_of(params, frozen, state, *args):
        leaves, seen["treedef"] = jax.tree.flatten(fun(Variables(params, frozen, state), *args))
        seen["fixed"] = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    given = (variables.state, *args)
    arrays = iter(Replayed(placement, model).apply(arrays_of, variables.params, variables.frozen, given))
    return seen["treedef"].unflatten([next(arrays) if leaf is None else leaf for leaf in seen["fixed"]])
