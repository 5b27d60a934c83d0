"""What parameters of parallel layers need from a step along the axes that those layers use: almost nothing."""

from dataclasses import dataclass
from typing import Any, Literal

import jax

from axonml_jax.collectives.primitives import sum_over
from axonml_jax.collectives.varying import vary
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.parallel.strategies.role import Role
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.parallel.strategies.transfer import Transfer
from axonml_jax.sharding.layout import Layout


@dataclass(frozen=True)
class InLayers(AbstractStrategy):
    """Parallel layers split their own parameters over the axis and communicate themselves (Megatron, AxoNN).

    Communicates: nothing for what a layer splits and along axes that share the batch; along `depth`, which splits the
    batch too, one all-reduce of every other gradient.

    Attributes:
      batch: what of the batch the axis splits: "rows" (`depth`), "positions", or None.
    """

    batch: Literal["rows", "positions"] | None = None

    @property
    def role(self) -> Role:
        """As layers split them; they are read and their gradients reduced inside the layers."""
        return Role(batch=self.batch, parameters="layers", reads="layers", reduces="layers")

    def spec(self, layout: Layout, axis: AxisNames, axis_size: int) -> Layout:
        """As the layer wrote it (see `tensor_specs`)."""
        return layout

    def gather(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The layer's own part."""
        return vary(shard, axis) if self.sums(layout, axis) else shard

    def sync(self, grad: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The layer's own gradient; summed where the axis splits the batch and the layer does not split the leaf."""
        return sum_over(grad, axis) if self.sums(layout, axis) else grad

    def gather_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """Nothing: the layers send, and say so themselves."""
        return ()

    def sync_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """One all-reduce where gradients are summed here."""
        if not self.sums(layout, axis):
            return ()
        return (Transfer(kind="all_reduce", elements=elements, ranks=ranks, dtype=dtype),)

    def sums(self, layout: Layout, axis: AxisNames) -> bool:
        """Whether a leaf's gradients are summed over the axis: it splits the batch and not the leaf."""
        return self.batch is not None and not set(as_axes(axis)) & set(layout.axes)
