"""The contract of every strategy."""

import abc
from collections.abc import Sequence

import jax

from axonml_jax.sharding.layout import Layout


class AbstractStrategy(abc.ABC):
    """How parameters live on one mesh axis, and how they are read.

    Law: `sync` is the transpose of `gather`: it sums. The division by the total weight happens once, in `training/`.

    `gather` and `sync` run inside `shard_map` with `axis` bound. Their `layout` is the leaf's final one; a strategy
    looks only at what it put there itself.
    """

    @abc.abstractmethod
    def spec(self, layout: Layout, axis: str, axis_size: int) -> Layout:
        """Where a parameter lives between steps: `layout` refined by this axis."""

    @abc.abstractmethod
    def gather(self, shard: jax.Array, layout: Layout, axis: str) -> jax.Array:
        """The shard as it rests -> the array the forward pass reads."""

    @abc.abstractmethod
    def sync(self, grad: jax.Array, layout: Layout, axis: str) -> jax.Array:
        """The local gradient of what was read -> the gradient of the shard, summed over the axis."""

    def sync_bucket(self, grads: Sequence[jax.Array], layouts: Sequence[Layout], axis: str) -> list[jax.Array]:
        """`sync` of several leaves that travel together."""
        return [self.sync(grad, layout, axis) for grad, layout in zip(grads, layouts, strict=True)]

    def gather_bucket(self, shards: Sequence[jax.Array], layouts: Sequence[Layout], axis: str) -> list[jax.Array]:
        """`gather` of several leaves that travel together."""
        return [self.gather(shard, layout, axis) for shard, layout in zip(shards, layouts, strict=True)]

    @property
    def each_microbatch(self) -> bool:
        """Whether gradients are synchronized after every microbatch, not once per update."""
        return False

    @property
    def when_used(self) -> bool:
        """Whether parameters are gathered unit by unit when they are used, not once at the start of the step."""
        return False
