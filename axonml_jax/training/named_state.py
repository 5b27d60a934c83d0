"""A `TrainState` as arrays by names that do not depend on the plan, and back: what checkpoints hold."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import optax

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.training.opt_state import opt_layouts
from axonml_jax.training.state import TrainState

_MODEL, _OPTIMIZER = "model/", "optimizer/"


def variable_leaves(model: Functional, variables: Variables, placement: Placement) -> dict[str, Leaf]:
    """A model's variables, named as in its `state_dict` behind `model/`; trained and frozen ones side by side."""
    prefix, alone = _MODEL + model.param_prefix, placement.plan.independent
    leaves = _leaves(prefix, variables.params, None if alone else placement.params)
    leaves |= _leaves(prefix, variables.frozen, placement.frozen)
    return leaves | _leaves(_MODEL, variables.state, None)


def variables_of(model: Functional, like: Variables, arrays: Mapping[str, Any]) -> Variables:
    """The inverse of `variable_leaves`."""
    prefix = _MODEL + model.param_prefix
    return Variables(
        _filled(prefix, like.params, arrays), _filled(prefix, like.frozen, arrays), _filled(_MODEL, like.state, arrays)
    )


def state_leaves(
    model: Functional, state: TrainState, placement: Placement, tx: optax.GradientTransformation
) -> dict[str, Leaf]:
    """Everything in a state by name: `step`, `key`, `loss_scale/...`, `model/...`, `optimizer/...`."""
    layouts = None if placement.plan.independent else opt_layouts(placement, tx)
    return (
        variable_leaves(model, state.variables, placement)
        | _leaves(_OPTIMIZER, state.opt_state, layouts)
        | _leaves("", _rest(state), None)
    )


def state_of_leaves(model: Functional, like: TrainState, arrays: Mapping[str, Any]) -> TrainState:
    """The inverse of `state_leaves`."""
    variables = variables_of(model, like.variables, arrays)
    opt_state = _filled(_OPTIMIZER, like.opt_state, arrays)
    return replace(like, variables=variables, opt_state=opt_state, **_filled("", _rest(like), arrays))


def _rest(state: TrainState) -> dict[str, Any]:
    return {name: value for name, value in vars(state).items() if name not in ("variables", "opt_state")}


def _leaves(prefix: str, tree: PyTree, layouts: PyTree | None) -> dict[str, Leaf]:
    named = named_leaves(tree)
    how = jax.tree.leaves(layouts, is_leaf=is_layout) if layouts is not None else [None] * len(named)
    return {prefix + name: Leaf(leaf, layout) for (name, leaf), layout in zip(named.items(), how, strict=True)}


def _filled(prefix: str, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[prefix + name] for name in named_leaves(like)])
