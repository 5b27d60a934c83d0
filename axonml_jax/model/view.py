"""A Flax module, NNX or Linen, as a pure function of named leaves."""

import abc
import collections
import dataclasses
import functools
import gc
import inspect
import itertools
import math
import re
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import unfreeze
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from axonml_jax.base import PyTree, is_array, logger, named_leaves, path_name, some_of
from axonml_jax.compat.order import current_trace, noting_lacked_streams
from axonml_jax.model.buffers import (
    HOOK,
    Join,
    check_same_shapes,
    declared_joins,
    linen_kinds,
    nnx_kinds,
    run_hooks,
    synchronize_linen,
    synchronize_nnx,
    with_hooks,
)
from axonml_jax.model.loss import Precision

# --------------------------------------------------------------------------------------------------
# In which order a model's parameters are read, as far as it can be told before a batch is seen.
#
# Of an NNX module it is that in which its author defined them; of a Linen module that in which `init` called its
# modules.
# --------------------------------------------------------------------------------------------------


def definition_order(model: nnx.Module) -> dict[str, tuple]:
    """Map variables' paths to a sort key: the order in which attributes on the way to them were assigned.

    A shared module has the path of its first assignment here; where Flax names it by another one, that path is not in it.
    """
    return {"/".join(path): place for path, place in _walk(model, (), (), set())}


def _walk(node: Any, path: tuple, place: tuple, seen: set[int]) -> Iterator[tuple[tuple, tuple]]:
    if isinstance(node, nnx.Variable):
        yield path, place
        return
    if id(node) in seen:
        return
    seen.add(id(node))
    for i, (name, child) in enumerate(_children(node)):
        yield from _walk(child, (*path, name), (*place, i), seen)


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, (list, tuple, nnx.List)):
        return [(str(i), child) for i, child in enumerate(node)]
    if isinstance(node, dict):
        return [(str(name), child) for name, child in node.items()]
    if isinstance(node, nnx.Module):
        return [(name, child) for name, child in vars(node).items() if not name.startswith("_pytree")]
    return []


def order_of_init(params: Any) -> dict[str, tuple] | None:
    """Map every parameter's path to a sort key, the order in which Linen's `init` called the modules, read from its dicts.

    None where every dict is in alphabetical order: whatever passes `jit`, `eval_shape` or `jax.tree.map` is.

    >>> order_of_init({"Conv_0": {"kernel": 0}, "BatchNorm_0": {"scale": 0}})
    {'Conv_0/kernel': (0, 0), 'BatchNorm_0/scale': (1, 0)}
    """
    found, tells = {}, False
    todo: list[tuple[Any, tuple, tuple]] = [(params, (), ())]
    while todo:
        node, path, place = todo.pop(0)
        if not isinstance(node, Mapping):
            found["/".join(path)] = place
            continue
        names = list(map(str, node))
        tells |= names != sorted(names)
        todo += [(child, (*path, str(name)), (*place, i)) for i, (name, child) in enumerate(node.items())]
    return found if tells else None


def noting_calls(init: Callable[[], Any], found: dict[str, tuple]) -> Callable[[], Any]:
    """Wrap `init` of a Linen module to store in `found` the order in which it calls the parameters' modules.

    `found` stays empty where no call is seen, as of a jitted function that is traced already.
    """

    def noted() -> Any:
        calls: dict[tuple[str, ...], int] = {}

        def note(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
            calls.setdefault(context.module.path, len(calls))
            return call(*args, **kwargs)

        with linen.intercept_methods(note):
            made = init()
        params = made.get("params", made) if isinstance(made, Mapping) else {}
        if (order := order_of_init(params)) is None and len(calls) > 1:  # sorted: by an inner jit
            names = {name: tuple(name.split("/")) for name in named_leaves(unboxed(params))}
            order = {name: (*_called(calls, path), -1, path[-1]) for name, path in names.items()}
        found.update(order or {})
        return made

    return noted


def unboxed(tree: PyTree) -> PyTree:
    """Remove the boxes from Linen variables without moving arrays: Flax's own `unbox` moves them under a mesh and rules."""

    def value(leaf: Any) -> Any:
        while isinstance(leaf, linen.meta.AxisMetadata):
            leaf = leaf.unbox(apply_constraint=False) if isinstance(leaf, linen.Partitioned) else leaf.unbox()
        return leaf

    return jax.tree.map(value, tree, is_leaf=lambda leaf: isinstance(leaf, linen.meta.AxisMetadata))


def _called(calls: Mapping[tuple[str, ...], int], path: tuple[str, ...]) -> tuple[int, ...]:
    """The order in which the modules on the way to a parameter were first called, from the root inwards."""
    return tuple(calls[path[:end]] for end in range(len(path)) if path[:end] in calls)


# --------------------------------------------------------------------------------------------------
# One pure view of a model, whether it is an NNX or a Linen module.
# --------------------------------------------------------------------------------------------------

Trainable = str | Sequence[str] | Callable[[str], bool] | Any | None
"""Which parameters train: None (all), regular expressions of path names, a predicate of the path name, or an NNX filter: a
type of variables, `nnx.All`, `nnx.PathContains` and its like, or a function of (path, value)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Variables:
    """A model's arrays by their role, each role a nested dict keyed as in the model.

    Attributes:
      params: trained.
      frozen: parameters that are read and never trained.
      state: what the forward pass itself changes, such as running averages of BatchNorm.
    """

    params: PyTree
    frozen: PyTree
    state: PyTree


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How one call of the model runs.

    Attributes:
      training: True or False switch the model as `model.train()` and `model.eval()` do; None leaves it as it was made.
      batch_norm_axes: mesh axes over which BatchNorm statistics are joined; none when empty.
      sum_over_ranks: `sum_over_ranks(x, axes)` with the gradient of the sum of all ranks' losses; needed with axes.
      precision: dtypes of the call's arguments and results.
    """

    training: bool | None = None
    batch_norm_axes: tuple[str, ...] = ()
    sum_over_ranks: Callable[[jax.Array, Any], jax.Array] | None = None
    precision: Precision = Precision()


Made = Callable[[Callable[[], PyTree]], Callable[[], PyTree]]
"""`made(fun)`: the function that makes arrays as `fun` does, for code that cannot run as it is."""


class Functional(abc.ABC):
    """A model as pure functions: its variables, a model bound to given ones, and the state that a forward pass changed.

    Law: `state_of(bind(variables, key, mode))` before any call is `variables.state`.

    Attributes:
      param_prefix: what path names of parameters start with in a `state_dict`.
      order: of every variable's path a sort key of its place in the model: as its author wrote an NNX module, or as `init` of a
        Linen module called it; None where only names tell (dicts that have been sorted).
      create: makes the model's variables, under `jit` too, where the user gave a function in the place of arrays, or shapes;
        else None.
      hollow: the user gave shapes, and `create` makes zeros: the values are still to be loaded.
      users_meshes: those that the model was given with, under the user's names of axes, and on which its arrays lay.
      users_specs: the specs that its arrays had there, one by one, where axes were Explicit; None: no such spec.
    """

    param_prefix: str = ""
    order: Mapping[str, tuple] | None = None
    create: Callable[[], Variables] | None = None
    hollow: bool = False
    users_meshes: tuple[AbstractMesh, ...] = ()
    users_specs: tuple[PartitionSpec | None, ...] = ()

    def given_on(self, mesh: Any) -> None:
        """Record the user's mesh, under which the model was made."""
        self.users_meshes += (mesh.abstract_mesh,) if isinstance(mesh, Mesh) else ()

    @property
    def adapters(self) -> Mapping[str, Any]:
        """The adapters of every matrix that has some, by its path (see `model/lora.py`)."""
        return {}

    @property
    def stacked_dims(self) -> Mapping[str, int]:
        """Number of a parameter's leading dims that count layers or experts, by path, if its module declares it (`STACKED`)."""
        return {}

    @property
    def sides(self) -> Mapping[str, Any]:
        """The input and output dims of layers' kernels, by path, if the layers declare them (see `Sides`)."""
        return {}

    @property
    @abc.abstractmethod
    def shapes(self) -> Variables:
        """The shapes and dtypes of the model's variables; the view itself keeps no arrays alive."""

    @abc.abstractmethod
    def bind(self, variables: Variables, key: jax.Array, mode: Mode) -> Any:
        """The model on these arrays, as `loss_fn` gets it: an NNX module, or a Linen module to call like one.

        Args:
          variables: arrays or tracers in the structure of `shapes`.
          key: every random stream of the model derives from it.
          mode: how it runs.
        """

    @abc.abstractmethod
    def state_of(self, bound: Any) -> PyTree:
        """The state after calls of a bound model, in the structure of `shapes.state`."""

    @abc.abstractmethod
    def module(self, variables: Variables) -> Any:
        """The user's module with these arrays in it."""

    @property
    def abstract_module(self) -> Any:
        """An NNX module on shapes, from which metadata of its parameters can be read; None for Linen."""
        return None

    @abc.abstractmethod
    def module_types(self) -> Mapping[str, type]:
        """The type of every module by its path; of a Linen module those seen in the calls made so far."""

    @abc.abstractmethod
    def declares(self, attribute: str) -> bool:
        """Whether the class of the model, or of a module in it that is known before a call, has this attribute set to true."""

    @abc.abstractmethod
    def synchronized(self) -> Callable[[str], bool]:
        """A predicate of path names: whether `Mode.batch_norm_axes` already makes the state leaf equal on all ranks."""

    @abc.abstractmethod
    def batch_statistics(self) -> Callable[[str], bool]:
        """A predicate of path names: whether the state leaf is a batch statistic, which only training may change."""

    @abc.abstractmethod
    def state_joins(self) -> Mapping[str, Join]:
        """The join of state leaves that differ between ranks, by path, as module classes declare it in `state_joins`.

        Of a Linen module those seen in the calls made so far.

        Raises:
          ValueError: with everything that is wrong with the declarations.
        """

    @abc.abstractmethod
    def after_update(self, state: PyTree) -> PyTree:
        """The state after an update: every module's own `after_update` has run on it, once.

        Raises:
          ValueError: when a hook changed more than the values of state, or cannot run.
        """


def with_zeros(tree: PyTree) -> PyTree:
    """The tree with zeros in the place of shapes (`jax.ShapeDtypeStruct`)."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if is_shape(x) else x, tree)


def is_shape(leaf: Any) -> bool:
    """Whether a leaf is a `jax.ShapeDtypeStruct` instead of an array."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def as_arrays(tree: PyTree, *, strong: bool = False) -> PyTree:
    """The tree with arrays in the place of Python's numbers (`nnx.Param(1.0)`).

    `strong`: weakly typed arrays (`jnp.full(4, 1.0)`) become strongly typed too, because an update of parameters returns strong
    types.
    """
    kept = lambda x: is_shape(x) or (is_array(x) and not (strong and getattr(x, "weak_type", False)))
    return jax.tree.map(lambda x: x if kept(x) else jnp.asarray(x, jnp.result_type(x) if strong else None), tree)


def abstract(tree: PyTree) -> PyTree:
    """The shape and dtype of every leaf."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


# --------------------------------------------------------------------------------------------------
# Which parameters train: splitting a nest of parameters by path name.
# --------------------------------------------------------------------------------------------------


def selector(trainable: Any) -> Callable[[str], bool]:
    """A predicate of path names from None (all), regular expressions (searched in the name), or a predicate.

    >>> selector(["^head/", "bias$"])("blocks/0/bias")
    True
    """
    if trainable is None:
        return lambda name: True
    if is_filter(trainable):
        raise TypeError(
            f"trainable={trainable!r} is a filter of NNX variables, but these parameters are known by name only (as those of "
            "a Linen module, or beside ax.lora): give regular expressions of path names, or a predicate of the path name"
        )
    if callable(trainable):
        return lambda name: bool(trainable(name))
    patterns = [trainable] if isinstance(trainable, str) else trainable
    if not isinstance(patterns, Iterable) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"trainable={trainable!r} does not select parameters: give regular expressions of path names, a predicate "
            "of the path name, an NNX variable type, or None for all"
        )
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise ValueError(f"trainable={trainable!r}: {error.pattern!r} is no regular expression: {error}") from error
    return lambda name: any(pattern.search(name) for pattern in compiled)


def is_filter(trainable: Any) -> bool:
    """Whether `trainable` is a filter of NNX variables, of (path, value), rather than a predicate of path names.

    >>> is_filter(nnx.PathContains("head")), is_filter(lambda path, value: True), is_filter(lambda name: True)
    (True, True, False)
    """
    if isinstance(trainable, list | tuple):
        return any(not isinstance(each, str) for each in trainable)
    if isinstance(trainable, type) or trainable is Ellipsis:
        return True
    try:
        inspect.signature(trainable).bind("name")
    except TypeError:
        return callable(trainable)
    except ValueError:  # a builtin that does not say
        return False
    return False


def partition(params: PyTree, trainable: Any, given: Any = None) -> tuple[PyTree, PyTree]:
    """Split a nest of dicts into (trained, frozen); the two merge back with `merge`. `given` is what the user wrote.

    Raises:
      ValueError: when there are parameters and none of them trains.
    """
    names = list(named_leaves(params))
    select = selector(trainable)
    chosen = {name for name in names if select(name)}
    if names and not chosen:
        raise ValueError(
            f"trainable={trainable if given is None else given!r} matches none of the {len(names)} parameters, so nothing "
            f"would train; their paths are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        )
    return _keep(params, chosen, True, ()), _keep(params, chosen, False, ())


def _keep(tree: PyTree, chosen: set[str], wanted: bool, path: tuple) -> PyTree:
    kept = {}
    for key, value in tree.items():
        name = (*path, str(key))
        if isinstance(value, dict):
            if inner := _keep(value, chosen, wanted, name):
                kept[key] = inner
        elif ("/".join(name) in chosen) == wanted:
            kept[key] = value
    return kept


def merge(*trees: PyTree) -> PyTree:
    """The union of nests of dicts that share no leaf.

    >>> merge({"a": {"x": 1}}, {"a": {"y": 2}}, {})
    {'a': {'x': 1, 'y': 2}}
    """
    merged: dict = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and key in merged
            merged[key] = merge(merged[key], value) if both else value
    return merged


# --------------------------------------------------------------------------------------------------
# Which dims of a parameter number matrices, and which are the two sides of the matrix that a product multiplies by.
#
# A kernel [h, n, d] that attention multiplies x [..., h] by is the matrix [h, n * d], not a stack of h matrices [n, d].
# --------------------------------------------------------------------------------------------------

STACKED = "stacked_dims"
"""Metadata of a parameter: so many of its first dims number matrices, as layers of a stack or experts do."""

WORDS = {"stack": "s", "in": "i", "out": "o"}
"""What a dim may be called: it numbers matrices, is summed over by the product, or is one of its results."""


@dataclass(frozen=True)
class Sides:
    """The roles of a parameter's dims (input or output), of which the first ones may stack matrices.

    Attributes:
      stacked: so many first dims number matrices.
      roles: of each of the others "i" where the product sums over it, "o" where its result has it.
    """

    stacked: int = 0
    roles: str = "io"

    def dims(self, role: str, behind: int | None = None) -> tuple[int, ...]:
        """The dims of a role in the parameter, or among those behind its first `behind` dims instead of the stacked ones."""
        first = self.stacked if behind is None else behind
        return tuple(first + k for k, each in enumerate(self.roles) if each == role)

    def sizes(self, role: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The sizes of the dims of that role."""
        return tuple(shape[dim] for dim in self.dims(role))

    def words(self) -> str:
        """The sides as `dims` of `ax.lora` takes them.

        >>> Sides(1, "ioo").words()
        'stack in out out'
        """
        return " ".join(["stack"] * self.stacked + ["in" if role == "i" else "out" for role in self.roles])

    def joined(self, a: Any, b: Any) -> Any:
        """Multiply A [*stack, *in, r] and B [*stack, r, *out], and order the dims of the product as the parameter's."""
        if self.roles == "io":
            return a @ b
        stack, rank, inputs, outputs = (
            a.shape[: self.stacked],
            a.shape[-1],
            a.shape[self.stacked : -1],
            b.shape[self.stacked + 1 :],
        )
        flat = a.reshape(*stack, math.prod(inputs), rank) @ b.reshape(*stack, rank, math.prod(outputs))
        made, places = flat.reshape(*stack, *inputs, *outputs), [*self.dims("i"), *self.dims("o")]
        return jnp.transpose(
            made, [*range(self.stacked), *(self.stacked + places.index(d) for d in range(self.stacked, made.ndim))]
        )


def said_sides(words: str) -> Sides | str:
    """Parse the sides in a text such as "in out out"; returns them, or the problem with it.

    >>> said_sides("stack in out"), said_sides("in in")
    (Sides(stacked=1, roles='io'), "'in in' needs at least one in and one out, and stack only in front")
    """
    roles = "".join(WORDS.get(word, "?") for word in str(words).split())
    own = roles.lstrip("s")
    if "?" in roles:
        return f"{words!r} must be made of the words {', '.join(WORDS)}, one for every dim"
    if set(own) != {"i", "o"}:
        return f"{words!r} needs at least one in and one out, and stack only in front"
    return Sides(len(roles) - len(own), own)


def layer_sides(model: nnx.Module) -> dict[str, Sides]:
    """The sides of kernels whose layers say how they multiply: `nnx.LinearGeneral`, and layers with an `einsum_str`.

    The first dims that a stack of such layers adds are not counted.
    """
    found: dict[str, Sides] = {}
    for path, module in nnx.iter_graph(model):
        if not isinstance(module, nnx.Module):
            continue
        sides = None
        if isinstance(module, nnx.LinearGeneral):
            sides = Sides(len(module.batch_axis), "i" * len(module.in_features) + "o" * len(module.out_features))
        elif isinstance(text := getattr(module, "einsum_str", None), str):
            sides = _of_einsum(text)
        if sides is not None and (name := _kernel(module, sides)) is not None:
            found["/".join(map(str, (*path, name)))] = sides
    return found


def bias_sides(shapes: Mapping[str, Any], name: str) -> Sides | None:
    """The sides of a Linen kernel whose bias has the dims of its results; None where it has none, or where they leave a doubt.

    >>> import numpy as np
    >>> bias_sides({"q/kernel": np.ones((8, 2, 4)), "q/bias": np.ones((2, 4))}, "q/kernel")
    Sides(stacked=0, roles='ioo')
    """
    bias = shapes.get(name.removesuffix("kernel") + "bias") if name.endswith("/kernel") else None
    if bias is None:
        return None
    shape, own = tuple(shapes[name].shape), tuple(bias.shape)
    fits = [
        Sides(stacked, "i" * (len(shape) - len(own)) + "o" * (len(own) - stacked))
        for stacked in range(len(own))
        if 0 < len(own) < len(shape) and own == (*shape[:stacked], *shape[len(shape) - len(own) + stacked :])
    ]
    return fits[0] if len(fits) == 1 else None


def _kernel(module: nnx.Module, sides: Sides) -> str | None:
    """The name of the parameter that a layer multiplies by."""
    least = sides.stacked + len(sides.roles)
    params = {name: each for name, each in vars(module).items() if isinstance(each, nnx.Param)}
    fitting = [name for name, each in params.items() if name != "bias" and len(each.shape) >= least]
    return "kernel" if "kernel" in fitting else fitting[0] if len(fitting) == 1 else None


def _of_einsum(text: str) -> Sides | None:
    """The sides of an einsum's second operand; None if it is not a matrix that multiplies the first.

    >>> _of_einsum("BSD,CKDH->CBSKH"), _of_einsum("BTNH,NHD->BTD"), _of_einsum("...d,df->...f")
    (Sides(stacked=0, roles='ooio'), Sides(stacked=0, roles='iio'), Sides(stacked=0, roles='io'))
    """
    operands, arrow, made = text.replace(" ", "").partition("->")
    value, comma, kernel = operands.partition(",")
    if not arrow or not comma or not kernel.isalpha() or len(set(kernel)) < len(kernel):
        return None
    roles = "".join(
        ("s" if each in made else "i") if each in value else "o" if each in made else "?" for each in kernel
    )
    own = roles.lstrip("s")
    return Sides(len(roles) - len(own), own) if set(own) == {"i", "o"} else None


# --------------------------------------------------------------------------------------------------
# The pure view of a Linen module.
# --------------------------------------------------------------------------------------------------

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
    """The pure view of a Linen module, and the variables given for it (all collections, or the params alone).

    Raises:
      TypeError: when they are no mapping.
      ValueError: when they hold scales that are to be overwritten by their gradients.
    """
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"params= of a Linen module must be what module.init returned, not a {type(variables).__name__}"
        )
    order = order_of_init(variables.get("params", variables))
    collections = dict(unfreeze(unboxed(variables)))
    if OVERWRITE_WITH_GRADIENT in collections:
        raise ValueError(
            f"{type(module).__name__} has a collection {OVERWRITE_WITH_GRADIENT!r}, as Flax's fp8 layers have: its gradients "
            "are new scales, which a step here would not store. Use layers without it (nn.Dense), and "
            'precision="fp8" of a facade or a plan, whose products of 8-bit floats need no such state'
        )
    if "params" not in collections:
        collections = {"params": collections}
    trained, frozen = partition(collections.pop("params"), trainable)
    collections.pop("intermediates", None)
    split = Variables(as_arrays(trained, strong=True), as_arrays(frozen), as_arrays(collections))
    view = LinenFunctional(module, abstract(split))
    view.order = order
    return view, split


def deferred_linen(
    module: linen.Module, init: Callable[[], PyTree], trainable: Trainable = None, made: Made = lambda fun: fun
) -> tuple["LinenFunctional", Variables]:
    """The pure view of a Linen module whose variables `init` will make, and their shapes."""
    order: dict[str, tuple] = {}
    view, shapes = linen_functional(module, jax.eval_shape(noting_calls(init, order)), trainable)
    view.order = order or None
    view.create = made(lambda: linen_functional(module, init(), trainable)[1])
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
        """Whether the class of the model, or of a module given to it as a field, has this attribute set to true."""
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
        """A predicate of path names: whether the leaf is in the collection `batch_stats`."""
        return lambda name: name.startswith("batch_stats/")

    def state_joins(self) -> Mapping[str, Join]:
        """The joins that the classes of the modules seen so far declare, for variables in any collection."""
        return declared_joins(linen_kinds(self._types, self._shapes.state), self._shapes.state)

    def after_update(self, state: PyTree) -> PyTree:
        """Return the state unchanged: a Linen module has its variables only while it is called.

        Raises:
          ValueError: naming the modules that want to be asked.
        """
        found = ((path or "the root", kind) for path, kind in self._types.items() if hasattr(kind, HOOK))
        hooked = [f"{kind.__name__} at {path}" for path, kind in found]
        if hooked:
            raise ValueError(
                f"{HOOK} runs on NNX modules only, because a Linen module has variables only while it is called; these Linen "
                f"modules have such a method: {', '.join(hooked)}. Write them as NNX modules, or rename the method"
            )
        return state


_ASKED: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()
"""The streams besides `params` that a class's modules have drawn from, or asked for: kept, because `nn.jit` asks but once."""


def _streams(key: jax.Array, asked: Iterable[str]) -> dict[str, jax.Array]:
    """A call's random streams by name; with `params` and `dropout` alone, `make_rng` draws any other from `params`."""
    numbers = {name: zlib.crc32(name.encode()) for name in sorted(set(asked))} | {"params": 0, "dropout": 1}
    return {name: jax.random.fold_in(key, number) for name, number in numbers.items()}


@contextmanager
def _explained(fixed: bool) -> Iterator[None]:
    """Raise an error that names what a call tried to change, where nothing may be changed."""
    try:
        yield
    except flax.errors.ModifyScopeVariableError as error:
        if not fixed:
            raise
        raise ValueError(
            "the loss calls the model within jax.jit, jax.grad, jax.vmap, jax.checkpoint or a JAX loop, and the change of its "
            f"state there would be lost ({error}): call it outside, or as in evaluation (train=False), or "
            "let the module do that itself (nn.jit, nn.remat, nn.scan)"
        ) from None


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
        self._said, self._trace, self._fixed = said, current_trace(), False
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
                f"leave {' and '.join(given)} out of model(...): the model provides random streams of every name, and keeps "
                "the state that a call changes"
            )
        if self._mode.training is False:
            module, kwargs = self._evaluating(method, args, kwargs)
        key = jax.random.fold_in(self._key, self._calls)
        self._calls += 1
        args, kwargs = self._mode.precision.cast_compute((args, kwargs))

        def note(call: Callable, args: tuple, kwargs: dict, context: Any):
            # Lifted transforms call lambdas of wrappers whose path is empty, like the root's, which comes first.
            self._types.setdefault("/".join(context.module.path), type(context.module))
            if self._mode.training is False and isinstance(context.module, linen.Dropout):
                self._note_dropout(context.module, args, kwargs)
            return call(*args, **kwargs)

        fixed = self.is_within
        joined = synchronize_linen(self._mode.batch_norm_axes, self._mode.sum_over_ranks)
        asked = _ASKED.setdefault(type(module), set())
        with joined, linen.intercept_methods(note), noting_lacked_streams(asked), _explained(fixed):
            while True:
                streams = _streams(key, () if self._mode.training is False else asked)
                out, changed = module.apply(
                    {"params": self.params, **self.state},
                    *args,
                    rngs=streams,
                    mutable=[] if fixed else list(self.state),
                    method=method,
                    **kwargs,
                )
                if self._mode.training is False or asked <= streams.keys():
                    break
        self._check_kept(changed := unfreeze(changed))
        self.state |= changed
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
        """The module and keywords of a call in evaluation; each flag that differs from training is reported once."""
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
                    f"evaluation calls {whose}({words}), because the loss does not pass it; to choose it yourself, write "
                    "model(x, train=model.is_training)"
                )
        return module, kwargs | {flag: value for flag, (value, _) in given.items()}

    def _note_dropout(self, module: linen.Dropout, args: tuple, kwargs: dict) -> None:
        """Report that units are dropped in an evaluation, which some want and most forgot."""
        given = kwargs.get("deterministic", args[1] if len(args) > 1 else None)
        if not (module.deterministic if given is None else given) and module.rate:
            path = "/".join(module.path)
            self._say(f"{path} drops units in evaluation too, because it is made or called with deterministic=False")

    @property
    def is_within(self) -> bool:
        """Whether the call is traced by a JAX transform inside the loss, where changes of state would be lost."""
        return self._fixed or current_trace() != self._trace

    def fix(self) -> None:
        """Forbid calls to change state."""
        self._fixed = True

    def _check_kept(self, changed: PyTree) -> None:
        """Refuse state that grows with every call: a step must end with the state's structure that it began with."""
        if new := sorted(named_leaves(changed).keys() - named_leaves(self.state).keys()):
            own = sorted({name.partition("/")[0] for name in new})
            raise ValueError(
                f"{type(self._module).__name__} adds {', '.join(new)} to its state when it is called, as `sow` does. Leave "
                f"{', '.join(own)} out of params=, and read what a call sows inside the loss: out, sown = "
                f"module.apply({{'params': model.params, **model.state}}, x, mutable={own})"
            )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)


def evaluation_flags(
    module: linen.Module, method: Any, args: tuple, kwargs: dict
) -> tuple[dict[str, bool], dict[str, tuple[bool, Any]]]:
    """The changes that turn a call into evaluation: new values of module fields, and of arguments with their defaults.

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


# --------------------------------------------------------------------------------------------------
# The pure view of an NNX module.
# --------------------------------------------------------------------------------------------------


def nnx_functional(model: nnx.Module, trainable: Trainable = None) -> tuple["NNXFunctional", Variables]:
    """The pure view of an NNX module, and its arrays.

    Raises:
      ValueError: when an `nnx.RngKey` holds numbers instead of a key, by path: a step could not give it a key of its own.
    """
    graphdef, params, streams, state = nnx.split(model, nnx.Param, nnx.RngState, ...)
    _refuse_raw_keys(streams)
    select = trainable
    if is_filter(trainable):
        wanted = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, _filter(trainable)))}
        select = wanted.__contains__
    trained, frozen = partition(nnx.to_pure_dict(params), select, given=trainable)
    state = as_arrays(_without_intermediates(state))
    variables = Variables(as_arrays(trained, strong=True), as_arrays(frozen), state)
    view = NNXFunctional(graphdef, nnx.to_pure_dict(streams), abstract(variables))
    view.order = definition_order(model)
    return view, variables


def _refuse_raw_keys(streams: nnx.State) -> None:
    is_raw = lambda x: isinstance(x, nnx.RngKey) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if raw := ["/".join(map(str, path)) for path, x in nnx.to_flat_state(streams) if is_raw(x)]:
        raise ValueError(
            f"the model's nnx.RngKey holds numbers instead of a key: {', '.join(raw)}. Make it of jax.random.key(seed) or "
            "jax.random.wrap_key_data(numbers), so that every step can give it a key of its own"
        )


def _filter(trainable: Any) -> Callable[[Any, Any], bool]:
    """Resolve an NNX filter as Flax reads it.

    Raises:
      TypeError: for what Flax takes for none.
    """
    try:
        return nnx.filterlib.to_predicate(tuple(trainable) if isinstance(trainable, list) else trainable)
    except TypeError as error:
        raise TypeError(
            f"trainable={trainable!r} does not select parameters: give regular expressions of path names, a predicate "
            f"of the path name, or an NNX filter ({error})"
        ) from None


def plain_tree(tree: PyTree) -> PyTree:
    """Convert parameters to a nested dict, out of an `nnx.State` or Linen's boxes."""
    if isinstance(tree, nnx.State):
        kept = nnx.filter_state(tree, lambda path, x: isinstance(x, nnx.Param) or not isinstance(x, nnx.Variable))
        tree = nnx.to_pure_dict(kept)
    return unboxed(tree)


def deferred_nnx(
    make: Callable[[], nnx.Module], trainable: Trainable = None, made: Made = lambda fun: fun
) -> tuple["NNXFunctional", Variables]:
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
    view.create = made(lambda: nnx_functional(make(), trainable)[1])
    # Streams are a few words; jit drops the rest of the model.
    view._make_streams = jax.jit(made(lambda: nnx.to_pure_dict(nnx.state(make(), nnx.RngState))))
    return view, shapes


class Written:
    """Records the parameters that model code overwrote in its calls."""

    def __init__(self) -> None:
        self._given: dict[str, list[Any]] = {}
        self.found: dict[str, Any] = {}

    def bind(self, params: Mapping[str, Any]) -> None:
        """Record the parameters that a module was made with."""
        for name, leaf in params.items():
            self._given.setdefault(name, []).append(leaf)

    def note(self, params: Mapping[str, Any]) -> None:
        """Compare a module's parameters after its calls with those it was made with, and record the changed ones."""
        given = self._given
        self.found |= {name: x for name, x in params.items() if all(x is not each for each in given.get(name, [x]))}


_written: ContextVar[Written | None] = ContextVar("written", default=None)


@contextmanager
def noting_written() -> Iterator[Written]:
    """Record in the block what NNX modules write into their parameters."""
    token = _written.set(written := Written())
    try:
        yield written
    finally:
        _written.reset(token)


class NNXFunctional(Functional):
    """An NNX module as pure functions. The user's module itself is never changed.

    Tied modules and parameters are one leaf. Random streams are no variables: they restart from the key of every call.
    """

    def __init__(self, graphdef: nnx.GraphDef, streams: PyTree, shapes: Variables):
        self.graphdef, self._streams, self._shapes = graphdef, streams, shapes
        self._make_streams: Callable[[], PyTree] = lambda: with_zeros(streams)
        self._types: Mapping[str, type] | None = None

    @property
    def stacked_dims(self) -> Mapping[str, int]:
        """Number of leading stacked dims of each parameter, from its metadata."""
        flat = nnx.to_flat_state(nnx.state(self.abstract_module, nnx.Param))
        return {"/".join(map(str, path)): leaf.get_metadata().get(STACKED, 0) for path, leaf in flat}

    @property
    def sides(self) -> Mapping[str, Sides]:
        """The sides of kernels, read from the layers that multiply by them."""
        return layer_sides(self.abstract_module)

    @property
    def shapes(self) -> Variables:
        """The shapes and dtypes of the module's variables."""
        return self._shapes

    def bind(self, variables: Variables, key: jax.Array, mode: Mode) -> nnx.Module:
        """A new module of the user's class on these arrays."""
        params = merge(variables.params, variables.frozen)
        if (written := _written.get()) is not None:
            written.bind(named_leaves(params))
        model = nnx.merge(self.graphdef, params, self._restart(key), variables.state, copy=True)
        if mode.training is not None:
            model.train() if mode.training else model.eval()
        if mode.batch_norm_axes and mode.sum_over_ranks is not None and self._has_batch_norm:
            synchronize_nnx(model, mode.batch_norm_axes, mode.sum_over_ranks)
        if mode.precision != Precision():
            model.__class__ = _casting_class(type(model), mode.precision)
        return model

    def state_of(self, bound: nnx.Module) -> PyTree:
        """The module's state after its calls; variables that the calls added (such as `sow`) are dropped."""
        _, params, _, state = nnx.split(bound, nnx.Param, nnx.RngState, ...)
        if (written := _written.get()) is not None:
            written.note(named_leaves(nnx.to_pure_dict(params)))
        state = nnx.to_pure_dict(state)
        return _like(self._shapes.state, state)

    def module(self, variables: Variables) -> nnx.Module:
        """A module of the user's class and structure holding these arrays."""
        params = merge(variables.params, variables.frozen)
        return nnx.merge(self.graphdef, params, self._make_streams(), variables.state, copy=True)

    def module_types(self) -> Mapping[str, type]:
        """The type of every module by its path."""
        if self._types is None:
            model = self.abstract_module
            self._types = {
                "/".join(map(str, p)): type(m) for p, m in nnx.iter_graph(model) if isinstance(m, nnx.Module)
            }
        return self._types

    @functools.cached_property
    def _has_batch_norm(self) -> bool:
        return any(issubclass(kind, nnx.BatchNorm) for kind in self.module_types().values())

    def declares(self, attribute: str) -> bool:
        """Whether the class of any of its modules has this attribute set to true."""
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
        """A predicate of path names: whether the leaf is an `nnx.BatchStat`."""
        flat = nnx.to_flat_state(nnx.state(self.abstract_module, nnx.BatchStat))
        return {"/".join(map(str, path)) for path, _ in flat}.__contains__

    def state_joins(self) -> Mapping[str, Join]:
        """The joins that the modules' classes declare."""
        return declared_joins(nnx_kinds(self.abstract_module, self._shapes.state), self._shapes.state)

    def after_update(self, state: PyTree) -> PyTree:
        """Run the hooks on a module with this state, and shapes instead of all other variables."""
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
                fresh.append(_keys_of(stream, leaf.shape) if leaf.shape else stream)
            else:
                fresh.append(jnp.zeros(leaf.shape, leaf.dtype))
        return treedef.unflatten(fresh)


def _keys_of(stream: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Keys of a stack of streams; under keys of rows none of its dims is taken for the rows."""
    from axonml_jax.compat.row_keys import is_row_key

    if not is_row_key(stream):
        return jax.random.split(stream, shape)
    numbers = jnp.arange(math.prod(shape))
    return jax.vmap(lambda number: jax.random.fold_in(stream, number))(numbers).reshape(shape)


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


# --------------------------------------------------------------------------------------------------
# A model's variables by path name: those of a pure view, and those of whatever a user may hold a model's arrays in.
# --------------------------------------------------------------------------------------------------


def named_variables(model: Functional, variables: Variables) -> dict[str, Any]:
    """Every variable by its name in a `state_dict`, parameters first."""
    prefix = model.param_prefix
    params = {prefix + n: x for tree in (variables.params, variables.frozen) for n, x in named_leaves(tree).items()}
    return params | named_leaves(variables.state)


def named_arrays(given: Any) -> dict[str, Any]:
    """Arrays by path name, of an NNX module, Linen variables, a nested state, or a flat mapping as it is.

    Random streams and what a call has sown are no variables and are left out of a module and of an `nnx.State`.

    Raises:
      TypeError: for anything else, with what to give in its place, and for leaves that are no arrays, all by path.
      ValueError: listing paths that are written the same.

    >>> named_arrays({"params": {"dense": {"kernel": 1.0}}, "a/b": 2.0})
    {'a/b': 2.0, 'params/dense/kernel': 1.0}
    """
    if isinstance(given, nnx.Module):
        return _checked(list(named_variables(*nnx_functional(given)).items()))
    if isinstance(given, nnx.State):
        given = nnx.to_pure_dict(nnx.filter_state(given, nnx.Not(nnx.Any(nnx.RngState, nnx.Intermediate))))
    if not isinstance(given, Mapping):
        raise TypeError(f"give a flax.nnx.Module or arrays by name, not {_words(given)}")
    leaves = jax.tree_util.tree_flatten_with_path(unfreeze(unboxed(dict(given))), is_leaf=_whole)[0]
    return _checked([(path_name(p), x.get_value() if isinstance(x, nnx.Variable) else x) for p, x in leaves])


def _checked(leaves: list[tuple[str, Any]]) -> dict[str, Any]:
    foreign = [f"{name}: {_words(leaf)}" for name, leaf in leaves if _is_foreign(leaf)]
    if foreign:
        raise TypeError(f"these values are not arrays: {'; '.join(foreign)}. Leave them out")
    counts = collections.Counter(name for name, _ in leaves)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"several values have the same path: {', '.join(twice)}. Rename one of each")
    return dict(leaves)


def _is_foreign(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):  # whose values stay where they are
        return False
    return np.asarray(leaf).dtype.kind in "OUSMm"


def _whole(value: Any) -> bool:
    return value is None or isinstance(value, nnx.Variable)


def _words(given: Any) -> str:
    kind = type(given).__name__
    if isinstance(given, linen.Module):
        return f"the Linen module {kind}, which holds no arrays: give its variables"
    if hasattr(given, "state_dict"):
        return f"a {kind}: call its state_dict() in every process and give what that returns"
    return f"a {kind}"


# --------------------------------------------------------------------------------------------------
# What a model returns with arrays in it where JAX does not see them: in objects of other classes, functions, generators.
# --------------------------------------------------------------------------------------------------


def refuse_hidden(out: Any) -> None:
    """Refuse outputs of the model, within its trace, that hold arrays where JAX does not find them."""
    if hidden := hidden_arrays(out):
        raise TypeError(hidden_words(hidden))


@contextmanager
def unwritten(given: PyTree, name: Callable[[tuple], str]) -> Iterator[None]:
    """Within this context, a trace, a call may not write into modules and variables that it is given: it would be lost.

    Raises:
      ValueError: naming what was written, by the name of the argument's path.
    """
    is_node = lambda x: isinstance(x, (nnx.Module, nnx.Variable))
    found = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(given, is_leaf=is_node) if is_node(x)]
    before = [named_leaves(node) for _, node in found]
    yield
    written = []
    for (path, node), old in zip(found, before, strict=True):
        new = named_leaves(node)
        changed = [leaf for leaf in {**old, **new} if old.get(leaf) is not new.get(leaf)]
        if parts := [leaf.removesuffix("value").rstrip("/") or "its value" for leaf in changed]:
            written.append(f"{name(path)}, of class {type(node).__name__} ({some_of(parts)})")
    if written:
        raise ValueError(
            f"a call writes into what it is given: {'; '.join(written)}. Under a plan it gives back what it returns, and "
            "all else that it makes is lost: let it return the new values, a cache as a dict of arrays that goes in and comes "
            "out; keep them in the model, as its own state or its own nnx.Rngs; or make them inside of predict_fn, and run the "
            "whole loop there: trainer.predict([batch], predict_fn)"
        )


def hidden_arrays(out: Any, given: Sequence[Any] = ()) -> dict[int, str]:
    """Numbers of the leaves that hide arrays of a call from JAX; those that the call was given it may return."""
    leaves = enumerate(jax.tree_util.tree_flatten_with_path(out)[0])
    opaque = {n: (path_name(path) or "the result", x) for n, (path, x) in leaves if not is_array(x)}
    known = tracers_within(*given) if opaque else {}
    found = {n: named for n, named in opaque.items() if tracers_within(named[1]).keys() - known.keys()}
    return {n: f"{name}: a {type(x).__name__}" for n, (name, x) in found.items()}


def hidden_words(hidden: Mapping[int, str], path: Iterable[Any] = (), method: str = "__call__") -> str:
    """The message that refuses outputs with hidden arrays."""
    call = ".".join(["model", *map(str, path), *([] if method == "__call__" else [method])])
    return (
        f"{call}(...) returned arrays inside objects that are not pytrees: {'; '.join(hidden.values())}. Register the class "
        "(jax.tree_util.register_dataclass, flax.struct.dataclass, nnx.Pytree), or return the arrays in a dict or a tuple"
    )


_DEPTH = 8
"""How far what a model returns is looked into; an object, its fields and their values are three."""


def tracers_within(*values: Any) -> dict[int, Tracer]:
    """Tracers reachable from the values, by identity; of a function its closure and defaults, not its module's names."""
    found, seen, of_function = {}, {}, lambda x: (x.__closure__, x.__defaults__, x.__kwdefaults__)
    for _ in range(_DEPTH):
        level = {id(x): x for x in values if id(x) not in seen and not isinstance(x, (type, types.ModuleType))}
        seen |= level
        found |= {key: x for key, x in level.items() if isinstance(x, Tracer)}
        inner = [
            of_function(x) if inspect.isfunction(x) else gc.get_referents(x) for k, x in level.items() if k not in found
        ]
        values = tuple(itertools.chain(*inner))
    return found


# --------------------------------------------------------------------------------------------------
# From the model a user gives to its pure view.
# --------------------------------------------------------------------------------------------------


class ModelAround(abc.ABC):
    """A wrapper that users give as a model, such as `ax.lora`'s result: a model and a change to it.

    Attributes:
      model: the model.
    """

    model: Any

    @abc.abstractmethod
    def view(self, params: PyTree | None, trainable: Trainable, made: Made) -> tuple[Functional, Variables]:
        """The functional view and variables that `functionalize` returns for it, of the same arguments."""


def functionalize(
    model: Any, params: PyTree | None = None, trainable: Trainable = None, made: Made = lambda fun: fun
) -> tuple[Functional, Variables]:
    """The pure view of a model, and its arrays (not copies), or their shapes where they are still to be made or loaded.

    Args:
      model: an `nnx.Module`, a function without arguments that makes one, or a `linen.Module` given with its variables; or one
        of them with adapters (`ax.lora`), which train. A module of shapes (`nnx.eval_shape`) has zeros until it is loaded.
      params: for Linen, what `module.init` returned (`{"params": ..., "batch_stats": ...}` or the params alone), a
        function without arguments that makes it, or its shapes (`jax.eval_shape`).
      trainable: which parameters train; with adapters, which of the model's own train besides them.
      made: how functions that the user gave make arrays.

    Raises:
      TypeError: when `model` is none of these.
      ValueError: when `params` is missing or superfluous, when `trainable` matches nothing, or for arrays of which only some
        are given as shapes.
    """
    if isinstance(model, ModelAround):
        return model.view(params, trainable, made)
    if isinstance(model, linen.Module):
        if params is None:
            raise ValueError(
                f"{type(model).__name__} is a Linen module and holds no arrays: give its variables too, "
                "params=module.init(key, example)"
            )
        if callable(params):
            return deferred_linen(model, params, trainable, made)
        return _given(*linen_functional(model, params, trainable))
    if isinstance(model, nnx.Module):
        if params is not None:
            raise ValueError(f"{type(model).__name__} is an NNX module and holds its own arrays: leave params= out")
        return _given(*nnx_functional(model, trainable))
    if callable(model) and not isinstance(model, type) and not hasattr(model, "state_dict"):  # as a torch.nn.Module has
        make: Any = model
        try:
            inspect.signature(make).bind()
        except TypeError as error:
            raise TypeError(
                "a model is a flax.nnx.Module, or a function without arguments that makes one, but a function was given that "
                f"cannot be called so: {error}"
            ) from None
        if params is not None:
            raise ValueError("a function that makes an NNX module makes its arrays too: leave params= out")
        return deferred_nnx(make, trainable, made)
    raise TypeError(
        "a model is a flax.nnx.Module, a function without arguments that makes one, or a flax.linen.Module with params=, but "
        f"{f'the class {model.__name__}' if isinstance(model, type) else f'a {type(model).__name__}'} was given"
    )


def _given(view: Functional, variables: Variables) -> tuple[Functional, Variables]:
    """The view of a model that was given with its arrays, or as shapes."""
    leaves = named_leaves(variables)
    lies = [getattr(leaf, "sharding", None) for leaf in leaves.values()]
    meshes = {each.mesh.abstract_mesh: None for each in lies if isinstance(each, NamedSharding)}
    view.users_meshes = (*view.users_meshes, *meshes)
    typed = lambda each: isinstance(each, NamedSharding) and AxisType.Explicit in each.mesh.axis_types
    view.users_specs = tuple(each.spec if each is not None and typed(each) else None for each in lies)
    shapes = [name for name, leaf in leaves.items() if is_shape(leaf)]
    if shapes and len(shapes) < len(leaves):
        raise ValueError(
            "a model is given with its arrays, or as shapes (nnx.eval_shape, jax.eval_shape), but of "
            f"{len(leaves)} arrays these are shapes: {', '.join(shapes)}"
        )
    if shapes:
        view.create, view.hollow = (lambda: with_zeros(variables)), True
        view.order = None  # a module of shapes has its attributes in alphabetical order
    return view, variables
