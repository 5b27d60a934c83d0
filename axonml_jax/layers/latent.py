"""Multi-head latent attention, whose keys and values are computed from a latent (DeepSeek-V2 and V3)."""

from dataclasses import dataclass
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.collectives.gradients import copy_to
from axonml_jax.collectives.primitives import bound, degree, gather_whole
from axonml_jax.layers.attention import WHOLE, Packed, attend, mixed_heads, places_after, rotate
from axonml_jax.layers.linear import ColumnParallelLinear, ParallelDropout, ParallelRMSNorm, RowParallelLinear
from axonml_jax.layers.options import ATTENTIONS, LatentConfig, RopeScaling
from axonml_jax.layers.products import SEQUENCE_DIM, LinearOptions, Prefetch, flat_dot_general, outside, substitute
from axonml_jax.layers.whole import Units
from axonml_jax.strategies.strategy import context_positions

# --------------------------------------------------------------------------------------------------
# `LatentCache`: what latent attention keeps of the positions that it has seen.
# --------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """The latent and the rotary key of each position, shared by all heads (b batch, t capacity).

    Attributes:
      latent: [b, t, r], normed; keys and values of all heads are computed from it.
      turned: [b, t, d], the part of the key that all heads share, after its rotation.
      length: how many positions are filled, an integer scalar.
      starts: integer [b], how many positions of padding each row begins with; None: none.
    """

    latent: jax.Array
    turned: jax.Array
    length: jax.Array
    starts: jax.Array | None = None

    def extended(self, latent: jax.Array, turned: jax.Array) -> "LatentCache":
        """The cache with s more positions, [b, s, r] and [b, s, d]; the caller must ensure that there is room."""
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), self.length, axis=1)
        both = write(self.latent, latent), write(self.turned, turned)
        return LatentCache(*both, self.length + latent.shape[1], self.starts)


# --------------------------------------------------------------------------------------------------
# `WholeLinear`: a linear layer whose kernel every rank of a tensor axis holds in full.
# --------------------------------------------------------------------------------------------------


class WholeLinear(nnx.Linear):
    """An `nnx.Linear` without bias that every rank computes in full, outside the region in which features are split.

    Args:
      in_features: size i of the input's last dim.
      out_features: size o of the output's last dim.
      sequence_parallel: the input is this rank's part [..., s/n, i] of the sequence.
      axis: the mesh axis.
      rngs: stream `params`.
      **options: those of `nnx.Linear`.

    Communicates: nothing; with sequence parallelism one all-reduce of the kernel's gradient.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        axis: str = "tensor",
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        options.setdefault("dot_general", flat_dot_general)
        super().__init__(in_features, out_features, use_bias=False, rngs=rngs, **options)
        self.sequence_parallel, self.axis = sequence_parallel, axis

    def __call__(self, x: jax.Array, out_sharding=None) -> jax.Array:
        """Apply the layer, [..., i] -> [..., o]; `out_sharding` as for `nnx.Linear`."""
        layer, axes = self, bound(self.axis)
        if axes and self.sequence_parallel:
            layer = substitute(self, kernel=outside(self.kernel[...], axes, sequence=True))
        return nnx.Linear.__call__(layer, x, out_sharding)


# --------------------------------------------------------------------------------------------------
# `LatentAttention`: attention whose keys and values are computed from a latent, its heads split over an axis (DeepSeek-V3).
# --------------------------------------------------------------------------------------------------


class LatentAttention(nnx.Module):
    """Causal self-attention whose keys and values are computed from one latent per position (DeepSeek-V2, 2024).

    A position's latent is normed, and every head computes a key and a value from it; a second part of the key, the same for
    all heads, has rotary positions. Queries may be computed from a latent of their own. Every rank of the axis computes the
    latents in full; heads are split.

    Args:
      hidden_size: h.
      num_heads: n; they must divide by the axis's ranks.
      latent: the sizes of latents and heads.
      rope_theta: base of rotary positions, which rotate dims 2i and 2i + 1 as a pair (the layout of DeepSeek's weights).
      rope_scaling: how their frequencies change for long sequences; None: they do not.
      sequence_parallel: input and output are this rank's part of the sequence.
      overlap: see `ColumnParallelLinear`.
      dropout: rate on the attention weights in train mode; masks do not depend on the degree.
      kernel: what computes the attention itself, as for `TensorParallelAttention`.
      out_init: initializer of the last layer's kernel; None: that of the others.
      axis: the mesh axis.
      rngs: streams `params` and, with dropout, `dropout`.
      **options: those of `nnx.Linear`, for every linear layer.

    Under `ax.Context` the input is this rank's positions, which attend to those of all ranks (see `ax.context_attention`).

    Communicates: one all-reduce of [..., h] forward; backward one all-reduce each of the gradients of the latents and of the
    shared key, and, where queries have no latent, of the input. With sequence parallelism an all-gather of each of these and
    a reduce-scatter of the output, and their transposes backward.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        latent: LatentConfig,
        rope_theta: float = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        sequence_parallel: bool = False,
        overlap: bool = False,
        dropout: float = 0.0,
        kernel: str = "auto",
        out_init: nnx.Initializer | None = None,
        axis: str = "tensor",
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        if kernel not in ATTENTIONS:
            raise ValueError(f"LatentAttention: kernel={kernel!r} must be one of {', '.join(ATTENTIONS)}")
        if not latent.kv_rank:
            raise ValueError("LatentAttention: kv_rank=0 is attention without latents: give the numbers of a latent")
        if not rope_theta > 0:
            raise ValueError(f"LatentAttention: rope_theta={rope_theta} must be positive")
        self.latent, self.num_heads, self.kernel, self.axis = latent, num_heads, kernel, axis
        self.rope_theta, self.rope_scaling, self.scale = rope_theta, rope_scaling, latent.scale(rope_scaling)
        self.sequence_parallel = sequence_parallel
        given: dict[str, Any] = dict(options)
        kinds = {name: given[name] for name in ("dtype", "param_dtype") if name in given}
        where: dict[str, Any] = {"sequence_parallel": sequence_parallel, "axis": axis, "rngs": rngs}
        units = Units(num_heads, "heads")

        def norm(size: int):
            return ParallelRMSNorm(size, epsilon=latent.norm_eps, **kinds, **where)

        def heads(fan_in: int, size: int):
            flags = {"use_bias": False, "overlap": overlap, "units": units}
            return ColumnParallelLinear(fan_in, num_heads * size, **flags, **where, **options)

        rank = latent.query_rank
        self.query_down = None if rank is None else WholeLinear(hidden_size, rank, **where, **options)
        self.query_norm = None if rank is None else norm(rank)
        self.query = heads(hidden_size if rank is None else rank, latent.query_size)
        self.key_value_down = WholeLinear(hidden_size, latent.kv_rank + latent.rotary_size, **where, **options)
        self.key_value_norm = norm(latent.kv_rank)
        self.key_value = heads(latent.kv_rank, latent.plain_size + latent.value_size)
        out: dict[str, Any] = given | ({"kernel_init": out_init} if out_init else {})
        self.out = RowParallelLinear(num_heads * latent.value_size, hidden_size, use_bias=False, **where, **out)
        self.dropout = ParallelDropout(dropout, dim=-3, axis=axis, rngs=rngs if dropout else None)

    def __call__(self, x: jax.Array, *, prefetch: Prefetch | None = None, packed: Packed = WHOLE) -> jax.Array:
        """Apply the layer.

        Args:
          x: [..., s, h], the same on every rank; [..., s/n, h] with `sequence_parallel`.
          prefetch: must be None: no weights are gathered.
          packed: of rows of several documents, which of them each of the s positions belongs to.

        Returns:
          As x.

        Raises:
          ValueError: for `prefetch`.
        """
        if prefetch is not None:
            raise ValueError("LatentAttention gathers no weights, so there is nothing to prefetch: leave prefetch out")
        plain, turned = self._queries(x, 0, packed.positions)
        latent, shared = self._latents(x)
        made = self._per_head(self.key_value(latent))
        key, value = jnp.split(made, [self.latent.plain_size], axis=-1)
        shared = self._turned(self._entered(shared)[..., None, :], 0, packed.positions)
        shared = jnp.broadcast_to(shared, (*key.shape[:-1], shared.shape[-1]))
        query, key = jnp.concatenate([plain, turned], -1), jnp.concatenate([key, shared], -1)
        how: dict[str, Any] = {"kernel": self.kernel, "dropout": self.dropout, "scale": self.scale}
        mixed = mixed_heads(query, key, value, packed.segment_ids, causal=True, **how)
        return self.out(mixed.reshape(*mixed.shape[:-2], -1))

    def cache_specs(self, rows: Any, heads: str | None, padded: bool = False) -> LatentCache:
        """The PartitionSpecs of a cache's arrays on a mesh; they are never split over heads.

        Args:
          rows: the mesh axes that split rows, as an entry of a spec.
          heads: the mesh axis that splits heads; ignored, as all heads share the latents.
          padded: whether it has `starts`.
        """
        part: Any = PartitionSpec(rows)
        length: Any = PartitionSpec()
        return LatentCache(part, part, length, part if padded else None)

    def empty_cache(self, batch: int, room: int, starts: jax.Array | None = None) -> LatentCache:
        """An empty cache with room for `room` positions.

        Args:
          batch: rows.
          room: positions.
          starts: integer [batch], how many positions of padding each row begins with; None: none.
        """
        layer, sizes = self.key_value_down, (self.latent.kv_rank, self.latent.rotary_size)
        dtype = layer.kernel.dtype if layer.dtype is None else layer.dtype
        latent, turned = (jnp.zeros((batch, room, size), dtype) for size in sizes)
        return LatentCache(latent, turned, jnp.zeros((), jnp.int32), starts)

    def extend(self, x: jax.Array, cache: LatentCache) -> tuple[jax.Array, LatentCache]:
        """Apply the layer to s more positions after those in a cache, without computing the cached keys and values.

        The weights that compute keys from latents multiply the queries, and those that compute values multiply the attention's
        result: all heads read the latents as if they were one head's keys and values ("absorbed", DeepSeek-V2).

        Args:
          x: [b, s, h], whole.
          cache: latents of the positions before.

        Returns:
          ([b, s, h], the cache with s more positions).
        """
        start, starts = cache.length, cache.starts
        places = None if starts is None else places_after(start, starts, context_positions(x.shape[1]))
        plain, turned = self._queries(x, start, places)
        latent, shared = self._latents(x)
        cache = cache.extended(latent, self._turned(shared[..., None, :], start, places)[..., 0, :])
        kernel, _ = self.key_value.columns()
        plain, turned, kernel = self.key_value.promote_dtype((plain, turned, kernel), dtype=self.key_value.dtype)
        to_key, to_value = jnp.split(self._per_head(kernel), [self.latent.plain_size], axis=-1)
        query = jnp.concatenate([jnp.einsum("bsnd,rnd->bsnr", plain, to_key), turned], -1)
        key = jnp.concatenate([cache.latent, cache.turned], -1)[:, :, None]
        rules = {"start": start, "starts": starts, "scale": self.scale}
        read = attend(query, key, cache.latent[:, :, None], causal=True, **rules)
        mixed = jnp.einsum("bsnr,rne->bsne", read, to_value)
        return self.out(mixed.reshape(*mixed.shape[:-2], -1)), cache

    def _queries(self, x: jax.Array, start: int | jax.Array, positions: jax.Array | None):
        """The plain and rotated parts of this rank's queries, [..., s, n, plain_size] and [..., s, n, rotary_size]."""
        if self.query_down is not None and self.query_norm is not None:
            x = self.query_norm(self.query_down(x))
        plain, turned = jnp.split(self._per_head(self.query(x)), [self.latent.plain_size], axis=-1)
        return plain, self._turned(turned, start, positions)

    def _latents(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The normed latents of x's positions, [..., s, r], and the shared key [..., s, d] before its rotation."""
        latent, shared = jnp.split(self.key_value_down(x), [self.latent.kv_rank], axis=-1)
        return self.key_value_norm(latent), shared

    def _entered(self, shared: jax.Array) -> jax.Array:
        """The shared key on every rank, of all positions."""
        if not (axes := bound(self.axis)):
            return shared
        if self.sequence_parallel:
            return gather_whole(shared, axes, SEQUENCE_DIM, invarying=False)
        return copy_to(shared, axes)

    def _turned(self, x: jax.Array, start: int | jax.Array, positions: jax.Array | None) -> jax.Array:
        """Rotate [..., s, n, d], whose dims 2i and 2i + 1 are a pair; in the result all first dims precede the second ones."""
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        positions = start + context_positions(x.shape[-3]) if positions is None else positions
        return rotate(pairs.swapaxes(-1, -2).reshape(x.shape), self.rope_theta, positions, self.rope_scaling)

    def _per_head(self, x: jax.Array) -> jax.Array:
        """Split [..., n * d] into this rank's heads, [..., n, d]."""
        heads = self.num_heads // degree(self.axis)
        return x.reshape(*x.shape[:-1], heads, -1)
