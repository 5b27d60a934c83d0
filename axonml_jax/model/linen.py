"""The pure view of a Linen module."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen
from flax.core import unfreeze

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.model.batch_norm import synchronize_linen
from axonml_jax.model.definition_order import noting_calls, order_of_init
from axonml_jax.model.functional import Functional, Mode, Trainable, Variables, abstract
from axonml_jax.model.state_joins import HOOK, Join, declared_joins, linen_kinds
from axonml_jax.model.trainable import merge, partition


def linen_functional(
    module: linen.Module, variables: PyTree, trainable: Trainable = None
) -> tuple["LinenFunctional", Variables]:
    """The pure view of a Linen module, and the variables given for it (all collections, or the params alone)."""
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"params= of a Linen module must be what module.init returned, not a {type(variables).__name__}"
        )
    order = order_of_init(variables.get("params", variables))
    collections = dict(unfreeze(linen.meta.unbox(variables)))
    if "params" not in collections:
        collections = {"params": collections}
    trained, frozen = partition(collections.pop("params"), trainable)
    collections.pop("intermediates", None)
    split = Variables(trained, frozen, collections)
    view = LinenFunctional(module, abstract(split))
    view.order = order
    return view, split


def deferred_linen(
    module: linen.Module, init: Callable[[], PyTree], trainable: Trainable = None
) -> tuple["LinenFunctional", Variables]:
    """The pure view of a Linen module whose variables `init` will make, and their shapes."""
    order: dict[str, tuple] = {}
    view, shapes = linen_functional(module, jax.eval_shape(noting_calls(init, order)), trainable)
    view.order = order or None
    view.create = lambda: linen_functional(module, init(), trainable)[1]
    return view, shapes


class LinenFunctional(Functional):
    """A Linen module and its variables as pure functions."""

    param_prefix = "params/"

    def __init__(self, module: linen.Module, shapes: Variables):
        self._module, self._shapes = module, shapes
        self._types: dict[str, type] = {}

    @property
    def shapes(self) -> Variables:
        """The shapes and dtypes of the module's variables."""
        return self._shapes

    def bind(self, variables: Variables, key: jax.Array, mode: Mode) -> "BoundLinen":
        """The module with its variables, to be called like an NNX module."""
        return BoundLinen(self._module, variables, key, mode, self._types)

    def state_of(self, bound: "BoundLinen") -> PyTree:
        """The non-parameter collections after the bound module's calls; collections that the calls added are dropped."""
        return {name: bound.state[name] for name in self._shapes.state}

    def module(self, variables: Variables) -> linen.Module:
        """A bound copy of the user's module (`module.variables` holds the arrays)."""
        params = merge(variables.params, variables.frozen)
        return self._module.bind({"params": params, **variables.state})

    def module_types(self) -> Mapping[str, type]:
        """The type of every module seen in the calls made so far, by its path."""
        return self._types

    def declares(self, attribute: str) -> bool:
        """Of the model, and of the modules given to it as fields."""
        parts = jax.tree.leaves(
            [getattr(self._module, field.name, None) for field in dataclasses.fields(self._module)],
            is_leaf=lambda x: isinstance(x, linen.Module),
        )
        modules = [self._module, *(part for part in parts if isinstance(part, linen.Module))]
        return any(getattr(type(module), attribute, False) for module in modules)

    def synchronized(self) -> Callable[[str], bool]:
        """The `batch_stats` that `linen.BatchNorm` keeps, recognised by their names."""
        names = named_leaves(self._shapes.state)
        kept = {n for n in names if n.startswith("batch_stats/") and n.rsplit("/", 1)[-1] in ("mean", "var")}
        return kept.__contains__

    def state_joins(self) -> Mapping[str, Join]:
        """As the classes of the modules seen so far declare, of variables in any collection."""
        return declared_joins(linen_kinds(self._types, self._shapes.state), self._shapes.state)

    def after_update(self, state: PyTree) -> PyTree:
        """Nothing: a Linen module has its variables only while it is called.

        Raises:
          ValueError: naming the modules that want to be asked.
        """
        found = ((path or "the root", kind) for path, kind in self._types.items() if hasattr(kind, HOOK))
        hooked = [f"{kind.__name__} at {path}" for path, kind in found]
        if hooked:
            raise ValueError(
                f"{HOOK} runs on NNX modules; a Linen module has variables only while it is called, but these have such a "
                f"method: {', '.join(hooked)}. Write them as NNX modules, or name the method otherwise"
            )
        return state


class BoundLinen:
    """A Linen module with its variables, called like an NNX module: `model(x)`, `model(x, method="encode")`.

    Attributes:
      is_training: what `train()` and `eval()` of the facade set, True where neither was called: a `loss_fn` that also
        evaluates can say `model(x, train=model.is_training)`.
      params: the parameters, read-only by convention.
      state: the other collections, after the calls made so far.
    """

    def __init__(self, module: linen.Module, variables: Variables, key: jax.Array, mode: Mode, types: dict[str, type]):
        self._module, self._mode, self._key, self._calls, self._types = module, mode, key, 0, types
        self.params = merge(variables.params, variables.frozen)
        self.state = dict(variables.state)
        self.is_training = mode.training is not False

    def __call__(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """Apply the module; collections it changes are kept, random streams differ from call to call."""
        key = jax.random.fold_in(self._key, self._calls)
        self._calls += 1
        # Linen's make_rng falls back to the stream "params", so one key serves streams of every name.
        rngs = {"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}
        args, kwargs = self._mode.precision.cast_compute((args, kwargs))

        def note(call: Callable, args: tuple, kwargs: dict, context: Any):
            # Lifted transforms call lambdas of wrappers whose path is empty, like the root's, which comes first.
            self._types.setdefault("/".join(context.module.path), type(context.module))
            return call(*args, **kwargs)

        joined = synchronize_linen(self._mode.batch_norm_axes, self._mode.sum_over_ranks)
        with joined, linen.intercept_methods(note):
            out, changed = self._module.apply(
                {"params": self.params, **self.state},
                *args,
                rngs=rngs,
                mutable=list(self.state),
                method=method,
                **kwargs,
            )
        self.state |= unfreeze(changed)
        return self._mode.precision.cast_output(out)
