"""What parameters of parallel layers need from a step along the axes that those layers use: almost nothing."""

from dataclasses import dataclass

import jax

from axonml_jax.collectives.primitives import sum_over
from axonml_jax.collectives.varying import vary
from axonml_jax.mesh.axes import BATCH_AXES
from axonml_jax.parallel.strategy import AbstractStrategy
from axonml_jax.sharding.layout import Layout


@dataclass(frozen=True)
class InLayers(AbstractStrategy):
    """Parallel layers split their own parameters over the axis and communicate themselves (Megatron, AxoNN).

    Communicates: nothing for what a layer splits and along axes that share the batch; along `depth`, which splits the
    batch too, one all-reduce of every other gradient.
    """

    def spec(self, layout: Layout, axis: str, axis_size: int) -> Layout:
        """As the layer wrote it (see `tensor_specs`)."""
        return layout

    def gather(self, shard: jax.Array, layout: Layout, axis: str) -> jax.Array:
        """The layer's own part."""
        return vary(shard, axis) if self.sums(layout, axis) else shard

    def sync(self, grad: jax.Array, layout: Layout, axis: str) -> jax.Array:
        """The layer's own gradient; summed where the axis splits the batch and the layer does not split the leaf."""
        return sum_over(grad, axis) if self.sums(layout, axis) else grad

    @staticmethod
    def sums(layout: Layout, axis: str) -> bool:
        """Whether a leaf's gradients are summed over the axis: it splits the batch and not the leaf."""
        return axis in BATCH_AXES and axis not in layout.axes
