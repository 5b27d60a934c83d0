"""How a pipeline's parameters and optimizer state rest: in buffers of stages."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.collectives.primitives import axis_index, gather_whole, vary
from axonml_jax.compat.order import together_as_typed
from axonml_jax.model.loss import Loss
from axonml_jax.model.view import Functional, Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.pipeline.pack import Buffers, StageStore, Staging, on_own_rank
from axonml_jax.pipeline.run import one_of
from axonml_jax.pipeline.schedules import AXIS
from axonml_jax.sharding.layout import (
    Layout,
    Leaf,
    copies,
    is_layout,
    offloaded,
    replicated,
    shardings,
    to_device_memory,
)
from axonml_jax.training.compile import Objective, Part, clipped, norm
from axonml_jax.training.on_shards import Held, OnRank, OnShards, ShardedProgram, seen_shard, stored_shard
from axonml_jax.training.optimizer import apply, opt_layouts, opt_owners, whole_shape
from axonml_jax.training.pipelined import pipelined_call, pipelined_loss
from axonml_jax.training.rest import (
    Rest,
    Runs,
    Square,
    Tree,
    square,
)

# --------------------------------------------------------------------------------------------------
# The optimizer of a pipelined model: it sees trees, its state rests on the stages' devices.
#
# Inside a step every rank runs that part of the update's program that acts on the leaves it holds (`sharded_program`).
# State that belongs to no parameter (counts) is whole on every rank.
# --------------------------------------------------------------------------------------------------

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


# --------------------------------------------------------------------------------------------------
# Parameters of a pipeline rest on their stage's devices, packed in buffers (`StageStore`); users and checkpoints see
# trees.
# --------------------------------------------------------------------------------------------------


class Staged(Rest):
    """Per group of parameters one array, split over `pipe` and the group's own axes."""

    @property
    def staging(self) -> Staging:
        """Where parameters live."""
        assert self.placement.stages is not None
        return self.placement.stages

    def specs(self, variables: Variables) -> Variables:
        """Of the buffers."""
        staging = self.staging
        return Variables(staging.params.specs(), staging.frozen.specs(), self.buffer_specs(variables.state))

    def opt_specs(self, tx: optax.GradientTransformation) -> PyTree:
        """Of the buffers, and of what belongs to no parameter."""
        return StagedOptimizer.of(tx, self.placement).specs()

    def place(self, variables: Variables, mesh: Mesh) -> Variables:
        """Leaf by leaf; see `StageStore.place`."""
        frozen = self.staging.place_frozen(self.placement.plan.precision.cast_param(variables.frozen), mesh)
        kept = offloaded(frozen, self.placement.plan.offload.params)
        return Variables(self.inside(variables.params, mesh), kept, replicated(variables.state, mesh))

    def create(self, model: Functional, mesh: Mesh) -> Variables:
        """Every rank makes the parameters of its own stages."""
        create, staging, placement = model.create, self.staging, self.placement
        assert create is not None

        def own(store: StageStore, tree: Any, rank: int) -> Buffers:
            leaves = jax.tree.leaves(placement.plan.precision.cast_param(tree))
            cut = {i: placement.own_part(leaves[i], store.layouts[i]) for i in store.leaves_of_rank(rank)}
            return {group: vary(buffer, (AXIS, *group.axes)) for group, buffer in store.pack(cut).items()}

        def local() -> tuple[Any, Any]:
            def of_rank(rank: int) -> tuple[Buffers, Buffers]:
                made = create()
                return own(staging.params, made.params, rank), own(staging.frozen, made.frozen, rank)

            params, frozen = on_own_rank(axis_index(AXIS), staging.num_ranks, of_rank)
            return staging.params.named(params), staging.frozen.named(frozen)

        specs = (staging.params.specs(), staging.frozen.specs())
        made = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))()
        params, frozen = offloaded(made, placement.plan.offload.params)
        state = jax.jit(lambda: create().state)()
        return Variables(params, frozen, replicated(state, mesh))

    def first_opt_state(self, tx: optax.GradientTransformation, params: PyTree, mesh: Mesh) -> PyTree:
        """Every rank makes that of its own stages."""
        placement = self.placement
        staged, on_shards = StagedOptimizer.of(tx, placement), OnShards.of(tx, placement)
        specs, kept = staged.specs(), placement.plan.offload
        first = staged.first_whole if on_shards is None else functools.partial(staged.first, on_shards.first)
        mapped = jax.shard_map(
            lambda params: first(to_device_memory(params, kept.params)),
            mesh=mesh,
            in_specs=(self.staging.params.specs(),),
            out_specs=specs,
            check_vma=placement.plan.check_vma,
        )
        return offloaded(jax.jit(mapped, out_shardings=shardings(specs, mesh))(params), kept.optimizer)

    def shapes(self, shapes: Variables, tx: optax.GradientTransformation) -> tuple[Variables, PyTree]:
        """Of the buffers."""
        staging, staged = self.staging, StagedOptimizer.of(tx, self.placement)
        cast = self.placement.plan.precision.cast_param
        loose = staged.at_rest(jax.eval_shape(lambda params: tx.init(cast(params)), shapes.params), None)
        variables = Variables(staging.params.shapes(), staging.frozen.shapes(), shapes.state)
        opt_state = {**loose, "stages": staged.store.shapes()}
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (variables, opt_state))

    def read(self, fun: Callable, model: Functional, variables: Variables, *args: Any) -> Any:
        """Through the stages."""
        return pipelined_call(fun, self.placement, variables, *args)

    def loss(self, objective: Objective, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, Any]:
        """Through the stages."""
        return pipelined_loss(objective, self.placement, variables, key, batch)

    def parts(self, grads: PyTree) -> Iterable[Part]:
        """Buffer by buffer."""
        return self.staging.parts(grads)

    def squares(self, tree: PyTree) -> Iterable[Square]:
        """Every rank those of its own stages' leaves."""
        staging, store = self.staging, self.staging.params
        kinds = [jnp.finfo(layout.dtype).dtype for layout in store.layouts]
        dtype = functools.reduce(jnp.promote_types, kinds, jnp.dtype(jnp.float32))
        sets: dict[tuple[str, ...], list[int]] = {}
        for i, layout in enumerate(store.layouts):
            sets.setdefault((AXIS, *layout.axes), []).append(i)

        def of_rank(rank: int) -> list[jax.Array]:
            own = store.unpack(store.grouped(tree), rank)
            one = lambda i: square(own[i]).astype(dtype) if i in own else jnp.zeros((), dtype)
            return [vary(jnp.stack([one(i) for i in leaves]), axes) for axes, leaves in sets.items()]

        vectors = on_own_rank(axis_index(AXIS), staging.num_ranks, of_rank)
        for (axes, leaves), vector in zip(sets.items(), vectors, strict=True):
            yield from ((staging.names[i], vector[j], axes) for j, i in enumerate(leaves))

    def update(
        self,
        tx: optax.GradientTransformation,
        on_shards: OnShards | None,
        grads: PyTree,
        opt_state: PyTree,
        params: PyTree,
        loss: jax.Array,
    ) -> tuple[PyTree, PyTree]:
        """Every rank updates the leaves of its own stages; see `StagedOptimizer`."""
        staged = StagedOptimizer.of(tx, self.placement)
        with jax.named_scope("axonml.update"):
            if on_shards is None:
                run = lambda grads, state, params: apply(tx, grads, state, params, loss)
                return staged.update_whole(run, grads, opt_state, params)
            return staged.update(on_shards.program(loss), grads, opt_state, params, loss)

    def outside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Copies, every array split over the devices as far as its dims divide."""
        return self.staging.spread_params(params, mesh)

    def outside_frozen(self, frozen: PyTree, mesh: Mesh) -> PyTree:
        """Likewise."""
        return self.staging.spread_frozen(frozen, mesh)

    def inside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """No device holds more than its own part, no process more than that and one array."""
        placed = self.staging.place_params(self.placement.plan.precision.cast_param(params), mesh)
        return offloaded(placed, self.placement.plan.offload.params)

    def clip(self, grads: PyTree, max_norm: jax.Array, p: float, mesh: Mesh) -> tuple[PyTree, jax.Array]:
        """Gradients outside a pipeline are the model's own tree, split anyhow."""
        size = norm(((grad, grad.dtype, ()) for grad in jax.tree.leaves(grads)), p)
        return clipped(grads, size, max_norm), size

    def param_leaves(self, variables: Variables) -> tuple[PyTree, PyTree]:
        """As they are outside."""
        mesh = _mesh_of(variables)
        params, frozen = self.outside(variables.params, mesh), self.outside_frozen(variables.frozen, mesh)
        return jax.tree.map(Leaf, params), jax.tree.map(Leaf, frozen)

    def resting(self, model: Functional, like: Variables, fill: Callable[[Variables], Variables]) -> Variables:
        """Placed leaf by leaf."""
        whole = fill(model.shapes)
        return self.place(whole, _mesh_of(whole))

    def opt_tree(self, tx: optax.GradientTransformation, opt_state: PyTree) -> PyTree:
        """Copies, split over the devices; a state without arrays (plain SGD's) is the tree alone."""
        staged = StagedOptimizer.of(tx, self.placement)
        if not jax.tree.leaves(opt_state):
            return staged.tree([], opt_state)
        return staged.spread(opt_state, _mesh_of(opt_state))

    def opt_leaves(self, tx: optax.GradientTransformation, opt_state: PyTree) -> PyTree:
        """Of that tree."""
        return jax.tree.map(Leaf, self.opt_tree(tx, opt_state))

    def resting_opt(self, tx: optax.GradientTransformation, like: PyTree, fill: Callable[[PyTree], PyTree]) -> PyTree:
        """Placed leaf by leaf."""
        if not jax.tree.leaves(like):
            return like
        staged = StagedOptimizer.of(tx, self.placement)
        whole = fill(jax.tree.map(whole_shape, opt_layouts(self.placement, tx), is_leaf=is_layout))
        mesh, leaves = _mesh_of(whole), jax.tree.leaves(whole)
        resting = staged.at_rest(whole, staged.store.place([leaves[i] for i in staged.owned], mesh))
        resting = {**resting, "whole": replicated(resting["whole"], mesh)}
        return offloaded(resting, self.placement.plan.offload.optimizer)


def _mesh_of(tree: PyTree) -> Mesh:
    return jax.tree.leaves(tree)[0].sharding.mesh
