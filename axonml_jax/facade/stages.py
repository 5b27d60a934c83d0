"""How the parameters of the model a user gives are assigned to stages."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from axonml_jax.model.functional import Functional
from axonml_jax.model.lora.adapters import LoraModel
from axonml_jax.parallel.pipeline.cutting.assign import Assignment, assign, by_prefix
from axonml_jax.parallel.pipeline.cutting.chain import Chain, LinenChain, stage_of_modules
from axonml_jax.parallel.pipeline.policy import Pipelined
from axonml_jax.parallel.units.wrap import units


def stage_assigner(model: Any, view: Functional, policy: Pipelined) -> Callable[[Mapping[str, Any], int], Assignment]:
    """What `bind_plan` asks for the stages of a model's parameters.

    Args:
      model: what the user gave, of which only a chain says more than its view.
      view: its view, which knows in what order it was written.
      policy: the plan's.
    """

    model = model.model if isinstance(model, LoraModel) else model

    def assigned(shapes: Mapping[str, Any], num_stages: int) -> Assignment:
        if isinstance(model, (Chain, LinenChain)):
            return _of_chain(model, shapes, num_stages, policy)
        order = view.order
        known = order is not None and all(name in order for name in shapes)
        if not known and policy.split is None and num_stages > 1:
            _warn_of_names(shapes)
        return assign(shapes, num_stages, split=policy.split, order=order if known else None)

    return assigned


def _warn_of_names(shapes: Mapping[str, Any]) -> None:
    """Say that nothing but names tells in which order blocks of several kinds run, where there are some."""
    kinds = dict.fromkeys(path.rstrip("0123456789") for path in units(list(shapes), None, {}))
    if len(kinds) > 1:
        warnings.warn(
            f"stages follow the names of {', '.join(f'{kind}*' for kind in kinds)}: in which order these are called is not "
            "known, as parameters that pass jax.jit or jax.tree.map are sorted. What a stage reads of another's is sent in "
            "every step. Give params= what module.init returned, or a function that calls it (params=lambda: module.init(key, "
            "example)), or say where stages begin (split=)",
            stacklevel=2,
        )


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
