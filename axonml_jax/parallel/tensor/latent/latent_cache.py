"""`LatentCache`: what latent attention keeps of the positions that it has seen."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """Of every position its latent and the turned key, for all heads together (b batch, t positions it has room for).

    Attributes:
      latent: [b, t, r], normed; keys and values of all heads are made of it.
      turned: [b, t, d], the part of the key that all heads share.
      length: how many positions are filled, an integer scalar.
      starts: integer [b], the first position of each row that is none of padding; None: 0 of all.
    """

    latent: jax.Array
    turned: jax.Array
    length: jax.Array
    starts: jax.Array | None = None

    def extended(self, latent: jax.Array, turned: jax.Array) -> "LatentCache":
        """With s more positions, [b, s, r] and [b, s, d]; the caller sees to it that there is room."""
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), self.length, axis=1)
        both = write(self.latent, latent), write(self.turned, turned)
        return LatentCache(*both, self.length + latent.shape[1], self.starts)
