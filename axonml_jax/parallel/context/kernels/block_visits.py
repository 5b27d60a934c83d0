"""Which blocks of keys a kernel visits for every block of queries, in tables of one size for all ranks."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.compat.splash import Visits
from axonml_jax.parallel.context.visible import Visible

BLOCK = 128
"""Queries and keys of a piece are multiples of it: the lanes of a chip's vectors."""

_PAIRS = 2**17  # of blocks in a table, which lies in the scalar memory of a chip: 1 MiB of all but the oldest
_MOST = 512

LARGEST_PIECE = _PAIRS * (2 * _MOST) ** 2
"""Pairs of positions in the largest piece that has a table, where blocks of the largest size divide it."""


def block_sizes(queries: int, keys: int) -> tuple[int, int] | None:
    """Positions of a block of queries and of one of keys, multiples of 128 that divide them; None: there are too many blocks.

    Of at most 512; of twice as many where the table of pairs would be too large.

    >>> block_sizes(1024, 384), block_sizes(2**17, 2**20), block_sizes(2**20, 2**21)
    ((512, 384), (1024, 1024), None)
    """
    for most in (_MOST, 2 * _MOST):
        rows, columns = _divisor(queries, most), _divisor(keys, most)
        if queries // rows * (keys // columns) <= _PAIRS:
            return rows, columns
    return None


def _divisor(length: int, most: int) -> int:
    return next(size for size in range(most, 0, -BLOCK) if length % size == 0)


def most_visits(
    visible: Visible, pairs: Iterable[tuple[np.ndarray, np.ndarray]], rows: int, columns: int
) -> tuple[int, int]:
    """How many blocks of keys a block of queries visits at most, and how many of queries one of keys.

    Args:
      visible: what positions see.
      pairs: positions of queries and of keys, int [s] and [t], of each rank and round.
      rows, columns: positions of a block of queries, of one of keys.
    """
    most = 1, 1
    for queries, keys in pairs:
        here, there = queries.reshape(-1, rows, 1), keys.reshape(-1, 1, columns)
        may = visible.may_see(here.min(1), here.max(1), there.min(2).T, there.max(2).T)
        most = max(most[0], int(may.sum(1).max())), max(most[1], int(may.sum(0).max()))
    return most


def visits(may: jax.Array, most: tuple[int, int]) -> Visits:
    """Of every block those that it visits, in their order, and behind them the last one again, which does not count.

    What is named again is not fetched again.

    Args:
      may: bool [i, j], whether a block of queries sees a block of keys.
      most: of `most_visits`.
    """
    return Visits(_firsts(may, most[0]), tuple(x.T for x in _firsts(may.T, most[1])))  # pyright: ignore[reportArgumentType]


def _firsts(may: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    counts = may.sum(1, dtype=jnp.int32, keepdims=True)
    places = jnp.arange(most, dtype=jnp.int32)[None]
    order = jnp.argsort(~may, axis=1, stable=True).astype(jnp.int32)
    chosen = jnp.take_along_axis(order, jnp.clip(places, 0, jnp.maximum(counts - 1, 0)), axis=1)
    return chosen, places < counts
