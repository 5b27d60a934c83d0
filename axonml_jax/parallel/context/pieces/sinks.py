"""Sinks of attention: a score of each head that takes its part of the softmax and stands for no key (Xiao et al. 2023)."""

import jax
import jax.numpy as jnp

from axonml_jax.parallel.context.pieces.attention_pieces import ReadPiece


def sunk(read: ReadPiece, sinks: jax.Array) -> ReadPiece:
    """What queries read of the sinks: nothing, with their weight. Merged with what they read of all keys.

    Args:
      read: [t, b, g, r, x, ...], what they read of keys.
      sinks: [g * r], of the same heads.
    """
    top = jnp.broadcast_to(_by_head(read, sinks), read.top.shape)
    return ReadPiece(jnp.zeros_like(read.out), top, jnp.zeros_like(read.total))


def sinks_gradient(sinks: jax.Array, read: ReadPiece, grad: jax.Array) -> jax.Array:
    """The gradient of the sinks, [g * r]: as a score's, whose value is 0.

    Args:
      sinks: [g * r].
      read: what queries read of keys and sinks.
      grad: of `read.out`.
    """
    wide = read.top.dtype
    weights = jnp.exp(_by_head(read, sinks) - read.top - read.total)
    inner = (grad.astype(wide) * read.out.astype(wide)).sum(-1)
    return -(weights * inner).sum((0, 1, 4)).reshape(-1)


def _by_head(read: ReadPiece, sinks: jax.Array) -> jax.Array:
    return sinks.astype(read.top.dtype).reshape(*read.top.shape[2:4], 1)
