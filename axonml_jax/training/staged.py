"""How a pipeline's parameters and optimizer state rest: in buffers, each rank those of its own stages."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.collectives.primitives import axis_index, gather_whole, vary
from axonml_jax.compat.order import together_as_typed
from axonml_jax.model.loss import Loss
from axonml_jax.model.view import Functional, Variables
from axonml_jax.pipeline.branches import on_own_rank, one_of
from axonml_jax.pipeline.pack import Buffers, Packing, Slot, slot_value
from axonml_jax.pipeline.schedules import AXIS
from axonml_jax.pipeline.store import StageStore, Staging
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
from axonml_jax.training.objective import Objective
from axonml_jax.training.on_shards import Held, OnRank, ShardedProgram, seen_shard, stored_shard, within
from axonml_jax.training.optimizer import apply, gather_leaf, leaf_shard, whole_shape
from axonml_jax.training.pipelined import pipelined_call, pipelined_loss
from axonml_jax.training.rest import Part, Rest, RestingOptimizer, Square, clipped, norm, square

# --------------------------------------------------------------------------------------------------
# Parameters of a pipeline's rank that lie one behind the other and are updated alike, element by element: updated as
# one.
#
# The update of a rank then has as many operations as that of one parameter, and not as many for each: less to trace and
# compile.
# --------------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """One tree of arrays per parameter among the arguments of an update, and where its leaves lie in buffers.

    Attributes:
      store: where its leaves lie.
      owners: for every leaf of the store, the parameter that it belongs to.
      given: for every leaf, its position among the arguments.
      made: for every leaf, the position of its new value among the results; empty: it has none.
    """

    store: StageStore
    owners: Sequence[int]
    given: Sequence[int]
    made: Sequence[int] = ()


class _Place(NamedTuple):
    """The slot in which a leaf lies, alone or together with those behind it that are updated as one."""

    slot: Slot
    alone: bool


class Runs:
    """Groups a rank's parameters for the update: neighbours that are updated alike become one flat array.

    Args:
      program: the update; None: every parameter stays an array of its own.
      trees: the update's arguments that belong to parameters; the parameters themselves are the last.
    """

    def __init__(self, program: ShardedProgram | None, trees: Sequence[Tree]):
        self.trees, self._store = trees, trees[-1].store
        self._chains = {} if program is None else chains(program)
        self._leaves: dict[int, list[tuple[int, int]]] = {}  # of every parameter its leaf in each tree
        for number, tree in enumerate(trees):
            for leaf, owner in enumerate(tree.owners):
                self._leaves.setdefault(owner, []).append((number, leaf))
        ranks = [self._runs(rank) for rank in range(self._store.num_ranks)]
        whole = self._are_alike(ranks)
        self._places = [self._of_rank(runs, whole) for runs in ranks]

    def held(self, buffers: Sequence[Buffers], rank: int) -> dict[int, jax.Array]:
        """A rank's arguments by position; a group of parameters stands at the position of its first."""
        values = {}
        for (number, leaf), (slot, alone) in self._places[rank].items():
            tree, value = self.trees[number], slot_value(slot, buffers[number][slot.group])
            values[tree.given[leaf]] = seen_shard(value, tree.store.layouts[leaf]) if alone else value
        return values

    def looks(self, rank: int) -> Hashable:
        """A key that is equal for ranks whose leaves lie at the same places, so that they may share one branch."""
        return tuple((number, slot, alone) for (number, _), (slot, alone) in self._places[rank].items())

    def pack(self, number: int, made: Mapping[int, Any]) -> Buffers:
        """Packs one tree's results on a rank, by position, into its buffers; the inverse of `held`."""
        tree, packed = self.trees[number], {}
        for places in self._places:
            for (other, leaf), (slot, alone) in places.items():
                if other == number and tree.made[leaf] in made:
                    value = made[tree.made[leaf]]
                    packed[slot] = stored_shard(value, tree.store.layouts[leaf]) if alone else value
        return Packing(tuple(packed)).pack(list(packed.values()), tree.store.buffers.sizes)

    def _runs(self, rank: int) -> list[list[int]]:
        """A rank's parameters in runs of neighbours that are updated as one."""
        slots, runs = self._store.slots, []
        for owner in sorted(self._store.leaves_of_rank(rank), key=lambda i: (slots[i].group, slots[i].offset)):
            if runs and self._follows(owner, runs[-1][-1]):
                runs[-1].append(owner)
            else:
                runs.append([owner])
        return runs

    def _are_alike(self, ranks: Sequence[Sequence[Sequence[int]]]) -> bool:
        """Whether on all ranks each buffer is one run, updated by the same chain of operations.

        Then ranks that hold more and less of it update the whole buffer, in its place: numbers behind what they hold are never
        read. Else each rank updates its own in a branch, of which XLA makes new buffers beside the old ones.
        """
        kinds = [{self._store.slots[run[0]].group: self._chains.get(run[0]) for run in runs} for runs in ranks]
        one_each = all(
            len(runs) == len(kind) == len(self._store.groups) for runs, kind in zip(ranks, kinds, strict=True)
        )
        # Chains of several ranks are equal only where all is done element by element; with one rank there is no branch.
        alike = (
            len(ranks) > 1 and one_each and None not in kinds[0].values() and all(kind == kinds[0] for kind in kinds)
        )
        firsts = [place for runs in ranks for run in runs for place in self._leaves[run[0]]]
        return alike and all(self._slot(place).offset == 0 for place in firsts)

    def _of_rank(self, runs: Sequence[Sequence[int]], whole: bool) -> dict[tuple[int, int], _Place]:
        """Places of a rank's leaves; a run of parameters has the place of its first, as long as all of them."""
        places = {}
        for run in runs:
            for each in zip(*(self._leaves[owner] for owner in run), strict=True):
                (number, _), first, alone = each[0], self._slot(each[0]), len(run) == 1 and not whole
                size = sum(self._slot(place).size for place in each)
                size = self.trees[number].store.buffers.sizes[first.group] if whole else size
                places[each[0]] = _Place(first if alone else first._replace(shape=(size,)), alone)
        return places

    def _follows(self, owner: int, before: int) -> bool:
        """Whether a parameter is updated like the one before it, and lies right behind it in every tree."""
        chain = self._chains.get(owner)
        if chain is None or chain != self._chains.get(before):
            return False
        pairs = zip(self._leaves[before], self._leaves[owner], strict=True)
        slots = [(self._slot(first), self._slot(second)) for first, second in pairs]
        return all((a.group, a.offset + a.size) == (b.group, b.offset) for a, b in slots)

    def _slot(self, place: tuple[int, int]) -> Slot:
        number, leaf = place
        return self.trees[number].store.slots[leaf]


def chains(program: ShardedProgram) -> dict[int, Hashable]:
    """For every parameter a key of the elementwise operations that update it; equal keys mean equal updates."""
    known: dict[Hashable, int] = {}  # what a value is made of, so that equal numbers made twice are one
    made: dict[int, Hashable] = {}
    counts: Counter[int] = Counter()
    for number, owner in zip(program.inputs, program.owners[0], strict=True):
        made[number] = ("argument", number)
        if owner is not None:
            made[number], counts[owner] = ("own", counts[owner]), counts[owner] + 1
    for number, value in program.constants.items():
        one = not isinstance(value, Tracer) and np.size(value) == 1
        made[number] = ("number", str(value.dtype), np.asarray(value).tobytes()) if one else ("array", number)
    for step in program.steps:
        kind = None if step.by_element is None else step.by_element.kind()
        key = (kind, *(made[number] for number in step.inputs))
        for output, number in enumerate(step.outputs):
            made[number] = ("step", number) if kind is None else known.setdefault((output, *key), len(known))
    found: dict[int, list[Hashable]] = {}
    for number, owner in zip(program.outputs, program.owners[1], strict=True):
        if owner is not None:
            found.setdefault(owner, []).append(made[number])
    return {owner: tuple(results) for owner, results in found.items()}


# --------------------------------------------------------------------------------------------------
# The optimizer of a pipelined model: it sees trees, its state rests on the stages' devices.
#
# Inside a step every rank runs that part of the update's program that acts on the leaves it holds (`sharded_program`).
# State that belongs to no parameter (counts) is whole on every rank.
# --------------------------------------------------------------------------------------------------

_STAGES, _WHOLE = "stages", "whole"


class StagedOptimizer(RestingOptimizer):
    """The optimizer's state rests in buffers of stages; leaves that belong to no parameter are replicated."""

    @property
    def staging(self) -> Staging:
        """The buffers in which parameters rest, and their stages."""
        assert self.placement.stages is not None
        return self.placement.stages

    @cached_property
    def layouts(self) -> list[Layout]:
        """The layout of every leaf of the optimizer's state."""
        return jax.tree.leaves(self.placed[0], is_leaf=is_layout)

    @property
    def owners(self) -> list[int | None]:
        """The parameter (position) that every leaf of the state belongs to, or None."""
        return self.placed[1]

    @cached_property
    def names(self) -> list[str]:
        """The name of every leaf of the state."""
        return list(named_leaves(jax.tree.map(lambda _: 0, self.placed[0], is_leaf=is_layout)))

    @property
    def owned(self) -> list[int]:
        """The positions of the leaves that belong to parameters."""
        return [i for i, owner in enumerate(self.owners) if owner is not None]

    @cached_property
    def store(self) -> StageStore:
        """The buffers of the leaves that belong to parameters."""
        staging, params = self.staging, self.staging.params
        owners = [i for i in self.owners if i is not None]
        stages, layouts = [params.stages[i] for i in owners], [self.layouts[i] for i in self.owned]
        # Moments of a parameter lie in a buffer each, where it lies in its own.
        numbers, seen = [0] * len(owners), dict.fromkeys(owners, -1)
        for k, owner in enumerate(owners):
            numbers[k] = seen[owner] = seen[owner] + 1
        ranks = staging.num_stages, staging.num_ranks
        return StageStore(tuple(layouts), tuple(stages), *ranks, self.placement.degrees, numbers=tuple(numbers))

    def specs(self) -> PyTree:
        """The specs of the state at rest."""
        return {_STAGES: self.store.specs(), _WHOLE: {name: PartitionSpec() for name in self._loose_names}}

    def at_rest(self, state: PyTree, buffers: Any) -> PyTree:
        """The resting state from its buffers and, of its tree, the leaves without a parameter; others are not read."""
        leaves = jax.tree.leaves(state)
        return {_STAGES: buffers, _WHOLE: {self.names[i]: leaves[i] for i in self._loose}}

    def unpacked(self, owned: Sequence[Any], resting: PyTree) -> PyTree:
        """The optimizer's own tree, from the leaves that belong to parameters and the state at rest."""
        leaves: list[Any] = [None] * len(self.layouts)
        for i, leaf in zip(self.owned, owned, strict=True):
            leaves[i] = leaf
        for i in self._loose:
            leaves[i] = resting[_WHOLE][self.names[i]]
        return jax.tree.structure(self.placed[0], is_leaf=is_layout).unflatten(leaves)

    def first(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Every rank creates the state of its own stages."""
        specs, kept = self.specs(), self.placement.plan.offload
        first = self._first_whole if self.on_shards is None else self._first
        mapped = jax.shard_map(
            lambda params: first(to_device_memory(params, kept.params)),
            mesh=mesh,
            in_specs=(self.staging.params.specs(),),
            out_specs=specs,
            check_vma=self.placement.plan.check_vma,
        )
        return offloaded(jax.jit(mapped, out_shardings=shardings(specs, mesh))(params), kept.optimizer)

    def _first(self, params: Any) -> PyTree:
        """Creates this rank's part of the resting state by the program of `OnShards.first`, inside `shard_map`."""
        assert self.on_shards is not None
        mine, loose = self.on_shards.first.run({}, self._on_rank(params), self._pack_state)
        return {_STAGES: self.store.named(mine), _WHOLE: {self.names[i]: loose[i] for i in self._loose}}

    def _first_whole(self, params: Any) -> PyTree:
        """Creates the state from full leaves, which every rank gathers for it. Communicates: one all-gather per buffer."""
        state = self.tx.init(self.staging.treedefs[0].unflatten(self._gathered(self.staging.params, params)))
        leaves = jax.tree.leaves(state)
        mine = self._of_rank(lambda rank: self._packed(self._own_parts(leaves), rank))
        return self.at_rest(state, self.store.named(mine))

    def shapes(self, shapes: Variables) -> PyTree:
        """Zeros of the buffers' shapes, and of the leaves that belong to no parameter."""
        cast = self.placement.plan.precision.cast_param
        loose = self.at_rest(jax.eval_shape(lambda params: self.tx.init(cast(params)), shapes.params), None)
        opt_state = {**loose, _STAGES: self.store.shapes()}
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), opt_state)

    def update(self, grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array) -> tuple[PyTree, PyTree]:
        """Every rank updates the leaves of its own stages."""
        with jax.named_scope("axonml.update"):
            if self.on_shards is None:
                run = lambda grads, state, params: apply(self.tx, grads, state, params, loss)
                return self._update_whole(run, grads, opt_state, params)
            return self._update(self.on_shards.program(loss), grads, opt_state, params, loss)

    def tree(self, opt_state: PyTree) -> PyTree:
        """The state as optax made it: copies, split over the devices. A state without arrays (plain SGD's) has no copies."""
        if not jax.tree.leaves(opt_state):
            return self.unpacked([], opt_state)
        spread = self.store.spread(opt_state[_STAGES], _mesh_of(opt_state))
        return self.unpacked(spread, {_WHOLE: copies(opt_state[_WHOLE])})

    def leaves(self, opt_state: PyTree) -> PyTree:
        """Every leaf of the state in the model's shapes."""
        return jax.tree.map(Leaf, self.tree(opt_state))

    def resting(self, like: PyTree, fill: Callable[[PyTree], PyTree]) -> PyTree:
        """Packs full leaves into buffers, leaf by leaf."""
        if not jax.tree.leaves(like):
            return like
        whole = fill(jax.tree.map(whole_shape, self.placed[0], is_leaf=is_layout))
        mesh, leaves = _mesh_of(whole), jax.tree.leaves(whole)
        resting = self.at_rest(whole, self.store.place([leaves[i] for i in self.owned], mesh))
        resting = {**resting, _WHOLE: replicated(resting[_WHOLE], mesh)}
        return offloaded(resting, self.placement.plan.offload.optimizer)

    def _update(
        self, program: ShardedProgram, grads: Any, resting: PyTree, params: Any, loss: jax.Array
    ) -> tuple[Any, PyTree]:
        """Runs the update (`OnShards.program`) of the leaves that each rank holds, inside `shard_map`."""
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
        """Groups the leaves of the update (gradients, state, parameters, loss) -> (parameters, state)."""
        store, count, size = self.staging.params, len(self.staging.params.layouts), len(self.layouts)
        owners = [owner for owner in self.owners if owner is not None]
        state = Tree(self.store, owners, [count + i for i in self.owned], [count + i for i in self.owned])
        params = Tree(store, range(count), range(count + size, 2 * count + size), range(count))
        return Runs(program, (Tree(store, range(count), range(count)), state, params))

    def _update_whole(self, apply: Any, grads: Any, resting: PyTree, params: Any) -> tuple[Any, PyTree]:
        """Updates full leaves, which every rank gathers for it. Communicates: one all-gather per buffer."""
        stores = (self.staging.params, self.store, self.staging.params)
        wholes = [
            self._gathered(store, each) for store, each in zip(stores, (grads, resting[_STAGES], params), strict=True)
        ]
        tree = self.staging.treedefs[0].unflatten
        new, state = apply(tree(wholes[0]), self.unpacked(wholes[1], resting), tree(wholes[2]))
        leaves, owned = jax.tree.leaves(new), jax.tree.leaves(state)

        def own(rank: int) -> tuple[Buffers, Buffers]:
            params_store = self.staging.params
            cut = {i: _own_part(params_store, leaves[i], i) for i in params_store.leaves_of_rank(rank)}
            return _typed(params_store.pack(cut)), self._packed(self._own_parts(owned), rank)

        packed, packed_state = self._of_rank(own)
        named = self.staging.params.named(packed)
        return named, self.at_rest(state, self.store.named(packed_state))

    def _gathered(self, store: StageStore, named: Any) -> list[Any]:
        rests, leaves = store.grouped(named), []
        everywhere = {group: gather_whole(x, AXIS, invarying=True) for group, x in rests.items() if not group.rows}
        for i, layout in enumerate(store.layouts):
            slot, group = store.slots[i], store.slots[i].group
            if (rank := store.rank_of(i)) is None:
                leaves.append(store.in_order(gather_leaf(slot_value(slot, rests[group]), layout), i))
                continue
            start = rank * store.buffers.sizes[group] + slot.offset
            buffer = everywhere[group]
            leaves.append(gather_leaf(buffer[start : start + slot.size].reshape(layout.shard), layout))
        return leaves

    def _of_rank(self, run: Any) -> Any:
        return on_own_rank(axis_index(AXIS), self.staging.num_ranks, run)

    def _on_rank(self, params: Any) -> OnRank:
        """A runner of functions of this rank's parameters, by position."""
        store = self.staging.params

        def own(work: Callable[[Held], Any], rank: int) -> Any:
            leaves = store.unpack(store.grouped(params), rank)
            return work({i: seen_shard(leaf, store.layouts[i]) for i, leaf in leaves.items()})

        return lambda work: self._of_rank(lambda rank: own(work, rank))

    def _pack_state(self, made: dict[int, Any]) -> Buffers:
        """Packs a rank's leaves of the state, by position in the tree, into its buffers."""
        at, layouts = enumerate(self.owned), self.store.layouts
        return _typed(self.store.pack({k: stored_shard(made[i], layouts[k]) for k, i in at if i in made}))

    def _own_parts(self, leaves: Sequence[Any]) -> list[jax.Array]:
        return [_own_part(self.store, leaves[i], k) for k, i in enumerate(self.owned)]

    def _packed(self, owned: Sequence[Any], rank: int) -> Buffers:
        return _typed(self.store.pack({k: owned[k] for k in self.store.leaves_of_rank(rank)}))

    @property
    def _loose(self) -> list[int]:
        return [i for i, owner in enumerate(self.owners) if owner is None]

    @property
    def _loose_names(self) -> list[str]:
        return [self.names[i] for i in self._loose]


def _own_part(store: StageStore, whole: Any, leaf: int) -> jax.Array:
    """Cuts this rank's part out of a whole leaf, inside `shard_map`."""
    return leaf_shard(store.by_rank(jnp.asarray(whole), leaf), store.layouts[leaf])


def _typed(buffers: Buffers) -> Buffers:
    """Types the buffers as varying over the pipeline axis and their own axes, as all ranks' must be."""
    return {group: vary(buffer, (AXIS, *group.axes)) for group, buffer in buffers.items()}


# --------------------------------------------------------------------------------------------------
# Parameters of a pipeline rest on their stage's devices, packed in buffers (`StageStore`); users and checkpoints see
# trees.
# --------------------------------------------------------------------------------------------------


class Staged(Rest):
    """Parameters rest in one array for each group of them, split over `pipe` and the group's own axes."""

    @property
    def staging(self) -> Staging:
        """The buffers in which parameters rest, and their stages."""
        assert self.placement.stages is not None
        return self.placement.stages

    def specs(self, variables: Variables) -> Variables:
        """The specs of the buffers."""
        staging = self.staging
        return Variables(staging.params.specs(), staging.frozen.specs(), self.buffer_specs(variables.state))

    def place(self, variables: Variables, mesh: Mesh) -> Variables:
        """Packs full variables into buffers, leaf by leaf (see `StageStore.place`)."""
        frozen = self.staging.place_frozen(self.placement.plan.precision.cast_param(variables.frozen), mesh)
        kept = offloaded(frozen, self.placement.plan.offload.params)
        return Variables(self.inside(variables.params, mesh), kept, replicated(variables.state, mesh))

    def create(self, model: Functional, mesh: Mesh) -> Variables:
        """Every rank creates the parameters of its own stages, under `jit`."""
        create, staging, placement = model.create, self.staging, self.placement
        assert create is not None

        def own(store: StageStore, tree: Any, rank: int) -> Buffers:
            leaves = jax.tree.leaves(placement.plan.precision.cast_param(tree))
            cut = {i: _own_part(store, leaves[i], i) for i in store.leaves_of_rank(rank)}
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

    def shapes(self, shapes: Variables) -> Variables:
        """Zeros of the buffers' shapes."""
        variables = Variables(self.staging.params.shapes(), self.staging.frozen.shapes(), shapes.state)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables)

    def optimizer(self, tx: optax.GradientTransformation) -> RestingOptimizer:
        """The optimizer whose state rests in buffers of stages too."""
        return StagedOptimizer(tx, self.placement)

    def read(self, fun: Callable, model: Functional, variables: Variables, *args: Any) -> Any:
        """Runs the function through the stages."""
        return pipelined_call(fun, self.placement, variables, *args)

    def loss(self, objective: Objective, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, Any]:
        """The loss of this rank's rows, run through the stages (`pipelined_loss`)."""
        return pipelined_loss(objective, self.placement, variables, key, batch)

    def parts(self, grads: PyTree) -> Iterable[Part]:
        """Every buffer of gradients, with its parameters' dtype and the mesh axes that split it."""
        return self.staging.parts(grads)

    def squares(self, tree: PyTree) -> Iterable[Square]:
        """The sum of squares of every leaf; a rank contributes those of its own stages, and zeros for others."""
        staging, store = self.staging, self.staging.params
        kinds = [jnp.finfo(layout.dtype).dtype for layout in store.layouts]
        dtype = functools.reduce(jnp.promote_types, kinds, jnp.dtype(jnp.float32))
        sets: dict[tuple[str, ...], list[int]] = {}
        for i, layout in enumerate(store.layouts):
            sets.setdefault(tuple(dict.fromkeys((AXIS, *layout.axes))), []).append(i)

        def of_rank(rank: int) -> list[jax.Array]:
            own = store.unpack(store.grouped(tree), rank)
            held = lambda i: within(own[i], store.layouts[i])  # an update may leave anything in the padding
            one = lambda i: square(held(i)).astype(dtype) if i in own else jnp.zeros((), dtype)
            return [vary(jnp.stack([one(i) for i in leaves]), axes) for axes, leaves in sets.items()]

        vectors = on_own_rank(axis_index(AXIS), staging.num_ranks, of_rank)
        for (axes, leaves), vector in zip(sets.items(), vectors, strict=True):
            yield from ((staging.names[i], vector[j], axes) for j, i in enumerate(leaves))

    def outside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Parameters as the model's tree: copies, every array split over the devices as far as its dims divide."""
        return self.staging.spread_params(params, mesh)

    def outside_frozen(self, frozen: PyTree, mesh: Mesh) -> PyTree:
        """Frozen parameters as the model's tree, split likewise."""
        return self.staging.spread_frozen(frozen, mesh)

    def inside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Packs parameters into buffers: no device holds more than its own part, no process more than that and one array."""
        placed = self.staging.place_params(self.placement.plan.precision.cast_param(params), mesh)
        return offloaded(placed, self.placement.plan.offload.params)

    def clip(self, grads: PyTree, max_norm: jax.Array, p: float, mesh: Mesh) -> tuple[PyTree, jax.Array]:
        """Clips gradients of the model's own tree, however they are split."""
        size = norm(((grad, grad.dtype, ()) for grad in jax.tree.leaves(grads)), p)
        return clipped(grads, size, max_norm), size

    def param_leaves(self, variables: Variables) -> tuple[PyTree, PyTree]:
        """Parameters as the model's tree of `Leaf`."""
        mesh = _mesh_of(variables)
        params, frozen = self.outside(variables.params, mesh), self.outside_frozen(variables.frozen, mesh)
        return jax.tree.map(Leaf, params), jax.tree.map(Leaf, frozen)

    def resting(self, model: Functional, like: Variables, fill: Callable[[Variables], Variables]) -> Variables:
        """Packs full parameters into buffers, leaf by leaf."""
        whole = fill(model.shapes)
        return self.place(whole, _mesh_of(whole))


def _mesh_of(tree: PyTree) -> Mesh:
    return jax.tree.leaves(tree)[0].sharding.mesh
