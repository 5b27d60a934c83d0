"""The pure view of a Linen module."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen
from flax.core import unfreeze

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.logging import logger
from axonml_jax.model.batch_norm import synchronize_linen
from axonml_jax.model.definition_order import noting_calls, order_of_init
from axonml_jax.model.functional import Functional, Mode, Trainable, Variables, abstract
from axonml_jax.model.state_joins import HOOK, Join, declared_joins, linen_kinds
from axonml_jax.model.trainable import merge, partition

EVALUATES = {
    "train": False,
    "training": False,
    "is_training": False,
    "deterministic": True,
    "use_running_average": True,
}
"""What Flax's users call the flag that tells training from evaluation, and its value in evaluation."""


_CALLED = (
    "call it, model(x) or model(x, method='encode'), in the place of module.apply(variables, x); `model.params` and "
    "`model.state` are its arrays"
)


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
        self._said: set[str] = set()

    @property
    def shapes(self) -> Variables:
        """The shapes and dtypes of the module's variables."""
        return self._shapes

    def bind(self, variables: Variables, key: jax.Array, mode: Mode) -> "BoundLinen":
        """The module with its variables, to be called like an NNX module."""
        return BoundLinen(self._module, variables, key, mode, self._types, self._said)

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

    def batch_statistics(self) -> Callable[[str], bool]:
        """The collection `batch_stats`."""
        return lambda name: name.startswith("batch_stats/")

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

    def __init__(
        self,
        module: linen.Module,
        variables: Variables,
        key: jax.Array,
        mode: Mode,
        types: dict[str, type],
        said: set[str],
    ):
        self._module, self._mode, self._key, self._calls, self._types = module, mode, key, 0, types
        self._said = said
        self.params = merge(variables.params, variables.frozen)
        self.state = dict(variables.state)
        self.is_training = mode.training is not False

    def __call__(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """Apply the module; collections it changes are kept, random streams differ from call to call.

        In evaluation a flag of `EVALUATES` that the call has and is not given gets its value there.
        """
        module = self._module
        if given := [f"{name}=" for name in ("rngs", "mutable") if name in kwargs]:
            raise TypeError(
                f"leave {' and '.join(given)} out of model(...): the model has random streams of every name, and keeps what a "
                "call changes"
            )
        if self._mode.training is False:
            module, kwargs = self._evaluating(method, args, kwargs)
        key = jax.random.fold_in(self._key, self._calls)
        self._calls += 1
        # Linen's make_rng falls back to the stream "params", so one key serves streams of every name.
        rngs = {"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}
        args, kwargs = self._mode.precision.cast_compute((args, kwargs))

        def note(call: Callable, args: tuple, kwargs: dict, context: Any):
            # Lifted transforms call lambdas of wrappers whose path is empty, like the root's, which comes first.
            self._types.setdefault("/".join(context.module.path), type(context.module))
            if self._mode.training is False and isinstance(context.module, linen.Dropout):
                self._note_dropout(context.module, args, kwargs)
            return call(*args, **kwargs)

        joined = synchronize_linen(self._mode.batch_norm_axes, self._mode.sum_over_ranks)
        with joined, linen.intercept_methods(note):
            out, changed = module.apply(
                {"params": self.params, **self.state},
                *args,
                rngs=rngs,
                mutable=list(self.state),
                method=method,
                **kwargs,
            )
        self.state |= unfreeze(changed)
        return self._mode.precision.cast_output(out)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(f"{self._named()} has no `{name}`: {_CALLED}", name=name, obj=self)

    def __getitem__(self, name: Any) -> Any:
        raise TypeError(f"{self._named()} is no mapping with an entry {name!r}: {_CALLED}")

    def __contains__(self, name: Any) -> bool:
        raise TypeError(f"{self._named()} is no mapping of variables: {_CALLED}")

    def _named(self) -> str:
        return f"the model that a loss gets ({type(self._module).__name__} with its variables in it)"

    def _evaluating(self, method: Any, args: tuple, kwargs: dict) -> tuple[linen.Module, dict]:
        """The module and the keywords of a call in evaluation; what becomes another than in training is said once."""
        module, name = self._module, type(self._module).__name__
        fields, given = evaluation_flags(module, method, args, kwargs)
        if fields:
            module = module.clone(**fields)  # pyright: ignore[reportArgumentType]  # the names are of its fields
        call = method if isinstance(method, str) else getattr(method, "__name__", "__call__")
        changed = {name: fields, f"{name}.{call}": {k: v for k, (v, usual) in given.items() if usual is not v}}
        for whose, flags in changed.items():
            words = ", ".join(f"{flag}={value}" for flag, value in flags.items())
            if flags:
                self._say(
                    f"evaluation calls {whose}({words}), as the loss does not say it: model(x, train=model.is_training)"
                )
        return module, kwargs | {flag: value for flag, (value, _) in given.items()}

    def _note_dropout(self, module: linen.Dropout, args: tuple, kwargs: dict) -> None:
        """Say that units are dropped in an evaluation, which some want and most forgot."""
        given = kwargs.get("deterministic", args[1] if len(args) > 1 else None)
        if not (module.deterministic if given is None else given) and module.rate:
            path = "/".join(module.path)
            self._say(f"{path} drops units in evaluation too: it is made or called with deterministic=False")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)


def evaluation_flags(
    module: linen.Module, method: Any, args: tuple, kwargs: dict
) -> tuple[dict[str, bool], dict[str, tuple[bool, Any]]]:
    """What turns a call into evaluation: fields of the module with other values, and arguments with their defaults.

    Both are empty where the caller gives such a flag: then the caller decides. An argument that is None by default stays so
    where a field of its name decides (`linen.merge_param`).
    """
    function = type(module).__call__ if method is None else method
    function = getattr(type(module), function, None) if isinstance(function, str) else function
    try:
        signature = inspect.signature(getattr(function, "__func__", function))  # pyright: ignore[reportArgumentType]
        said = signature.bind_partial(module, *args, **kwargs).arguments
    except (TypeError, ValueError):
        return {}, {}  # Flax says what is wrong with the call
    if EVALUATES.keys() & said.keys():
        return {}, {}
    own = {flag: getattr(module, flag) for flag in EVALUATES if flag in {f.name for f in dataclasses.fields(module)}}
    fields = {
        flag: EVALUATES[flag] for flag, value in own.items() if value is not None and value is not EVALUATES[flag]
    }
    usual = {flag: each.default for flag, each in signature.parameters.items() if flag in EVALUATES}
    decided = {flag for flag, default in usual.items() if default is None and own.get(flag) is not None}
    return fields, {flag: (EVALUATES[flag], default) for flag, default in usual.items() if flag not in decided}
