"""The pure view of an NNX module."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.model.batch_norm import synchronize_nnx
from axonml_jax.model.definition_order import definition_order
from axonml_jax.model.functional import Functional, Mode, Trainable, Variables, abstract, with_zeros
from axonml_jax.model.lora.sides import STACKED, Sides, layer_sides
from axonml_jax.model.precision import Precision
from axonml_jax.model.state_joins import HOOK, Join, check_same_shapes, declared_joins, nnx_kinds, run_hooks, with_hooks
from axonml_jax.model.trainable import merge, partition


def nnx_functional(model: nnx.Module, trainable: Trainable = None) -> tuple["NNXFunctional", Variables]:
    """The pure view of an NNX module, and its arrays."""
    graphdef, params, streams, state = nnx.split(model, nnx.Param, nnx.RngState, ...)
    select = trainable
    if isinstance(trainable, type):
        wanted = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, trainable))}
        select = wanted.__contains__
    trained, frozen = partition(nnx.to_pure_dict(params), select, given=trainable)
    variables = Variables(trained, frozen, _without_intermediates(state))
    view = NNXFunctional(graphdef, nnx.to_pure_dict(streams), abstract(variables))
    view.order = definition_order(model)
    return view, variables


def deferred_nnx(make: Callable[[], nnx.Module], trainable: Trainable = None) -> tuple["NNXFunctional", Variables]:
    """The pure view of the NNX module that `make` will make, and the shapes of its arrays.

    Raises:
      TypeError: when it makes something else.
    """
    orders: list[dict[str, tuple]] = []

    def noted() -> nnx.Module:
        made = make()
        if not isinstance(made, nnx.Module):
            raise TypeError(
                f"the function given as a model made a {type(made).__name__}: it must return a flax.nnx.Module"
            )
        orders.append(definition_order(made))  # `eval_shape` returns attributes in alphabetical order
        return made

    view, shapes = nnx_functional(nnx.eval_shape(noted), trainable)
    view.order = orders[-1]
    view.create = lambda: nnx_functional(make(), trainable)[1]
    # Streams are a few words; jit drops the rest of the model.
    view._make_streams = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make(), nnx.RngState)))
    return view, shapes


class NNXFunctional(Functional):
    """An NNX module as pure functions. The user's module itself is never changed.

    Tied modules and parameters are one leaf. Random streams are no variables: they restart from the key of every call.
    """

    def __init__(self, graphdef: nnx.GraphDef, streams: PyTree, shapes: Variables):
        self.graphdef, self._streams, self._shapes = graphdef, streams, shapes
        self._make_streams: Callable[[], PyTree] = lambda: with_zeros(streams)

    @property
    def stacked_dims(self) -> Mapping[str, int]:
        """As metadata of its parameters."""
        flat = nnx.to_flat_state(nnx.state(self.abstract_module, nnx.Param))
        return {"/".join(map(str, path)): leaf.get_metadata().get(STACKED, 0) for path, leaf in flat}

    @property
    def sides(self) -> Mapping[str, Sides]:
        """As its layers multiply."""
        return layer_sides(self.abstract_module)

    @property
    def shapes(self) -> Variables:
        """The shapes and dtypes of the module's variables."""
        return self._shapes

    def bind(self, variables: Variables, key: jax.Array, mode: Mode) -> nnx.Module:
        """A new module of the user's class on these arrays."""
        params = merge(variables.params, variables.frozen)
        model = nnx.merge(self.graphdef, params, self._restart(key), variables.state, copy=True)
        if mode.training is not None:
            model.train() if mode.training else model.eval()
        if mode.batch_norm_axes and mode.sum_over_ranks is not None:
            synchronize_nnx(model, mode.batch_norm_axes, mode.sum_over_ranks)
        if mode.precision != Precision():
            model.__class__ = _casting_class(type(model), mode.precision)
        return model

    def state_of(self, bound: nnx.Module) -> PyTree:
        """The module's state after its calls; variables that the calls added (such as `sow`) are dropped."""
        _, _, _, state = nnx.split(bound, nnx.Param, nnx.RngState, ...)
        state = nnx.to_pure_dict(state)
        return _like(self._shapes.state, state)

    def module(self, variables: Variables) -> nnx.Module:
        """A module of the user's class and structure holding these arrays."""
        params = merge(variables.params, variables.frozen)
        return nnx.merge(self.graphdef, params, self._make_streams(), variables.state, copy=True)

    def module_types(self) -> Mapping[str, type]:
        """The type of every module by its path."""
        model = self.abstract_module
        return {"/".join(map(str, p)): type(m) for p, m in nnx.iter_graph(model) if isinstance(m, nnx.Module)}

    def declares(self, attribute: str) -> bool:
        """Of all its modules."""
        return any(getattr(kind, attribute, False) for kind in self.module_types().values())

    def synchronized(self) -> Callable[[str], bool]:
        """The running averages of every `nnx.BatchNorm` that joins no axes of its own."""
        model = self.abstract_module
        owners = {
            "/".join(map(str, (*path, leaf)))
            for path, module in nnx.iter_graph(model)
            if isinstance(module, nnx.BatchNorm) and module.axis_name is None
            for leaf in ("mean", "var")
        }
        return owners.__contains__

    def batch_statistics(self) -> Callable[[str], bool]:
        """Every `nnx.BatchStat`."""
        flat = nnx.to_flat_state(nnx.state(self.abstract_module, nnx.BatchStat))
        return {"/".join(map(str, path)) for path, _ in flat}.__contains__

    def state_joins(self) -> Mapping[str, Join]:
        """As the modules' classes declare."""
        return declared_joins(nnx_kinds(self.abstract_module, self._shapes.state), self._shapes.state)

    def after_update(self, state: PyTree) -> PyTree:
        """The hooks run on a module that holds this state, and shapes in the place of all else."""
        params = merge(self._shapes.params, self._shapes.frozen)
        model = nnx.merge(self.graphdef, params, self._streams, state, copy=True)
        modules = with_hooks(model)
        if not modules:
            return state
        run_hooks(modules)
        changed = named_leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        own = named_leaves(params)
        if wrong := [name for name, leaf in changed.items() if leaf is not own.get(name)]:
            raise ValueError(
                f"{HOOK} may change a model's state only: parameters are changed by the optimizer, but it changed "
                f"{', '.join(wrong)}"
            )
        new = self.state_of(model)
        check_same_shapes(state, new)
        return new

    @property
    def abstract_module(self) -> nnx.Module:
        """The module on shapes."""
        params = merge(self._shapes.params, self._shapes.frozen)
        return nnx.merge(self.graphdef, params, self._streams, self._shapes.state, copy=True)

    def _restart(self, key: jax.Array) -> PyTree:
        leaves, treedef = jax.tree.flatten(self._streams)
        fresh = []
        for i, leaf in enumerate(leaves):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                stream = jax.random.fold_in(key, i)
                fresh.append(jax.random.split(stream, leaf.shape) if leaf.shape else stream)
            else:
                fresh.append(jnp.zeros(leaf.shape, leaf.dtype))
        return treedef.unflatten(fresh)


def _without_intermediates(state) -> PyTree:
    return nnx.to_pure_dict(nnx.filter_state(state, nnx.Not(nnx.Intermediate)))


def _like(structure: PyTree, tree: PyTree) -> PyTree:
    found = named_leaves(tree)
    names = list(named_leaves(structure))
    return jax.tree.unflatten(jax.tree.structure(structure), [found[name] for name in names])


_CASTING: dict[tuple[type, Precision], type] = {}


def _casting_class(cls: type, precision: Precision) -> type:
    """A subclass of the user's class whose call casts its floating arguments and results."""
    if (cls, precision) not in _CASTING:

        def __call__(self, *args: Any, **kwargs: Any):
            args, kwargs = precision.cast_compute((args, kwargs))
            return precision.cast_output(cls.__call__(self, *args, **kwargs))

        _CASTING[cls, precision] = type(cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__})
    return _CASTING[cls, precision]
