"""A pipelined plan bound to a model: on which stage each parameter lives and how all of them rest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.parallel.pipeline.cutting.assign import Assignment
from axonml_jax.parallel.pipeline.policy import AXIS, Pipelined
from axonml_jax.parallel.pipeline.resting.packing import Buffers
from axonml_jax.parallel.pipeline.resting.stage_store import Named, StageStore
from axonml_jax.sharding.layout import Layout, is_layout


@dataclass(frozen=True)
class Staging:
    """The stages of one model's parameters.

    Attributes:
      policy: the schedule and its options.
      begins: see `Assignment`.
      params, frozen: how trained and frozen parameters rest.
      names: of all parameters, trained ones first.
      treedefs: of both trees.
    """

    policy: Pipelined
    begins: tuple[tuple[int, ...], ...] | None
    params: StageStore
    frozen: StageStore
    names: tuple[str, ...]
    treedefs: tuple[Any, Any]

    @classmethod
    def of(
        cls, policy: Pipelined, assignment: Assignment, params: PyTree, frozen: PyTree, degrees: Mapping[str, int]
    ) -> "Staging":
        """Bind.

        Args:
          policy: the plan's.
          assignment: of all parameters, trained ones first.
          params, frozen: trees of layouts.
          degrees: size of every mesh axis.
        """
        num_ranks = degrees[AXIS]
        flat = [jax.tree.flatten(tree, is_leaf=is_layout) for tree in (params, frozen)]
        count, num_stages = len(flat[0][0]), policy.num_stages(num_ranks)
        sizes = (num_stages, num_ranks, degrees)
        stores = (
            StageStore(tuple(flat[0][0]), assignment.stages[:count], *sizes),
            StageStore(tuple(flat[1][0]), assignment.stages[count:], *sizes, frozen=True),
        )
        names = (*_names(params), *_names(frozen))
        return cls(policy, assignment.begins, *stores, names, (flat[0][1], flat[1][1]))

    @property
    def num_ranks(self) -> int:
        """S."""
        return self.params.num_ranks

    @property
    def num_stages(self) -> int:
        """S*V."""
        return self.params.num_stages

    @property
    def layouts(self) -> list[Layout]:
        """Of all parameters, trained ones first."""
        return [*self.params.layouts, *self.frozen.layouts]

    @property
    def stages(self) -> tuple[int, ...]:
        """Of all parameters, trained ones first."""
        return (*self.params.stages, *self.frozen.stages)

    def place_params(self, params: PyTree, mesh: Mesh) -> Named:
        """What rests, from whole trained parameters in this process's memory."""
        return self.params.place(jax.tree.leaves(params), mesh)

    def place_frozen(self, frozen: PyTree, mesh: Mesh) -> Named:
        """What rests, from whole frozen parameters in this process's memory."""
        return self.frozen.place(jax.tree.leaves(frozen), mesh)

    def spread_params(self, named: Named, mesh: Mesh) -> PyTree:
        """Trained parameters, or gradients of them, as the model's tree, split over all devices; of arrays over all ranks."""
        return self.treedefs[0].unflatten(self.params.spread(named, mesh))

    def spread_frozen(self, named: Named, mesh: Mesh) -> PyTree:
        """Frozen parameters as the model's tree."""
        return self.treedefs[1].unflatten(self.frozen.spread(named, mesh))

    def parts(self, named: Named) -> Iterator[tuple[jax.Array, Any, tuple[str, ...]]]:
        """Every buffer of trained parameters or their gradients: itself, its dtype, and the axes over which it is split."""
        for name, group in sorted(self.params.groups.items()):
            yield named[name], group.dtype, (AXIS, *group.axes)

    def resting(self, params: Named, frozen: Named) -> Buffers:
        """This rank's buffers of both, by group."""
        return self.params.grouped(params) | self.frozen.grouped(frozen)


def _names(tree: PyTree) -> Sequence[str]:
    return list(named_leaves(jax.tree.map(lambda _: 0, tree, is_leaf=is_layout)))
