"""Dynamic loss scaling for float16 (Micikevicius et al. 2018): gradients are scaled up so that small ones do not vanish."""

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree

T = TypeVar("T")

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 200


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The factor by which losses are multiplied, and how it has been faring.

    Attributes:
      scale: float32 scalar. It starts at 2^16, doubles after 200 clean steps, and halves when gradients overflow.
      clean: int32 scalar, steps without overflow since it last changed.
      skipped: int32 scalar, updates that were skipped because gradients overflowed.
    """

    scale: jax.Array
    clean: jax.Array
    skipped: jax.Array

    @staticmethod
    def first() -> "LossScale":
        """The scale of a run's first step."""
        return LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0), jnp.int32(0))

    def after(self, finite: jax.Array) -> "LossScale":
        """The scale of the next step, given whether this one's gradients were finite."""
        grown = self.clean + 1 >= GROWTH_INTERVAL
        up = jnp.where(grown, self.scale * 2, self.scale)
        return LossScale(
            jnp.where(finite, up, jnp.maximum(self.scale / 2, 1.0)),
            jnp.where(finite & ~grown, self.clean + 1, 0),
            self.skipped + jnp.where(finite, 0, 1),
        )


def unscaled(grads: PyTree, scale: jax.Array) -> PyTree:
    """Gradients of the loss itself."""
    return jax.tree.map(lambda g: g / scale.astype(g.dtype), grads)


def chosen(finite: jax.Array, new: T, old: T) -> T:
    """The new values, or the old ones bit for bit when an update is skipped."""
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
