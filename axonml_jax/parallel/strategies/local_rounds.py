"""`LocalRounds`: steps that the ranks of an axis make by themselves, and how they join after so many."""

import abc
from collections.abc import Sequence
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.strategies.transfer import Transfer
from axonml_jax.sharding.layout import Layout


class LocalRounds(abc.ABC):
    """Rounds of steps in which every rank of an axis trains parameters of its own.

    All ranks begin a round with the outer parameters. These are the model: what is evaluated, saved and exported. In a step
    nothing travels along the axis. After the last step of a round the outer parameters are updated from what the ranks have
    made of them, and every rank begins again.

    Attributes:
      every: H, the steps of a round; it ends where the number of updates divides by it.
    """

    every: int

    @property
    def round_copies(self) -> float:
        """How many copies of what a rank trains the end of a round holds at its fullest, beside what rests.

        What this step has made of its own parameters, their differences and the sums of these.
        """
        return 3

    @abc.abstractmethod
    def first_kept(self, param: jax.Array) -> PyTree:
        """What ranks keep together beside an outer parameter, given whole, such as its momentum. It rests as they do."""

    @abc.abstractmethod
    def end_round(
        self,
        outer: Sequence[jax.Array],
        own: Sequence[jax.Array],
        kept: Sequence[PyTree],
        layouts: Sequence[Layout],
        axis: AxisNames,
    ) -> tuple[list[jax.Array], list[PyTree]]:
        """The outer parameters of the next round, inside `shard_map`, the same on every rank of the axis.

        Args:
          outer: those of this round, as they rest, [*layout.shard].
          own: what this rank has made of them.
          kept: of every leaf, as `first_kept` shapes it.
          layouts: of the leaves.
          axis: the strategy's.

        Returns:
          (outer parameters, kept), shaped and typed as they were.
        """

    @abc.abstractmethod
    def round_dtype(self, dtype: Any) -> Any:
        """The dtype in which most of what a matrix of `dtype` changed by travels: published amounts are told in it."""

    @abc.abstractmethod
    def round_flows(self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any) -> Sequence[Transfer]:
        """What the end of a round sends of a leaf.

        Args:
          elements: of what a rank holds of it.
          layout, axis, ranks: as for `AbstractStrategy.sync_flows`.
          dtype: of the resting leaf.
        """
