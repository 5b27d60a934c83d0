"""The optimizer of a pipelined model: it sees trees, its state rests on the stages' devices.

The update is traced once, on the whole tree, so that masks and labels by path keep their structure; inside a step every rank
runs what the leaves it holds need of it. State that belongs to no parameter (counts) is whole on every rank.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.collectives.primitives import axis_index, gather_whole
from axonml_jax.collectives.varying import vary
from axonml_jax.parallel.pipeline.packing import Buffers, Packing
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.pipeline.staging import Staging
from axonml_jax.parallel.pipeline.store import StageStore, on_own_rank
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Layout, is_layout
from axonml_jax.sharding.place import copies
from axonml_jax.training.divided import Divided
from axonml_jax.training.opt_state import opt_owners

_STAGES, _WHOLE = "stages", "whole"


@dataclass(frozen=True)
class StagedOptimizer:
    """An optimizer's state over the ranks of a pipeline.

    Attributes:
      tx: the optimizer.
      placement: the plan on its mesh.
      layouts: of every leaf of its state.
      owners: of every leaf the parameter (position) it belongs to, or None.
      names: of every leaf.
      treedef: of its state.
    """

    tx: optax.GradientTransformation
    placement: Placement
    layouts: tuple[Layout, ...]
    owners: tuple[int | None, ...]
    names: tuple[str, ...]
    treedef: Any

    @classmethod
    def of(cls, tx: optax.GradientTransformation, placement: Placement) -> "StagedOptimizer":
        """From where the parameters live."""
        tree, owners = opt_owners(placement, tx)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_layout)
        names = named_leaves(jax.tree.map(lambda _: 0, tree, is_leaf=is_layout))
        return cls(tx, placement, tuple(leaves), tuple(owners), tuple(names), treedef)

    @property
    def staging(self) -> Staging:
        """Where parameters live."""
        assert self.placement.stages is not None
        return self.placement.stages

    @property
    def owned(self) -> list[int]:
        """The leaves that belong to parameters."""
        return [i for i, owner in enumerate(self.owners) if owner is not None]

    @cached_property
    def store(self) -> StageStore:
        """How those rest."""
        staging, params = self.staging, self.staging.params
        stages = tuple(params.stages[i] for i in self.owners if i is not None)
        layouts = tuple(self.layouts[i] for i in self.owned)
        return StageStore(layouts, stages, staging.num_stages, staging.num_ranks, self.placement.degrees)

    def specs(self) -> PyTree:
        """The specs of the state at rest."""
        return {_STAGES: self.store.specs(), _WHOLE: {name: PartitionSpec() for name in self._loose_names}}

    def at_rest(self, state: PyTree, buffers: Any) -> PyTree:
        """The state at rest, from its tree, of which only leaves without a parameter are read, and the others' buffers."""
        leaves = jax.tree.leaves(state)
        return {_STAGES: buffers, _WHOLE: {self.names[i]: leaves[i] for i in self._loose}}

    def tree(self, owned: Sequence[Any], resting: PyTree) -> PyTree:
        """The optimizer's own tree, from the leaves that belong to parameters and the state at rest."""
        leaves: list[Any] = [None] * len(self.layouts)
        for i, leaf in zip(self.owned, owned, strict=True):
            leaves[i] = leaf
        for i in self._loose:
            leaves[i] = resting[_WHOLE][self.names[i]]
        return self.treedef.unflatten(leaves)

    def spread(self, resting: PyTree, mesh: Mesh) -> PyTree:
        """The optimizer's own tree of arrays split over all devices, from arrays over all ranks."""
        return self.tree(self.store.spread(resting[_STAGES], mesh), {_WHOLE: copies(resting[_WHOLE])})

    def first(self, params: Any) -> PyTree:
        """The first state at rest, of resting parameters, inside `shard_map`."""
        store = self.staging.params

        def made(leaves: list, whole: None) -> list[Any]:
            return jax.tree.leaves(self.tx.init(self.staging.treedefs[0].unflatten(leaves)))

        program = Divided.of(made, lambda named: _all_leaves(store, named), params, None)

        def own(rank: int) -> Buffers:
            kept = self.store.leaves_of_rank(rank)
            values = program.run(store.unpack(store.grouped(params), rank), None, [self.owned[k] for k in kept])
            return self._packed(values, rank)

        return {_STAGES: self.store.named(self._of_rank(own)), _WHOLE: self._loose_of(program, None, 0)}

    def update(self, apply: Any, grads: Any, resting: PyTree, params: Any) -> tuple[Any, PyTree]:
        """`apply(grads, state, params) -> (params, state)` of the leaves that each rank holds, inside `shard_map`."""
        stores, named = (self.staging.params, self.store, self.staging.params), (grads, resting[_STAGES], params)
        starts = list(itertools.accumulate((len(store.layouts) for store in stores), initial=0))
        whole, tree = resting[_WHOLE], self.staging.treedefs[0].unflatten

        def made(leaves: list, whole: PyTree) -> list[Any]:
            given = [leaves[a:b] for a, b in itertools.pairwise(starts)]
            return jax.tree.leaves(apply(tree(given[0]), self.tree(given[1], {_WHOLE: whole}), tree(given[2])))

        def unpacked(named: Sequence[Any]) -> list[Any]:
            return [leaf for store, each in zip(stores, named, strict=True) for leaf in _all_leaves(store, each)]

        program = Divided.of(made, unpacked, named, whole)

        def own(rank: int) -> tuple[Buffers, Buffers]:
            leaves: dict[int, Any] = {}
            for start, store, each in zip(starts, stores, named, strict=False):
                leaves |= {start + i: value for i, value in store.unpack(store.grouped(each), rank).items()}
            mine, kept = stores[0].leaves_of_rank(rank), stores[1].leaves_of_rank(rank)
            values = program.run(leaves, whole, [*mine, *(starts[1] + self.owned[k] for k in kept)])
            new = dict(zip(mine, values[: len(mine)], strict=True))
            return _typed(stores[0].pack(new)), self._packed(values[len(mine) :], rank)

        new, state = self._of_rank(own)
        # What belongs to no parameter is the same on all ranks, and must not depend on which one this is.
        loose = self._loose_of(program, whole, starts[1])
        return stores[0].named(new), {_STAGES: stores[1].named(state), _WHOLE: loose}

    def update_whole(self, apply: Any, grads: Any, resting: PyTree, params: Any) -> tuple[Any, PyTree]:
        """The same on whole leaves, which every rank gathers for it. Communicates: one all-gather per buffer."""
        stores = (self.staging.params, self.store, self.staging.params)
        wholes = [
            self._gathered(store, each) for store, each in zip(stores, (grads, resting[_STAGES], params), strict=True)
        ]
        tree = self.staging.treedefs[0].unflatten
        new, state = apply(tree(wholes[0]), self.tree(wholes[1], resting), tree(wholes[2]))
        leaves, owned = jax.tree.leaves(new), jax.tree.leaves(state)

        def own(rank: int) -> tuple[Buffers, Buffers]:
            params_store = self.staging.params
            cut = {
                i: self.placement.own_part(leaves[i], params_store.layouts[i])
                for i in params_store.leaves_of_rank(rank)
            }
            kept = [self.owned[k] for k in self.store.leaves_of_rank(rank)]
            mine = [self.placement.own_part(jnp.asarray(owned[i]), self.layouts[i]) for i in kept]
            return _typed(params_store.pack(cut)), self._packed(mine, rank)

        packed, packed_state = self._of_rank(own)
        named = self.staging.params.named(packed)
        return named, self.at_rest(state, self.store.named(packed_state))

    def _gathered(self, store: StageStore, named: Any) -> list[Any]:
        everywhere = {name: gather_whole(named[name], AXIS, invarying=True) for name in named}
        leaves = []
        for i, layout in enumerate(store.layouts):
            slot, group = store.slots[i], store.slots[i].group
            start = store.rank_of(i) * store.buffers.sizes[group] + slot.offset
            buffer = store.grouped(everywhere)[group]
            leaves.append(self.placement.gather_stored(buffer[start : start + slot.size].reshape(layout.shard), layout))
        return leaves

    def _of_rank(self, run: Any) -> Any:
        return on_own_rank(axis_index(AXIS), self.staging.num_ranks, run)

    def _packed(self, values: Sequence[Any], rank: int) -> Buffers:
        """A rank's state, from that of the leaves it holds."""
        return _typed(self.store.pack(dict(zip(self.store.leaves_of_rank(rank), values, strict=True))))

    def _loose_of(self, program: Divided, whole: PyTree, start: int) -> dict[str, Any]:
        values = program.run({}, whole, [start + i for i in self._loose])
        return dict(zip(self._loose_names, values, strict=True))

    @property
    def _loose(self) -> list[int]:
        return [i for i, owner in enumerate(self.owners) if owner is None]

    @property
    def _loose_names(self) -> list[str]:
        return [self.names[i] for i in self._loose]


def _all_leaves(store: StageStore, named: Any) -> list[Any]:
    """Every leaf of all ranks, of one rank's buffers: right in nothing but shape and type."""
    return Packing(tuple(store.slots[i] for i in range(len(store.layouts)))).unpack(store.grouped(named))


def _typed(buffers: Buffers) -> Buffers:
    """Typed alike on all ranks."""
    return {group: vary(buffer, (AXIS, *group.axes)) for group, buffer in buffers.items()}
