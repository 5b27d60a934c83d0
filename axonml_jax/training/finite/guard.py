"""Counts of updates that were skipped because something was not finite."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NonFinite:
    """How often updates were skipped. After `limit` in a row nothing is updated any more, until the host looks.

    Attributes:
      skipped: int32 scalar, updates skipped so far.
      in_a_row: int32 scalar, those since the last good one.
      since: int32 scalar, `TrainState.step` before the first of those.
    """

    skipped: jax.Array
    in_a_row: jax.Array
    since: jax.Array

    @staticmethod
    def first() -> "NonFinite":
        """At a run's first step."""
        return NonFinite(jnp.int32(0), jnp.int32(0), jnp.int32(0))

    def after(self, bad: jax.Array, skipped: jax.Array, step: jax.Array, limit: int) -> "NonFinite":
        """The counts after a step.

        Args:
          bad: whether it counts towards the limit.
          skipped: whether its update was skipped.
          step: `TrainState.step` before it.
          limit: how many in a row end the training.
        """
        halted = self.in_a_row >= limit
        row = jnp.where(halted, self.in_a_row, jnp.where(bad, self.in_a_row + 1, 0))
        since = jnp.where(self.in_a_row == 0, step, self.since)
        return NonFinite(self.skipped + jnp.where(halted | ~skipped, 0, 1), row, since)
