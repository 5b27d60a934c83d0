"""Multi-head attention with its heads split over `tensor`: rotary positions, norms of heads, sinks, masks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from axonml_jax.collectives.gradients import copy_to
from axonml_jax.collectives.primitives import bound, degree
from axonml_jax.layers.context import context_attention
from axonml_jax.layers.kernels import PLATFORMS, attention_kernel, fused_attention, in_context
from axonml_jax.layers.linear import ParallelDropout, Softcap, capped, zero_centered
from axonml_jax.layers.options import ATTENTIONS, RopeScaling
from axonml_jax.layers.pairs import PairAxes, closed, closing, opened_biased, opening, pair_options, split_axis
from axonml_jax.layers.products import LinearOptions, Prefetch, substitute
from axonml_jax.layers.whole import Units, check_shard, metadata
from axonml_jax.program.cut import KEPT
from axonml_jax.strategies.strategy import context_positions, current_split

# --------------------------------------------------------------------------------------------------
# Scaled dot-product attention of the heads one rank has, with grouped queries, rotary positions and a cache of keys.
# --------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """The document of each position, where rows hold several documents (b batch, s this rank's positions).

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
    """Cached keys and values of the positions seen so far (b batch, t capacity, k heads, d head size).

    Attributes:
      key: [b, t, k, d].
      value: [b, t, k, d].
      length: how many positions are filled, an integer scalar.
      starts: integer [b], how many positions of padding each row begins with; None: none.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array
    starts: jax.Array | None = None

    def extended(self, key: jax.Array, value: jax.Array) -> "KVCache":
        """The cache with s more positions, [b, s, k, d] each; the caller must ensure that there is room."""
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), self.length, axis=1)
        return KVCache(write(self.key, key), write(self.value, value), self.length + key.shape[1], self.starts)


def places_after(start: jax.Array, starts: jax.Array | None, places: jax.Array) -> jax.Array:
    """The rotary positions of s more tokens, [s], or [b, s] if rows begin with padding; 0 for padding.

    Args:
      start: how many positions the cache holds before them, padding included.
      starts: [b], how many of those each row has as padding at its front; None: none.
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
      start: position of the first query among the keys, for causal attention; None: the last query is at the last key.
      starts: integer [...], the first key that each row sees (those before it are padding); None: key 0.
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
    """Softmax of [..., k, g, s, t] over t; with sinks [k * g], one more score that the result leaves out."""
    if sinks is None:
        return softmax(scores)
    own = jnp.broadcast_to(sinks.reshape(*scores.shape[-4:-2], 1, 1).astype(scores.dtype), (*scores.shape[:-1], 1))
    return softmax(jnp.concatenate([scores, own], axis=-1))[..., :-1]


@jax.custom_jvp
def _kept_softmax(scores: jax.Array) -> jax.Array:
    """Softmax of [..., t] over t, named so that a backward which recomputes elementwise results keeps the weights."""
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


# --------------------------------------------------------------------------------------------------
# `HeadNorm`: the norm of queries and keys, head by head (Henry et al. 2020; Qwen3).
# --------------------------------------------------------------------------------------------------


class HeadNorm(nnx.RMSNorm):
    """The RMS norm of each head; ranks of `axis` hold different heads, so the scale's gradient is summed over them.

    Args:
      head_size: d.
      axis: the mesh axis that splits heads.
      centered: whether it multiplies by 1 + its scale, which starts at 0 (Gemma 3).
      rngs: stream `params`.
      **options: those of `nnx.RMSNorm`.

    Communicates: one all-reduce of the scale's gradient.
    """

    def __init__(self, head_size: int, *, axis: str, centered: bool = False, rngs: nnx.Rngs, **options: Any):
        if centered:
            options = {"scale_init": nnx.initializers.zeros, **options}
        super().__init__(head_size, rngs=rngs, **options)
        self.axis, self.centered = axis, centered

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize [..., d]; `mask` as the Flax norm takes it."""
        axes = bound(self.axis)
        assert self.scale is not None
        if self.centered:
            scale = self.scale[...]
            return zero_centered(self, x, copy_to(scale, axes) if axes else scale, mask)
        norm = substitute(self, scale=copy_to(self.scale[...], axes)) if axes else self
        return nnx.RMSNorm.__call__(norm, x, mask=mask)


# --------------------------------------------------------------------------------------------------
# `TensorParallelAttention`: self-attention whose heads are split over the ranks of an axis (Shoeybi et al. 2019).
# --------------------------------------------------------------------------------------------------


class TensorParallelAttention(nnx.Module):
    """Multi-head or grouped-query self-attention, with each head on one rank.

    Args:
      hidden_size: h.
      num_heads: query heads; they must divide by the axis's n ranks.
      num_kv_heads: key and value heads, a divisor of `num_heads`; None: as many. They must divide by n too, or n by them:
        with fewer of them than ranks every rank holds the key and value weights whole and computes the one head it reads.
      head_size: d; None: h / num_heads.
      causal: whether a position sees only itself and those before it.
      rope_theta: base of rotary positions; None: no positions.
      rope_scaling: how their frequencies change for long sequences; None: they do not.
      qk_norm: epsilon of RMS norms of each head's queries and keys, before their rotation (Qwen3); None: there are none.
      qk_centered: whether these multiply by 1 + their scales, which start at 0 (Gemma 3).
      window: how many positions one sees of causal attention, itself among them (Mistral); None: all before it.
      sinks: whether each head has a trained score that takes its part of the softmax and stands for no key (gpt-oss).
      scale: of the scores; None: d ** -0.5.
      softcap: holds the scaled scores between -softcap and softcap (Gemma 2); None: nothing does.
      use_bias: whether the linear layers have biases.
      out_bias: whether the last of them has one; None: as the others.
      sequence_parallel: input and output are this rank's part of the sequence.
      ring: cut gathers and scatters into hops between the products, to overlap them; needs `sequence_parallel`.
      overlap: issue each reduction of an input's gradient before the weights' gradients, to run behind them; not with `ring`.
      dropout: rate on the attention weights in train mode; masks do not depend on the degree.
      kernel: what computes the attention itself: "xla" (two einsums), "blocks" (block by block, see `ax.context_attention`),
        "splash" (JAX's kernel on TPU), "cudnn" (on GPU), or "auto": the kernel of the platform where it applies, on CPU blocks
        for long sequences, else the einsums.
      out_init: initializer of the last layer's kernel; None: that of the others.
      axis: the mesh axis; three of them (row, col, depth) make it of AxoNN's 3-D layers, heads split over row. There key
        and value heads must divide too.
      rngs: streams `params` and, with dropout, `dropout`.
      **options: those of `nnx.Linear`, for every linear layer.

    Raises:
      ValueError: for sizes that do not fit each other; in the call, when heads do not divide over the ranks, or a kernel
        asked for by name does not apply.

    Under `ax.Context` the input is this rank's positions, which attend to those of all ranks (see `ax.context_attention`).

    Communicates: one all-reduce of [..., h] forward and one backward; with sequence parallelism an all-gather and a
    reduce-scatter each way, and one more all-gather backward. Replicated key and value weights: an all-reduce of their
    gradients.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_size: int | None = None,
        causal: bool = True,
        rope_theta: float | None = None,
        rope_scaling: RopeScaling | None = None,
        qk_norm: float | None = None,
        qk_centered: bool = False,
        window: int | None = None,
        sinks: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        use_bias: bool = True,
        out_bias: bool | None = None,
        sequence_parallel: bool = False,
        ring: bool = False,
        overlap: bool = False,
        dropout: float = 0.0,
        kernel: str = "auto",
        out_init: nnx.Initializer | None = None,
        axis: PairAxes = "tensor",
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if kernel not in ATTENTIONS:
            raise ValueError(f"TensorParallelAttention: kernel={kernel!r} must be one of {', '.join(ATTENTIONS)}")
        wrong = _without_effect(softcap, qk_norm, qk_centered)
        sizes = hidden_size, num_heads, kv_heads, head_size, rope_theta, window, causal
        self.head_size = _checked_head_size(*sizes, list(wrong))
        self.causal, self.rope_theta, self.kernel = causal, rope_theta, kernel
        self.rope_scaling, self.window, self.num_heads = rope_scaling, window, num_heads
        self.scale, self.softcap = self.head_size**-0.5 if scale is None else scale, softcap
        self.kv_heads, self.split_axis = kv_heads, split_axis(axis)
        flags = {"sequence_parallel": sequence_parallel, "ring": ring, "overlap": overlap}
        shared = pair_options("TensorParallelAttention", axis, options, use_bias=use_bias, rngs=rngs, **flags)

        def heads(units: Units):
            return opening(hidden_size, units.count * self.head_size, units=units, **shared)

        one_axis = isinstance(axis, str)
        self.query = heads(Units(num_heads, "query heads"))
        self.key = heads(Units(kv_heads, "key and value heads", replicated=one_axis))
        self.value = heads(Units(kv_heads, "key and value heads", replicated=one_axis))
        given: dict[str, Any] = dict(options)
        kinds = {name: given[name] for name in ("dtype", "param_dtype") if name in given} | {"centered": qk_centered}
        norm = partial(HeadNorm, self.head_size, axis=self.split_axis, epsilon=qk_norm or 0.0, rngs=rngs, **kinds)
        self.query_norm, self.key_norm = (norm(), norm()) if qk_norm is not None else (None, None)
        scores = jnp.zeros(num_heads, options.get("param_dtype", jnp.float32)) if sinks else None
        spec = metadata(PartitionSpec(self.split_axis), units=Units(num_heads, "query heads"))
        self.sinks = None if scores is None else nnx.Param(scores, **spec)
        out: dict[str, Any] = shared | ({"kernel_init": out_init} if out_init else {})
        out["use_bias"] = use_bias if out_bias is None else out_bias
        self.out = closing(num_heads * self.head_size, hidden_size, **out)
        self.dropout = ParallelDropout(dropout, dim=-3, axis=split_axis(axis), rngs=rngs if dropout else None)

    def __call__(self, x: jax.Array, *, prefetch: Prefetch | None = None, packed: Packed = WHOLE) -> jax.Array:
        """Apply the layer.

        Args:
          x: [..., s, h], the same on every rank; [..., s/n, h] with `sequence_parallel`.
          prefetch: of 3-D layers: the order in which weights are gathered over depth, each while the layer before computes.
          packed: of rows of several documents, which of them each of the s positions belongs to.

        Returns:
          As x.
        """
        mixed = self._mixed(*self._heads(x, 0, prefetch, packed.positions), packed.segment_ids)
        return closed(self.out, mixed.reshape(*mixed.shape[:-2], -1), prefetch=prefetch)

    def _mixed(self, query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None) -> jax.Array:
        rules = {"causal": self.causal, "window": self.window, "sinks": self._sinks(), "softcap": self.softcap}
        return mixed_heads(
            query, key, value, ids, kernel=self.kernel, dropout=self.dropout, scale=self.scale, **rules
        )  # fmt: skip

    def _sinks(self) -> jax.Array | None:
        """The sinks of this rank's heads; None without sinks."""
        if self.sinks is None:
            return None
        check_shard(
            "TensorParallelAttention sinks", own := self.sinks[...], (self.num_heads,), PartitionSpec(self.split_axis)
        )
        return own

    def cache_specs(self, rows: Any, heads: str | None, padded: bool = False) -> KVCache:
        """The PartitionSpecs of a cache's arrays on a mesh.

        Args:
          rows: the mesh axes that split rows, as an entry of a spec.
          heads: the mesh axis that splits heads; None: no axis does.
          padded: whether it has `starts`.
        """
        part: Any = PartitionSpec(rows, None, heads)
        length: Any = PartitionSpec()
        starts: Any = PartitionSpec(rows) if padded else None
        return KVCache(part, part, length, starts)

    def empty_cache(self, batch: int, room: int, starts: jax.Array | None = None) -> KVCache:
        """An empty cache of this rank's key and value heads with room for `room` positions.

        Args:
          batch: rows.
          room: positions.
          starts: integer [batch], how many positions of padding each row begins with; None: none.
        """
        heads = max(1, self.kv_heads // degree(self.split_axis))
        shape = (batch, room, heads, self.head_size)
        dtype = self.key.kernel.dtype if self.key.dtype is None else self.key.dtype
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32), starts)

    def extend(self, x: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Apply the layer to s more positions after those in a cache of this rank's heads; for causal attention.

        Args:
          x: [b, s, h], whole.
          cache: keys and values of the positions before.

        Returns:
          ([b, s, h], the cache with s more positions).
        """
        start, starts = cache.length, cache.starts
        places = None if starts is None else places_after(start, starts, context_positions(x.shape[1]))
        query, key, value = self._heads(x, start, positions=places)
        cache = cache.extended(key, value)
        rules = {"window": self.window, "sinks": self._sinks(), "scale": self.scale, "softcap": self.softcap}
        mixed = attend(query, cache.key, cache.value, causal=True, start=start, starts=starts, **rules)
        return self.out(mixed.reshape(*mixed.shape[:-2], -1)), cache

    def _heads(
        self,
        x: jax.Array,
        start: int | jax.Array,
        prefetch: Prefetch | None = None,
        positions: jax.Array | None = None,
    ):
        outputs = opened_biased([self.query, self.key, self.value], x, prefetch=prefetch)
        # How many heads there are is read off the projections: on a rank they are its own.
        query, key, value = (y.reshape(*y.shape[:-1], -1, self.head_size) for y in outputs)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rope_theta is not None:
            positions = start + context_positions(query.shape[-3]) if positions is None else positions
            query, key = (rotate(y, self.rope_theta, positions, self.rope_scaling) for y in (query, key))
        return query, key, value


def mixed_heads(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array | None,
    *,
    kernel: str,
    dropout: ParallelDropout,
    causal: bool,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attention of this rank's heads: by the requested kernel, or across the ranks that share positions.

    Args:
      query: [..., s, n, d] (s sequence, n heads, d head size).
      key: [..., s, k, d], of k heads.
      value: [..., s, k, e].
      ids: integer [..., s], the document of each position; None: rows are one document.
      kernel: one of `ATTENTIONS`.
      dropout: of the attention weights.
      causal, scale, window, sinks, softcap: see `attend`.

    Returns:
      [..., s, n, e].
    """
    drops = dropout.rate > 0 and not dropout.deterministic
    if current_split() is None:
        rules = {"window": window is not None, "sinks": sinks is not None, "softcap": softcap is not None}
        kernel = attention_kernel(kernel, query, key, value, drops=drops, segmented=ids is not None, **rules)
    else:
        kernel = in_context(kernel)
    sees: dict[str, Any] = {"causal": causal, "segment_ids": ids, "window": window, "scale": scale}
    if kernel == "xla":
        return attend(query, key, value, **sees, sinks=sinks, softcap=softcap, weights_fn=dropout)
    if kernel in PLATFORMS and current_split() is None:
        return fused_attention(kernel, query, key, value, **sees, softcap=softcap)
    keys = dropout.keys(query.shape[-2]) if drops else None
    joined = [x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)]
    ids = None if ids is None else ids.reshape(-1, ids.shape[-1])
    cap = None if softcap is None else Softcap(softcap)
    reach = None if window is None else (window - 1, 0)
    sees |= {"segment_ids": ids, "window": reach, "sinks": sinks, "score_mod": cap}
    rate = dropout.rate if drops else 0.0
    mixed = context_attention(*joined, **sees, dropout_rate=rate, dropout_key=keys, kernel=kernel)
    return mixed.reshape(*query.shape[:-1], value.shape[-1])


def _without_effect(softcap: float | None, qk_norm: float | None, qk_centered: bool) -> Iterator[str]:
    if softcap is not None and softcap <= 0:
        yield f"softcap={softcap} must be positive, or None"
    if qk_centered and qk_norm is None:
        yield "qk_centered=True is how norms of queries and keys scale, and there are none: give qk_norm, their epsilon"


def _checked_head_size(
    hidden_size, num_heads, kv_heads, head_size, rope_theta, window, causal, wrong: list[str]
) -> int:
    if num_heads < 1 or kv_heads < 1:
        raise ValueError(
            f"TensorParallelAttention: num_heads {num_heads} and num_kv_heads {kv_heads} must be at least 1"
        )
    size = hidden_size // num_heads if head_size is None else head_size
    if head_size is None and hidden_size % num_heads:
        wrong.append(f"hidden_size {hidden_size} is no multiple of num_heads {num_heads}: give head_size")
    if num_heads % kv_heads:
        wrong.append(f"num_heads {num_heads} is no multiple of num_kv_heads {kv_heads}")
    if rope_theta is not None and not rope_theta > 0:
        wrong.append(f"rope_theta={rope_theta} must be positive, or None: no positions")
    if rope_theta is not None and size % 2:
        wrong.append(f"rotary positions rotate pairs, and the head size {size} is odd")
    if window is not None and (window < 1 or not causal):
        wrong.append(
            f"window={window} is how many positions one sees of causal attention: at least 1, and with causal=True"
        )
    if wrong:
        raise ValueError("TensorParallelAttention: " + "; ".join(wrong))
    return size
