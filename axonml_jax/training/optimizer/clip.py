"""Clipping gradients outside a step, as a program of its own."""

import jax
from jax.sharding import Mesh

from axonml_jax._types import PyTree
from axonml_jax.mesh.fake_devices import bound_run_ahead
from axonml_jax.training.rest.rest import Rest


class Clip:
    """`clip(grads, max_norm) -> (clipped, norm)` of gradients as users see them, compiled once."""

    def __init__(self, rest: Rest, mesh: Mesh, norm_type: float):
        self._compiled = jax.jit(lambda grads, max_norm: rest.clip(grads, max_norm, norm_type, mesh))

    def __call__(self, grads: PyTree, max_norm: float) -> tuple[PyTree, jax.Array]:
        """Clip; under NO_SYNC every rank's own gradients by their own norm."""
        return bound_run_ahead(self._compiled(grads, max_norm))
