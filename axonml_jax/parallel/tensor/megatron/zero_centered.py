"""RMS norms that multiply by 1 + their scale, which starts at 0, so that weight decay draws it to 1 (Gemma)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.parallel.tensor.products.substitute import substitute


def zero_centered(norm: nnx.RMSNorm, x: jax.Array, scale: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """What a norm makes of x with 1 + scale in the place of its own, in its dtype.

    The sum and the product are in at least float32: in bfloat16 1 + a small scale would be 1.

    Args:
      norm: says over what, with which epsilon and in which dtype.
      x: [..., d].
      scale: [d].
      mask: as the Flax norm takes it.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    plain: Any = substitute(norm, scale=None, dtype=wide)
    y = nnx.RMSNorm.__call__(plain, x, mask=mask) * (1 + scale.astype(wide))
    return y.astype(jnp.promote_types(x.dtype, scale.dtype) if norm.dtype is None else norm.dtype)
