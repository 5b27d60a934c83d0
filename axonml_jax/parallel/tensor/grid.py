"""The three axes of AxoNN's 3-D tensor parallelism (Singh et al. 2024), and the product every 3-D layer is built on."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from axonml_jax.collectives.pairs import copy_to, gather_from, reduce_from, split_to
from axonml_jax.parallel.tensor.axes import bound
from axonml_jax.parallel.tensor.rerun import regathered


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

    def entered(self, x: jax.Array) -> jax.Array:
        """x read by every rank of `out`. Communicates: one all-reduce of its gradient over `out`."""
        out = bound(self.out)
        return copy_to(x, out) if out else x

    def product(self, fn: Callable, x: jax.Array, weight_shard: jax.Array) -> jax.Array:
        """`fn(weight, x)` with the weight whole over `depth`, summed over `into`.

        Args:
          fn: the layer's arithmetic on a rank's block of the weight and of x.
          x: this rank's input features, `entered`.
          weight_shard: [..., i/(into depth), o/out].

        Communicates: forward one all-gather of the weight's block over `depth` and one all-reduce of y over `into`;
        backward that all-gather again and one reduce-scatter of the block over `depth`.
        """
        into = bound(self.into)
        with jax.named_scope("axonml.parameters"):
            y = regathered(fn, weight_shard, x, bound(self.depth), weight_shard.ndim - 2)
        return reduce_from(y, into) if into else y
