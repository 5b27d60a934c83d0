"""How the parameters of the model a user gives are assigned to stages."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from axonml_jax.parallel.pipeline.assign import Assignment, assign, by_prefix
from axonml_jax.parallel.pipeline.chain import Chain, LinenChain, stage_of_modules
from axonml_jax.parallel.pipeline.order import definition_order
from axonml_jax.parallel.pipeline.policy import Pipelined


def stage_assigner(model: Any, policy: Pipelined) -> Callable[[Mapping[str, Any], int], Assignment]:
    """What `bind_plan` asks for the stages of a model's parameters."""

    def assigned(shapes: Mapping[str, Any], num_stages: int) -> Assignment:
        if isinstance(model, (Chain, LinenChain)):
            return _of_chain(model, shapes, num_stages, policy)
        order = _order(model)
        if order is not None and not all(name in order for name in shapes):
            order = None
        return assign(shapes, num_stages, split=policy.split, order=order)

    return assigned


def _of_chain(chain: Chain | LinenChain, shapes: Mapping[str, Any], num_stages: int, policy: Pipelined) -> Assignment:
    given = len(chain.groups)
    if policy.split is not None:
        raise ValueError(
            f"split={policy.split!r} says where stages begin, and so do the modules given one by one: give one"
        )
    if given != num_stages:
        ranks = num_stages // policy.chunks
        raise ValueError(
            f"{given} stages were given for {ranks} ranks x {policy.chunks} chunks = {num_stages}: give that many, or a mesh "
            f"and chunks whose product is {given}"
        )
    return by_prefix(list(shapes), chain.prefixes(), stage_of_modules(chain))


def _order(model: Any) -> dict[str, tuple] | None:
    """The order in which an NNX module defines its parameters; None for Linen, whose names must do."""
    if isinstance(model, nnx.Module):
        return definition_order(model)
    if not callable(model):
        return None
    seen: list[dict[str, tuple]] = []

    def make() -> Any:
        made = model()
        if isinstance(made, nnx.Module):
            seen.append(definition_order(made))
        return made

    try:
        nnx.eval_shape(make)
    except TypeError:  # a Linen module: it is called with arguments
        return None
    return seen[-1] if seen else None
