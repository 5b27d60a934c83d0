"""Megatron's 1-D layers: column and row linear layers, embeddings, norms, sequence parallelism, dropout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.collectives.gradients import copy_to, gather_from, split_to
from axonml_jax.collectives.primitives import axis_index, bound, degree, vary_alike
from axonml_jax.layers import fused
from axonml_jax.layers.products import (
    SEQUENCE_DIM,
    EmbedOptions,
    LinearOptions,
    NormOptions,
    add_bias,
    check_ring,
    entered,
    flat_dot_general,
    left,
    linear,
    logits_of,
    outside,
    own_rows,
    require_integers,
    substitute,
    summed,
)
from axonml_jax.layers.whole import Units, check_shard, check_units, left_split, metadata, own_part, taken_split
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.strategies.strategy import context_positions, current_split

# --------------------------------------------------------------------------------------------------
# `ParallelDropout`: dropout whose masks do not depend on how a dim is split over ranks.
# --------------------------------------------------------------------------------------------------


class ParallelDropout(nnx.Dropout):
    """An `nnx.Dropout` with its own key for every index of one dim, such as every head or position.

    Each rank draws the masks of its own indices, and any number of ranks draws the same masks.

    Args:
      rate: the probability of being dropped.
      dim: the dim, counted from the end, of which a rank may hold a part.
      axis: the mesh axes that split that dim; none: it is whole.
      positions: whether the dim holds positions, which `ax.Context` splits before those axes do.
      rngs: stream `dropout`; None: without random state, for a rate of 0 or calls that give rngs.
    """

    def __init__(self, rate: float, *, dim: int, axis: AxisNames = (), positions: bool = False, rngs: nnx.Rngs | None):
        super().__init__(rate, rngs=rngs)
        self.dim, self.axis, self.holds_positions = dim, axis, positions

    def __call__(self, inputs: jax.Array, *, deterministic: bool | None = None, rngs=None) -> jax.Array:
        """Apply dropout; arguments as for `nnx.Dropout`."""
        off = self.deterministic if deterministic is None else deterministic
        if self.rate in (0.0, 1.0) or off:
            return super().__call__(inputs, deterministic=off, rngs=rngs)
        dim = self.dim % inputs.ndim
        others = [size for i, size in enumerate(inputs.shape) if i != dim]
        draw = lambda key: jax.random.bernoulli(key, 1 - self.rate, others)
        kept = jax.vmap(draw, out_axes=dim)(self.keys(inputs.shape[dim], rngs=rngs))
        return jnp.where(kept, inputs / (1 - self.rate), jnp.zeros_like(inputs))

    def keys(self, count: int, *, rngs=None) -> jax.Array:
        """The keys of the next mask for this rank's `count` indices of the dim."""
        key = self._key(self.rngs if rngs is None else rngs)
        axes = bound(self.axis)
        if self.holds_positions and current_split() is not None:
            own = context_positions(count * degree(axes))
            own = jax.lax.dynamic_slice_in_dim(own, axis_index(axes) * count if axes else 0, count)
        else:
            own = jnp.arange(count)
            own = own + axis_index(axes) * count if axes else own
        return jax.vmap(lambda index: jax.random.fold_in(key, index))(own)

    def _key(self, source) -> jax.Array:
        if source is None:
            raise ValueError(
                f"ParallelDropout: a rate of {self.rate} draws masks, and there is nothing to draw them from: give rngs= to "
                "the layer or to the call, a rate of 0, or deterministic=True"
            )
        if isinstance(source, nnx.Rngs):
            return source[self.rng_collection]()
        return source() if isinstance(source, nnx.RngStream) else source


# --------------------------------------------------------------------------------------------------
# `ColumnParallelLinear`: a linear layer whose output features are split over the ranks of an axis (Shoeybi et al.
# 2019).
# --------------------------------------------------------------------------------------------------


class ColumnParallelLinear(nnx.Linear):
    """y = x A + b with the columns of A, and b, split over `axis`: the first half of a Megatron pair.

    Where `axis` is not bound it is `nnx.Linear`.

    Args:
      in_features: size i of the input's last dim.
      out_features: size o of the output's last dim; it must divide by the axis's n ranks, or `pads`.
      use_bias: whether to add b.
      gather_output: True returns the whole output on every rank.
      sequence_parallel: the input is this rank's part [..., s/n, i] of the sequence.
      ring: cut gathers and scatters into hops between the products, to overlap them; needs `sequence_parallel`.
      overlap: issue the reduction of x's gradient before the product of the kernel's, to run behind it; not with `ring`.
      axis: the mesh axis.
      pads: o may leave a remainder: each rank has ceil(o/n) columns, those behind the last feature are zeros, and an output
        that stays split ends with their zeros. For an output layer over a vocabulary: give the loss `words=o`.
      units: parts of the output features that are not cut (attention heads); None: any cut will do.
      rngs: stream `params`.
      **options: those of `nnx.Linear`.

    Raises:
      ValueError: in the call, when o does not divide; from the constructor, for `units` with `gather_output` or `pads` and for
        `ring` without sequence parallelism or with `overlap`.

    Communicates: see `column_outputs`; with `gather_output` one all-gather of y more.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        ring: bool = False,
        overlap: bool = False,
        axis: str = "tensor",
        pads: bool = False,
        units: Units | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        check_ring("ColumnParallelLinear", ring, sequence_parallel, overlap)
        if units is not None and gather_output:
            raise ValueError("ColumnParallelLinear: units may be held by several ranks, so gather_output must be False")
        if units is not None and pads:
            raise ValueError("ColumnParallelLinear: units are not cut, so pads must be False")
        kernel, bias = options.get("kernel_metadata"), options.get("bias_metadata")
        options["kernel_metadata"] = metadata(PartitionSpec(None, axis), kernel, units, pads=pads)
        options["bias_metadata"] = metadata(PartitionSpec(axis), bias, units, pads=pads)
        options.setdefault("dot_general", flat_dot_general)
        super().__init__(in_features, out_features, use_bias=use_bias, rngs=rngs, **options)
        self.gather_output, self.sequence_parallel, self.ring = gather_output, sequence_parallel, ring
        self.overlap, self.axis, self.units, self.pads = overlap, axis, units, pads

    def __call__(self, x: jax.Array, out_sharding=None) -> jax.Array:
        """Apply the layer.

        Args:
          x: [..., i], the same on every rank ([..., s/n, i] with `sequence_parallel`).
          out_sharding: as `nnx.Linear`; only where the axis is not bound.

        Returns:
          [..., o/n], this rank's features; [..., o] with `gather_output` or where the axis is not bound.
        """
        axes = bound(self.axis)
        if not axes:
            return super().__call__(x, out_sharding)
        (y,) = column_outputs([self], x)
        if not self.gather_output:
            return left_split(self, y, self.axis)
        return gather_from(y, axes)[..., : self.out_features] if self.pads else gather_from(y, axes)

    def columns(self) -> tuple[jax.Array, jax.Array | None]:
        """The kernel and the bias that this rank multiplies with, each with the gradient that its split needs."""
        kernel, bias = own_part(self.kernel), None if self.bias is None else own_part(self.bias)
        if self.units is not None and self.units.whole_on(degree(self.axis)):
            return self._of_own_unit(kernel), None if bias is None else self._of_own_unit(bias)
        name = f"{type(self).__name__}({self.in_features}, {self.out_features})"
        whole = (self.in_features, self.out_features)
        check_shard(f"{name} kernel", kernel, whole, PartitionSpec(None, self.axis), pads=self.pads)
        check_units(name, self.units, self.axis)
        return kernel, bias

    def _of_own_unit(self, whole: jax.Array) -> jax.Array:
        """This rank's unit of a parameter that every rank holds in full; ranks that share a unit sum its gradient."""
        assert self.units is not None
        check_shard(f"{type(self).__name__} parameter", whole, (*whole.shape[:-1], self.out_features), PartitionSpec())
        size = self.out_features // self.units.count
        mine = axis_index(self.axis) * self.units.count // degree(self.axis)
        return jax.lax.dynamic_slice_in_dim(copy_to(whole, self.axis), mine * size, size, whole.ndim - 1)


def column_outputs(layers: Sequence[ColumnParallelLinear], x: jax.Array) -> tuple[jax.Array, ...]:
    """The outputs of several layers that read the same x, which enters the region once.

    Communicates: one all-reduce of x backward; with sequence parallelism one all-gather of it forward, an all-gather and
    a reduce-scatter backward.
    """
    first = layers[0]
    axes = bound(first.axis)
    if not axes:
        return tuple(layer(x) for layer in layers)
    kernels, biases = [], []
    for layer in layers:
        kernel, bias = layer.columns()
        # Cast before it is gathered: half the bytes in reduced precision.
        x, kernel, bias = layer.promote_dtype((x, kernel, bias), dtype=layer.dtype)
        kernels.append(kernel)
        biases.append(bias)

    def products(x, kernels):
        return tuple(linear(layer, x, kernel) for layer, kernel in zip(layers, kernels, strict=True))

    flags = {"sequence": first.sequence_parallel, "ring": first.ring, "overlap": first.overlap}
    outputs = entered(products, x, tuple(kernels), axes, **flags)
    return tuple(add_bias(y, bias) for y, bias in zip(outputs, biases, strict=True))


def column_product(layers: Sequence[ColumnParallelLinear], x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The outputs side by side by one product, without biases; and the biases side by side.

    Args:
      layers: of the same options, all with a bias or none.
      x: as they take it.

    Communicates: as `column_outputs`.
    """
    first = layers[0]
    axes, kernels, biases = bound(first.axis), [], []
    for layer in layers:
        kernel, bias = layer.columns() if axes else (layer.kernel[...], None if layer.bias is None else layer.bias[...])
        x, kernel = layer.promote_dtype((x, kernel), dtype=layer.dtype)
        kernels.append(kernel)
        biases += [] if bias is None else [bias]

    def product(x: jax.Array, kernels: tuple[jax.Array, ...]) -> jax.Array:
        kernel, *more = kernels
        return linear(first, x, jnp.concatenate(kernels, -1) if more else kernel)

    flags = {"sequence": first.sequence_parallel, "ring": first.ring, "overlap": first.overlap}
    y = entered(product, x, tuple(kernels), axes, **flags) if axes else product(x, tuple(kernels))
    return y, jnp.concatenate(vary_alike(biases)) if biases else None


# --------------------------------------------------------------------------------------------------
# `VocabParallelEmbedding`: a table whose rows are split over the ranks of an axis (Shoeybi et al. 2019).
# --------------------------------------------------------------------------------------------------


class VocabParallelEmbedding(nnx.Embed):
    """A [v, f] table of which each rank of `axis` holds v/n rows; also the output layer that shares the table.

    Where `axis` is not bound it is `nnx.Embed`.

    Args:
      num_embeddings: v, the vocabulary; it must divide by the axis's n ranks, or `pads`.
      features: f.
      sequence_parallel: the result is this rank's part [..., s/n, f] of the sequence, and so is `attend`'s query.
      gather_output: `attend` returns all logits on every rank instead of this rank's.
      pads: v may leave a remainder: each rank has ceil(v/n) rows, and those behind the last word are zeros, which no id means.
        The logits that `attend` leaves split then end with some that stand for no word: give the loss `words=v`.
      overlap: `attend` issues the reduction of the query's gradient before the product of the table's, to run behind it.
      axis: the mesh axis.
      rngs: stream `params`.
      **options: those of `nnx.Embed`.

    Raises:
      ValueError: in the call, when v does not divide or ids are no integers.

    Communicates: one all-reduce of the result forward (a reduce-scatter with sequence parallelism), nothing backward.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        pads: bool = False,
        overlap: bool = False,
        axis: str = "tensor",
        rngs: nnx.Rngs,
        **options: Unpack[EmbedOptions],
    ):
        given = options.get("embedding_metadata")
        options["embedding_metadata"] = metadata(PartitionSpec(axis, None), given, pads=pads)
        super().__init__(num_embeddings, features, rngs=rngs, **options)
        self.sequence_parallel, self.gather_output = sequence_parallel, gather_output
        self.overlap, self.axis, self.pads = overlap, axis, pads

    def __call__(self, ids: jax.Array, out_sharding=None) -> jax.Array:
        """Look up rows.

        Args:
          ids: integers [...], the same on every rank.
          out_sharding: as `nnx.Embed`; only where the axis is not bound.

        Returns:
          [..., f], the same on every rank; [..., s/n, f] of ids [..., s] with `sequence_parallel`.
        """
        axes = bound(self.axis)
        if not axes:
            return super().__call__(ids, out_sharding)
        require_integers("VocabParallelEmbedding", ids)
        (table,) = self.promote_dtype((self._shard(),), dtype=self.dtype, inexact=False)
        if self.num_embeddings == 1:  # as nnx.Embed: every id means the one row
            ids = jnp.zeros_like(ids)
        return left(
            own_rows(table, ids, axes, self.num_embeddings if self.pads else None),
            axes,
            sequence=self.sequence_parallel,
        )

    def attend(self, query: jax.Array, out_sharding=None) -> jax.Array:
        """Logits of every row by its product with the query, as a tied output layer.

        Args:
          query: [..., f], the same on every rank; [..., s/n, f] with `sequence_parallel`.
          out_sharding: as `nnx.Embed.attend`; only where the axis is not bound.

        Returns:
          [..., v/n], this rank's logits, as `vocab_parallel_cross_entropy` takes them; [..., v] with `gather_output`.

        Communicates: one all-reduce of the query backward; with sequence parallelism one all-gather of it forward, an
        all-gather and a reduce-scatter backward.
        """
        axes = bound(self.axis)
        if out_sharding is not None and not axes:
            return super().attend(query, out_sharding)
        table = self._shard() if axes else self.embedding[...]
        query, table = self.promote_dtype((query, table), dtype=self.dtype)
        if not axes:
            return logits_of(query, table)
        split = {"sequence": self.sequence_parallel, "overlap": self.overlap}
        logits = entered(logits_of, query, table, axes, **split)
        if not self.gather_output:
            return logits
        return gather_from(logits, axes)[..., : self.num_embeddings] if self.pads else gather_from(logits, axes)

    def _shard(self) -> jax.Array:
        table = own_part(self.embedding)
        name = f"VocabParallelEmbedding({self.num_embeddings}, {self.features}) embedding"
        whole = (self.num_embeddings, self.features)
        check_shard(name, table, whole, PartitionSpec(self.axis, None), pads=self.pads)
        return table


# --------------------------------------------------------------------------------------------------
# `RowParallelLinear`: a linear layer whose input features are split over the ranks of an axis (Shoeybi et al. 2019).
# --------------------------------------------------------------------------------------------------


class RowParallelLinear(nnx.Linear):
    """y = x A + b with the rows of A split over `axis`: the second half of a Megatron pair.

    Every rank holds all of b, which is added once, after the reduction. Where `axis` is not bound it is `nnx.Linear`.

    Args:
      in_features: size i of the input's last dim; it must divide by the axis's n ranks.
      out_features: size o of the output's last dim.
      use_bias: whether to add b.
      input_is_parallel: the input is this rank's features [..., i/n]; False: it is whole, and each rank takes its own.
      sequence_parallel: the output is this rank's part [..., s/n, o] of the sequence.
      ring: cut gathers and scatters into hops between the products, to overlap them; needs `sequence_parallel`.
      axis: the mesh axis.
      rngs: stream `params`.
      **options: those of `nnx.Linear`.

    Raises:
      ValueError: in the call, when i does not divide; from the constructor, for `ring` without sequence parallelism.

    Communicates: one all-reduce of y forward, nothing backward; with sequence parallelism one reduce-scatter of y forward,
    one all-gather of its gradient and an all-reduce of the bias's backward. A whole input: one all-gather of its gradient.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        ring: bool = False,
        axis: str = "tensor",
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        check_ring("RowParallelLinear", ring, sequence_parallel)
        options["kernel_metadata"] = metadata(PartitionSpec(axis, None), options.get("kernel_metadata"))
        options.setdefault("dot_general", flat_dot_general)
        super().__init__(in_features, out_features, use_bias=use_bias, rngs=rngs, **options)
        self.input_is_parallel, self.sequence_parallel, self.ring = input_is_parallel, sequence_parallel, ring
        self.axis = axis

    def __call__(self, x: jax.Array, out_sharding=None) -> jax.Array:
        """Apply the layer.

        Args:
          x: [..., i/n], this rank's features; [..., i] without `input_is_parallel` or where the axis is not bound.
          out_sharding: as `nnx.Linear`; only where the axis is not bound.

        Returns:
          [..., o], the same on every rank; [..., s/n, o] with `sequence_parallel`.
        """
        axes = bound(self.axis)
        if not axes:
            return super().__call__(x, out_sharding)
        kernel, bias = own_part(self.kernel), None if self.bias is None else self.bias[...]
        name = f"{type(self).__name__}({self.in_features}, {self.out_features})"
        check_shard(f"{name} kernel", kernel, (self.in_features, self.out_features), PartitionSpec(self.axis, None))
        x, kernel, bias = self.promote_dtype((x, kernel, bias), dtype=self.dtype)
        x = taken_split(self, x, self.axis) if self.input_is_parallel else split_to(x, axes)
        split = {"sequence": self.sequence_parallel, "ring": self.ring}
        y = summed(lambda x, kernel: linear(self, x, kernel), x, kernel, axes, **split)
        return add_bias(y, outside(bias, axes, sequence=self.sequence_parallel))


# --------------------------------------------------------------------------------------------------
# RMS norms that multiply by 1 + their scale, which starts at 0, so that weight decay draws it to 1 (Gemma).
# --------------------------------------------------------------------------------------------------


def zero_centered(norm: nnx.RMSNorm, x: jax.Array, scale: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Apply an RMS norm with 1 + scale in place of its scale, in its dtype.

    The sum and the product are in at least float32: in bfloat16 1 + a small scale would be 1.

    Args:
      norm: says over what, with which epsilon and in which dtype.
      x: [..., d].
      scale: [d].
      mask: as the Flax norm takes it.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    plain: Any = substitute(norm, scale=None, dtype=wide)
    y = nnx.RMSNorm.__call__(plain, x, mask=mask) * (1 + scale.astype(wide))
    return y.astype(jnp.promote_types(x.dtype, scale.dtype) if norm.dtype is None else norm.dtype)


# --------------------------------------------------------------------------------------------------
# `Softcap`: scores and logits held between -cap and cap by a hyperbolic tangent (Bello et al. 2016; Gemma 2).
# --------------------------------------------------------------------------------------------------


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Softcap: cap * tanh(x / cap); x if cap is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


@dataclass(frozen=True)
class Softcap:
    """`capped` for a block's scores, as `ax.context_attention(score_mod=...)` takes it; equal caps compare equal.

    >>> Softcap(50.0) == Softcap(50.0)
    True
    """

    cap: float

    def __call__(self, scores: jax.Array, where: Any) -> jax.Array:
        """Cap scores [b, h, x, y]."""
        return capped(scores, self.cap)


# --------------------------------------------------------------------------------------------------
# Norms with sequence parallelism, and the two ends of a model that runs with it (Korthikanti et al. 2022).
# --------------------------------------------------------------------------------------------------


class _PerPosition:
    """Mixin before a Flax norm over features, for ranks that hold a part of the sequence."""

    def __init__(
        self,
        num_features: int,
        *,
        sequence_parallel: bool = False,
        axis: str = "tensor",
        rngs: nnx.Rngs,
        **options: Unpack[NormOptions],
    ):
        super().__init__(num_features, rngs=rngs, **options)  # pyright: ignore[reportCallIssue]  # the Flax norm's
        self.sequence_parallel, self.axis = sequence_parallel, axis

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize [..., h]; `mask` as the Flax norm takes it."""
        own = self._own()
        if mask is None and (form := self._form(own, x)) != "xla":
            return fused.norm(x, *self._factors(own), form=form, **self._kind())
        return self._plain(own, x, mask)

    def beside(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (the norm of x, x) for a residual stream, so that one pass can compute both gradients of x."""
        own = self._own()
        if (form := self._form(own, x)) == "xla":
            return self._plain(own, x, None), x
        return fused.norm_beside(x, *self._factors(own), form=form, **self._kind())

    def _own(self) -> dict[str, jax.Array]:
        """The scale and bias, as far as they exist, as every rank reads them, by name."""
        axes = bound(self.axis)
        found = {name: each[...] for name in ("scale", "bias") if (each := getattr(self, name, None)) is not None}
        return {name: copy_to(each, axes) for name, each in found.items()} if axes and self.sequence_parallel else found

    def _plain(self, own: dict[str, jax.Array], x: jax.Array, mask: jax.Array | None) -> jax.Array:
        norm: Any = self
        if bound(self.axis) and self.sequence_parallel:
            norm = substitute(self, **own)  # pyright: ignore[reportArgumentType]
        return super(_PerPosition, norm).__call__(x, mask=mask)  # pyright: ignore[reportAttributeAccessIssue]

    def _form(self, own: dict[str, jax.Array], x: jax.Array) -> str:
        """The form of the norm: a kernel if it is over the last dim, in the input's dtype, with a scale; else "xla"."""
        norm: Any = self
        usual = norm.reduction_axes == -1 and norm.feature_axes == -1 and norm.axis_name is None
        result = norm.dtype or jnp.result_type(x, *own.values())
        return fused.chosen(x) if usual and "scale" in own and jnp.dtype(result) == x.dtype else "xla"

    def _factors(self, own: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        return own["scale"], own.get("bias")

    def _kind(self) -> dict[str, Any]:
        norm: Any = self
        return {"epsilon": norm.epsilon, "centers": isinstance(self, nnx.LayerNorm)}


class ParallelLayerNorm(_PerPosition, nnx.LayerNorm):
    """`nnx.LayerNorm` over the features, which every rank of `axis` holds in full.

    Args:
      num_features: size h of the last dim.
      sequence_parallel: the input is this rank's part [..., s/n, h] of the sequence.
      axis: the mesh axis.
      rngs: stream `params`.
      **options: those of `nnx.LayerNorm`.

    Communicates: nothing; with sequence parallelism one all-reduce of the gradients of scale and bias.
    """


class ParallelRMSNorm(_PerPosition, nnx.RMSNorm):
    """`nnx.RMSNorm` over the features, which every rank of `axis` holds in full.

    Args:
      num_features: size h of the last dim.
      sequence_parallel: the input is this rank's part [..., s/n, h] of the sequence.
      axis: the mesh axis.
      centered: whether it multiplies by 1 + its scale, which starts at 0 (Gemma).
      rngs: stream `params`.
      **options: those of `nnx.RMSNorm`.

    Communicates: nothing; with sequence parallelism one all-reduce of the scale's gradient.
    """

    def __init__(
        self,
        num_features: int,
        *,
        sequence_parallel: bool = False,
        axis: str = "tensor",
        centered: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[NormOptions],
    ):
        if centered:
            options = {"scale_init": nnx.initializers.zeros, **options}
        super().__init__(num_features, sequence_parallel=sequence_parallel, axis=axis, rngs=rngs, **options)
        self.centered = centered

    def _plain(self, own: dict[str, jax.Array], x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """The norm in plain operations; if centered, with 1 + scale."""
        if not self.centered or self.scale is None:
            return super()._plain(own, x, mask)
        return zero_centered(self, x, own["scale"], mask)

    def _factors(self, own: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        if not self.centered:
            return super()._factors(own)
        scale = own["scale"]
        return 1 + scale.astype(jnp.promote_types(scale.dtype, jnp.float32)), None


def split_sequence(x: jax.Array, axis: str = "tensor", dim: int = SEQUENCE_DIM) -> jax.Array:
    """Enter sequence parallelism: this rank's part of a full activation.

    Args:
      x: [..., s, h], the same on every rank; s must divide by the axis's n ranks.
      axis: the mesh axis; where it is not bound x is returned.
      dim: the dim to split.

    Returns:
      [..., s/n, h].

    Raises:
      ValueError: when the dim does not divide.

    Communicates: one all-gather of its gradient.
    """
    axes = bound(axis)
    return split_to(x, axes, dim) if axes else x


def join_sequence(x_shard: jax.Array, axis: str = "tensor", dim: int = SEQUENCE_DIM) -> jax.Array:
    """Leave sequence parallelism: gather the full activation on every rank.

    Args:
      x_shard: [..., s/n, h], this rank's part.
      axis: the mesh axis; where it is not bound `x_shard` is returned.
      dim: the dim that is split.

    Returns:
      [..., s, h].

    Communicates: one all-gather.
    """
    axes = bound(axis)
    return gather_from(x_shard, axes, dim) if axes else x_shard
