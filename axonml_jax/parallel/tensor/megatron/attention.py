"""`TensorParallelAttention`: self-attention whose heads are split over the ranks of an axis (Shoeybi et al. 2019)."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.parallel.context.context_attention import context_attention
from axonml_jax.parallel.context.context_split import context_positions, current_split
from axonml_jax.parallel.tensor.bound_axes import degree
from axonml_jax.parallel.tensor.dropout import ParallelDropout
from axonml_jax.parallel.tensor.megatron.attend import WHOLE, KVCache, Packed, attend, places_after, rotate
from axonml_jax.parallel.tensor.megatron.attentions import ATTENTIONS
from axonml_jax.parallel.tensor.megatron.fused_attention import PLATFORMS, attention_kernel, fused_attention, in_context
from axonml_jax.parallel.tensor.megatron.head_norm import HeadNorm
from axonml_jax.parallel.tensor.megatron.rope_scaling import RopeScaling
from axonml_jax.parallel.tensor.megatron.softcap import Softcap
from axonml_jax.parallel.tensor.products.options import LinearOptions
from axonml_jax.parallel.tensor.products.ordered import Prefetch
from axonml_jax.parallel.tensor.products.pair import (
    PairAxes,
    closed,
    closing,
    opened,
    opening,
    pair_options,
    split_axis,
)
from axonml_jax.parallel.tensor.specs import Units, check_shard, metadata


class TensorParallelAttention(nnx.Module):
    """Multi-head or grouped-query self-attention; a rank computes some heads, and no head is cut.

    Args:
      hidden_size: h.
      num_heads: query heads; they must divide by the axis's n ranks.
      num_kv_heads: key and value heads, a divisor of `num_heads`; None: as many. They must divide by n too, or n by them:
        with fewer of them than ranks every rank holds the key and value weights whole and computes the one head it reads.
      head_size: d; None: h / num_heads.
      causal: whether a position sees only itself and those before it.
      rope_theta: base of rotary positions; None: no positions.
      rope_scaling: how their frequencies change for long sequences; None: they do not.
      qk_norm: epsilon of RMS norms of each head's queries and keys, before they are turned (Qwen3); None: there are none.
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
        """Attend.

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
        """Of this rank's heads."""
        if self.sinks is None:
            return None
        check_shard(
            "TensorParallelAttention sinks", own := self.sinks[...], (self.num_heads,), PartitionSpec(self.split_axis)
        )
        return own

    def cache_specs(self, rows: Any, heads: str | None, padded: bool = False) -> KVCache:
        """How a cache lies on a mesh: a PartitionSpec for each of its arrays.

        Args:
          rows: the axes that split sequences, as an entry of a spec.
          heads: the axis that splits heads.
          padded: whether it has `starts`.
        """
        part: Any = PartitionSpec(rows, None, heads)
        length: Any = PartitionSpec()
        starts: Any = PartitionSpec(rows) if padded else None
        return KVCache(part, part, length, starts)

    def empty_cache(self, batch: int, room: int, starts: jax.Array | None = None) -> KVCache:
        """A cache of this rank's key and value heads with room for so many positions.

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
        """The same for s more positions after those in a cache of this rank's key and value heads; for causal attention.

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
        outputs = opened([self.query, self.key, self.value], x, prefetch=prefetch)
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
    """Attention of this rank's heads, by the kernel that was asked for, or of positions that ranks share.

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
    size = hidden_size // num_heads if head_size is None else head_size
    if head_size is None and hidden_size % num_heads:
        wrong.append(f"hidden_size {hidden_size} is no multiple of num_heads {num_heads}: give head_size")
    if num_heads % kv_heads:
        wrong.append(f"num_heads {num_heads} is no multiple of num_kv_heads {kv_heads}")
    if rope_theta is not None and size % 2:
        wrong.append(f"rotary positions rotate pairs, and the head size {size} is odd")
    if window is not None and (window < 1 or not causal):
        wrong.append(f"window={window} must be how many positions one sees of causal attention, at least 1")
    if wrong:
        raise ValueError("TensorParallelAttention: " + "; ".join(wrong))
    return size
