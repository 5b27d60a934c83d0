"""`HeadNorm`: the norm of queries and keys, head by head (Henry et al. 2020; Qwen3)."""

from typing import Any

import jax
from flax import nnx

from axonml_jax.collectives.gradients.pairs import copy_to
from axonml_jax.parallel.tensor.bound_axes import bound
from axonml_jax.parallel.tensor.megatron.zero_centered import zero_centered
from axonml_jax.parallel.tensor.products.substitute import substitute


class HeadNorm(nnx.RMSNorm):
    """The RMS norm of each head, of which a rank of `axis` has some: the gradient of its scale is summed over them.

    Args:
      head_size: d.
      axis: the mesh axis that splits heads.
      centered: whether it multiplies by 1 + its scale, which starts at 0 (Gemma 3).
      rngs: stream `params`.
      **options: those of `nnx.RMSNorm`.

    Communicates: one all-reduce of the scale's gradient.
    """

    def __init__(self, head_size: int, *, axis: str, centered: bool = False, rngs: nnx.Rngs, **options: Any):
        if centered:
            options = {"scale_init": nnx.initializers.zeros, **options}
        super().__init__(head_size, rngs=rngs, **options)
        self.axis, self.centered = axis, centered

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """[..., d] -> [..., d]; a mask as the Flax norm takes it."""
        axes = bound(self.axis)
        assert self.scale is not None
        if self.centered:
            scale = self.scale[...]
            return zero_centered(self, x, copy_to(scale, axes) if axes else scale, mask)
        norm = substitute(self, scale=copy_to(self.scale[...], axes)) if axes else self
        return nnx.RMSNorm.__call__(norm, x, mask=mask)
