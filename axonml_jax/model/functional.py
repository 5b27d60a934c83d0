"""One pure view of a model, whether it is an NNX or a Linen module."""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree
from axonml_jax.model.precision import Precision
from axonml_jax.model.state_joins import Join

Trainable = str | Sequence[str] | Callable[[str], bool] | Any | None
"""Which parameters train: None (all), regular expressions of path names, a predicate of the path name, or an NNX filter."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Variables:
    """A model's arrays by what happens to them, each a nest of dicts keyed as in the model.

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


class Functional(abc.ABC):
    """A model as pure functions: its variables, a model bound to given ones, and what the forward changed.

    Law: `state_of(bind(variables, key, mode))` before any call is `variables.state`.

    Attributes:
      param_prefix: what path names of parameters start with in a `state_dict`.
      order: of every variable's path a sort key of its place in the model: as its author wrote an NNX module, or as `init` of a
        Linen module called it; None where only names tell (dicts that have been sorted).
      create: makes the model's variables, under `jit` too, where the user gave a function in the place of arrays, or shapes;
        else None.
      hollow: the user gave shapes, and `create` makes zeros: the values are still to be loaded.
    """

    param_prefix: str = ""
    order: Mapping[str, tuple] | None = None
    create: Callable[[], Variables] | None = None
    hollow: bool = False

    @property
    def adapters(self) -> Mapping[str, Any]:
        """The adapters of every matrix that has some, by its path (see `lora/lora_view.py`)."""
        return {}

    @property
    def stacked_dims(self) -> Mapping[str, int]:
        """How many first dims of a parameter number layers or experts, by path, where its module says it (see `STACKED`)."""
        return {}

    @property
    def sides(self) -> Mapping[str, Any]:
        """By which sides of their kernels layers multiply, by path, where they say it (see `lora/sides.py`)."""
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
        """What the user gave, with these arrays in it."""

    @property
    def abstract_module(self) -> Any:
        """An NNX module on shapes, from which metadata of its parameters can be read; None for Linen."""
        return None

    @abc.abstractmethod
    def module_types(self) -> Mapping[str, type]:
        """The type of every module by its path; of a Linen module those seen in the calls made so far."""

    @abc.abstractmethod
    def declares(self, attribute: str) -> bool:
        """Whether the class of the model, or of a module in it that is known before a call, has an attribute that is true."""

    @abc.abstractmethod
    def synchronized(self) -> Callable[[str], bool]:
        """Whether the state leaf of a path name is made equal on all ranks by `Mode.batch_norm_axes` itself."""

    @abc.abstractmethod
    def batch_statistics(self) -> Callable[[str], bool]:
        """Whether the state leaf of a path name is a statistic of batches, which only training may change."""

    @abc.abstractmethod
    def state_joins(self) -> Mapping[str, Join]:
        """How state leaves of which ranks have their own join, by path, where a module class says it in `state_joins`.

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
    """Whether a leaf is the shape of an array in its place."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def abstract(tree: PyTree) -> PyTree:
    """The shape and dtype of every leaf."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
