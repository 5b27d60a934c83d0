"""Causal self-attention with grouped queries and rotary positions."""

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.layers import make_dropout, make_linear


class Attention(nnx.Module):
    """Causal multi-head self-attention; query head i reads key and value head i // (heads / kv_heads).

    Args:
      config: sizes, position kind, dropout and dtypes.
      rngs: streams `params` and, with dropout, `dropout`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        size, kv_size = config.hidden_size, config.kv_heads * config.head_size
        self.head_size = config.head_size
        self.rope_theta = config.rope_theta if config.position == "rotary" else None
        self.query = make_linear(config, size, size, rngs=rngs)
        self.key = make_linear(config, size, kv_size, rngs=rngs)
        self.value = make_linear(config, size, kv_size, rngs=rngs)
        self.out = make_linear(config, size, size, residual=True, rngs=rngs)
        self.dropout = make_dropout(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Mix every position with those before it: [b, s, h] -> [b, s, h] (b batch, s sequence, h hidden size)."""
        # The number of heads is read off the projection, so that a layer holding only some heads works unchanged.
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        if self.rope_theta is not None:
            query, key = (rotate(heads, self.rope_theta) for heads in (query, key))
        mixed = causal_attention(query, key, value, weights_fn=self.dropout)
        return self.out(mixed.reshape(*x.shape[:-1], -1))

    def _split(self, x):
        return x.reshape(*x.shape[:-1], -1, self.head_size)


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, weights_fn=lambda weights: weights
) -> jax.Array:
    """Scaled dot-product attention under a causal mask, with the softmax in at least float32.

    Written as two einsums: `jax.nn.dot_product_attention` computes the same on CPU and was 12% to 40% slower there,
    forward and backward (b=16, s=128, n=4, d=48; jax 0.12 and 0.10).

    Args:
      query: [b, s, n, d] (b batch, s sequence, n heads, d head size).
      key: [b, s, k, d] (k key and value heads; n is a multiple of k).
      value: [b, s, k, d].
      weights_fn: applied to the attention weights, such as dropout.

    Returns:
      [b, s, n, d].
    """
    batch, length, heads, size = query.shape
    grouped = query.reshape(batch, length, key.shape[2], heads // key.shape[2], size)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, preferred_element_type=wide) * size**-0.5
    visible = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(wide).min), axis=-1)
    mixed = jnp.einsum("bkgqs,bskd->bqkgd", weights_fn(weights.astype(value.dtype)), value)
    return mixed.reshape(batch, length, heads, size)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al. 2021), pairing dim i with dim i + d/2 (the layout of published weights).

    Args:
      x: [b, s, n, d], position along s starting at 0.
      theta: base of the frequencies theta ** (-2i / d).

    Returns:
      [b, s, n, d] in x's dtype.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
