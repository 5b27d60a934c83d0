"""Parameters rest leaf by leaf, each in its layout: whole, sharded, or split by the model's layers."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.parallel.units.replayed import Replayed
from axonml_jax.sharding.layout import is_layout, shardings, specs
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.sharding.memory import HOST, movable, offloaded, to_device_memory
from axonml_jax.sharding.place import move, place
from axonml_jax.sharding.stored import from_stored, map_layouts, padded, to_stored, unpadded
from axonml_jax.training.optimizer.apply import apply
from axonml_jax.training.optimizer.norm import Part, clipped, norm
from axonml_jax.training.optimizer.opt_state import gather_stored, opt_layouts, own_parts
from axonml_jax.training.optimizer.sharded.on_shards import OnShards
from axonml_jax.training.rest.layer_norms import Square, square
from axonml_jax.training.rest.rest import Rest


class Plain(Rest):
    """Every leaf of every tree is an array of its own."""

    @property
    def layouts(self) -> PyTree:
        """Of trained parameters between steps."""
        return self.placement.params

    def opt_layouts(self, tx: optax.GradientTransformation) -> PyTree:
        """Of the optimizer's state between steps: a leaf that belongs to a parameter lives as the parameter does."""
        return opt_layouts(self.placement, tx)

    def specs(self, variables: Variables) -> Variables:
        """As the layouts say."""
        return Variables(specs(self.layouts), specs(self.placement.frozen), self.buffer_specs(variables.state))

    def opt_specs(self, tx: optax.GradientTransformation) -> PyTree:
        """As the layouts say."""
        return specs(self.opt_layouts(tx))

    def place(self, variables: Variables, mesh: Mesh) -> Variables:
        """Each device gets its own part."""
        wanted = self.between().specs(variables)
        return self._kept(place(self._stored(variables), wanted, mesh))

    def create(self, model: Functional, mesh: Mesh) -> Variables:
        """Each device makes its own part."""
        assert model.create is not None
        create = model.create
        wanted = shardings(self.between().specs(model.shapes), mesh)
        return self._kept(jax.jit(lambda: self._stored(create()), out_shardings=wanted)())

    def first_opt_state(self, tx: optax.GradientTransformation, params: PyTree, mesh: Mesh) -> PyTree:
        """Made under `jit` where it will live."""
        shapes = jax.eval_shape(lambda params: self._first_opt_state(tx, params), params)
        wanted = shardings(self.between().opt_specs(tx), mesh)
        if self.placement.plan.offload.optimizer:
            wanted = jax.tree.map(lambda x, s: s.with_memory_kind(HOST) if movable(x) else s, shapes, wanted)
        kept = self.placement.plan.offload.params

        def first(params: PyTree) -> PyTree:
            return self._first_opt_state(tx, to_device_memory(params, kept))

        return jax.jit(first, out_shardings=wanted)(params)

    def shapes(self, shapes: Variables, tx: optax.GradientTransformation) -> tuple[Variables, PyTree]:
        """In stored form."""
        variables = self._stored(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
        return variables, self._first_opt_state(tx, variables.params)

    def read(self, fun: Callable, model: Functional, variables: Variables, *args: Any) -> Any:
        """At once; unit by unit where the plan gathers parameters when they are used."""
        placement = self.placement
        if not placement.gathers_when_used:
            params = placement.read_tree(variables.params, placement.params)
            frozen = placement.read_tree(variables.frozen, placement.frozen)
            return fun(Variables(params, frozen, variables.state), *args)
        seen: dict[str, Any] = {}

        def arrays_of(params, frozen, state, *args):
            leaves, seen["treedef"] = jax.tree.flatten(fun(Variables(params, frozen, state), *args))
            seen["fixed"] = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
            return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

        given = (variables.state, *args)
        arrays = iter(Replayed(placement, model).apply(arrays_of, variables.params, variables.frozen, given))
        return seen["treedef"].unflatten([next(arrays) if leaf is None else leaf for leaf in seen["fixed"]])

    def parts(self, grads: PyTree) -> Iterable[Part]:
        """Leaf by leaf."""
        layouts = jax.tree.leaves(self.placement.params, is_leaf=is_layout)
        return [(g, layout.dtype, layout.axes) for g, layout in zip(jax.tree.leaves(grads), layouts, strict=True)]

    def squares(self, tree: PyTree) -> Iterable[Square]:
        """Leaf by leaf."""
        layouts = jax.tree.leaves(self.placement.params, is_leaf=is_layout)
        named = named_leaves(tree).items()
        return [(name, square(leaf), layout.axes) for (name, leaf), layout in zip(named, layouts, strict=True)]

    def update(
        self,
        tx: optax.GradientTransformation,
        on_shards: OnShards | None,
        grads: PyTree,
        opt_state: PyTree,
        params: PyTree,
        loss: jax.Array,
    ) -> tuple[PyTree, PyTree]:
        """Communicates: on shards, see `OnShards.update`; else one all-gather of all that is split with `update="whole"`."""
        placement = self.placement
        if on_shards is not None:
            with jax.named_scope("axonml.update"):
                return on_shards.update(grads, opt_state, params, loss)
        if placement.plan.update == "shards":
            return apply(tx, grads, opt_state, params, loss)
        layouts = placement.params, opt_layouts(placement, tx)
        with jax.named_scope("axonml.update"):
            grads, params = (gather_stored(tree, placement.params, placement) for tree in (grads, params))
            opt_state = gather_stored(opt_state, layouts[1], placement)
        params, opt_state = apply(tx, grads, opt_state, params, loss)
        return own_parts(params, layouts[0], placement), own_parts(opt_state, layouts[1], placement)

    @property
    def updates_in_slices(self) -> bool:
        """Where the optimizer sees shards."""
        return self.placement.plan.update == "shards"

    def outside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Without padding."""
        return unpadded(params, self.layouts, mesh)

    def outside_frozen(self, frozen: PyTree, mesh: Mesh) -> PyTree:
        """Without padding."""
        return unpadded(frozen, self.placement.frozen, mesh)

    def inside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Padded, where it rests."""
        wanted = shardings(self.between().specs(Variables(params, {}, {})).params, mesh)
        return jax.tree.map(move, padded(params, self.layouts), wanted)

    def clip(self, grads: PyTree, max_norm: jax.Array, p: float, mesh: Mesh) -> tuple[PyTree, jax.Array]:
        """On shards."""
        rests = self.specs(Variables(grads, {}, {})).params

        def local(grads: PyTree, max_norm: jax.Array) -> tuple[PyTree, jax.Array]:
            own = self.own(grads)
            size = norm(self.parts(own), p)
            return self.kept((clipped(own, size, max_norm), size))

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(rests, PartitionSpec()),
            out_specs=(rests, self.means),
            axis_names=self.placement.manual_axes,
            check_vma=self.placement.plan.check_vma,
        )(padded(grads, self.layouts), max_norm)

    def param_leaves(self, variables: Variables) -> tuple[PyTree, PyTree]:
        """With their layouts."""
        params = map_layouts(Leaf, variables.params, self.layouts)
        return params, map_layouts(Leaf, variables.frozen, self.placement.frozen)

    def resting(self, model: Functional, like: Variables, fill: Callable[[Variables], Variables]) -> Variables:
        """Checkpoints give arrays as they rest."""
        return fill(like)

    def opt_tree(self, tx: optax.GradientTransformation, opt_state: PyTree) -> PyTree:
        """Without padding, as parameters are outside."""
        layouts = self.opt_layouts(tx)
        if all(layout.stored == layout.shape for layout in jax.tree.leaves(layouts, is_leaf=is_layout)):
            return opt_state
        return unpadded(opt_state, layouts, jax.tree.leaves(opt_state)[0].sharding.mesh)

    def opt_leaves(self, tx: optax.GradientTransformation, opt_state: PyTree) -> PyTree:
        """With their layouts."""
        return map_layouts(Leaf, opt_state, self.opt_layouts(tx))

    def resting_opt(self, tx: optax.GradientTransformation, like: PyTree, fill: Callable[[PyTree], PyTree]) -> PyTree:
        """Checkpoints give arrays as they rest."""
        return fill(like)

    def _stored(self, variables: Variables) -> Variables:
        """Whole variables in stored form: cast, padded, stacked."""
        cast, placement = self.placement.plan.precision.cast_param, self.placement
        params = map_layouts(to_stored, cast(variables.params), placement.params)
        frozen = map_layouts(to_stored, cast(variables.frozen), placement.frozen)
        return Variables(params, frozen, self._repeated(variables.state, placement.buffer_axes))

    def _repeated(self, tree: PyTree, axes: tuple[str, ...] | None) -> PyTree:
        """One entry for every rank of these axes."""
        if axes is None:
            return tree
        count = self.placement.ranks(axes)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree)

    def _kept(self, placed: Variables) -> Variables:
        """What the plan keeps in host memory, there."""
        kept = self.placement.plan.offload.params
        return Variables(offloaded(placed.params, kept), offloaded(placed.frozen, kept), placed.state)

    def _first_opt_state(self, tx: optax.GradientTransformation, params: PyTree) -> PyTree:
        """Of stored parameters, in stored form."""
        whole = map_layouts(from_stored, params, self.placement.params)
        return map_layouts(to_stored, tx.init(whole), opt_layouts(self.placement, tx))
