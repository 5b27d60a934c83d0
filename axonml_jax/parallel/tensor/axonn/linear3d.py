"""`ParallelLinear`: a linear layer over a row x col x depth grid of ranks (AxoNN, Singh et al. 2024)."""

from collections.abc import Sequence
from typing import Unpack

import jax
from flax import nnx

from axonml_jax.parallel.tensor.axonn.grid import Grid
from axonml_jax.parallel.tensor.products.flat import flat_dot_general
from axonml_jax.parallel.tensor.products.options import LinearOptions
from axonml_jax.parallel.tensor.products.ordered import Prefetch
from axonml_jax.parallel.tensor.products.substitute import add_bias, linear
from axonml_jax.parallel.tensor.specs import Units, check_shard, check_units, metadata
from axonml_jax.parallel.tensor.whole.whole_reads import own_part

ROW_COL_DEPTH = ("row", "col", "depth")
"""The mesh axes of a 3-D layer: AxoNN's G_intra_r, G_intra_c and G_intra_d."""


class ParallelLinear(nnx.Linear):
    """y = x A + b with A [i, o] split over three axes: i over col and depth, o over row. The batch is split over depth.

    Where none of the axes is bound it is `nnx.Linear`, whose signature it keeps.

    Args:
      in_features: i; it must divide by col x depth (by row x depth when transposed).
      out_features: o; it must divide by row (by col when transposed).
      use_bias: whether to add b, once, after the reduction.
      transpose: swaps row and col, so that a layer takes its input as the layer before it left its output. Alternate it.
      scatter_input: the input is whole over row and col, and each rank takes its features ("easy" mode); False: it is this
        rank's [..., i/col] already.
      gather_output: return the output whole over row and col; False: this rank's [..., o/row].
      overlap: issue the all-reduce of x's gradient before the product of the kernel's, to run behind it.
      axes: the names of row, col and depth; those that are not bound do not split anything.
      units: parts of the output features that are not cut (attention heads); None: any cut will do.
      rngs: stream `params`.
      **options: those of `nnx.Linear`.

    Raises:
      ValueError: in the call, when sizes do not divide.

    Communicates: forward an all-gather of the weight's block over depth and an all-reduce of y over col; backward that
    all-gather again, an all-reduce of x over row and a reduce-scatter of the block over depth. `gather_output`: an
    all-gather of y over row; `scatter_input`: one of x's gradient over col.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        transpose: bool = False,
        scatter_input: bool = True,
        gather_output: bool = True,
        overlap: bool = False,
        axes: tuple[str, str, str] = ROW_COL_DEPTH,
        units: Units | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        self.grid = Grid.of(axes, transpose)
        options["kernel_metadata"] = metadata(self.grid.weight(), options.get("kernel_metadata"), units)
        options["bias_metadata"] = metadata(self.grid.bias, options.get("bias_metadata"), units)
        options.setdefault("dot_general", flat_dot_general)
        super().__init__(in_features, out_features, use_bias=use_bias, rngs=rngs, **options)
        self.scatter_input, self.gather_output = scatter_input, gather_output
        self.overlap, self.units = overlap, units

    def __call__(self, x: jax.Array, out_sharding=None, *, prefetch: Prefetch | None = None) -> jax.Array:
        """Apply the layer.

        Args:
          x: [..., i], the same over row and col; [..., i/col] without `scatter_input`.
          out_sharding: as `nnx.Linear`; only where no axis is bound.
          prefetch: the order in which weights are gathered over depth, each while the layer before computes.

        Returns:
          [..., o], the same over row and col; [..., o/row] without `gather_output`.
        """
        if not self.grid.is_bound:
            return super().__call__(x, out_sharding)
        (y,) = grid_outputs([self], x, prefetch=prefetch)
        return self.grid.gather_output(y) if self.gather_output else y

    def checked(self) -> tuple[jax.Array, jax.Array | None]:
        """This rank's block of the kernel, and of the bias."""
        name, grid = f"ParallelLinear({self.in_features}, {self.out_features})", self.grid
        kernel, bias = own_part(self.kernel), None if self.bias is None else own_part(self.bias)
        check_shard(f"{name} kernel", kernel, (self.in_features, self.out_features), grid.weight())
        check_units(name, self.units, grid.out)
        return kernel, bias


def grid_outputs(
    layers: Sequence[ParallelLinear], x: jax.Array, *, prefetch: Prefetch | None = None
) -> tuple[jax.Array, ...]:
    """Each rank's output features of several layers on one grid that read the same x, which enters once.

    Communicates: what `Grid.products` does, and with `scatter_input` an all-gather of x's gradient over col.
    """
    first, grid = layers[0], layers[0].grid
    if not grid.is_bound:
        return tuple(layer(x) for layer in layers)
    # Cast before anything is gathered: half the bytes in reduced precision.
    blocks = [layer.promote_dtype((x, *layer.checked()), dtype=layer.dtype) for layer in layers]
    x = grid.scatter_input(blocks[0][0]) if first.scatter_input else blocks[0][0]

    def products(x, kernels):
        return tuple(linear(layer, x, kernel) for layer, kernel in zip(layers, kernels, strict=True))

    kernels = [kernel for _, kernel, _ in blocks]
    outputs = grid.products(products, x, kernels, overlap=first.overlap, prefetch=prefetch)
    return tuple(add_bias(y, bias) for y, (_, _, bias) in zip(outputs, blocks, strict=True))
