"""Between an array as the model knows it and the form in which its layout stores it: padding, invisible outside."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax._types import PyTree
from axonml_jax.sharding.layout import Layout, is_layout


def to_stored(x: Any, layout: Layout) -> Any:
    """A whole array [*layout.shape] -> [*layout.stored], zeros behind the last element of every padded dim."""
    if x.shape == layout.stored:
        return x
    x = x if len(layout.stored) == x.ndim else jnp.reshape(x, (*x.shape, 1))
    return jnp.pad(x, [(0, more - n) for n, more in zip(x.shape, layout.stored, strict=True)])


def from_stored(x: Any, layout: Layout) -> Any:
    """A stored array -> the whole one. The inverse of `to_stored`."""
    if x.shape == layout.shape:
        return x
    kept = [slice(n) for n in layout.shape] + [slice(1)] * (x.ndim - len(layout.shape))
    return jnp.reshape(x[tuple(kept)], layout.shape)


def map_layouts(change, tree: PyTree, layouts: PyTree) -> PyTree:
    """`change(leaf, layout)` of every leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(map(change, leaves, jax.tree.leaves(layouts, is_leaf=is_layout)))


def unpadded(tree: PyTree, layouts: PyTree, mesh: Mesh) -> PyTree:
    """Stored global arrays as whole ones: a leaf without padding is the same array, a padded one a copy on every device."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def change(leaf: Any, layout: Layout) -> Any:
        if layout.stored == layout.shape:
            return leaf
        return jax.jit(from_stored, static_argnums=1, out_shardings=everywhere)(leaf, layout)

    return map_layouts(change, tree, layouts)


def padded(tree: PyTree, layouts: PyTree) -> PyTree:
    """Whole arrays in the shapes in which they are stored. The inverse of `unpadded`, before placing."""
    return map_layouts(to_stored, tree, layouts)
