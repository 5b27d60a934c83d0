"""`Placed`: a weight where a plan lets it rest, from a configuration or from the layouts of a model that is there."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax._types import named_leaves
from axonml_jax.cost.amounts import Many, most, plain, several
from axonml_jax.cost.flow import named
from axonml_jax.cost.weight import Weight
from axonml_jax.mesh.axes import AxisNames, flat_axes
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategies.local_rounds import LocalRounds
from axonml_jax.parallel.strategies.role import Role
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.sharding.layout import Layout


@dataclass(frozen=True)
class Setting:
    """What decides where weights rest and what one gather and one reduction of them send.

    Attributes:
      strategies: of the mesh's axes, outermost first, as a training step has them.
      degrees: of the mesh; arrays where they stand for many meshes.
      precision: dtypes.
      overlaps: whether gradients are reduced inside the backward.
      rounds: by axis those in which ranks train parameters of their own.
    """

    strategies: Mapping[AxisNames, AbstractStrategy]
    degrees: Mapping[str, Many]
    precision: Precision
    overlaps: bool
    rounds: Mapping[AxisNames, LocalRounds] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, degrees: Mapping[str, int]) -> "Setting":
        """A plan's on a mesh."""
        within = plan.within_round()
        return cls(within.on(degrees), degrees, plan.precision, within.reducer(degrees).overlaps, plan.rounds)

    def ranks(self, axis: AxisNames) -> Many:
        """Of an axis, or of several together."""
        return self.degrees[axis] if isinstance(axis, str) else plain(math.prod(self.degrees[name] for name in axis))

    @cached_property
    def roles(self) -> dict[AxisNames, Role]:
        """Of the axes."""
        return {axis: strategy.role for axis, strategy in self.strategies.items()}

    @cached_property
    def by_unit(self) -> bool:
        """Whether parameters are read unit by unit, at their use."""
        return any(role.reads == "use" and several(self.ranks(axis)) for axis, role in self.roles.items())

    @cached_property
    def rounded(self) -> bool:
        """Whether parameters are rounded on their way."""
        return any(not own.reads_exactly and own.role.parameters == "sharded" for own in self.strategies.values())

    @cached_property
    def layer_axes(self) -> frozenset[str]:
        """The mesh axes along which layers split parameters."""
        return frozenset(flat_axes(axis for axis, role in self.roles.items() if role.parameters == "layers"))


@dataclass(frozen=True)
class Placed:
    """A weight under a plan.

    Attributes:
      weight: which.
      layout: where each of them rests; its sizes are arrays where it stands for many meshes.
      setting: of the plan.
    """

    weight: Weight
    layout: Layout
    setting: Setting

    @cached_property
    def shard(self) -> Many:
        """Elements of one that a rank holds between steps, padding included."""
        return math.prod(self.layout.shard)

    @cached_property
    def read(self) -> Many:
        """Elements of one that the model reads on a rank: whole but for what its own layers split."""
        within = self.setting.layer_axes
        over = [[name for name in self.layout.axes_of(dim) if name in within] for dim in range(len(self.layout.shape))]
        cuts = (math.prod(self.setting.degrees[name] for name in names) for names in over)
        return math.prod(-(-size // cut) for size, cut in zip(self.layout.shape, cuts, strict=True))

    @cached_property
    def sharded(self) -> dict[AxisNames, AbstractStrategy]:
        """The axes over which it rests sharded, to be gathered."""
        split = lambda axis, role: role.parameters == "sharded" and self.layout.dim_of(axis) is not None
        return {axis: self.setting.strategies[axis] for axis, role in self.setting.roles.items() if split(axis, role)}

    @cached_property
    def gathered(self) -> Many:
        """Elements of one after its gathers, padding included."""
        return self.shard * math.prod(map(self.setting.ranks, self.sharded))

    @cached_property
    def slices(self) -> int:
        """In how many parts it is gathered: ZeRO-3 gathers one layer of a stack per trip of its scan."""
        if self.weight.layers == 1 or not (self.setting.by_unit and self.sharded):
            return 1
        return self.weight.layers if all(self.layout.dim_of(axis) != 0 for axis in self.sharded) else 1

    def reductions(self, axis: AxisNames) -> int:
        """How often a step reduces its gradient along an axis: a stack's layer by layer, where that overlaps the backward."""
        if self.setting.by_unit:
            return self.slices if axis in self.sharded else 1
        return self._in_scan

    @property
    def gathers_alone(self) -> int:
        """In how many parts a step of one microbatch gathers it where gradients are reduced inside the backward.

        As `parallel/overlap.py` does: at its first use, a stack layer by layer, but whole where it is rounded on its way.
        """
        return 1 if self.setting.by_unit or not self.weight.trained else self._in_scan

    @property
    def _in_scan(self) -> int:
        """The layers of a stack whose gradients are reduced inside the backward's scan; else 1."""
        whole = bool(self.layout.parts) and several(self.layout.parts[0])
        return 1 if whole or self.setting.rounded or not self.setting.overlaps else self.weight.layers

    @property
    def padding(self) -> Many:
        """Elements of one on a rank that are padding, as near as an even share of it is."""
        ranks = math.prod(map(self.setting.ranks, self.sharded)) if several(self.shard) or self.shard else 1
        return most(0, self.shard - -(-self.read // ranks))

    @cached_property
    def rest_dtype(self) -> Any:
        """Between steps."""
        return jnp.dtype(self.layout.dtype)

    @cached_property
    def read_dtype(self) -> Any:
        """As the model reads it."""
        return self.setting.precision.read_dtype(self.rest_dtype)

    @cached_property
    def sum_dtype(self) -> Any:
        """Of its gradient while it accumulates."""
        return self.setting.precision.accumulate_dtype(self.rest_dtype)

    @cached_property
    def reduce_dtype(self) -> Any:
        """Of its gradient on its way over ranks."""
        return self.setting.precision.reduce_dtype(self.rest_dtype)

    @property
    def read_bytes(self) -> Many:
        """Of one as the model reads it on a rank."""
        return self.read * named(self.read_dtype)[1]

    @property
    def sum_bytes(self) -> Many:
        """Of its gradient on a rank where it accumulates whole."""
        return self.read * named(self.sum_dtype)[1]

    @property
    def left_bytes(self) -> Many:
        """Of what its sums leave out of a rank's gradient, where a strategy feeds that back."""
        return self.sum_bytes if any(each.feeds_back for each in self.setting.strategies.values()) else 0

    @property
    def reduce_bytes(self) -> Many:
        """Of its gradient on a rank, before it is reduced."""
        return self.read * named(self.reduce_dtype)[1]


def placed_leaves(placement: Placement, units: Mapping[int, str] | None = None) -> list[Placed]:
    """The parameters of a model that is there, trained ones first: every leaf where a bound plan lets it rest.

    Args:
      placement: the plan on its mesh.
      units: by number of leaf the unit in which it is gathered at its use; of others each is one of its own.
    """
    plan = placement.plan
    setting = Setting(placement.strategies, placement.degrees, plan.precision, placement.reducer.overlaps)
    leaves = [(name, each, True) for name, each in named_leaves(placement.params).items()]
    leaves += [(name, each, False) for name, each in named_leaves(placement.frozen).items()]
    weight = lambda i, name, layout, trained: Weight(
        name=f"{name} {i}", shape=layout.shape, dtype=layout.dtype, trained=trained, unit=(units or {}).get(i, "")
    )
    return [Placed(weight(i, *each), each[1], setting) for i, each in enumerate(leaves)]


def rests_at(weight: Weight, setting: Setting) -> Layout:
    """Where one weight rests on one mesh, by the rules with which `bind_plan` places a real one."""
    layout = split_by_layers(weight, setting.precision.param, setting.degrees)
    for axis, strategy in setting.strategies.items():
        layout = strategy.spec(layout, axis, setting.ranks(axis))
    return layout


def split_by_layers(weight: Weight, dtype: str | None, degrees: Mapping[str, int]) -> Layout:
    """The layout of a weight as its layers split it, in a dtype or in the model's own."""
    layout = Layout.whole(jax.ShapeDtypeStruct(weight.shape, jnp.dtype(dtype or weight.dtype)), weight.stack_dims)
    for axes, dim in weight.splits:
        for axis in axes:
            if degrees.get(axis, 1) > 1:
                layout = layout.on(axis, dim, degrees[axis])
    return layout
