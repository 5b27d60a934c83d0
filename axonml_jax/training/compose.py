"""The composition of a training step: three functions, transforms around them, and the state that these keep between steps.

A step is three functions, one inside the other: the whole step, what takes gradients, and what updates. A transform wraps those
of them that it changes and knows of no other transform. `training/transforms.py` lists all that there are, in their order.
"""

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.model.view import Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Leaf
from axonml_jax.training.rest import InRounds, Partitioned, PartitionedStacked, Plain, Rest, RestingOptimizer, Stacked
from axonml_jax.training.state import TrainState

Metrics = dict[str, jax.Array]

# --------------------------------------------------------------------------------------------------
# The three functions, and what goes around them.
# --------------------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """Gradients, loss, metrics and model state of one step, on one rank.

    Attributes:
      grads: synchronized gradients of the resting parameters.
      loss: the mean over the global batch.
      metrics: means over the global batch, by name.
      state: the model's state after the last microbatch, before ranks are made equal.
      left_out: the residual: what rounding left out of this rank's gradients in the sums, where the plan feeds it back.
      norm: the norm of the gradients over all ranks, once it is measured.
    """

    grads: PyTree
    loss: jax.Array
    metrics: Metrics
    state: PyTree
    left_out: PyTree = None
    norm: Any = None


class Reading(NamedTuple):
    """The arguments of a step's differentiation, on one rank.

    Attributes:
      state: this rank's own, as it is before the step.
      batch: this rank's rows.
      options: options of `training/gradients.py`, by keyword.
    """

    state: TrainState
    batch: PyTree
    options: Mapping[str, Any] = MappingProxyType({})


Step = Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]
"""`step(state, batch) -> (state, metrics)`, inside `shard_map`, of states as they rest."""

Differentiate = Callable[[Reading], Gradients]
"""`differentiate(reading) -> made`, on this rank's values."""

Update = Callable[[Gradients, TrainState], tuple[TrainState, Metrics]]
"""`update(made, before) -> (after, metrics)`, on this rank's values: it changes parameters, buffers and extras."""


class StepTransform:
    """One capability of a step. Every `around_...` gives the function back, or another in its place that calls it."""

    def kept(self) -> "dict[str, Kept]":
        """The state that it keeps from one step to the next, by name in `TrainState.extras`."""
        return {}

    def around_step(self, run: Step) -> Step:
        """Wraps the function of the whole step."""
        return run

    def around_gradients(self, run: Differentiate) -> Differentiate:
        """Wraps the function that differentiates."""
        return run

    def around_update(self, run: Update) -> Update:
        """Wraps the function that updates. It returns extras that it changes in the state, where outer transforms see them."""
        return run


def composed(run: Callable, around: str, transforms: tuple[StepTransform, ...]) -> Callable:
    """Wraps a function in all transforms, the first of them outermost.

    >>> class Twice(StepTransform):
    ...     def around_step(self, run):
    ...         return lambda x: 2 * run(x)
    >>> composed(lambda x: x + 1, "around_step", (Twice(), StepTransform()))(3)
    8
    """
    for transform in reversed(transforms):
        run = getattr(transform, around)(run)
    return run


# --------------------------------------------------------------------------------------------------
# What a transform keeps from one step to the next.
# --------------------------------------------------------------------------------------------------


class Kept(abc.ABC):
    """One entry of `TrainState.extras`: how it is made, rests, goes in and out of a step, and is saved."""

    @abc.abstractmethod
    def first(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Its value for a run that begins with these resting parameters, created where it will live."""

    @abc.abstractmethod
    def shapes(self, shapes: Variables) -> PyTree:
        """Its value for a model of these shapes, as zeros: for `jax.eval_shape`."""

    @abc.abstractmethod
    def specs(self, value: PyTree, *, between: bool) -> PyTree:
        """Its PartitionSpecs as the step's `shard_map` takes it, or `between` steps (`Rest.between`)."""

    @abc.abstractmethod
    def leaves(self, value: PyTree) -> dict[str, Leaf]:
        """Its arrays by the names that they have in checkpoints."""

    @abc.abstractmethod
    def filled(self, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
        """The inverse of `leaves`: a value like `like` from arrays by these names."""

    def enter(self, value: PyTree) -> PyTree:
        """This rank's part of its value, inside `shard_map`."""
        return value

    def leave(self, value: PyTree) -> PyTree:
        """The inverse of `enter`."""
        return value


@dataclass(frozen=True)
class AsOptimizer(Kept):
    """State that rests and is named like an optimizer's: an array of a parameter's shape rests as the parameter does.

    Attributes:
      rest: how a step's state rests.
      name: what its names in checkpoints begin with.
      make: its first value, of whole parameters.
    """

    rest: Rest
    name: str
    make: Callable[[PyTree], PyTree]

    @cached_property
    def optimizer(self) -> RestingOptimizer:
        """An optimizer with this state, whose update does nothing."""
        nothing = lambda updates, state, params=None: (updates, state)
        return self.rest.optimizer(optax.GradientTransformation(lambda params: self.make(params), nothing))

    def first(self, params: PyTree, mesh: Mesh) -> PyTree:
        """The first value, each leaf created where it will live."""
        return self.optimizer.first(params, mesh)

    def shapes(self, shapes: Variables) -> PyTree:
        """The first value's shapes, as zeros."""
        return self.optimizer.shapes(shapes)

    def specs(self, value: PyTree, *, between: bool) -> PyTree:
        """The specs of an optimizer's state."""
        return (self.optimizer.between() if between else self.optimizer).specs()

    def enter(self, value: PyTree) -> PyTree:
        """This rank's part of an optimizer's state."""
        return self.rest.local(value)

    def leave(self, value: PyTree) -> PyTree:
        """The inverse of `enter`."""
        return self.rest.stored(value)

    def leaves(self, value: PyTree) -> dict[str, Leaf]:
        """Its arrays with their layouts, by their names in checkpoints."""
        found = named_leaves(self.optimizer.leaves(value))
        return {f"{self.name}/{name}": leaf for name, leaf in found.items()}

    def filled(self, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
        """The value from arrays by their names in checkpoints."""
        return self.optimizer.resting(like, lambda tree: filled(f"{self.name}/", tree, arrays))


def filled(prefix: str, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
    """A tree like `like` from the arrays whose names are a prefix and its leaves' names."""
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[prefix + name] for name in named_leaves(like)])


# --------------------------------------------------------------------------------------------------
# Which resting form a plan has: asked here and nowhere else.
# --------------------------------------------------------------------------------------------------


def rest_of(placement: Placement) -> Rest:
    """The resting form of a plan on its mesh."""
    if placement.stages is not None:
        from axonml_jax.training.staged import Staged

        return Staged(placement)
    if placement.at_rest is not None:
        return PartitionedStacked(placement) if placement.axes.independent else Partitioned(placement)
    if placement.agreed is not None:
        return InRounds(placement)
    return Stacked(placement) if placement.axes.independent else Plain(placement)
