"""AxoNN's 3-D layers over `row`, `col` and `depth` (Singh et al. 2022)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.collectives.gradients import copy_to, gather_from, own_slice, reduce_from, split_to
from axonml_jax.collectives.primitives import bound, degree, gather_whole
from axonml_jax.layers.products import (
    Border,
    ConvOptions,
    EmbedOptions,
    LinearOptions,
    Prefetch,
    add_bias,
    flat_dot_general,
    linear,
    logits_of,
    ordered,
    own_rows,
    require_integers,
    substitute,
)
from axonml_jax.layers.whole import Units, check_shard, check_units, metadata, own_part

# --------------------------------------------------------------------------------------------------
# The three axes of AxoNN's 3-D tensor parallelism (Singh et al. 2024), and the product every 3-D layer is built on.
# --------------------------------------------------------------------------------------------------

WEIGHT_DIM = -2
"""The dim of weights [..., i, o] that `depth` splits."""


@dataclass(frozen=True)
class Grid:
    """The mesh axes that split a 3-D layer's input features, output features, and batch.

    Attributes:
      into: the axis that splits input features; the partial outputs are summed over it.
      out: the axis that splits output features; the gradient of the input is summed over it.
      depth: the axis that splits the batch, and the weights a second time.
    """

    into: str
    out: str
    depth: str

    @staticmethod
    def of(axes: tuple[str, str, str], transpose: bool) -> "Grid":
        """The grid of a layer over (row, col, depth): its input is split over col, or over row when transposed."""
        row, col, depth = axes
        return Grid(row, col, depth) if transpose else Grid(col, row, depth)

    def weight(self, ndim: int = 2) -> PartitionSpec:
        """The spec of weights [..., i, o]: i over `into` and then `depth`, o over `out`."""
        return PartitionSpec(*[None] * (ndim - 2), (self.into, self.depth), self.out)

    @property
    def bias(self) -> PartitionSpec:
        """The spec of a bias [o]."""
        return PartitionSpec(self.out)

    @property
    def is_bound(self) -> bool:
        """Whether any axis of the grid is bound here."""
        return bool(bound((self.into, self.out, self.depth)))

    def scatter_input(self, x: jax.Array) -> jax.Array:
        """[..., i] -> [..., i/into]. Communicates: one all-gather of its gradient over `into`."""
        axes = bound(self.into)
        return split_to(x, axes) if axes else x

    def gather_input(self, x_shard: jax.Array) -> jax.Array:
        """[..., i/into] -> [..., i]. Communicates: one all-gather over `into`."""
        axes = bound(self.into)
        return gather_from(x_shard, axes) if axes else x_shard

    def gather_output(self, y_shard: jax.Array) -> jax.Array:
        """[..., o/out] -> [..., o]. Communicates: one all-gather over `out`."""
        axes = bound(self.out)
        return gather_from(y_shard, axes) if axes else y_shard

    def products(
        self,
        fn: Callable,
        x: jax.Array,
        weights: Sequence[jax.Array],
        *,
        entering: bool = True,
        overlap: bool = False,
        prefetch: Prefetch | None = None,
    ) -> tuple[jax.Array, ...]:
        """Compute `fn(x, weights)` with the weights gathered over `depth`, each result summed over `into`.

        Args:
          fn: the layers' arithmetic on a rank's features of x and its blocks of the weights; returns one result per weight.
          x: this rank's input features, the same on every rank of `out`.
          weights: [..., i/(into depth), o/out] each.
          entering: False: x differs between the ranks of `out`.
          overlap: issue the all-reduce of x's gradient before the products of the weights'.
          prefetch: gather the weights ahead of these products.

        Communicates: forward one all-gather of each weight's block over `depth` and one all-reduce of each result over
        `into`; backward those all-gathers again, one all-reduce of x's gradient over `out` and one reduce-scatter of each
        block over `depth`.
        """
        out, into = bound(self.out) if entering else (), bound(self.into)
        depth, weights = bound(self.depth), tuple(weights)
        prefetch = prefetch if depth else None  # otherwise nothing is gathered
        if depth or overlap:
            blocks = Border(depth, WEIGHT_DIM)
            results = ordered(fn, x, weights, Border(out), blocks, overlap=overlap, prefetch=prefetch)
        else:
            results = fn(copy_to(x, out) if out else x, weights)
        return tuple(reduce_from(y, into) if into else y for y in results)


# --------------------------------------------------------------------------------------------------
# `ParallelLinear`: a linear layer over a row x col x depth grid of ranks (AxoNN, Singh et al. 2024).
# --------------------------------------------------------------------------------------------------

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
        """This rank's blocks of the kernel and the bias, with their shapes checked."""
        name, grid = f"ParallelLinear({self.in_features}, {self.out_features})", self.grid
        kernel, bias = own_part(self.kernel), None if self.bias is None else own_part(self.bias)
        check_shard(f"{name} kernel", kernel, (self.in_features, self.out_features), grid.weight())
        check_units(name, self.units, grid.out)
        return kernel, bias


def grid_outputs(
    layers: Sequence[ParallelLinear], x: jax.Array, *, prefetch: Prefetch | None = None
) -> tuple[jax.Array, ...]:
    """This rank's output features of several layers on one grid that read the same x, which enters the region once.

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


# --------------------------------------------------------------------------------------------------
# `ParallelConv`: a convolution of any spatial rank over a row x col x depth grid of ranks (AxoNN).
# --------------------------------------------------------------------------------------------------


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
        """[..., i] -> [..., i/(into out)]: the channels of this rank's groups that its kernel block reads."""
        grouped = x.reshape(*x.shape[:-1], self.feature_group_count, -1)
        out, into = bound(self.grid.out), bound(self.grid.into)
        grouped = split_to(grouped, out, -2) if out else grouped
        grouped = split_to(grouped, into, -1) if into else grouped
        return grouped.reshape(*x.shape[:-1], -1)


# --------------------------------------------------------------------------------------------------
# `ParallelEmbedding`: an embedding table over a row x col x depth grid of ranks (AxoNN).
# --------------------------------------------------------------------------------------------------


class ParallelEmbedding(nnx.Embed):
    """A [v, f] table split over three axes: v over col and depth, f over row. Ids are split over depth.

    Where none of the axes is bound it is `nnx.Embed`.

    Args:
      num_embeddings: v; it must divide by col x depth (by row x depth when transposed).
      features: f; they must divide by row (by col when transposed).
      transpose: swaps row and col; a `ParallelLinear` after it has the other value.
      scatter_input: `attend`'s query is whole over row and col; False: it is this rank's features [..., f/row].
      gather_output: results are whole over row and col; False: this rank's part.
      overlap: `attend` issues the all-reduce of the query's gradient before the product of the table's, to run behind it.
      axes: the names of row, col and depth; those that are not bound do not split anything.
      rngs: stream `params`.
      **options: those of `nnx.Embed`.

    Raises:
      ValueError: in the call, when sizes do not divide or ids are no integers.

    Communicates: forward an all-gather of the table's block over depth and an all-reduce of the result over col; backward
    a reduce-scatter of the block over depth. `gather_output`: an all-gather of the result over row.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        transpose: bool = False,
        scatter_input: bool = True,
        gather_output: bool = True,
        overlap: bool = False,
        axes: tuple[str, str, str] = ROW_COL_DEPTH,
        rngs: nnx.Rngs,
        **options: Unpack[EmbedOptions],
    ):
        self.grid = Grid.of(axes, transpose)
        options["embedding_metadata"] = metadata(self.grid.weight(), options.get("embedding_metadata"))
        super().__init__(num_embeddings, features, rngs=rngs, **options)
        self.scatter_input, self.gather_output, self.overlap = scatter_input, gather_output, overlap

    def __call__(self, ids: jax.Array, out_sharding=None) -> jax.Array:
        """Look rows up.

        Args:
          ids: integers [...], the same over row and col.
          out_sharding: as `nnx.Embed`; only where no axis is bound.

        Returns:
          [..., f], the same over row and col; [..., f/row] without `gather_output`.
        """
        grid = self.grid
        if not grid.is_bound:
            return super().__call__(ids, out_sharding)
        require_integers("ParallelEmbedding", ids)
        (table,) = self.promote_dtype((self._shard(),), dtype=self.dtype, inexact=False)
        if depth := bound(grid.depth):
            # The backward of a lookup does not read the table, so nothing is gathered again.
            with jax.named_scope("axonml.parameters"):
                table = gather_whole(table, depth, 0, invarying=False)
        if self.num_embeddings == 1:  # as nnx.Embed: every id means the one row
            ids = jnp.zeros_like(ids)
        into = bound(grid.into)
        rows = own_rows(table, ids, into)
        rows = reduce_from(rows, into) if into else rows
        return grid.gather_output(rows) if self.gather_output else rows

    def attend(
        self,
        query: jax.Array,
        out_sharding=None,
        *,
        gather_output: bool | None = None,
        prefetch: Prefetch | None = None,
    ) -> jax.Array:
        """Logits of every row by its product with the query, as a tied output layer.

        Args:
          query: [..., f], the same over row and col; [..., f/row] without `scatter_input`.
          out_sharding: as `nnx.Embed.attend`; only where no axis is bound.
          gather_output: whether these logits are whole; None: as all results of the layer.
          prefetch: the order in which weights are gathered over depth, each while the layer before computes.

        Returns:
          [..., v], the same over row and col; [..., v/col] without `gather_output`.

        Communicates: as a transposed `ParallelLinear`.
        """
        grid = self.grid
        if not grid.is_bound:
            return super().attend(query, out_sharding)
        query, table = self.promote_dtype((query, self._shard()), dtype=self.dtype)
        out, into = bound(grid.out), bound(grid.into)
        query = split_to(query, out) if out and self.scatter_input else query
        swapped = replace(grid, into=grid.out, out=grid.into)
        products = lambda x, rows: (logits_of(x, rows[0]),)
        (logits,) = swapped.products(products, query, [table], overlap=self.overlap, prefetch=prefetch)
        gathered = self.gather_output if gather_output is None else gather_output
        return gather_from(logits, into) if into and gathered else logits

    def _shard(self) -> jax.Array:
        table = own_part(self.embedding)
        name = f"ParallelEmbedding({self.num_embeddings}, {self.features}) embedding"
        check_shard(name, table, (self.num_embeddings, self.features), self.grid.weight())
        return table
