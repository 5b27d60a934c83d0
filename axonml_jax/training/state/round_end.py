"""The end of a round, in which replicas have trained parameters of their own: one outer step, and they begin again."""

from dataclasses import replace

import jax

from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout
from axonml_jax.training.rest.rest import single, stacked
from axonml_jax.training.state.round_state import RoundState
from axonml_jax.training.state.train_state import TrainState


def in_place_of_outer(state: TrainState) -> TrainState:
    """A state with every replica's own parameters in the place of the outer ones: what a step updates."""
    if state.rounds is None:
        return state
    return replace(state, variables=replace(state.variables, params=state.rounds.own))


def end_of_round(placement: Placement, before: TrainState, after: TrainState) -> TrainState:
    """A state after a step and, where a round ends with it, after the outer step; inside `shard_map`.

    Args:
      placement: of a step within a round.
      before: the state before the step.
      after: after it, with replicas' own parameters in the place of the outer ones.

    Communicates: at the end of a round what the strategy's `end_round` does, else nothing.
    """
    if before.rounds is None:
        return after
    assert placement.agreed is not None
    ((axis, rounds),) = placement.agreed.plan.rounds.items()
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    outer, treedef = jax.tree.flatten(before.variables.params)
    own, kept = treedef.flatten_up_to(after.variables.params), treedef.flatten_up_to(before.rounds.kept)

    def joined(outer: list, own: list, kept: list) -> tuple:
        with jax.named_scope(f"axonml.gradients.every{rounds.every}"):
            outer, kept = rounds.end_round(outer, single(own), kept, layouts, axis)
        return outer, stacked(outer, placement.own_axes), kept

    ends = after.step % rounds.every == 0
    outer, own, kept = jax.lax.cond(ends, joined, lambda *each: each, outer, own, kept)
    variables = replace(after.variables, params=treedef.unflatten(outer))
    return replace(after, variables=variables, rounds=RoundState(treedef.unflatten(own), treedef.unflatten(kept)))
