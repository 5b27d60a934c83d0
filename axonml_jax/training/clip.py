"""Clipping gradients outside a step, as a program of its own."""

import jax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax._types import PyTree
from axonml_jax.mesh.fake_devices import bound_run_ahead
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.stored import padded
from axonml_jax.training.stacked import stacked, stacked_specs
from axonml_jax.training.update import clip, whole_norm


class Clip:
    """`clip(grads, max_norm) -> (clipped, norm)` of whole or stacked gradients, compiled once."""

    def __init__(self, placement: Placement, mesh: Mesh, norm_type: float):
        self.placement, self.mesh, self.norm_type = placement, mesh, norm_type
        self._compiled = jax.jit(self._whole)

    def __call__(self, grads: PyTree, max_norm: float) -> tuple[PyTree, jax.Array]:
        """Clip; under NO_SYNC every rank's own gradients by their own norm."""
        return bound_run_ahead(self._compiled(grads, max_norm))

    def _whole(self, grads: PyTree, max_norm: jax.Array) -> tuple[PyTree, jax.Array]:
        placement, independent = self.placement, self.placement.plan.independent
        if placement.stages is not None:  # gradients outside a pipeline are the model's own tree, split anyhow
            norm = whole_norm(grads, self.norm_type)
            return clip(grads, norm, max_norm), norm
        grads = grads if independent else padded(grads, placement.params)
        specs = stacked_specs(placement, placement.params) if independent else placement.param_specs()
        norm = placement.rank_spec if independent else PartitionSpec()

        def local(grads: PyTree, max_norm: jax.Array) -> tuple[PyTree, jax.Array]:
            own = jax.tree.map(lambda g: g[0], grads) if independent else grads
            norm = placement.norm(own, self.norm_type)
            result = clip(own, norm, max_norm), norm
            return stacked(result, placement) if independent else result

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(specs, PartitionSpec()),
            out_specs=(specs, norm),
            axis_names=placement.manual_axes,
            check_vma=placement.plan.check_vma,
        )(grads, max_norm)
