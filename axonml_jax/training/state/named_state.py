"""A `TrainState` as arrays by names that do not depend on the plan, and back: what checkpoints hold."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.training.rest.rest import Rest
from axonml_jax.training.state.strategy_state import keeping
from axonml_jax.training.state.train_state import TrainState

_MODEL, _OPTIMIZER, _KEPT = "model/", "optimizer/", "strategies/"


def variable_leaves(model: Functional, variables: Variables, rest: Rest) -> dict[str, Leaf]:
    """A model's variables, named as in its `state_dict` behind `model/`; trained and frozen ones side by side."""
    prefix, (params, frozen) = _MODEL + model.param_prefix, rest.param_leaves(variables)
    own = named_leaves(params) | named_leaves(frozen)
    for name, adapter in model.adapters.items():
        own[name] = replace(own[name], low_rank=(own[adapter.a], own[adapter.b], adapter.scale))
    return {prefix + name: leaf for name, leaf in own.items()} | _named(_MODEL, jax.tree.map(Leaf, variables.state))


def variables_of(model: Functional, like: Variables, arrays: Mapping[str, Any], rest: Rest) -> Variables:
    """The inverse of `variable_leaves`."""
    prefix = _MODEL + model.param_prefix

    def fill(held: Variables) -> Variables:
        params, frozen = _filled(prefix, held.params, arrays), _filled(prefix, held.frozen, arrays)
        return Variables(params, frozen, _filled(_MODEL, held.state, arrays))

    return rest.resting(model, like, fill)


def state_leaves(model: Functional, state: TrainState, rest: Rest, tx: optax.GradientTransformation) -> dict[str, Leaf]:
    """Everything in a state by name: `step`, `key`, `loss_scale/...`, `model/...`, `optimizer/...`."""
    return (
        variable_leaves(model, state.variables, rest)
        | _named(_OPTIMIZER, rest.opt_leaves(tx, state.opt_state))
        | _named("", jax.tree.map(Leaf, _others(state)))
        | ({} if (kept := keeping(rest.placement)) is None else _named(_KEPT, rest.opt_leaves(kept, state.strategies)))
    )


def state_of_leaves(
    model: Functional, like: TrainState, arrays: Mapping[str, Any], rest: Rest, tx: optax.GradientTransformation
) -> TrainState:
    """The inverse of `state_leaves`."""
    fill: Callable[[PyTree], PyTree] = lambda tree: _filled(_OPTIMIZER, tree, arrays)
    opt_state = rest.resting_opt(tx, like.opt_state, fill)
    variables = variables_of(model, like.variables, arrays, rest)
    held = {"variables": variables, "opt_state": opt_state}
    if (kept := keeping(rest.placement)) is not None:
        held["strategies"] = rest.resting_opt(kept, like.strategies, lambda tree: _filled(_KEPT, tree, arrays))
    return replace(like, **held, **_filled("", _others(like), arrays))


def averaged_variables(model: Functional, state: TrainState, rest: Rest, tx: optax.GradientTransformation) -> Variables:
    """A model's variables with the moving average in the place of the trained parameters: copies (see `with_ema`)."""
    leaves = variable_leaves(model, state.variables, rest)
    own, averages = _MODEL + model.param_prefix, named_leaves(rest.opt_leaves(tx, state.opt_state).ema)

    def placed(name: str, leaf: Leaf) -> Any:
        if not name.startswith(own) or (average := averages.get(name.removeprefix(own))) is None:
            return leaf.array
        return jnp.copy(jax.device_put(average.array.astype(leaf.array.dtype), leaf.array.sharding))

    return variables_of(model, state.variables, {name: placed(name, leaf) for name, leaf in leaves.items()}, rest)


def _others(state: TrainState) -> dict[str, Any]:
    return {name: value for name, value in vars(state).items() if name not in ("variables", "opt_state", "strategies")}


def _named(prefix: str, tree: PyTree) -> dict[str, Leaf]:
    return {prefix + name: leaf for name, leaf in named_leaves(tree).items()}


def _filled(prefix: str, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[prefix + name] for name in named_leaves(like)])
