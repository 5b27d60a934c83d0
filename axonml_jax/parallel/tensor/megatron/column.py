"""`ColumnParallelLinear`: a linear layer whose output features are split over the ranks of an axis (Shoeybi et al. 2019)."""

from collections.abc import Sequence
from typing import Unpack

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.collectives.gradients.pairs import copy_to, gather_from
from axonml_jax.collectives.primitives import axis_index
from axonml_jax.parallel.tensor.bound_axes import bound, degree
from axonml_jax.parallel.tensor.products.flat import flat_dot_general
from axonml_jax.parallel.tensor.products.options import LinearOptions
from axonml_jax.parallel.tensor.products.region import check_ring, entered
from axonml_jax.parallel.tensor.products.substitute import add_bias, linear
from axonml_jax.parallel.tensor.specs import Units, check_shard, check_units, metadata
from axonml_jax.parallel.tensor.whole.whole_reads import left_split, own_part


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
      pads: o may leave a remainder: of ceil(o/n) columns on each rank those behind the last feature are zeros, and an output
        that is left split ends with theirs. For an output layer over a vocabulary: give the loss `words=o`.
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
        """The kernel and the bias that this rank multiplies with, each with the gradient its split asks for."""
        kernel, bias = own_part(self.kernel), None if self.bias is None else own_part(self.bias)
        if self.units is not None and self.units.whole_on(degree(self.axis)):
            return self._of_own_unit(kernel), None if bias is None else self._of_own_unit(bias)
        name = f"{type(self).__name__}({self.in_features}, {self.out_features})"
        whole = (self.in_features, self.out_features)
        check_shard(f"{name} kernel", kernel, whole, PartitionSpec(None, self.axis), pads=self.pads)
        check_units(name, self.units, self.axis)
        return kernel, bias

    def _of_own_unit(self, whole: jax.Array) -> jax.Array:
        """Every rank holds all units and uses one; ranks that share it add their gradients."""
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
