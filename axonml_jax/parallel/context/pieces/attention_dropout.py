"""Dropout of attention weights, tile by tile: the masks are those that one device draws for all weights at once."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from axonml_jax.compat.random_bits import bernoulli_at


@dataclass(frozen=True)
class WeightsDropout:
    """The mask of the weights: `bernoulli(key, 1 - rate, shape)` of an array over rows, heads, queries and keys, or over some
    of them; or for each head of its own key one over the others.

    Attributes:
      rate: the probability of being dropped.
      dims: (what it runs over, size) of each dim of that array: "row", "head", "query", "key", or "" for a dim of size 1; the
        size of the first is not read.
      by_head: whether every head has a key of its own.
    """

    rate: float
    dims: tuple[tuple[str, int], ...]
    by_head: bool = False

    def keep(self, key: jax.Array, rows: int, heads: jax.Array, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Which weights of a tile stay.

        Args:
          key: key data, uint32 [2], or [n, 2] by head.
          rows: b.
          heads: int [h], which heads of the whole mask the tile has.
          queries: int32 [x], their positions.
          keys: int32 [y].

        Returns:
          bool [b, h, x, y], of size 1 along what the mask does not run over.
        """
        along = {"row": jnp.arange(rows), "head": heads, "query": queries, "key": keys, "": jnp.zeros(1, int)}
        places = ("row", "head", "query", "key")
        high = low = jnp.zeros((1, 1, 1, 1), jnp.uint32)
        for name, size in self.dims:
            own = along[name].astype(jnp.uint32)
            if name:
                own = jnp.expand_dims(own, [i for i, each in enumerate(places) if each != name])
            high, low = _times(high, low, size)
            ends = low + own
            high, low = high + (ends < low).astype(jnp.uint32), ends
        if not self.by_head:
            return bernoulli_at(key, 1 - self.rate, high, low)
        one = lambda own: bernoulli_at(own, 1 - self.rate, high[:, 0], low[:, 0])
        return jnp.moveaxis(jax.vmap(one)(key[heads]), 0, 1)


def _times(high: jax.Array, low: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """(high, low) * factor in 64 bits, in which XLA's 32-bit integers cannot multiply."""
    upper, lower = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
    a, b = low >> 16, low & 0xFFFF
    middle = a * lower + ((b * lower) >> 16)
    carried = (middle & 0xFFFF) + b * upper
    return high * jnp.uint32(factor) + a * upper + (middle >> 16) + (carried >> 16), low * jnp.uint32(factor)
