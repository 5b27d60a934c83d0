"""Batches whose positions stand in the order in which ranks hold them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax._types import PyTree
from axonml_jax.sharding.sequence_order import Order


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InRankOrder:
    """A batch whose positions stand as ranks hold them.

    Only `BatchLayout.place` makes one, and a step's program takes nothing else: no batch is reordered twice, or not at all.

    Attributes:
      batch: its leaves.
    """

    batch: PyTree


@dataclass(frozen=True)
class RankOrder:
    """How the positions of one leaf are reordered, so that every rank's part of the dim holds those of the rank.

    Attributes:
      dim: holds positions.
      order: see `sequence_order`.
      ranks: that share them.

    >>> RankOrder(0, "zigzag", 2)(np.arange(8))
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """

    dim: int
    order: Order
    ranks: int

    def __call__(self, x: Any) -> Any:
        """The leaf reordered: a NumPy array where one is given, else a JAX array."""
        xp = np if isinstance(x, np.ndarray) else jnp
        dim, before, after = self.dim, x.shape[: self.dim], x.shape[self.dim + 1 :]
        if self.order == "striped":
            stripes = x.reshape(*before, -1, self.ranks, *after)
            return xp.swapaxes(stripes, dim, dim + 1).reshape(x.shape)
        if self.order == "zigzag":
            halves = x.reshape(*before, 2, self.ranks, x.shape[dim] // (2 * self.ranks), *after)
            heads, tails = xp.take(halves, 0, axis=dim), xp.flip(xp.take(halves, 1, axis=dim), axis=dim)
            return xp.stack([heads, tails], axis=dim + 1).reshape(x.shape)
        return x
