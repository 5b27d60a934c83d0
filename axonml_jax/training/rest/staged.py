"""Parameters of a pipeline rest on their stage's devices, packed in buffers (`StageStore`); users and checkpoints see trees."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from axonml_jax._types import PyTree
from axonml_jax.collectives.primitives import axis_index
from axonml_jax.collectives.varying import vary
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.model.loss import Loss
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.pipeline.resting.packing import Buffers
from axonml_jax.parallel.pipeline.resting.stage_store import StageStore, on_own_rank
from axonml_jax.parallel.pipeline.resting.staging import Staging
from axonml_jax.sharding.layout import is_layout, shardings
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.sharding.memory import offloaded, to_device_memory
from axonml_jax.sharding.place import replicated
from axonml_jax.training.engine.pipelined import pipelined_call, pipelined_loss
from axonml_jax.training.objective import Objective
from axonml_jax.training.optimizer.apply import apply
from axonml_jax.training.optimizer.norm import Part, clipped, norm
from axonml_jax.training.optimizer.opt_state import opt_layouts, whole_shape
from axonml_jax.training.optimizer.sharded.on_shards import OnShards
from axonml_jax.training.rest.layer_norms import Square, square
from axonml_jax.training.rest.rest import Rest
from axonml_jax.training.rest.staged_optimizer import StagedOptimizer


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

    def loss(self, objective: Objective, variables: Variables, key: jax.Array, batch: PyTree) -> Loss:
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
