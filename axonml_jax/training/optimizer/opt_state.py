"""Where the optimizer's state lives: a leaf that belongs to a parameter lives as the parameter does."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from axonml_jax._types import PyTree
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Layout, is_layout
from axonml_jax.sharding.stored import map_layouts
from axonml_jax.training.optimizer.owners import owners


def opt_layouts(placement: Placement, tx: optax.GradientTransformation) -> PyTree:
    """The layout of every leaf of the optimizer's state: that of the parameter it belongs to, else whole on every rank."""
    return opt_owners(placement, tx)[0]


def opt_owners(placement: Placement, tx: optax.GradientTransformation) -> tuple[PyTree, list[int | None]]:
    """The layout of every leaf of the optimizer's state, and the parameter (position in tree order) it belongs to, or None.

    What belongs to a parameter and has its shape lives as the parameter does. Along a pipeline, where one rank has the whole
    parameter, all that belongs to it lives there. Everything else (counts, factored moments) is whole on every rank.
    """
    layouts = placement.params
    whole = jax.tree.map(whole_shape, layouts, is_leaf=is_layout)
    leaves, treedef = jax.tree.flatten(state := jax.eval_shape(tx.init, whole))
    found, params = owners(state, whole), jax.tree.leaves(layouts, is_leaf=is_layout)

    def layout_of(leaf: Any, owner: int | None) -> tuple[Layout, int | None]:
        own = None if owner is None else params[owner]
        if own is not None and own.shape == leaf.shape:
            return Layout(own.shape, leaf.dtype, own.spec, own.stored, own.parts), owner
        alone = placement.stages is not None and own is not None and not own.axes
        return Layout.whole(leaf), owner if alone else None

    placed = [layout_of(*each) for each in zip(leaves, found, strict=True)]
    return treedef.unflatten([layout for layout, _ in placed]), [owner for _, owner in placed]


def whole_shape(layout: Layout) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the whole array."""
    return jax.ShapeDtypeStruct(layout.shape, layout.dtype)


def gather_stored(tree: PyTree, layouts: PyTree, placement: Placement) -> PyTree:
    """Inside `shard_map`: the whole arrays of stored shards, the same on every rank."""
    return map_layouts(placement.gather_stored, tree, layouts)


def own_parts(tree: PyTree, layouts: PyTree, placement: Placement) -> PyTree:
    """Inside `shard_map`: this rank's shards of whole arrays. The inverse of `gather_stored`."""
    return map_layouts(lambda x, layout: placement.own_part(jnp.asarray(x), layout), tree, layouts)
