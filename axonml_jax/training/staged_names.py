"""The parameters and the optimizer state of a pipelined model as whole trees, and back: what checkpoints hold of them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from axonml_jax._types import PyTree
from axonml_jax.model.functional import Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.leaf import dividing
from axonml_jax.sharding.memory import offloaded, to_device_memory
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
        staging = staging_of(self.placement)
        params = self._spread("params", staging.whole_params, variables.params)
        return Variables(params, self._spread("frozen", staging.whole_frozen, variables.frozen), variables.state)

    def resting_variables(self, whole: Variables) -> Variables:
        """The inverse. No device holds more than its own part, no process more than that and one array."""
        return place_staged(whole, self.placement, _mesh_of(whole))

    def whole_opt_state(self, resting: PyTree) -> PyTree:
        """The optimizer's own tree."""
        return self._spread("optimizer", self._optimizer.whole, resting)

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

    @functools.cached_property
    def _programs(self) -> dict[str, Any]:
        return {}

    def _spread(self, name: str, run: Callable[[PyTree], PyTree], resting: PyTree) -> PyTree:
        if not jax.tree.leaves(resting):
            return run(resting)
        if name not in self._programs:
            wanted = spread(jax.eval_shape(run, resting), _mesh_of(resting))
            self._programs[name] = jax.jit(lambda resting: run(to_device_memory(resting)), out_shardings=wanted)
        return self._programs[name](resting)


def spread(shapes: PyTree, mesh: Mesh) -> PyTree:
    """Shardings of whole arrays that are split over the devices as far as their dims divide."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, dividing(leaf.shape, mesh.axis_names, mesh)), shapes)


def replicated_loose(resting: PyTree, mesh: Mesh) -> PyTree:
    """State at rest whose leaves without a parameter are on every device."""
    return {**resting, "whole": replicated(resting["whole"], mesh)}


def _mesh_of(tree: PyTree) -> Mesh:
    return jax.tree.leaves(tree)[0].sharding.mesh
