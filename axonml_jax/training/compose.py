"""What a step is composed of: what it keeps from one to the next beside parameters and the optimizer's state."""

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.model.view import Variables
from axonml_jax.sharding.layout import Leaf
from axonml_jax.training.rest import Rest


class Kept(abc.ABC):
    """One entry of `TrainState.extras`: how it is made, rests, goes in and out of a step, and is saved."""

    @abc.abstractmethod
    def first(self, params: PyTree, mesh: Mesh) -> PyTree:
        """That of a run that begins with these resting parameters, made where it will live."""

    @abc.abstractmethod
    def shapes(self, shapes: Variables) -> PyTree:
        """That of a model of these shapes, as zeros: for `jax.eval_shape`."""

    @abc.abstractmethod
    def specs(self, value: PyTree, rest: Rest) -> PyTree:
        """Its PartitionSpecs, in a form of rest: a step's own, or that between steps (`Rest.between`)."""

    @abc.abstractmethod
    def leaves(self, value: PyTree) -> dict[str, Leaf]:
        """By the names that it has in checkpoints."""

    @abc.abstractmethod
    def filled(self, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
        """The inverse of `leaves`: a value like one, of arrays by these names."""

    def enter(self, value: PyTree) -> PyTree:
        """This rank's own, inside `shard_map`."""
        return value

    def leave(self, value: PyTree) -> PyTree:
        """The inverse of `enter`."""
        return value


@dataclass(frozen=True)
class AsOptimizer(Kept):
    """What lives, and is named, as an optimizer's state: an array of a parameter's shape rests as the parameter does.

    Attributes:
      rest: how a step's state rests.
      name: what its names in checkpoints begin with.
      make: its first value, of whole parameters.
    """

    rest: Rest
    name: str
    make: Callable[[PyTree], PyTree]

    @property
    def tx(self) -> optax.GradientTransformation:
        """An optimizer with this state, which does nothing."""
        return optax.GradientTransformation(self.make, lambda updates, state, params=None: (updates, state))

    def first(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Each leaf made where it will live."""
        return self.rest.first_opt_state(self.tx, params, mesh)

    def shapes(self, shapes: Variables) -> PyTree:
        """As zeros."""
        return self.rest.shapes(shapes, self.tx)[1]

    def specs(self, value: PyTree, rest: Rest) -> PyTree:
        """As an optimizer's."""
        return rest.opt_specs(self.tx)

    def enter(self, value: PyTree) -> PyTree:
        """This rank's entry."""
        return self.rest.own(value)

    def leave(self, value: PyTree) -> PyTree:
        """The inverse."""
        return self.rest.kept(value)

    def leaves(self, value: PyTree) -> dict[str, Leaf]:
        """With their layouts."""
        found = named_leaves(self.rest.opt_leaves(self.tx, value))
        return {f"{self.name}/{name}": leaf for name, leaf in found.items()}

    def filled(self, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
        """Of arrays by these names."""
        return self.rest.resting_opt(self.tx, like, lambda tree: filled(f"{self.name}/", tree, arrays))


def filled(prefix: str, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
    """A tree like one, of the arrays that have its leaves' names behind a prefix."""
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[prefix + name] for name in named_leaves(like)])
