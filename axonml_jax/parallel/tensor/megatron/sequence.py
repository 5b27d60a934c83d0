"""Norms with sequence parallelism, and the two ends of a model that runs with it (Korthikanti et al. 2022)."""

from typing import Any, Unpack

import jax
from flax import nnx

from axonml_jax.collectives.gradients.pairs import copy_to, gather_from, split_to
from axonml_jax.parallel.tensor.bound_axes import bound
from axonml_jax.parallel.tensor.megatron.zero_centered import zero_centered
from axonml_jax.parallel.tensor.products.options import NormOptions
from axonml_jax.parallel.tensor.products.region import SEQUENCE_DIM, outside
from axonml_jax.parallel.tensor.products.substitute import substitute


class _PerPosition:
    """What a Flax norm over the features needs where every rank has seen a part of the sequence. Mixed in before it."""

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
        """[..., h] -> [..., h]; a mask as the Flax norm takes it."""
        norm, axes = self, bound(self.axis)
        if axes and self.sequence_parallel:
            names = [name for name in ("scale", "bias") if getattr(self, name, None) is not None]
            summed = {name: outside(getattr(self, name)[...], axes, sequence=True) for name in names}
            norm: Any = substitute(self, **summed)  # pyright: ignore[reportArgumentType]
        return super(_PerPosition, norm).__call__(x, mask=mask)  # pyright: ignore[reportAttributeAccessIssue]


class ParallelLayerNorm(_PerPosition, nnx.LayerNorm):
    """`nnx.LayerNorm` over the features, which every rank of `axis` has whole.

    Args:
      num_features: size h of the last dim.
      sequence_parallel: the input is this rank's part [..., s/n, h] of the sequence.
      axis: the mesh axis.
      rngs: stream `params`.
      **options: those of `nnx.LayerNorm`.

    Communicates: nothing; with sequence parallelism one all-reduce of the gradients of scale and bias.
    """


class ParallelRMSNorm(_PerPosition, nnx.RMSNorm):
    """`nnx.RMSNorm` over the features, which every rank of `axis` has whole.

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

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """[..., h] -> [..., h]; a mask as the Flax norm takes it."""
        if not self.centered or self.scale is None:
            return super().__call__(x, mask=mask)
        scale, axes = self.scale[...], bound(self.axis)
        summed = axes and self.sequence_parallel
        return zero_centered(self, x, copy_to(scale, axes) if summed else scale, mask)


def split_sequence(x: jax.Array, axis: str = "tensor", dim: int = SEQUENCE_DIM) -> jax.Array:
    """Where sequence parallelism begins: this rank's part of a whole activation.

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
    """Where sequence parallelism ends: the whole activation on every rank.

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
