"""`Softcap`: scores and logits held between -cap and cap by a hyperbolic tangent (Bello et al. 2016; Gemma 2)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap); without a cap x."""
    return x if cap is None else cap * jnp.tanh(x / cap)


@dataclass(frozen=True)
class Softcap:
    """The same of a block's scores, as `ax.context_attention(score_mod=...)` takes it; equal caps compare equal.

    >>> Softcap(50.0) == Softcap(50.0)
    True
    """

    cap: float

    def __call__(self, scores: jax.Array, where: Any) -> jax.Array:
        """Scores [b, h, x, y] -> the same, capped."""
        return capped(scores, self.cap)
