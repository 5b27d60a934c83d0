"""State that a step keeps for its strategies, and for error feedback, from one step to the next."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import LEFT_OUT, Leaf, is_layout, shardings
from axonml_jax.strategies.strategy import Stateful
from axonml_jax.training.compose import (
    AsOptimizer,
    Differentiate,
    Gradients,
    Kept,
    Metrics,
    Reading,
    StepTransform,
    Update,
)
from axonml_jax.training.rest import Rest, single, stacked
from axonml_jax.training.state import TrainState, each_ranks_specs

# --------------------------------------------------------------------------------------------------
# What strategies keep between steps beside parameters, such as the error of a lossy gather or the anchor of local
# steps.
#
# It lives as the optimizer's state does: a leaf of a parameter's shape rests as the parameter does.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BetweenSteps(StepTransform):
    """Calls the strategies that keep a state: before a step on the parameters that it reads, afterwards on the updated ones."""

    placement: Placement
    rest: Rest

    def kept(self) -> dict[str, Kept]:
        """One entry: the strategies' states, which rest as an optimizer's state does."""
        return {"strategies": AsOptimizer(self.rest, "strategies", partial(first_states, self.placement))}

    def around_gradients(self, run: Differentiate) -> Differentiate:
        """Differentiates at the parameters that each strategy reads in the place of the resting ones (`Stateful.to_read`)."""

        def of_theirs(reading: Reading) -> Gradients:
            state = reading.state
            params = to_read(self.placement, state.params, state.strategies)
            return run(reading._replace(state=replace(state, variables=replace(state.variables, params=params))))

        return of_theirs

    def around_update(self, run: Update) -> Update:
        """Lets each strategy change the updated parameters and its own state (`Stateful.after_update`)."""

        def acting(made: Gradients, before: TrainState) -> tuple[TrainState, Metrics]:
            after, metrics = run(made, before)
            params, own = after_update(self.placement, after.params, before.params, before.strategies)
            after = replace(after, variables=replace(after.variables, params=params))
            return after.keeping(strategies=own), metrics

        return acting


def stateful(placement: Placement) -> dict[AxisNames, Stateful]:
    """The strategies of a plan that act between steps, outermost first."""
    return {axis: own for axis, each in placement.strategies.items() if (own := each.having(Stateful)) is not None}


def first_states(placement: Placement, params: PyTree) -> dict[str, PyTree]:
    """Makes the strategies' states for a run's first step, from the full parameters."""
    return {_name(axis): jax.tree.map(each.init_state, params) for axis, each in stateful(placement).items()}


def to_read(placement: Placement, params: PyTree, state: Mapping[str, PyTree]) -> PyTree:
    """The parameters that strategies gather in the place of the resting shards, inside `shard_map` (`Stateful.to_read`)."""
    for axis, each in stateful(placement).items():
        call = lambda shard, own, layout, axis=axis, each=each: each.to_read(shard, own, layout, axis)
        params = _per_leaf(placement, call, (params,), state[_name(axis)])[0]
    return params


def after_update(
    placement: Placement, params: PyTree, before: PyTree, state: Mapping[str, PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    """Parameters and the strategies' state after an update, inside `shard_map` (`Stateful.after_update`)."""
    new = dict(state)
    for axis, each in stateful(placement).items():

        def call(shard, before, own, layout, axis=axis, each=each):
            return each.after_update(shard, own, layout, axis, before=before)

        params, new[_name(axis)] = _per_leaf(placement, call, (params, before), state[_name(axis)], pairs=True)
    return params, new


def _per_leaf(placement: Placement, call: Callable, trees: tuple, state: PyTree, pairs: bool = False) -> tuple:
    """Calls `call(*leaves, state, layout)` for every parameter; `pairs`: it returns (result, new state)."""
    leaves, treedef = jax.tree.flatten(trees[0])
    others = [jax.tree.leaves(tree) for tree in trees[1:]]
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    made = [call(*each) for each in zip(leaves, *others, treedef.flatten_up_to(state), layouts, strict=True)]
    if not pairs:
        return (treedef.unflatten(made),)
    return treedef.unflatten([shard for shard, _ in made]), treedef.unflatten([own for _, own in made])


def _name(axis: AxisNames) -> str:
    return "*".join(as_axes(axis))


# --------------------------------------------------------------------------------------------------
# Residuals of gradients (error feedback), kept from step to step: stacked by rank, as no two ranks' are alike.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FedBack(StepTransform):
    """Error feedback: the rounding error of the last step's gradient sums is added to this step's (Seide et al. 2014)."""

    placement: Placement

    def kept(self) -> dict[str, Kept]:
        """One entry: the residual of every rank (`LeftOut`)."""
        return {"left_out": LeftOut(self.placement)}

    def around_gradients(self, run: Differentiate) -> Differentiate:
        """Passes the last step's residual to `gradients`, which adds it to this step's gradients."""

        def beginning(reading: Reading) -> Gradients:
            return run(reading._replace(options={**reading.options, "left_out": reading.state.left_out}))

        return beginning

    def around_update(self, run: Update) -> Update:
        """Keeps the residual of this step's gradient sums for the next step."""

        def keeping(made: Gradients, before: TrainState) -> tuple[TrainState, Metrics]:
            after, metrics = run(made, before)
            return after.keeping(left_out=made.left_out), metrics

        return keeping


@dataclass(frozen=True)
class LeftOut(Kept):
    """The residuals of error feedback: [ranks, *shape] for every trained parameter, in its accumulation dtype."""

    placement: Placement

    def first(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Zeros, created under `jit` on the devices where they rest."""
        return jax.jit(self._zeros, out_shardings=shardings(each_ranks_specs(self.placement), mesh))()

    def shapes(self, shapes: Any) -> PyTree:
        """Zeros of the residuals' shapes."""
        return self._zeros()

    def specs(self, value: PyTree, *, between: bool) -> PyTree:
        """The specs of arrays that are stacked by rank along dim 0."""
        return each_ranks_specs(self.placement)

    def enter(self, value: PyTree) -> PyTree:
        """This rank's residual, inside `shard_map`."""
        return single(value)

    def leave(self, value: PyTree) -> PyTree:
        """This rank's residual as its entry of the stack; the inverse of `enter`."""
        return stacked(value, self.placement.axes.batch)

    def leaves(self, value: PyTree) -> dict[str, Leaf]:
        """The residuals by the names that they have in checkpoints."""
        entries = f"one entry for each of {self.placement.batch_layout.degree} ranks"
        return {LEFT_OUT + name: Leaf(array, entries=entries) for name, array in named_leaves(value).items()}

    def filled(self, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
        """The residuals of a checkpoint; zeros where it holds none."""
        found = [arrays.get(LEFT_OUT + name) for name in named_leaves(like)]
        leaves, treedef = jax.tree.flatten(like)
        zeros = lambda leaf: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)
        return treedef.unflatten([zeros(leaf) if own is None else own for leaf, own in zip(leaves, found, strict=True)])

    def _zeros(self) -> PyTree:
        kind, ranks = self.placement.plan.precision.accumulate_dtype, self.placement.batch_layout.degree
        zeros = lambda layout: jnp.zeros((ranks, *layout.shape), kind(layout.dtype))
        return jax.tree.map(zeros, self.placement.params, is_leaf=is_layout)
