"""The parameters and the optimizer state of a pipelined model as whole trees, and back: what checkpoints hold of them."""

import functools
from dataclasses import dataclass

import jax
import optax
from jax.sharding import Mesh

from axonml_jax._types import PyTree
from axonml_jax.model.functional import Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.memory import offloaded
from axonml_jax.sharding.place import replicated
from axonml_jax.training.staged import StagedOptimizer
from axonml_jax.training.staged_init import place_staged, staging_of


@dataclass(frozen=True, eq=False)
class StagedTrees:
    """Between what rests under a plan and whole trees; keep it, for it keeps its compiled programs.

    Attributes:
      placement: the plan on its mesh.
      tx: the optimizer, if there is one.
    """

    placement: Placement
    tx: optax.GradientTransformation | None = None

    def whole_variables(self, variables: Variables) -> Variables:
        """The model's own trees, every array split over the devices as far as its dims divide."""
        staging, mesh = staging_of(self.placement), _mesh_of(variables)
        params, frozen = staging.spread_params(variables.params, mesh), staging.spread_frozen(variables.frozen, mesh)
        return Variables(params, frozen, variables.state)

    def resting_variables(self, whole: Variables) -> Variables:
        """The inverse. No device holds more than its own part, no process more than that and one array."""
        return place_staged(whole, self.placement, _mesh_of(whole))

    def whole_opt_state(self, resting: PyTree) -> PyTree:
        """The optimizer's own tree."""
        return self._optimizer.spread(resting, _mesh_of(resting))

    def resting_opt_state(self, whole: PyTree) -> PyTree:
        """The inverse of `whole_opt_state`."""
        mesh, leaves = _mesh_of(whole), jax.tree.leaves(whole)
        owned = [leaves[i] for i in self._optimizer.owned]
        resting = replicated_loose(self._optimizer.at_rest(whole, self._optimizer.store.place(owned, mesh)), mesh)
        return offloaded(resting, self.placement.plan.offload.optimizer)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer, which there must be."""
        assert self.tx is not None
        return self.tx

    @functools.cached_property
    def _optimizer(self) -> StagedOptimizer:
        return StagedOptimizer.of(self.optimizer, self.placement)


def replicated_loose(resting: PyTree, mesh: Mesh) -> PyTree:
    """State at rest whose leaves without a parameter are on every device."""
    return {**resting, "whole": replicated(resting["whole"], mesh)}


def _mesh_of(tree: PyTree) -> Mesh:
    return jax.tree.leaves(tree)[0].sharding.mesh
