"""The three axes of AxoNN's 3-D tensor parallelism (Singh et al. 2024), and the product every 3-D layer is built on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from axonml_jax.collectives.gradients.pairs import copy_to, gather_from, reduce_from, split_to
from axonml_jax.parallel.tensor.bound_axes import bound
from axonml_jax.parallel.tensor.products.ordered import Border, Prefetch, ordered

WEIGHT_DIM = -2
"""The dim of weights [..., i, o] that `depth` splits."""


@dataclass(frozen=True)
class Grid:
    """Which mesh axis splits what of a layer.

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
        """How weights [..., i, o] are split: i over `into` and then `depth`, o over `out`."""
        return PartitionSpec(*[None] * (ndim - 2), (self.into, self.depth), self.out)

    @property
    def bias(self) -> PartitionSpec:
        """How a bias [o] is split."""
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
        """`fn(x, weights)` with the weights whole over `depth`, each result summed over `into`.

        Args:
          fn: the layers' arithmetic on a rank's features of x and its blocks of the weights: as many results.
          x: this rank's input features, the same on every rank of `out`.
          weights: [..., i/(into depth), o/out] each.
          entering: False: x is another on every rank of `out`.
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
