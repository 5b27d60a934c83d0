"""A `TrainState` as arrays by names that do not depend on the plan, and back: what checkpoints hold."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.sharding.layout import is_layout
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.training.opt_state import opt_layouts, whole_shape
from axonml_jax.training.staged_names import StagedTrees
from axonml_jax.training.state import TrainState

_MODEL, _OPTIMIZER = "model/", "optimizer/"


def variable_leaves(model: Functional, variables: Variables, trees: StagedTrees) -> dict[str, Leaf]:
    """A model's variables, named as in its `state_dict` behind `model/`; trained and frozen ones side by side."""
    placement = trees.placement
    prefix, alone = _MODEL + model.param_prefix, placement.plan.independent
    if placement.stages is not None:
        whole = trees.whole_variables(variables)
        parts = ((prefix, whole.params), (prefix, whole.frozen), (_MODEL, whole.state))
        return {name: leaf for start, tree in parts for name, leaf in _leaves(start, tree, None).items()}
    leaves = _leaves(prefix, variables.params, None if alone else placement.params)
    leaves |= _leaves(prefix, variables.frozen, placement.frozen)
    return leaves | _leaves(_MODEL, variables.state, None)


def variables_of(model: Functional, like: Variables, arrays: Mapping[str, Any], trees: StagedTrees) -> Variables:
    """The inverse of `variable_leaves`."""
    prefix, staged = _MODEL + model.param_prefix, trees.placement.stages is not None
    held = model.shapes if staged else like
    params, frozen = _filled(prefix, held.params, arrays), _filled(prefix, held.frozen, arrays)
    whole = Variables(params, frozen, _filled(_MODEL, held.state, arrays))
    return trees.resting_variables(whole) if staged else whole


def state_leaves(model: Functional, state: TrainState, trees: StagedTrees) -> dict[str, Leaf]:
    """Everything in a state by name: `step`, `key`, `loss_scale/...`, `model/...`, `optimizer/...`."""
    placement, opt_state, layouts = trees.placement, state.opt_state, None
    if placement.stages is not None:
        opt_state = trees.whole_opt_state(opt_state)
    elif not placement.plan.independent:
        layouts = opt_layouts(placement, trees.optimizer)
    return (
        variable_leaves(model, state.variables, trees)
        | _leaves(_OPTIMIZER, opt_state, layouts)
        | _leaves("", _rest(state), None)
    )


def state_of_leaves(model: Functional, like: TrainState, arrays: Mapping[str, Any], trees: StagedTrees) -> TrainState:
    """The inverse of `state_leaves`."""
    opt_state = like.opt_state
    if trees.placement.stages is None:
        opt_state = _filled(_OPTIMIZER, opt_state, arrays)
    else:
        layouts = opt_layouts(trees.placement, trees.optimizer)
        tree = jax.tree.map(whole_shape, layouts, is_leaf=is_layout)
        opt_state = trees.resting_opt_state(_filled(_OPTIMIZER, tree, arrays))
    variables = variables_of(model, like.variables, arrays, trees)
    return replace(like, variables=variables, opt_state=opt_state, **_filled("", _rest(like), arrays))


def _rest(state: TrainState) -> dict[str, Any]:
    return {name: value for name, value in vars(state).items() if name not in ("variables", "opt_state")}


def _leaves(prefix: str, tree: PyTree, layouts: PyTree | None) -> dict[str, Leaf]:
    named = named_leaves(tree)
    how = jax.tree.leaves(layouts, is_leaf=is_layout) if layouts is not None else [None] * len(named)
    return {prefix + name: Leaf(leaf, layout) for (name, leaf), layout in zip(named.items(), how, strict=True)}


def _filled(prefix: str, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[prefix + name] for name in named_leaves(like)])
