"""How parameters and optimizer state rest between steps: leaf by leaf, stacked by rank, partitioned by XLA, in rounds."""

import abc
import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.collectives.primitives import max_over, sum_over, vary
from axonml_jax.compat.order import platform_around, together
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.model.loss import Loss
from axonml_jax.model.view import Functional, Variables
from axonml_jax.parallel.placement import Placement, read_shapes, read_tree
from axonml_jax.sharding.layout import (
    HOST,
    Leaf,
    from_stored,
    is_layout,
    map_layouts,
    movable,
    move,
    offloaded,
    padded,
    place,
    shardings,
    specs,
    to_device_memory,
    to_stored,
    unpadded,
)
from axonml_jax.training.objective import Objective, begun_anew, part_keys
from axonml_jax.training.optimizer import apply, gather_stored, opt_owners, own_parts

if TYPE_CHECKING:
    from axonml_jax.training.on_shards import OnShards

# --------------------------------------------------------------------------------------------------
# The norms of gradients and parameters, of all and layer by layer: of whole arrays, though every rank squares only what
# it holds; and clipping by it.
# --------------------------------------------------------------------------------------------------

Part = tuple[jax.Array, Any, tuple[str, ...]]
"""An array of gradients, its parameters' dtype, and the mesh axes over which it is split."""


def norm(parts: Iterable[Part], p: float = 2.0) -> jax.Array:
    """The p-norm of all gradients on all ranks, each element counted once, in at least float32; p may be infinite.

    Communicates: inside `shard_map` one small all-reduce for every set of axes that splits parts.
    """
    infinite, totals = p == math.inf, {}
    for grad, dtype, axes in vectors_together(parts) if platform_around() == "gpu" else parts:
        size = jnp.abs(grad).astype(jnp.promote_types(jnp.finfo(dtype).dtype, jnp.float32))
        if infinite:
            totals[axes] = jnp.maximum(totals.get(axes, 0.0), jnp.max(size, initial=0))
        else:
            totals[axes] = totals.get(axes, 0.0) + jnp.sum(jnp.square(size) if p == 2 else size**p)
    join = max_over if infinite else sum_over
    with jax.named_scope("axonml.norm"):
        wholes = [join(total, axes) if axes else total for axes, total in totals.items()]
    if infinite:
        return functools.reduce(jnp.maximum, wholes, jnp.zeros(()))
    return sum(wholes, jnp.zeros(())) ** (1 / p) if p != 2 else jnp.sqrt(sum(wholes, jnp.zeros(())))


def vectors_together(parts: Iterable[Part]) -> list[Part]:
    """Concatenates all vectors of one dtype and placement into one array; the elements stay the same.

    XLA makes of each vector's update and of its share of the norm one kernel of several results, each too small for a GPU;
    apart the updates run together, and so do the squares.
    """
    kinds, found = {}, []
    for grad, dtype, axes in parts:
        if grad.ndim == 1:
            kinds.setdefault((jnp.dtype(grad.dtype), jnp.dtype(dtype), axes, varying_axes(grad)), []).append(grad)
        else:
            found.append((grad, dtype, axes))
    return found + [(jnp.concatenate(together(some)), dtype, axes) for (_, dtype, axes, _), some in kinds.items()]


def clipped(grads: PyTree, norm: jax.Array, max_norm: Any) -> PyTree:
    """Gradients scaled by min(1, max_norm / (norm + 1e-6)), PyTorch's rule."""
    scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


Square = tuple[str, jax.Array, tuple[str, ...]]
"""A parameter's name, the sum of squares of this rank's part of it, and the mesh axes over which it is split."""


def layer_of(name: str) -> str:
    """The layer of a parameter: up to the first part of its path with a number in it, else the module that has it.

    >>> layer_of("blocks/3/mlp/up/kernel"), layer_of("Dense_0/kernel"), layer_of("model/embed/table"), layer_of("scale")
    ('blocks/3', 'Dense_0', 'model/embed', 'scale')
    """
    parts = name.split("/")
    numbered = next((i for i, part in enumerate(parts[:-1]) if re.search(r"\d", part)), None)
    return "/".join(parts[: numbered + 1] if numbered is not None else parts[:-1] or parts)


def layer_norms(squares: Iterable[Square]) -> dict[str, jax.Array]:
    """The 2-norm of every layer over all ranks.

    Communicates: inside `shard_map` one all-reduce of a number per layer for every set of axes that splits parameters.
    """
    by_axes: dict[tuple[str, ...], dict[str, jax.Array]] = {}
    for name, square, axes in squares:
        sums, layer = by_axes.setdefault(axes, {}), layer_of(name)
        sums[layer] = sums.get(layer, jnp.zeros((), square.dtype)) + square
    totals: dict[str, jax.Array] = {}
    with jax.named_scope("axonml.norm"):
        for axes, sums in by_axes.items():
            own = jnp.stack([*sums.values()])
            for layer, total in zip(sums, sum_over(own, axes) if axes else own, strict=True):
                totals[layer] = totals.get(layer, 0.0) + total
    return {layer: jnp.sqrt(total) for layer, total in totals.items()}


def square(array: jax.Array) -> jax.Array:
    """The sum of squares of an array, in at least float32."""
    size = jnp.abs(array)
    return jnp.sum(jnp.square(size.astype(jnp.promote_types(size.dtype, jnp.float32))))


# --------------------------------------------------------------------------------------------------
# The interface of every resting form.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rest(abc.ABC):
    """How everything that a step keeps rests on a mesh, and the ways in and out of a step.

    A plan's resting form is chosen once (`rest_of`); nothing else asks which it is. Every form has the methods in this order:
    specs, making, a step's way in and out, reading, updating, and what users and checkpoints see.

    Attributes:
      placement: the plan on its mesh.
    """

    placement: Placement

    # Specs

    @abc.abstractmethod
    def specs(self, variables: Variables) -> Variables:
        """The PartitionSpec of every array of a model's variables as the step's `shard_map` takes it."""

    def between(self) -> "Rest":
        """The form in which arrays are between steps, where that is not what the step's `shard_map` takes."""
        return self

    def buffer_specs(self, state: PyTree) -> PyTree:
        """Specs of the model's own state: stacked along the axes whose ranks keep buffers of their own."""
        axes = self.placement.axes.buffers
        return jax.tree.map(lambda _: PartitionSpec(axes) if axes is not None else PartitionSpec(), state)

    # Making

    @abc.abstractmethod
    def place(self, variables: Variables, mesh: Mesh) -> Variables:
        """Whole variables (the same in every process) as they rest; copies, never the arrays given."""

    @abc.abstractmethod
    def create(self, model: Functional, mesh: Mesh) -> Variables:
        """A model's variables by `model.create`, made where they will rest: none is whole on any device."""

    @abc.abstractmethod
    def shapes(self, shapes: Variables) -> Variables:
        """The resting variables of a model of these shapes, as zeros: for `jax.eval_shape`."""

    @abc.abstractmethod
    def optimizer(self, tx: optax.GradientTransformation) -> "RestingOptimizer":
        """An optimizer whose state rests beside the parameters."""

    # A step's way in and out

    def local(self, tree: PyTree) -> PyTree:
        """Takes this rank's part of a resting tree: trained parameters, or a tree that rests like them; inside `shard_map`."""
        return tree

    def stored(self, tree: PyTree) -> PyTree:
        """The inverse of `local`."""
        return tree

    @property
    def means(self) -> PartitionSpec:
        """The spec of a value that is the same on all ranks that train one model, such as a loss or a norm, after `stored`."""
        return PartitionSpec()

    def enter(self, variables: Variables) -> Variables:
        """This rank's own variables, inside `shard_map`."""
        axes = self.placement.axes.buffers
        state = variables.state if axes is None else single(variables.state)
        return Variables(self.local(variables.params), variables.frozen, state)

    def leave(self, variables: Variables) -> Variables:
        """The inverse of `enter`."""
        axes = self.placement.axes.buffers
        state = variables.state if axes is None else stacked(variables.state, axes)
        return Variables(self.stored(variables.params), variables.frozen, state)

    # Reading and updating

    @abc.abstractmethod
    def read(self, fun: Callable, model: Functional, variables: Variables, *args: Any) -> Any:
        """Calls `fun(read_variables, *args)` on gathered variables, inside `shard_map` and without gradients."""

    def loss(self, objective: Objective, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, Any]:
        """Returns the loss of this rank's rows without gradients, in microbatches, so that it needs no more memory than a step.

        There are as many microbatches as the plan's number and the rows have in common; a plan that gathers parameters at their
        use gathers them in each. Also returns what is to be done with the loss's sum over ranks (`Objective.finish`).
        """
        layout, plan = self.placement.batch_layout, self.placement.plan
        model, count = objective.model, layout.common_count(batch, plan.microbatches)
        own = part_keys(self.placement, key, batch, count) if plan.draws == "rows" else None
        if count == 1:
            return self.read(objective, model, variables, key if own is None else own[0], batch)[0], None
        folded = jax.vmap(lambda number: jax.random.fold_in(key, number))
        keys = folded(jnp.arange(count)) if own is None else jnp.stack(own)
        read = read_shapes(self.placement, variables.state)
        batches, once = objective.microbatches(read, keys[0], batch, layout.microbatches(batch, count))
        if objective.sweeps(batches):
            return objective.swept_loss(self.swept(objective, variables, keys, batch, batches, once)[0]), None
        parts = keys, batches
        if self.placement.at_use:
            losses = jax.lax.map(lambda part: self.read(objective, model, variables, *part)[0], parts)
        else:
            of_all = lambda read, parts: jax.lax.map(lambda part: objective(read, *part)[0], parts)
            losses = self.read(of_all, model, variables, parts)
        loss = jax.tree.map(lambda x: x.sum(0), losses)
        loss = loss if loss.weight is not None else loss._replace(total=loss.total / count)
        return loss, objective.finish(batches)

    def swept(
        self,
        objective: Objective,
        variables: Variables,
        keys: jax.Array,
        rows: PyTree,
        batches: PyTree,
        once: frozenset[str],
    ) -> tuple[PyTree, dict[str, jax.Array]]:
        """Runs the first sweep over the microbatches, where the loss needs one (`Objective.swept`), and adds its results."""
        placement, model = self.placement, objective.model
        start = vary(variables.state, placement.axes.batch)

        def each(fun: Callable, batches: PyTree) -> list[jax.Array]:
            def trip(read: Callable, state: PyTree, part: tuple) -> tuple[PyTree, list[jax.Array]]:
                made, state = read(begun_anew(state, start, once), *part)
                return vary(state, placement.axes.batch), made

            if placement.at_use:
                read = lambda state, *part: self.read(fun, model, replace(variables, state=state), *part)
                return jax.lax.scan(partial(trip, read), start, (keys, batches))[1]

            def of_all(read: Variables, parts: tuple) -> list[jax.Array]:
                one = lambda state, *part: fun(replace(read, state=state), *part)
                return jax.lax.scan(partial(trip, one), start, parts)[1]

            return self.read(of_all, model, variables, (keys, batches))

        return objective.swept(each, read_shapes(placement, variables.state), keys[0], rows, batches)

    @abc.abstractmethod
    def parts(self, grads: PyTree) -> Iterable[Part]:
        """Every resting array of gradients, with its parameters' dtype and the mesh axes that split it."""

    @abc.abstractmethod
    def squares(self, tree: PyTree) -> Iterable[Square]:
        """Returns the sum of squares of this rank's part of every resting parameter, or gradient; inside `shard_map`."""

    # What users and checkpoints see

    @abc.abstractmethod
    def outside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Returns resting parameters (or their gradients) as the model's tree, without padding."""

    @abc.abstractmethod
    def outside_frozen(self, frozen: PyTree, mesh: Mesh) -> PyTree:
        """Returns resting frozen parameters as the model's tree, without padding."""

    @abc.abstractmethod
    def inside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """The inverse of `outside`; an array that is where it belongs already stays the caller's own."""

    @abc.abstractmethod
    def clip(self, grads: PyTree, max_norm: jax.Array, p: float, mesh: Mesh) -> tuple[PyTree, jax.Array]:
        """Clips gradients that `outside` returned by their p-norm, and returns this norm too; under `jit`."""

    def whole(self, variables: Variables, mesh: Mesh) -> Variables:
        """Returns the variables without padding; of ranks that train models of their own, those of the first rank."""
        params, frozen = self.outside(variables.params, mesh), self.outside_frozen(variables.frozen, mesh)
        state = variables.state if self.placement.axes.buffers is None else single(variables.state)
        return Variables(params, frozen, state)

    @abc.abstractmethod
    def param_leaves(self, variables: Variables) -> tuple[PyTree, PyTree]:
        """Trained and frozen parameters as trees of `Leaf`: what checkpoints hold."""

    @abc.abstractmethod
    def resting(self, model: Functional, like: Variables, fill: Callable[[Variables], Variables]) -> Variables:
        """Resting variables from arrays like those of `param_leaves`.

        Args:
          model: the model.
          like: resting variables of the same model.
          fill: puts the arrays in a tree like the one it is given.
        """


@dataclass(frozen=True, eq=False)
class RestingOptimizer(abc.ABC):
    """An optimizer whose state rests beside the parameters: a leaf that belongs to a parameter lives as the parameter does.

    Attributes:
      tx: the optimizer.
      placement: the plan on its mesh.
    """

    tx: optax.GradientTransformation
    placement: Placement

    @cached_property
    def placed(self) -> tuple[PyTree, list[int | None]]:
        """Returns the layout of every leaf of the optimizer's state, and the parameter that it belongs to (`opt_owners`)."""
        return opt_owners(self.placement, self.tx)

    @cached_property
    def on_shards(self) -> "OnShards | None":
        """The optimizer's update as a program on shards; None: it runs on gathered leaves, or no rank holds a part."""
        from axonml_jax.training.on_shards import OnShards

        return OnShards.of(self.tx, self.placement, *self.placed)

    def check(self) -> None:
        """Refuse an optimizer that cannot update what ranks hold; raises as `OnShards.of`."""
        _ = self.on_shards

    def between(self) -> "RestingOptimizer":
        """The same optimizer for the form in which arrays are between steps (`Rest.between`)."""
        return self

    @abc.abstractmethod
    def specs(self) -> PyTree:
        """The PartitionSpec of every array of its state as the step's `shard_map` takes it."""

    @abc.abstractmethod
    def first(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Makes the optimizer's first state from resting parameters, each leaf on the devices where it will rest."""

    @abc.abstractmethod
    def shapes(self, shapes: Variables) -> PyTree:
        """Its resting state for a model of these shapes, as zeros: for `jax.eval_shape`."""

    @abc.abstractmethod
    def update(self, grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns new parameters and state, inside `shard_map`; it acts on the shards, or gathers whole arrays."""

    @abc.abstractmethod
    def tree(self, opt_state: PyTree) -> PyTree:
        """Its state as the tree that optax made, every array in the shape that it has on one device."""

    @abc.abstractmethod
    def leaves(self, opt_state: PyTree) -> PyTree:
        """Its state as a tree of `Leaf`."""

    @abc.abstractmethod
    def resting(self, like: PyTree, fill: Callable[[PyTree], PyTree]) -> PyTree:
        """Its resting state from arrays like those of `leaves`; see `Rest.resting`."""


def single(tree: PyTree) -> PyTree:
    """Takes this rank's entry [...] of values [ranks, ...] that are stacked by rank along dim 0."""
    return jax.tree.map(lambda x: x[0], tree)


def stacked(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Makes of every leaf [...] this rank's entry [1, ...] of values stacked by rank along dim 0. The inverse of `single`."""
    return jax.tree.map(lambda x: vary(jnp.asarray(x), axes)[None], tree)


# --------------------------------------------------------------------------------------------------
# Parameters rest leaf by leaf, each in its layout: whole, sharded, or split by the model's layers.
# --------------------------------------------------------------------------------------------------


class Plain(Rest):
    """Every leaf rests as an array of its own, in its layout."""

    @property
    def layouts(self) -> PyTree:
        """The layout of every trained parameter as it is stored between steps."""
        return self.placement.params

    def specs(self, variables: Variables) -> Variables:
        """The specs of the leaves' layouts."""
        return Variables(specs(self.layouts), specs(self.placement.frozen), self.buffer_specs(variables.state))

    def place(self, variables: Variables, mesh: Mesh) -> Variables:
        """Pads the variables and sends each device its own shards."""
        wanted = self.between().specs(variables)
        return self._kept(place(self._stored(variables), wanted, mesh))

    def create(self, model: Functional, mesh: Mesh) -> Variables:
        """Creates the variables under `jit`, each device its own shards."""
        assert model.create is not None
        create = model.create
        wanted = shardings(self.between().specs(model.shapes), mesh)
        return self._kept(jax.jit(lambda: self._stored(create()), out_shardings=wanted)())

    def shapes(self, shapes: Variables) -> Variables:
        """Zeros in stored form: padded to the layouts."""
        return self._stored(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

    def optimizer(self, tx: optax.GradientTransformation) -> RestingOptimizer:
        """The optimizer with a state that rests leaf by leaf too."""
        return PlainOptimizer(tx, self.placement, self)

    def read(self, fun: Callable, model: Functional, variables: Variables, *args: Any) -> Any:
        """Gathers all parameters at once, or unit by unit where the plan gathers parameters at their use."""
        placement = self.placement
        if not placement.at_use:
            params = read_tree(placement, variables.params, placement.params)
            frozen = read_tree(placement, variables.frozen, placement.frozen)
            return fun(Variables(params, frozen, variables.state), *args)
        from axonml_jax.parallel.units import Replayed
        from axonml_jax.program.program import ArraysOf

        arrays_of = ArraysOf(lambda params, frozen, state, *args: fun(Variables(params, frozen, state), *args))
        given = (variables.state, *args)
        return arrays_of.restored(
            Replayed(placement, model).apply(arrays_of, variables.params, variables.frozen, given)
        )

    def parts(self, grads: PyTree) -> Iterable[Part]:
        """The gradient, stored dtype and mesh axes of every leaf."""
        layouts = jax.tree.leaves(self.placement.params, is_leaf=is_layout)
        return [(g, layout.dtype, layout.axes) for g, layout in zip(jax.tree.leaves(grads), layouts, strict=True)]

    def squares(self, tree: PyTree) -> Iterable[Square]:
        """The name, sum of squares on this rank and mesh axes of every leaf."""
        layouts = jax.tree.leaves(self.placement.params, is_leaf=is_layout)
        named = named_leaves(tree).items()
        return [(name, square(leaf), layout.axes) for (name, leaf), layout in zip(named, layouts, strict=True)]

    def outside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Removes the padding of trained parameters."""
        return unpadded(params, self.layouts, mesh)

    def outside_frozen(self, frozen: PyTree, mesh: Mesh) -> PyTree:
        """Removes the padding of frozen parameters."""
        return unpadded(frozen, self.placement.frozen, mesh)

    def inside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Pads parameters and moves them to where they rest, in host memory if the plan offloads them."""
        wanted = shardings(self.between().specs(Variables(params, {}, {})).params, mesh)
        placed = jax.tree.map(move, padded(params, self.layouts), wanted)
        return offloaded(placed, self.placement.plan.offload.params)

    def clip(self, grads: PyTree, max_norm: jax.Array, p: float, mesh: Mesh) -> tuple[PyTree, jax.Array]:
        """Clips gradients by their global norm; each rank scales its shards."""
        rests = self.specs(Variables(grads, {}, {})).params

        def local(grads: PyTree, max_norm: jax.Array) -> tuple[PyTree, jax.Array]:
            own = self.local(grads)
            size = norm(self.parts(own), p)
            return self.stored((clipped(own, size, max_norm), size))

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(rests, PartitionSpec()),
            out_specs=(rests, self.means),
            axis_names=self.placement.axes.manual,
            check_vma=self.placement.plan.check_vma,
        )(padded(grads, self.layouts), max_norm)

    def param_leaves(self, variables: Variables) -> tuple[PyTree, PyTree]:
        """Every parameter with its layout."""
        params = map_layouts(Leaf, variables.params, self.layouts)
        return params, map_layouts(Leaf, variables.frozen, self.placement.frozen)

    def resting(self, model: Functional, like: Variables, fill: Callable[[Variables], Variables]) -> Variables:
        """Fills the resting variables directly: checkpoints give arrays as they rest."""
        return fill(like)

    def _stored(self, variables: Variables) -> Variables:
        """Whole variables in stored form: cast, padded, stacked."""
        cast, placement = self.placement.plan.precision.cast_param, self.placement
        params = map_layouts(to_stored, cast(variables.params), placement.params)
        frozen = map_layouts(to_stored, cast(variables.frozen), placement.frozen)
        return Variables(params, frozen, self._repeated(variables.state, placement.axes.buffers))

    def _repeated(self, tree: PyTree, axes: tuple[str, ...] | None) -> PyTree:
        """Repeats every leaf along a new dim 0, once for every rank of these axes; None: returns the tree."""
        if axes is None:
            return tree
        count = self.placement.ranks(axes)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree)

    def _kept(self, placed: Variables) -> Variables:
        """Moves parameters to host memory, if the plan offloads them."""
        kept = self.placement.plan.offload.params
        return Variables(offloaded(placed.params, kept), offloaded(placed.frozen, kept), placed.state)


@dataclass(frozen=True, eq=False)
class PlainOptimizer(RestingOptimizer):
    """The optimizer's state rests leaf by leaf.

    Attributes:
      rest: how the parameters rest.
    """

    rest: Plain

    @property
    def layouts(self) -> PyTree:
        """The layout of every leaf of the optimizer's state as it is stored between steps."""
        return self.placed[0]

    def between(self) -> RestingOptimizer:
        """The optimizer whose state rests beside the parameters in their form between steps."""
        rest = self.rest.between()
        return self if rest is self.rest else rest.optimizer(self.tx)

    def specs(self) -> PyTree:
        """The specs of the state's layouts."""
        return specs(self.layouts)

    def first(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Creates the state under `jit`, on the devices where it rests, or in their host memory."""
        offload, wanted = self.placement.plan.offload, shardings(self.between().specs(), mesh)
        if offload.optimizer:
            shapes = jax.eval_shape(self._first, params)
            wanted = jax.tree.map(lambda x, s: s.with_memory_kind(HOST) if movable(x) else s, shapes, wanted)

        def first(params: PyTree) -> PyTree:
            return self._first(to_device_memory(params, offload.params))

        return jax.jit(first, out_shardings=wanted)(params)

    def shapes(self, shapes: Variables) -> PyTree:
        """Zeros in stored form: padded to the layouts."""
        return self._first(self.rest.shapes(shapes).params)

    def update(self, grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array) -> tuple[PyTree, PyTree]:
        """Communicates: on shards, see `OnShards.update`; else one all-gather of all that is split with `update="whole"`."""
        placement = self.placement
        if self.on_shards is not None:
            with jax.named_scope("axonml.update"):
                return self.on_shards.update(grads, opt_state, params, loss)
        if placement.plan.update == "shards":
            return apply(self.tx, grads, opt_state, params, loss)
        layouts = placement.params, self.placed[0]
        with jax.named_scope("axonml.update"):
            grads, params = (gather_stored(tree, placement.params) for tree in (grads, params))
            opt_state = gather_stored(opt_state, layouts[1])
        params, opt_state = apply(self.tx, grads, opt_state, params, loss)
        return own_parts(params, layouts[0]), own_parts(opt_state, layouts[1])

    def tree(self, opt_state: PyTree) -> PyTree:
        """Removes the padding of the state's leaves."""
        layouts = self.layouts
        if all(layout.stored == layout.shape for layout in jax.tree.leaves(layouts, is_leaf=is_layout)):
            return opt_state
        return unpadded(opt_state, layouts, jax.tree.leaves(opt_state)[0].sharding.mesh)

    def leaves(self, opt_state: PyTree) -> PyTree:
        """Every leaf of the state with its layout."""
        return map_layouts(Leaf, opt_state, self.layouts)

    def resting(self, like: PyTree, fill: Callable[[PyTree], PyTree]) -> PyTree:
        """Fills the resting state directly: checkpoints give arrays as they rest."""
        return fill(like)

    def _first(self, params: PyTree) -> PyTree:
        """The optimizer's first state in stored form, from parameters in stored form."""
        whole = map_layouts(from_stored, params, self.placement.params)
        return map_layouts(to_stored, self.tx.init(whole), self.placed[0])


# --------------------------------------------------------------------------------------------------
# Ranks of some axes train models of their own (NO_SYNC): what is trained is stacked along dim 0 over these axes.
# --------------------------------------------------------------------------------------------------


class Stacked(Plain):
    """Each rank trains a model of its own: arrays are stacked by rank, and a step takes its entry, as `Plain` has it."""

    @cached_property
    def layouts(self) -> PyTree:
        """The layouts of trained parameters with the dim of ranks in front."""
        return self.stacked(self.placement.params)

    def optimizer(self, tx: optax.GradientTransformation) -> RestingOptimizer:
        """The optimizer with a state that is stacked by rank too."""
        return StackedOptimizer(tx, self.placement, self)

    def entries(self, params: PyTree) -> PyTree:
        """Stored parameters with one entry along dim 0 for each rank that trains a model of its own."""
        return params

    def local(self, tree: PyTree) -> PyTree:
        """Takes this rank's entry of stacked arrays, inside `shard_map`."""
        return single(tree)

    def stored(self, tree: PyTree) -> PyTree:
        """Returns this rank's values as its entry of stacked arrays; the inverse of `local`."""
        return stacked(tree, self.placement.axes.independent)

    @property
    def means(self) -> PartitionSpec:
        """The spec of a value for each model, stacked by rank."""
        return PartitionSpec(self.placement.axes.independent)

    def whole(self, variables: Variables, mesh: jax.sharding.Mesh) -> Variables:
        """The variables of the first rank's model, without padding."""
        all_of_them = super().whole(variables, mesh)
        return Variables(single(all_of_them.params), all_of_them.frozen, all_of_them.state)

    def _stored(self, variables: Variables) -> Variables:
        stored = super()._stored(variables)
        return Variables(self._repeated(stored.params, self.placement.axes.independent), stored.frozen, stored.state)

    def stacked(self, layouts: PyTree) -> PyTree:
        """Adds the dim of ranks that train models of their own in front of each layout."""
        axes = self.placement.axes.independent
        count = self.placement.ranks(axes)
        return jax.tree.map(lambda layout: layout.stacked(axes, count), layouts, is_leaf=is_layout)


@dataclass(frozen=True, eq=False)
class StackedOptimizer(PlainOptimizer):
    """The state is stacked by rank: one entry for each rank that trains a model of its own."""

    rest: Stacked

    @cached_property
    def layouts(self) -> PyTree:
        """The layouts of the state's leaves with the dim of ranks in front."""
        return self.rest.stacked(self.placed[0])

    def leaves(self, opt_state: PyTree) -> PyTree:
        """Every leaf of the state with its layout, and in words what its dim 0 counts."""
        entries = f"one entry for each of {self.placement.ranks(self.placement.axes.independent)} replicas"
        return map_layouts(lambda array, layout: Leaf(array, layout, entries=entries), opt_state, self.layouts)

    def _first(self, params: PyTree) -> PyTree:
        return jax.vmap(super()._first)(self.rest.entries(params))


# --------------------------------------------------------------------------------------------------
# Replicas train parameters of their own for rounds of steps: these rest stacked, the outer ones as `Plain` has them.
# --------------------------------------------------------------------------------------------------


class InRounds(Stacked):
    """The model's variables are DiLoCo's outer parameters; a step updates the replicas' parameters in the `RoundState`."""

    @cached_property
    def agreed(self) -> Rest:
        """The form in which the outer parameters rest, and the state that replicas share of them."""
        assert self.placement.agreed is not None
        return Plain(self.placement.agreed)

    @property
    def layouts(self) -> PyTree:
        """The layouts of the outer parameters."""
        return self.placement.params

    def whole(self, variables: Variables, mesh: Mesh) -> Variables:
        """The outer parameters without padding."""
        return self.agreed.whole(variables, mesh)

    def clip(self, grads: PyTree, max_norm: jax.Array, p: float, mesh: Mesh) -> tuple[PyTree, jax.Array]:
        """Clips gradients of the outer parameters by their global norm."""
        return self.agreed.clip(grads, max_norm, p, mesh)

    def _stored(self, variables: Variables) -> Variables:
        return Plain._stored(self, variables)

    def entries(self, params: PyTree) -> PyTree:
        """Repeats the outer parameters, from which every replica begins, once for each replica."""
        return self._repeated(params, self.placement.axes.independent)


# --------------------------------------------------------------------------------------------------
# Axes that are left to XLA's partitioner: a step's `shard_map` sees leaves whole along them; between steps they are split.
# --------------------------------------------------------------------------------------------------


class Partitioned(Plain):
    """`Plain` in a step that leaves axes to XLA's partitioner: leaves are split along these axes between steps only."""

    def between(self) -> Rest:
        """The form between steps, in which the partitioner's axes split leaves."""
        return Plain(self.placement.resting)


class PartitionedStacked(Partitioned, Stacked):
    """Each rank of some axes trains a model of its own, and XLA's partitioner splits each of these models."""

    def between(self) -> Rest:
        """The form between steps, in which the partitioner's axes split leaves that are stacked by rank."""
        return Stacked(self.placement.resting)
