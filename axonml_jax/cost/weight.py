"""`Weight`: the parameters of one name and shape, how many of them there are, and how a step reads them."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp

from axonml_jax.cost.rounds import Rounds, rounds
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategy import AbstractStrategy
from axonml_jax.sharding.layout import Layout

Place = Literal["first", "block", "last", "both ends"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Parameters that are alike: one of each block, or one alone.

    Attributes:
      name: path in the model, without the number of the block.
      shape: of the whole array.
      count: how many there are.
      dtype: as the model makes it.
      unit: ZeRO-3 gathers the weights of one unit together; one that is in no unit is gathered alone.
      splits: (mesh axes, dim) pairs: how the model's own layers split it.
      again: whether the backward reads it.
      rebuilds: whether recomputing activations reads it.
      redone: whether redoing elementwise work, as the backward of a scan does, reads it.
      place: where in a pipeline it is; "block" is spread over all stages.
      trained: whether it gets gradients.
      summed: mesh axes of the model's layers over which they sum its gradient themselves.
      layers: of a stack of layers in one array, along dim 0, how many.
    """

    name: str
    shape: tuple[int, ...]
    count: int = 1
    dtype: str = "float32"
    unit: str = ""
    splits: tuple[tuple[tuple[str, ...], int], ...] = ()
    again: bool = True
    rebuilds: bool = True
    redone: bool = True
    place: Place = "block"
    trained: bool = True
    summed: tuple[str, ...] = ()
    layers: int = 1

    def stacked(self) -> "Weight":
        """All of them in one array, as a model that scans its layers holds them."""
        splits = tuple((axes, dim + 1) for axes, dim in self.splits)
        return replace(self, shape=(self.count, *self.shape), count=1, splits=splits, layers=self.count)

    @property
    def size(self) -> int:
        """Elements of all of them."""
        return self.count * math.prod(self.shape)


@dataclass(frozen=True)
class Placed:
    """A weight under a plan.

    Attributes:
      weight: which.
      layout: where each of them rests.
      plan: the plan.
      degrees: of the mesh.
      count: how many of them a rank has a part of (a pipeline's rank only has its stage's).
      copied: whether it lives on another stage, which sends it here once per step.
    """

    weight: Weight
    layout: Layout
    plan: Plan
    degrees: tuple[tuple[str, int], ...]
    count: int
    copied: bool = False

    @cached_property
    def shard(self) -> int:
        """Elements of one that a rank holds between steps, padding included."""
        return math.prod(self.layout.shard)

    @cached_property
    def read(self) -> int:
        """Elements of one that the model reads on a rank: whole but for what its own layers split."""
        sizes = dict(self.degrees)
        cuts = math.prod(sizes.get(axis, 1) for axes, _ in self.weight.splits for axis in axes)
        return math.prod(self.weight.shape) // cuts

    @cached_property
    def strategies(self) -> dict[AxisNames, AbstractStrategy]:
        """Those of the mesh's axes, outermost first."""
        return self.plan.on(dict(self.degrees))

    def ranks(self, axis: AxisNames) -> int:
        """Of an axis, or of several together."""
        return math.prod(dict(self.degrees)[name] for name in as_axes(axis))

    @cached_property
    def sharded(self) -> dict[AxisNames, AbstractStrategy]:
        """The axes over which it rests sharded, to be gathered."""
        split = lambda axis, role: role.parameters == "sharded" and self.layout.dim_of(axis) is not None
        return {axis: each for axis, each in self.strategies.items() if split(axis, each.role)}

    @property
    def rounds(self) -> Rounds:
        """How often a step gathers and scatters it."""
        roles = [strategy.role for strategy in self.sharded.values()]
        return rounds(self.plan, dict(self.degrees), roles[0]) if roles else Rounds(1, 0, 1)

    @property
    def prefetch(self) -> int:
        """How many units ahead it is gathered."""
        return max((strategy.prefetch for strategy in self.sharded.values()), default=0)

    @property
    def gathered(self) -> int:
        """Elements of one after its gathers, padding included."""
        return self.shard * math.prod(map(self.ranks, self.sharded))

    @property
    def slices(self) -> int:
        """In how many parts it is gathered: ZeRO-3 gathers one layer of a stack per trip of its scan."""
        apart = self._by_unit and self.sharded and all(self.layout.dim_of(axis) != 0 for axis in self.sharded)
        return self.weight.layers if apart else 1

    def reductions(self, axis: AxisNames) -> int:
        """How often a step reduces its gradient along an axis: a stack's layer by layer, where that overlaps the backward."""
        if self._by_unit:
            return self.slices if axis in self.sharded else 1
        whole = bool(self.layout.parts) and self.layout.parts[0] > 1
        return 1 if whole or not self._overlaps else self.weight.layers

    @cached_property
    def _overlaps(self) -> bool:
        return self.plan.reducer(dict(self.degrees)).overlaps

    @cached_property
    def _by_unit(self) -> bool:
        return any(each.role.reads == "use" and self.ranks(axis) > 1 for axis, each in self.strategies.items())

    @property
    def padding(self) -> int:
        """Elements of one on a rank that are padding, as near as an even share of it is."""
        return max(0, self.shard - -(-self.read // (self.gathered // self.shard if self.shard else 1)))

    @property
    def rest_dtype(self) -> Any:
        """Between steps."""
        return jnp.dtype(self.layout.dtype)

    @property
    def read_dtype(self) -> Any:
        """As the model reads it."""
        return self.plan.precision.read_dtype(self.rest_dtype)

    @property
    def sum_dtype(self) -> Any:
        """Of its gradient while it is accumulated and reduced."""
        return self.plan.precision.reduce_dtype(self.rest_dtype)

    def times(self, count: int, copied: bool = False) -> "Placed":
        """The same on a rank that has `count` of them."""
        return replace(self, count=count, copied=copied)


def place(weight: Weight, plan: Plan, degrees: dict[str, int]) -> Placed:
    """One weight under a plan, by the rules with which `bind_plan` places a real one.

    Args:
      weight: which.
      plan: its strategies and dtypes decide.
      degrees: of every mesh axis.
    """
    dtype = plan.precision.param or weight.dtype
    layout = Layout.whole(jax.ShapeDtypeStruct(weight.shape, jnp.dtype(dtype)))
    for axes, dim in weight.splits:
        for axis in axes:
            if degrees.get(axis, 1) > 1:
                layout = layout.on(axis, dim, degrees[axis])
    for axis, strategy in plan.on(degrees).items():
        layout = strategy.spec(layout, axis, math.prod(degrees[name] for name in as_axes(axis)))
    return Placed(weight, layout, plan, tuple(degrees.items()), weight.count)
