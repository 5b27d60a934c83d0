"""Rounds of steps in which replicas train parameters of their own (`ax.DiLoCo`), and the outer step that ends one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax.base import PyTree
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Leaf, is_layout
from axonml_jax.training.compose import AsOptimizer, Kept, Metrics, Step, StepTransform
from axonml_jax.training.rest import Plain, Rest, single, stacked
from axonml_jax.training.state import TrainState

# --------------------------------------------------------------------------------------------------
# What a run whose ranks train parameters of their own for rounds of steps (`LocalRounds`) keeps beside the outer ones.
# --------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundState:
    """The state of DiLoCo's replicas, beside the outer parameters, which are the model's variables.

    Attributes:
      own: the trained parameters of every replica, stacked along dim 0.
      kept: the state that replicas share for each outer parameter, such as its momentum.
    """

    own: PyTree
    kept: PyTree


@dataclass(frozen=True)
class Rounds(StepTransform):
    """A step updates each replica's own parameters in the place of the outer ones; every `every`-th step ends a round.

    Transforms inside it see neither the outer parameters nor the state that replicas share.
    """

    placement: Placement
    rest: Rest

    def kept(self) -> dict[str, Kept]:
        """One entry: the replicas' parameters, and the state that they share (`RoundState`)."""
        return {"rounds": RoundsKept(self.placement, self.rest)}

    def around_step(self, run: Step) -> Step:
        """Communicates: at the end of a round what the strategy's `end_round` does, else nothing."""

        def in_round(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
            own = replace(state.variables, params=state.rounds.own)
            after, metrics = run(replace(state.keeping(rounds=None), variables=own), batch)
            return end_of_round(self.placement, state, after), metrics

        return in_round


@dataclass(frozen=True)
class RoundsKept(Kept):
    """Stores a `RoundState`: replicas' parameters like their optimizer state, the outer momentum like outer parameters."""

    placement: Placement
    rest: Rest

    @cached_property
    def own(self) -> AsOptimizer:
        """Store each replica's parameters like optimizer state, stacked by rank."""
        return AsOptimizer(self.rest, "rounds/own", lambda params: params)

    @cached_property
    def together(self) -> AsOptimizer:
        """Store the state that all replicas share, such as the outer momentum, like optimizer state of the outer parameters."""
        assert self.placement.agreed is not None
        (rounds,) = self.placement.agreed.plan.rounds.values()
        first = lambda params: jax.tree.map(rounds.first_kept, params)
        return AsOptimizer(Plain(self.placement.agreed), "rounds/kept", first)

    def first(self, params: PyTree, mesh: Mesh) -> RoundState:
        """Starts every replica from the outer parameters, without gathering them on any device."""
        return RoundState(self.own.first(params, mesh), self.together.first(params, mesh))

    def shapes(self, shapes: Any) -> RoundState:
        """The first state's shapes, as zeros."""
        return RoundState(self.own.shapes(shapes), self.together.shapes(shapes))

    def specs(self, value: PyTree, *, between: bool) -> RoundState:
        """The specs of the replicas' parameters and of their shared state."""
        return RoundState(*(each.specs(None, between=between) for each in (self.own, self.together)))

    def leaves(self, value: RoundState) -> dict[str, Leaf]:
        """The replicas' parameters and their shared state, by their names in checkpoints."""
        return self.together.leaves(value.kept) | self.own.leaves(value.own)

    def filled(self, like: RoundState, arrays: Mapping[str, Any]) -> RoundState:
        """The state from arrays by their names in checkpoints."""
        return RoundState(self.own.filled(like.own, arrays), self.together.filled(like.kept, arrays))


# --------------------------------------------------------------------------------------------------
# The end of a round, in which replicas have trained parameters of their own: one outer step, and they begin again.
# --------------------------------------------------------------------------------------------------


def end_of_round(placement: Placement, before: TrainState, after: TrainState) -> TrainState:
    """The state after a step and, where a round ends with it, after the outer step; inside `shard_map`.

    Args:
      placement: the placement of a step within a round.
      before: the state before the step.
      after: after it, with replicas' own parameters in the place of the outer ones.

    Communicates: at the end of a round what the strategy's `end_round` does, else nothing.
    """
    assert placement.agreed is not None
    ((axis, rounds),) = placement.agreed.plan.rounds.items()
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    outer, treedef = jax.tree.flatten(before.variables.params)
    own, kept = treedef.flatten_up_to(after.variables.params), treedef.flatten_up_to(before.rounds.kept)

    def joined(outer: list, own: list, kept: list) -> tuple:
        with jax.named_scope(f"axonml.gradients.every{rounds.every}"):
            outer, kept = rounds.end_round(outer, single(own), kept, layouts, axis)
        return outer, stacked(outer, placement.axes.independent), kept

    ends = after.step % rounds.every == 0
    outer, own, kept = jax.lax.cond(ends, joined, lambda *each: each, outer, own, kept)
    variables = replace(after.variables, params=treedef.unflatten(outer))
    ended = RoundState(treedef.unflatten(own), treedef.unflatten(kept))
    return replace(after, variables=variables).keeping(rounds=ended)
