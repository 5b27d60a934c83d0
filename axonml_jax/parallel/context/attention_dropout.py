"""Dropout of attention weights, tile by tile: the masks are those that one device draws for all weights at once."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from axonml_jax.compat.random_bits import bernoulli_at


@dataclass(frozen=True)
class WeightsDropout:
    """The mask of the weights [b, n, s, t]: `bernoulli(key, 1 - rate, [b, n, s, t])`, or for each head of its own key
    `bernoulli(key of the head, 1 - rate, [b, s, t])`.

    Attributes:
      rate: the probability of being dropped.
      heads: n, of the whole mask.
      queries: s, of the whole sequence.
      keys: t, of the whole sequence.
      by_head: whether every head has a key of its own.
    """

    rate: float
    heads: int
    queries: int
    keys: int
    by_head: bool

    def keep(self, key: jax.Array, rows: int, heads: jax.Array, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Which weights of a tile stay.

        Args:
          key: key data, uint32 [2], or [n, 2] by head.
          rows: b.
          heads: int [h], which heads of the whole mask the tile has.
          queries: int32 [x], their positions.
          keys: int32 [y].

        Returns:
          bool [b, h, x, y].
        """
        as_count = lambda x: x.astype(jnp.uint32)
        row, place = jnp.arange(rows, dtype=jnp.uint32)[:, None, None, None], as_count(queries)[:, None]
        if self.by_head:
            high, low = _line(row, self.queries, place)
        else:
            first = row * jnp.uint32(self.heads) + as_count(heads)[:, None, None]
            high, low = _line(first, self.queries, place)
        high, low = _times(high, low, self.keys)
        column = as_count(keys)[None, None, None, :]
        ends = low + column
        high = high + (ends < low).astype(jnp.uint32)
        if not self.by_head:
            return bernoulli_at(key, 1 - self.rate, high, ends)
        one = lambda own: bernoulli_at(own, 1 - self.rate, high[:, 0], ends[:, 0])
        return jnp.moveaxis(jax.vmap(one)(key[heads]), 0, 1)


def _line(row: jax.Array, length: int, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """row * length + place in 64 bits, as an upper and a lower half."""
    high, low = _times(jnp.zeros_like(row), row, length)
    ends = low + place
    return high + (ends < low).astype(jnp.uint32), ends


def _times(high: jax.Array, low: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """(high, low) * factor in 64 bits, in which XLA's 32-bit integers cannot multiply."""
    upper, lower = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
    a, b = low >> 16, low & 0xFFFF
    middle = a * lower + ((b * lower) >> 16)
    carried = (middle & 0xFFFF) + b * upper
    return high * jnp.uint32(factor) + a * upper + (middle >> 16) + (carried >> 16), low * jnp.uint32(factor)
