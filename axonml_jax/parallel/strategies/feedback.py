"""What sums of a lossy strategy leave out of a rank's gradients, to be added to the next ones (error feedback)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp

from axonml_jax.collectives.gradients.bucketed import parts_along
from axonml_jax.collectives.primitives import axis_size
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.strategies.padding import cut, pad
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.sharding.layout import Layout


@dataclass(frozen=True)
class Feedback:
    """The strategy of a plan whose sums are fed back.

    Attributes:
      axis: which it owns.
      strategy: it.
      precision: the plan's.
    """

    axis: AxisNames
    strategy: AbstractStrategy
    precision: Precision

    @classmethod
    def of(cls, strategies: Mapping[AxisNames, AbstractStrategy], precision: Precision) -> Self | None:
        """That of strategies by axis; None: there is none."""
        return next((cls(axis, each, precision) for axis, each in strategies.items() if each.feeds_back), None)

    def left_out(self, grads: Sequence[jax.Array], layouts: Sequence[Layout]) -> list[jax.Array]:
        """Of whole gradients on a rank what the sum of all ranks lacks, inside `shard_map`.

        Args:
          grads: just before they are summed, what was left out before among them.
          layouts: theirs.

        Returns:
          Shaped and typed like them.
        """
        return [self._of_leaf(grad, layout) for grad, layout in zip(grads, layouts, strict=True)]

    def _of_leaf(self, grad: jax.Array, layout: Layout) -> jax.Array:
        trip = lambda part: self.strategy.sum_round_trip(part, layout, self.axis)
        dim, sent = layout.dim_of(self.axis), grad.astype(self.precision.reduce_dtype(layout.dtype))
        if dim is None:
            return grad - trip(sent).astype(grad.dtype)
        parts = parts_along(pad(sent, layout, self.axis, dim), dim, axis_size(self.axis))
        there = jax.lax.collapse(jnp.moveaxis(jax.vmap(trip)(parts), 0, dim), dim, dim + 2)
        return grad - cut(there, layout, self.axis, dim).astype(grad.dtype)
