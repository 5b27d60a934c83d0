"""Scaled dot-product attention of the heads one rank has, with grouped queries, and rotary positions."""

import jax
import jax.numpy as jnp


def attend(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool) -> jax.Array:
    """Attention with the softmax in at least float32; query head i reads key and value head i // (n / k).

    Args:
      query: [..., s, n, d] (s sequence, n heads, d head size).
      key: [..., t, k, d] (t positions to read, k key and value heads; n is a multiple of k).
      value: [..., t, k, d].
      causal: a position sees none after it; the last query is at the last key.

    Returns:
      [..., s, n, d].
    """
    *lead, length, heads, size = query.shape
    positions, kv_heads = key.shape[-3:-1]
    grouped = query.reshape(*lead, length, kv_heads, heads // kv_heads, size)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("...qkgd,...skd->...kgqs", grouped, key, preferred_element_type=wide) * size**-0.5
    if causal:
        visible = jnp.tril(jnp.ones((length, positions), bool), positions - length)
        scores = jnp.where(visible, scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("...kgqs,...skd->...qkgd", weights, value).reshape(query.shape)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al. 2021), pairing dim i with dim i + d/2 (the layout of published weights).

    Args:
      x: [..., s, n, d], position along s starting at 0; d is even.
      theta: base of the frequencies theta ** (-2i / d).

    Returns:
      [..., s, n, d] in x's dtype.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[-3], dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
