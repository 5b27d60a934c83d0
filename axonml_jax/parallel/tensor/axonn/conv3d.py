"""`ParallelConv`: a convolution of any spatial rank over a row x col x depth grid of ranks (AxoNN)."""

from collections.abc import Sequence
from typing import Unpack

import jax
from flax import nnx

from axonml_jax.collectives.gradients.pairs import own_slice, split_to
from axonml_jax.parallel.tensor.axonn.grid import Grid
from axonml_jax.parallel.tensor.axonn.linear3d import ROW_COL_DEPTH
from axonml_jax.parallel.tensor.bound_axes import bound, degree
from axonml_jax.parallel.tensor.products.options import ConvOptions
from axonml_jax.parallel.tensor.products.ordered import Prefetch
from axonml_jax.parallel.tensor.products.substitute import add_bias, substitute
from axonml_jax.parallel.tensor.specs import Units, check_shard, check_units, metadata
from axonml_jax.parallel.tensor.whole.whole_reads import own_part


class ParallelConv(nnx.Conv):
    """`nnx.Conv` with its kernel [k..., i/g, o] split over three axes: i/g over col and depth, o over row.

    Spatial dims stay whole and the batch is split over depth. Where none of the axes is bound it is `nnx.Conv`.

    Args:
      in_features: input channels i; i/g must divide by col x depth (row x depth when transposed).
      out_features: output channels o; they must divide by row (by col when transposed).
      kernel_size: one size, or one per spatial dim.
      strides: one stride, or one per spatial dim.
      feature_group_count: groups g; they must divide by row (by col when transposed): a rank computes whole groups.
      use_bias: whether to add a bias, once, after the reduction.
      transpose: swaps row and col; alternate it from layer to layer.
      scatter_input: the input is whole over row and col; False: it is this rank's channels [..., i/col] already. With
        groups those are gathered first, because a group's channels do not lie together then.
      gather_output: return the output whole over row and col; False: this rank's channels [..., o/row].
      overlap: issue the all-reduce of x's gradient before the convolution of the kernel's, to run behind it; not with groups,
        whose input's gradient is not reduced.
      axes: the names of row, col and depth; those that are not bound do not split anything.
      rngs: stream `params`.
      **options: those of `nnx.Conv`.

    Raises:
      ValueError: in the call, when sizes or groups do not divide; from the constructor, for `overlap` with groups.

    Communicates: what `ParallelLinear` does. With groups the input's gradient is all-gathered over row and over col
    instead of all-reduced over row.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        feature_group_count: int = 1,
        use_bias: bool = True,
        transpose: bool = False,
        scatter_input: bool = True,
        gather_output: bool = True,
        overlap: bool = False,
        axes: tuple[str, str, str] = ROW_COL_DEPTH,
        rngs: nnx.Rngs,
        **options: Unpack[ConvOptions],
    ):
        if overlap and feature_group_count > 1:
            raise ValueError(
                f"ParallelConv: overlap=True hides the all-reduce of the input's gradient, and with {feature_group_count} "
                "groups there is none: leave it out"
            )
        self.grid = Grid.of(axes, transpose)
        ndim = (1 if isinstance(kernel_size, int) else len(kernel_size)) + 2
        groups = Units(feature_group_count, "groups") if feature_group_count > 1 else None
        options["kernel_metadata"] = metadata(self.grid.weight(ndim), options.get("kernel_metadata"), groups)
        options["bias_metadata"] = metadata(self.grid.bias, options.get("bias_metadata"), groups)
        super().__init__(
            in_features,
            out_features,
            kernel_size,
            strides,
            feature_group_count=feature_group_count,
            use_bias=use_bias,
            rngs=rngs,
            **options,
        )
        self.scatter_input, self.gather_output, self.overlap = scatter_input, gather_output, overlap

    def __call__(self, x: jax.Array, out_sharding=None, *, prefetch: Prefetch | None = None) -> jax.Array:
        """Apply the layer.

        Args:
          x: [..., spatial..., i], the same over row and col; [..., spatial..., i/col] without `scatter_input`.
          out_sharding: as `nnx.Conv`; only where no axis is bound.
          prefetch: the order in which weights are gathered over depth, each while the layer before computes.

        Returns:
          [..., spatial..., o], the same over row and col; [..., spatial..., o/row] without `gather_output`.
        """
        grid = self.grid
        if not grid.is_bound:
            return super().__call__(x, out_sharding)
        kernel, bias = self._kernel(), None if self.bias is None else own_part(self.bias)
        x, kernel, bias = self.promote_dtype((x, kernel, bias), dtype=self.dtype)
        grouped = self.feature_group_count > 1
        if grouped:
            x = self._own_groups(x if self.scatter_input else grid.gather_input(x))
        elif self.scatter_input:
            x = grid.scatter_input(x)
        options = {"entering": not grouped, "overlap": self.overlap, "prefetch": prefetch}
        (y,) = grid.products(self._convolve, x, [kernel], **options)
        y = add_bias(y, bias)
        return grid.gather_output(y) if self.gather_output else y

    def _kernel(self) -> jax.Array:
        kernel, spec = own_part(self.kernel), self.grid.weight(len(self.kernel_shape))
        name = f"ParallelConv({self.in_features}, {self.out_features}, {self.kernel_size})"
        if self.feature_group_count > 1:
            check_units(name, Units(self.feature_group_count, "groups"), self.grid.out)
        check_shard(f"{name} kernel", kernel, self.kernel_shape, spec)
        if self.mask is None:
            return kernel
        mask = self.mask
        for axes, dim in (((self.grid.into, self.grid.depth), -2), ((self.grid.out,), -1)):
            mask = own_slice(mask, bound(axes), mask.ndim + dim) if bound(axes) else mask
        return kernel * mask

    def _convolve(self, x: jax.Array, kernels: Sequence[jax.Array]) -> tuple[jax.Array]:
        groups = self.feature_group_count // degree(self.grid.out) if self.feature_group_count > 1 else 1
        own = {"kernel": kernels[0], "bias": None, "use_bias": False, "mask": None, "feature_group_count": groups}
        return (nnx.Conv.__call__(substitute(self, **own), x),)

    def _own_groups(self, x: jax.Array) -> jax.Array:
        """[..., i] -> [..., i/(into out)]: of this rank's groups the channels that its kernel block reads."""
        grouped = x.reshape(*x.shape[:-1], self.feature_group_count, -1)
        out, into = bound(self.grid.out), bound(self.grid.into)
        grouped = split_to(grouped, out, -2) if out else grouped
        grouped = split_to(grouped, into, -1) if into else grouped
        return grouped.reshape(*x.shape[:-1], -1)
