"""`HeadNorm`: the norm of queries and keys, head by head (Henry et al. 2020; Qwen3)."""

from typing import Any

import jax
from flax import nnx

from axonml_jax.collectives.gradients.pairs import copy_to
from axonml_jax.parallel.tensor.bound_axes import bound
from axonml_jax.parallel.tensor.products.substitute import substitute


class HeadNorm(nnx.RMSNorm):
    """The RMS norm of each head, of which a rank of `axis` has some: the gradient of its scale is summed over them.

    Args:
      head_size: d.
      axis: the mesh axis that splits heads.
      rngs: stream `params`.
      **options: those of `nnx.RMSNorm`.

    Communicates: one all-reduce of the scale's gradient.
    """

    def __init__(self, head_size: int, *, axis: str, rngs: nnx.Rngs, **options: Any):
        super().__init__(head_size, rngs=rngs, **options)
        self.axis = axis

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """[..., d] -> [..., d]; a mask as the Flax norm takes it."""
        axes = bound(self.axis)
        assert self.scale is not None
        norm = substitute(self, scale=copy_to(self.scale[...], axes)) if axes else self
        return nnx.RMSNorm.__call__(norm, x, mask=mask)
