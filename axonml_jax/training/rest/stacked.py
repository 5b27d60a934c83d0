"""Ranks of some axes train models of their own (NO_SYNC): what is trained is stacked along dim 0 over these axes."""

from functools import cached_property

import jax
import optax
from jax.sharding import PartitionSpec

from axonml_jax._types import PyTree
from axonml_jax.model.functional import Variables
from axonml_jax.sharding.layout import is_layout
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.sharding.stored import map_layouts
from axonml_jax.training.optimizer.opt_state import opt_layouts
from axonml_jax.training.rest.plain import Plain
from axonml_jax.training.rest.rest import single, stacked


class Stacked(Plain):
    """Inside a step each rank has its own entry, which is as `Plain` has it."""

    @cached_property
    def layouts(self) -> PyTree:
        """With one more dim in front."""
        return self._stacked(self.placement.params)

    def opt_layouts(self, tx: optax.GradientTransformation) -> PyTree:
        """Likewise."""
        return self._stacked(opt_layouts(self.placement, tx))

    def own(self, tree: PyTree) -> PyTree:
        """This rank's entry."""
        return single(tree)

    def kept(self, tree: PyTree) -> PyTree:
        """The inverse."""
        return stacked(tree, self.placement.own_axes)

    @property
    def means(self) -> PartitionSpec:
        """One for every model."""
        return PartitionSpec(self.placement.own_axes)

    def whole(self, variables: Variables, mesh: jax.sharding.Mesh) -> Variables:
        """The first rank's."""
        all_of_them = super().whole(variables, mesh)
        return Variables(single(all_of_them.params), all_of_them.frozen, all_of_them.state)

    def opt_leaves(self, tx: optax.GradientTransformation, opt_state: PyTree) -> PyTree:
        """With their layouts, and what their first dim numbers."""
        entries = f"one entry for each of {self.placement.ranks(self.placement.own_axes)} replicas"
        leaf = lambda array, layout: Leaf(array, layout, entries=entries)
        return map_layouts(leaf, opt_state, self.opt_layouts(tx))

    def _stored(self, variables: Variables) -> Variables:
        stored = super()._stored(variables)
        return Variables(self._repeated(stored.params, self.placement.own_axes), stored.frozen, stored.state)

    def _first_opt_state(self, tx: optax.GradientTransformation, params: PyTree) -> PyTree:
        return jax.vmap(lambda own: super(Stacked, self)._first_opt_state(tx, own))(params)

    def _stacked(self, layouts: PyTree) -> PyTree:
        axes = self.placement.own_axes
        count = self.placement.ranks(axes)
        return jax.tree.map(lambda layout: layout.stacked(axes, count), layouts, is_leaf=is_layout)
