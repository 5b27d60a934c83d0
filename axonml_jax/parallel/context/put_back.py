"""Positions that stand as ranks hold them, back in the sequence's own order, inside `shard_map`."""

import jax
import jax.numpy as jnp

from axonml_jax.collectives.primitives import axis_index, axis_size, gather_whole, shift, swap_parts
from axonml_jax.sharding.sequence_order import Order, sequence_order


def put_back(x: jax.Array, dim: int, axis: str, order: Order) -> jax.Array:
    """A rank's part of an array in the sequence's order, from its part in the order of ranks.

    Args:
      x: [..., c, ...] (c positions of this rank).
      dim: holds positions.
      axis: the mesh axis over whose ranks they are split.
      order: in which these hold them.

    Returns:
      [..., c, ...]: positions r * c to (r + 1) * c of the sequence.

    Communicates: "zigzag" two collective-permutes of half of x; "striped" an all-to-all of x, or, where c does not divide
    over the ranks, an all-gather; "contiguous" nothing.
    """
    ranks = axis_size(axis)
    if order == "contiguous" or ranks == 1:
        return x
    if order == "zigzag":
        return _from_zigzag(x, dim, axis, ranks)
    return _from_stripes(x, dim, axis, ranks)


def _from_zigzag(x: jax.Array, dim: int, axis: str, ranks: int) -> jax.Array:
    """Rank r has the chunks r and 2 * ranks - 1 - r, of which one is even; it is to have 2 * r and 2 * r + 1."""
    head, tail = jnp.split(x, 2, axis=dim)
    swapped = axis_index(axis) % 2 == 1
    even, odd = jnp.where(swapped, tail, head), jnp.where(swapped, head, tail)
    chunks = [sorted((rank, 2 * ranks - 1 - rank), key=lambda chunk: chunk % 2) for rank in range(ranks)]
    sent = [
        shift(part, axis, [(rank, chunks[rank][parity] // 2) for rank in range(ranks)])
        for parity, part in enumerate((even, odd))
    ]
    return jnp.concatenate(sent, axis=dim)


def _from_stripes(x: jax.Array, dim: int, axis: str, ranks: int) -> jax.Array:
    """Rank r has the positions r, r + ranks, ...: of each other rank's part as many as of its own."""
    count = x.shape[dim]
    if count % ranks:
        places = jnp.asarray(sequence_order("striped", count * ranks, ranks).argsort().reshape(ranks, count))
        return jnp.take(gather_whole(x, axis, dim, invarying=False), places[axis_index(axis)], axis=dim)
    first = jnp.moveaxis(x, dim, 0)
    parts = swap_parts(first.reshape(ranks, count // ranks, *first.shape[1:]), axis)
    return jnp.moveaxis(jnp.swapaxes(parts, 0, 1).reshape(first.shape), 0, dim)
