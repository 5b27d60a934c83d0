"""A `TrainState` as arrays by names that do not depend on the plan, and back: what checkpoints hold."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.sharding.place import cast, copies
from axonml_jax.training.moving_average import MovingAverage
from axonml_jax.training.rest.rest import Rest
from axonml_jax.training.state.left_out import left_out_leaves, left_out_of
from axonml_jax.training.state.round_state import RoundState
from axonml_jax.training.state.strategy_state import keeping
from axonml_jax.training.state.train_state import TrainState

_MODEL, _OPTIMIZER, _AVERAGE, _KEPT, _ROUNDS = "model/", "optimizer/", "ema/", "strategies/", "rounds/"


def variable_leaves(model: Functional, variables: Variables, rest: Rest) -> dict[str, Leaf]:
    """A model's variables, named as in its `state_dict` behind `model/`; trained and frozen ones side by side."""
    prefix, (params, frozen) = _MODEL + model.param_prefix, rest.param_leaves(variables)
    own = named_leaves(params) | named_leaves(frozen)
    for name, adapter in model.adapters.items():
        scales = None if adapter.column_scales is None else own[adapter.column_scales]
        low_rank = own[adapter.a], own[adapter.b], adapter.scale
        own[name] = replace(own[name], low_rank=low_rank, column_scales=scales)
    return {prefix + name: leaf for name, leaf in own.items()} | _named(_MODEL, jax.tree.map(Leaf, variables.state))


def variables_of(model: Functional, like: Variables, arrays: Mapping[str, Any], rest: Rest) -> Variables:
    """The inverse of `variable_leaves`."""
    prefix = _MODEL + model.param_prefix

    def fill(held: Variables) -> Variables:
        params, frozen = _filled(prefix, held.params, arrays), _filled(prefix, held.frozen, arrays)
        return Variables(params, frozen, _filled(_MODEL, held.state, arrays))

    return rest.resting(model, like, fill)


def state_leaves(model: Functional, state: TrainState, rest: Rest, tx: optax.GradientTransformation) -> dict[str, Leaf]:
    """Everything in a state by name: `step`, `key`, `model/...`, `optimizer/...`, `ema/...`, `rounds/...`, `left_out/...`.

    The optimizer's own names are the same with a moving average and without one.
    """
    opt, averages = _apart(rest.opt_leaves(tx, state.opt_state))
    return (
        variable_leaves(model, state.variables, rest)
        | _named(_OPTIMIZER, opt)
        | _named(_AVERAGE, averages)
        | _named("", jax.tree.map(Leaf, _others(state)))
        | ({} if (kept := keeping(rest.placement)) is None else _named(_KEPT, rest.opt_leaves(kept, state.strategies)))
        | ({} if state.rounds is None else _named(_ROUNDS, vars(rest.round_leaves(state.rounds))))
        | ({} if state.left_out is None else left_out_leaves(rest.placement, state.left_out))
    )


def state_of_leaves(
    model: Functional, like: TrainState, arrays: Mapping[str, Any], rest: Rest, tx: optax.GradientTransformation
) -> TrainState:
    """The inverse of `state_leaves`. Where an average is missing among the arrays it begins with its parameter."""
    own = _MODEL + model.param_prefix

    def average(name: str, kept: Any) -> Any:
        found = arrays.get(_AVERAGE + name)
        return _copied(arrays[own + name], kept) if found is None else found

    def fill(tree: PyTree) -> PyTree:
        opt, averages = _apart(tree)
        opt = _filled(_OPTIMIZER, opt, arrays)
        if averages is None:
            return opt
        found = [average(name, kept) for name, kept in named_leaves(averages).items()]
        return MovingAverage(opt, jax.tree.unflatten(jax.tree.structure(averages), found))

    opt_state = rest.resting_opt(tx, like.opt_state, fill)
    variables = variables_of(model, like.variables, arrays, rest)
    held = {"variables": variables, "opt_state": opt_state}
    if (kept := keeping(rest.placement)) is not None:
        held["strategies"] = rest.resting_opt(kept, like.strategies, lambda tree: _filled(_KEPT, tree, arrays))
    if like.rounds is not None:
        held["rounds"] = RoundState(**_filled(_ROUNDS, vars(like.rounds), arrays))
    if like.left_out is not None:
        held["left_out"] = left_out_of(like.left_out, arrays)
    return replace(like, **held, **_filled("", _others(like), arrays))


def with_new_average(model: Functional, state: TrainState, rest: Rest, tx: optax.GradientTransformation) -> TrainState:
    """A state whose moving average begins with the parameters as they are now; all else stays."""
    leaves = state_leaves(model, state, rest, tx)
    arrays = {name: leaf.array for name, leaf in leaves.items() if not name.startswith(_AVERAGE)}
    return state_of_leaves(model, state, arrays, rest, tx)


def averaged_variables(model: Functional, state: TrainState, rest: Rest, tx: optax.GradientTransformation) -> Variables:
    """A model's variables with the moving average in the place of the trained parameters: copies (see `with_ema`)."""
    leaves = variable_leaves(model, state.variables, rest)
    own, averages = _MODEL + model.param_prefix, named_leaves(rest.opt_leaves(tx, state.opt_state).ema)

    def placed(name: str, leaf: Leaf) -> Any:
        if not name.startswith(own) or (average := averages.get(name.removeprefix(own))) is None:
            return leaf.array
        return _copied(average.array, leaf.array)

    return variables_of(model, state.variables, {name: placed(name, leaf) for name, leaf in leaves.items()}, rest)


def _apart(opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """The optimizer's own state, and the moving average beside it or None."""
    return tuple(opt_state) if isinstance(opt_state, MovingAverage) else (opt_state, None)


def _copied(array: jax.Array, like: Any) -> jax.Array:
    """A copy in the dtype of another array, and where that is."""
    at = array.sharding
    assert isinstance(at, NamedSharding)
    found = copies(cast(jax.device_put(array, NamedSharding(at.mesh, at.spec)), like.dtype))  # out of host memory
    return found if like.sharding is None else jax.device_put(found, like.sharding)


def _others(state: TrainState) -> dict[str, Any]:
    apart = ("variables", "opt_state", "strategies", "rounds", "left_out")
    return {name: value for name, value in vars(state).items() if name not in apart}


def _named(prefix: str, tree: PyTree) -> dict[str, Leaf]:
    return {prefix + name: leaf for name, leaf in named_leaves(tree).items()}


def _filled(prefix: str, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[prefix + name] for name in named_leaves(like)])
