"""What strategies keep between steps beside parameters, such as the error of a lossy gather or the anchor of local steps.

It lives as the optimizer's state does: a leaf of a parameter's shape rests as the parameter does.
"""

from collections.abc import Callable, Mapping

import jax
import optax

from axonml_jax._types import PyTree
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.sharding.layout import is_layout


def stateful(placement: Placement) -> dict[AxisNames, AbstractStrategy]:
    """The strategies of a plan that act between steps, outermost first."""
    return {axis: each for axis, each in placement.strategies.items() if each.acts_between_steps}


def keeping(placement: Placement) -> optax.GradientTransformation | None:
    """Something whose `init` makes the strategies' first state, to rest as an optimizer's does; None: there is none."""
    strategies = stateful(placement)
    if not strategies:
        return None

    def first(params: PyTree) -> dict[str, PyTree]:
        return {_name(axis): jax.tree.map(each.init_state, params) for axis, each in strategies.items()}

    return optax.GradientTransformation(first, lambda updates, state, params=None: (updates, state))


def to_read(placement: Placement, params: PyTree, state: Mapping[str, PyTree]) -> PyTree:
    """What is gathered in the place of resting shards, inside `shard_map` (`AbstractStrategy.to_read`)."""
    for axis, each in stateful(placement).items():
        call = lambda shard, own, layout, axis=axis, each=each: each.to_read(shard, own, layout, axis)
        params = _per_leaf(placement, call, (params,), state[_name(axis)])[0]
    return params


def after_update(
    placement: Placement, params: PyTree, before: PyTree, state: Mapping[str, PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    """Parameters and the strategies' state after an update, inside `shard_map` (`AbstractStrategy.after_update`)."""
    new = dict(state)
    for axis, each in stateful(placement).items():

        def call(shard, before, own, layout, axis=axis, each=each):
            return each.after_update(shard, own, layout, axis, before=before)

        params, new[_name(axis)] = _per_leaf(placement, call, (params, before), state[_name(axis)], pairs=True)
    return params, new


def _per_leaf(placement: Placement, call: Callable, trees: tuple, state: PyTree, pairs: bool = False) -> tuple:
    """`call(leaves, state, layout)` of every parameter: results, or results and states, as trees."""
    leaves, treedef = jax.tree.flatten(trees[0])
    others = [jax.tree.leaves(tree) for tree in trees[1:]]
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    made = [call(*each) for each in zip(leaves, *others, treedef.flatten_up_to(state), layouts, strict=True)]
    if not pairs:
        return (treedef.unflatten(made),)
    return treedef.unflatten([shard for shard, _ in made]), treedef.unflatten([own for _, own in made])


def _name(axis: AxisNames) -> str:
    return "*".join(as_axes(axis))
