"""A rank's positions cut into tiles of one size, so that scores of one tile of queries and one of keys are there at once."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def block_for(platform: str) -> int:
    """Positions of a tile at most, by what is fast on a platform."""
    return 256 if platform == "cpu" else 512


@dataclass(frozen=True)
class TileCut:
    """How so many places are cut into tiles.

    Places lie in chunks, within which positions grow; no tile has places of two. A chunk that its tiles do not divide is
    filled up with places that are no positions.

    Attributes:
      places: how many there are.
      chunks: of how many equal chunks.
      most: places of a tile at most.

    >>> cut = TileCut(places=12, chunks=2, most=4)
    >>> cut.size, cut.count
    (3, 4)
    """

    places: int
    chunks: int = 1
    most: int = 512

    @property
    def per_chunk(self) -> int:
        """Tiles of a chunk."""
        return max(1, math.ceil(self.places // self.chunks / self.most))

    @property
    def size(self) -> int:
        """Places of a tile."""
        return math.ceil(self.places // self.chunks / self.per_chunk)

    @property
    def count(self) -> int:
        """Tiles in all."""
        return self.chunks * self.per_chunk

    def tiles(self, x: jax.Array, dim: int, fill: int = 0) -> jax.Array:
        """[..., places, ...] -> [count, ..., size, ...]."""
        dim = dim % x.ndim
        chunk, filled = self.places // self.chunks, self.per_chunk * self.size
        x = x.reshape(*x.shape[:dim], self.chunks, chunk, *x.shape[dim + 1 :])
        if filled != chunk:
            ends = [(0, filled - chunk if i == dim + 1 else 0) for i in range(x.ndim)]
            x = jnp.pad(x, ends, constant_values=fill)
        x = x.reshape(*x.shape[:dim], self.count, self.size, *x.shape[dim + 2 :])
        return jnp.moveaxis(x, dim, 0)

    def joined(self, tiles: jax.Array, dim: int) -> jax.Array:
        """The inverse of `tiles`; `dim` counts in the result."""
        dim = dim % (tiles.ndim - 1)
        chunk, filled = self.places // self.chunks, self.per_chunk * self.size
        x = jnp.moveaxis(tiles, 0, dim)
        x = x.reshape(*x.shape[:dim], self.chunks, filled, *x.shape[dim + 2 :])
        x = jax.lax.slice_in_dim(x, 0, chunk, axis=dim + 1)
        return x.reshape(*x.shape[:dim], self.places, *x.shape[dim + 2 :])


class Side(NamedTuple):
    """What is known of the places of the queries, or of the keys, tile by tile (t tiles, s places of each, b rows).

    Attributes:
      positions: int32 [t, s]; -1: no position.
      first, last: the lowest and the highest position of each tile, int32 [t].
      segments: int32 [t, b, s], or None.
      least, most: the lowest and the highest segment of each tile, int32 [t]; None without segments.
    """

    positions: jax.Array
    first: jax.Array
    last: jax.Array
    segments: jax.Array | None = None
    least: jax.Array | None = None
    most: jax.Array | None = None


def side_of(cut: TileCut, positions: jax.Array, segments: jax.Array | None) -> Side:
    """The places of a piece.

    Args:
      cut: how its places are cut.
      positions: int32 [p], global.
      segments: int32 [b, p], or None.
    """
    own = cut.tiles(positions, 0, fill=-1)
    first, last = jnp.where(own < 0, np.iinfo(np.int32).max, own).min(-1), own.max(-1)
    if segments is None:
        return Side(own, first, last)
    ids, real = cut.tiles(segments, 1), (own >= 0)[:, None, :]
    least = jnp.where(real, ids, np.iinfo(np.int32).max).min((-1, -2))
    most = jnp.where(real, ids, np.iinfo(np.int32).min).max((-1, -2))
    return Side(own, first, last, ids, least, most)
