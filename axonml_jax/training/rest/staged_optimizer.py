"""The optimizer of a pipelined model: it sees trees, its state rests on the stages' devices.

Inside a step every rank runs that part of the update's program that acts on the leaves it holds (`sharded_program`). State
that belongs to no parameter (counts) is whole on every rank.
"""

from collections.abc import Callable, Sequence
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
from axonml_jax.compat.barrier import together_as_typed
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.pipeline.resting.packing import Buffers
from axonml_jax.parallel.pipeline.resting.stage_store import StageStore, on_own_rank
from axonml_jax.parallel.pipeline.resting.staging import Staging
from axonml_jax.parallel.pipeline.running.one_of import one_of
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Layout, is_layout
from axonml_jax.sharding.place import copies
from axonml_jax.training.optimizer.opt_state import opt_owners
from axonml_jax.training.optimizer.runs import Runs, Tree
from axonml_jax.training.optimizer.sharded.on_shards import seen_shard, stored_shard
from axonml_jax.training.optimizer.sharded.sharded_program import Held, OnRank, ShardedProgram

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

    def first(self, program: ShardedProgram, params: Any) -> PyTree:
        """The first state at rest, of resting parameters, inside `shard_map`; `program` makes it (`OnShards.first`)."""
        mine, loose = program.run({}, self._on_rank(params), self._pack_state)
        return {_STAGES: self.store.named(mine), _WHOLE: {self.names[i]: loose[i] for i in self._loose}}

    def first_whole(self, params: Any) -> PyTree:
        """The same of whole leaves, which every rank gathers for it. Communicates: one all-gather per buffer."""
        state = self.tx.init(self.staging.treedefs[0].unflatten(self._gathered(self.staging.params, params)))
        leaves = jax.tree.leaves(state)
        mine = self._of_rank(lambda rank: self._packed(self._own_parts(leaves), rank))
        return self.at_rest(state, self.store.named(mine))

    def update(
        self, program: ShardedProgram, grads: Any, resting: PyTree, params: Any, loss: jax.Array
    ) -> tuple[Any, PyTree]:
        """The update (`OnShards.program`) of the leaves that each rank holds, inside `shard_map`."""
        store, count = self.staging.params, len(self.staging.params.layouts)
        whole = {count + i: resting[_WHOLE][self.names[i]] for i in self._loose}
        whole[2 * count + len(self.layouts)] = loss
        buffers = store.grouped(grads), self.store.grouped(resting[_STAGES]), store.grouped(params)
        runs, alone = self._runs(program), self._runs(None)

        def on(runs: Runs) -> OnRank:
            ranks = range(self.staging.num_ranks)

            def of_rank(work: Callable[[Held], Any]) -> Any:
                own = [lambda rank=rank: work(runs.held(buffers, rank)) for rank in ranks]
                return one_of(axis_index(AXIS), own, [runs.looks(rank) for rank in ranks])

            return of_rank

        def finish(made: dict[int, Any]) -> tuple[Buffers, Buffers]:
            # All at once, so that XLA does not compute a moment again in the loops that pad and store it.
            made = dict(zip(made, together_as_typed(list(made.values())), strict=True))
            return _typed(runs.pack(2, made)), _typed(runs.pack(1, made))

        (new, state), made = program.run(whole, on(alone), finish, on(runs))
        loose = {self.names[i]: made[count + i] for i in self._loose}
        return store.named(new), {_STAGES: self.store.named(state), _WHOLE: loose}

    def _runs(self, program: ShardedProgram | None) -> Runs:
        """How the update (gradients, state, parameters, loss) -> (parameters, state) goes through a rank's leaves."""
        store, count, size = self.staging.params, len(self.staging.params.layouts), len(self.layouts)
        owners = [owner for owner in self.owners if owner is not None]
        state = Tree(self.store, owners, [count + i for i in self.owned], [count + i for i in self.owned])
        params = Tree(store, range(count), range(count + size, 2 * count + size), range(count))
        return Runs(program, (Tree(store, range(count), range(count)), state, params))

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
            return _typed(params_store.pack(cut)), self._packed(self._own_parts(owned), rank)

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

    def _on_rank(self, params: Any) -> OnRank:
        """What runs a function of a rank's own parameters."""
        store = self.staging.params

        def own(work: Callable[[Held], Any], rank: int) -> Any:
            leaves = store.unpack(store.grouped(params), rank)
            return work({i: seen_shard(leaf, store.layouts[i]) for i, leaf in leaves.items()})

        return lambda work: self._of_rank(lambda rank: own(work, rank))

    def _pack_state(self, made: dict[int, Any]) -> Buffers:
        """A rank's state, by position in the tree."""
        at, layouts = enumerate(self.owned), self.store.layouts
        return _typed(self.store.pack({k: stored_shard(made[i], layouts[k]) for k, i in at if i in made}))

    def _own_parts(self, leaves: Sequence[Any]) -> list[jax.Array]:
        return [self.placement.own_part(jnp.asarray(leaves[i]), self.layouts[i]) for i in self.owned]

    def _packed(self, owned: Sequence[Any], rank: int) -> Buffers:
        return _typed(self.store.pack({k: owned[k] for k in self.store.leaves_of_rank(rank)}))

    @property
    def _loose(self) -> list[int]:
        return [i for i, owner in enumerate(self.owners) if owner is None]

    @property
    def _loose_names(self) -> list[str]:
        return [self.names[i] for i in self._loose]


def _typed(buffers: Buffers) -> Buffers:
    """Typed alike on all ranks."""
    return {group: vary(buffer, (AXIS, *group.axes)) for group, buffer in buffers.items()}
