"""Places of neighbouring ranks, one rank after the other, brought into the sequence's order and back."""

import jax
import jax.numpy as jnp

from axonml_jax.sharding.sequence_order import Order


def in_sequence(x: jax.Array, order: Order, ranks: int, dim: int) -> jax.Array:
    """[..., s, ...] as so many neighbours hold the positions -> with positions that grow along the dim.

    They are all ranks of an axis, or those of one group of a size that divides them.
    """
    dim = dim % x.ndim
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if order == "striped":
        return x.reshape(*before, ranks, -1, *after).swapaxes(dim, dim + 1).reshape(x.shape)
    if order == "zigzag":  # a rank has one chunk of the first half, and its mirror image of the second
        chunks = x.reshape(*before, ranks, 2, -1, *after)
        first, second = (jax.lax.index_in_dim(chunks, i, dim + 1, keepdims=False) for i in range(2))
        return jnp.concatenate([first, jnp.flip(second, dim)], dim).reshape(x.shape)
    return x


def by_rank(x: jax.Array, order: Order, ranks: int, dim: int) -> jax.Array:
    """The inverse."""
    dim = dim % x.ndim
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if order == "striped":
        return x.reshape(*before, -1, ranks, *after).swapaxes(dim, dim + 1).reshape(x.shape)
    if order == "zigzag":
        first, second = jnp.split(x.reshape(*before, 2 * ranks, -1, *after), 2, axis=dim)
        return jnp.stack([first, jnp.flip(second, dim)], dim + 1).reshape(x.shape)
    return x
