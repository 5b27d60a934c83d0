"""Scaled dot-product attention of the heads one rank has, with grouped queries, rotary positions and a cache of keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axonml_jax.parallel.tensor.megatron.rope_scaling import RopeScaling
from axonml_jax.parallel.tensor.megatron.softcap import capped
from axonml_jax.program.recomputed import KEPT


class Packed(NamedTuple):
    """Which document of its row every position belongs to, where rows hold several (b batch, s this rank's positions).

    Attributes:
      segment_ids: integer [b, s]: a position sees those of its own number only; None: each row is one document.
      positions: integer [b, s]: the places in the documents; None: those in the row.
    """

    segment_ids: jax.Array | None = None
    positions: jax.Array | None = None


WHOLE = Packed()
"""Rows that are one document each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The keys and values of the positions seen so far (b batch, t positions it has room for, k heads, d head size).

    Attributes:
      key: [b, t, k, d].
      value: [b, t, k, d].
      length: how many positions are filled, an integer scalar.
      starts: integer [b], the first position of each row that is none of padding; None: 0 of all.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array
    starts: jax.Array | None = None

    def extended(self, key: jax.Array, value: jax.Array) -> "KVCache":
        """With s more positions, [b, s, k, d] each; the caller sees to it that there is room."""
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), self.length, axis=1)
        return KVCache(write(self.key, key), write(self.value, value), self.length + key.shape[1], self.starts)


def places_after(start: jax.Array, starts: jax.Array | None, places: jax.Array) -> jax.Array:
    """Where in their texts s more positions are, [s], or [b, s] of rows that begin at several; those of padding count as 0.

    Args:
      start: how many positions are before them.
      starts: [b], where rows begin; None: all at 0.
      places: [s], 0 to s - 1.
    """
    return start + places if starts is None else jnp.maximum(start + places - starts[:, None], 0)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    start: int | jax.Array | None = None,
    starts: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    weights_fn: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> jax.Array:
    """Attention with the softmax in at least float32; query head i reads key and value head i // (n / k).

    Written as two einsums: `jax.nn.dot_product_attention` computes the same on CPU and was 12% to 40% slower there,
    forward and backward (b=16, s=128, n=4, d=48; jax 0.12 and 0.10).

    Args:
      query: [..., s, n, d] (s sequence, n heads, d head size).
      key: [..., t, k, d] (t positions to read, k key and value heads; n is a multiple of k).
      value: [..., t, k, e] (e size of a head's values).
      causal: a position sees none after it.
      start: position of the first query among the keys; None: the last query is at the last key.
      starts: integer [...], the first key of each row that is seen; None: the first of all.
      segment_ids: integer [..., s], for as many keys as queries: a query sees the keys of its own segment only.
      window: of causal attention: how many positions one sees, itself among them; None: all before it.
      sinks: [n], a score of every head that takes its part of the softmax and stands for no key (Xiao et al. 2023).
      scale: of the scores; None: d ** -0.5.
      softcap: holds the scaled scores between -softcap and softcap (Gemma 2); None: nothing does.
      weights_fn: applied to the attention weights [..., n, s, t], such as dropout.

    Returns:
      [..., s, n, e].
    """
    *lead, length, heads, size = query.shape
    positions, kv_heads = key.shape[-3:-1]
    grouped = query.reshape(*lead, length, kv_heads, heads // kv_heads, size)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("...qkgd,...skd->...kgqs", grouped, key, preferred_element_type=wide)
    scores = capped(scores * (size**-0.5 if scale is None else scale), softcap)
    if causal:
        first = positions - length if start is None else start
        ahead = jnp.arange(positions) - (first + jnp.arange(length)[:, None])
        visible = ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)
        scores = jnp.where(visible, scores, jnp.finfo(wide).min)
    if starts is not None:
        begun = jnp.arange(positions) >= starts[..., None]
        scores = jnp.where(begun[..., None, None, None, :], scores, jnp.finfo(wide).min)
    if segment_ids is not None:
        together = segment_ids[..., :, None] == segment_ids[..., None, :]
        scores = jnp.where(together[..., None, None, :, :], scores, jnp.finfo(wide).min)
    softmax = _kept_softmax if softcap is None else jax.nn.softmax  # a softcap's derivative needs the scores besides
    weights = _with_sinks(softmax, scores, sinks).astype(value.dtype)
    weights = weights_fn(weights.reshape(*lead, heads, length, positions)).reshape(weights.shape)
    mixed = jnp.einsum("...kgqs,...skd->...qkgd", weights, value)
    return mixed.reshape(*query.shape[:-1], value.shape[-1])


def _with_sinks(softmax: Callable[[jax.Array], jax.Array], scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Of [..., k, g, s, t] over t; with sinks [k * g], one more score that is left out of the result."""
    if sinks is None:
        return softmax(scores)
    own = jnp.broadcast_to(sinks.reshape(*scores.shape[-4:-2], 1, 1).astype(scores.dtype), (*scores.shape[:-1], 1))
    return softmax(jnp.concatenate([scores, own], axis=-1))[..., :-1]


@jax.custom_jvp
def _kept_softmax(scores: jax.Array) -> jax.Array:
    """Of [..., t] over t. A backward that makes again what is elementwise keeps these weights in the place of the scores."""
    return jax.nn.softmax(scores, axis=-1)


@_kept_softmax.defjvp
def _moved_softmax(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (scores,), (moved,) = primals, tangents
    weights = checkpoint_name(_kept_softmax(scores), KEPT)
    return weights, weights * (moved - jnp.sum(weights * moved, axis=-1, keepdims=True))


def rotate(x: jax.Array, theta: float, positions: jax.Array, scaling: RopeScaling | None = None) -> jax.Array:
    """Rotary position embedding (Su et al. 2021), pairing dim i with dim i + d/2 (the layout of published weights).

    Args:
      x: [..., s, n, d]; d is even.
      theta: base of the frequencies theta ** (-2i / d).
      positions: of x along s, integer [s], or [..., s] where rows differ.
      scaling: how these frequencies change for long sequences.

    Returns:
      [..., s, n, d] in x's dtype.
    """
    half = x.shape[-1] // 2
    if scaling is None or scaling.kind == "none":
        frequencies, scale = theta ** (-jnp.arange(half, dtype=jnp.float32) / half), 1.0
    else:
        frequencies, scale = scaling.frequencies(theta, x.shape[-1], jnp), scaling.attention_scale
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = (wave if scale == 1 else wave * scale for wave in (jnp.cos(angles), jnp.sin(angles)))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
