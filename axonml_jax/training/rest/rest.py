"""The interface of every resting form."""

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax._types import PyTree
from axonml_jax.collectives.varying import vary
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.model.loss import Loss
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import shardings
from axonml_jax.training.objective import Objective
from axonml_jax.training.optimizer.norm import Part
from axonml_jax.training.optimizer.sharded.on_shards import OnShards
from axonml_jax.training.rest.layer_norms import Square
from axonml_jax.training.state.left_out import left_out_specs
from axonml_jax.training.state.round_state import RoundState
from axonml_jax.training.state.strategy_state import keeping
from axonml_jax.training.state.train_state import TrainState


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

    @abc.abstractmethod
    def opt_specs(self, tx: optax.GradientTransformation) -> PyTree:
        """The same of the optimizer's state."""

    def between(self) -> "Rest":
        """The form in which arrays are between steps, where that is not what the step's `shard_map` takes."""
        return self

    def settled(self, state: TrainState, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
        """A step's new state where the next step wants it: the partitioner is told what it would be free to choose."""
        if not self.placement.left:
            return state
        return jax.lax.with_sharding_constraint(state, shardings(self.between().state_specs(tx, state), mesh))

    def state_specs(self, tx: optax.GradientTransformation, state: TrainState) -> Any:
        """Specs of a whole `TrainState`."""
        everywhere = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
        return replace(
            state,
            step=PartitionSpec(),
            variables=self.specs(state.variables),
            opt_state=self.opt_specs(tx),
            key=PartitionSpec(),
            loss_scale=everywhere(state.loss_scale),
            guard=jax.tree.map(lambda _: self.means, state.guard),
            rounds=self.round_specs(),
            strategies=None if (kept := keeping(self.placement)) is None else self.opt_specs(kept),
            left_out=left_out_specs(self.placement),
        )

    def buffer_specs(self, state: PyTree) -> PyTree:
        """Specs of the model's own state: stacked along the axes whose ranks keep buffers of their own."""
        axes = self.placement.buffer_axes
        return jax.tree.map(lambda _: PartitionSpec(axes) if axes is not None else PartitionSpec(), state)

    # Making

    @abc.abstractmethod
    def place(self, variables: Variables, mesh: Mesh) -> Variables:
        """Whole variables (the same in every process) as they rest; copies, never the arrays given."""

    @abc.abstractmethod
    def create(self, model: Functional, mesh: Mesh) -> Variables:
        """A model's variables by `model.create`, made where they will rest: none is whole on any device."""

    @abc.abstractmethod
    def first_opt_state(self, tx: optax.GradientTransformation, params: PyTree, mesh: Mesh) -> PyTree:
        """The optimizer's first state, of resting parameters, each leaf made where it will live."""

    @abc.abstractmethod
    def shapes(self, shapes: Variables, tx: optax.GradientTransformation) -> tuple[Variables, PyTree]:
        """The resting variables and optimizer state of a model of these shapes, as zeros: for `jax.eval_shape`."""

    # Rounds, in which replicas train parameters of their own; None where there are none

    def round_specs(self) -> RoundState | None:
        """Specs of what a run keeps beside the outer parameters."""
        return None

    def first_round(self, params: PyTree, mesh: Mesh) -> RoundState | None:
        """That of a round that begins with these resting parameters, none of it ever whole."""
        return None

    def round_shapes(self, shapes: Variables) -> RoundState | None:
        """Of a model of these shapes, as zeros: for `jax.eval_shape`."""
        return None

    def round_leaves(self, rounds: RoundState) -> RoundState | None:
        """As trees of `Leaf`: what checkpoints hold. They give the arrays back as they rest."""
        return None

    # A step's way in and out

    def own(self, tree: PyTree) -> PyTree:
        """Inside `shard_map`: this rank's own of what rests of trained parameters, or of what lives as they do."""
        return tree

    def kept(self, tree: PyTree) -> PyTree:
        """The inverse of `own`."""
        return tree

    @property
    def means(self) -> PartitionSpec:
        """The spec of what `kept` makes of a value that is the same on all ranks that train one model: a loss, a norm."""
        return PartitionSpec()

    def enter(self, variables: Variables) -> Variables:
        """This rank's own variables, inside `shard_map`."""
        axes = self.placement.buffer_axes
        state = variables.state if axes is None else single(variables.state)
        return Variables(self.own(variables.params), variables.frozen, state)

    def leave(self, variables: Variables) -> Variables:
        """The inverse of `enter`."""
        axes = self.placement.buffer_axes
        state = variables.state if axes is None else stacked(variables.state, axes)
        return Variables(self.kept(variables.params), variables.frozen, state)

    # Reading and updating

    @abc.abstractmethod
    def read(self, fun: Callable, model: Functional, variables: Variables, *args: Any) -> Any:
        """`fun(read_variables, *args)` inside `shard_map`, without gradients; `variables` are this rank's own."""

    def loss(self, objective: Objective, variables: Variables, key: jax.Array, batch: PyTree) -> Loss:
        """The loss of this rank's rows, without gradients, in microbatches, so that memory does for it that does for a step.

        As many as the plan's number and the rows have in common. What is gathered when it is used is so in every microbatch.
        """
        layout, plan = self.placement.batch_layout, self.placement.plan
        model, count = objective.model, layout.common_count(batch, plan.microbatches)
        if count == 1:
            return self.read(objective, model, variables, key, batch)[0]
        keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(count))
        parts = keys, layout.microbatches(batch, count)
        if self.placement.gathers_when_used:
            losses = jax.lax.map(lambda part: self.read(objective, model, variables, *part)[0], parts)
        else:
            of_all = lambda read, parts: jax.lax.map(lambda part: objective(read, *part)[0], parts)
            losses = self.read(of_all, model, variables, parts)
        loss = jax.tree.map(lambda x: x.sum(0), losses)
        return loss if loss.weight is not None else loss._replace(total=loss.total / count)

    @abc.abstractmethod
    def parts(self, grads: PyTree) -> Iterable[Part]:
        """Every array of gradients at rest."""

    @abc.abstractmethod
    def squares(self, tree: PyTree) -> Iterable[Square]:
        """Of trained parameters, or of their gradients, at rest: the sum of squares of this rank's part; inside `shard_map`."""

    @abc.abstractmethod
    def update(
        self,
        tx: optax.GradientTransformation,
        on_shards: OnShards | None,
        grads: PyTree,
        opt_state: PyTree,
        params: PyTree,
        loss: jax.Array,
    ) -> tuple[PyTree, PyTree]:
        """One update by the optimizer, inside `shard_map`: on shards (`OnShards.of`), or on gathered leaves if it is None."""

    @property
    def updates_in_slices(self) -> bool:
        """Whether large leaves that rest on the host may be updated slice by slice."""
        return False

    # What users and checkpoints see

    @abc.abstractmethod
    def outside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Trained parameters (or gradients of them) as the model's tree, without padding."""

    @abc.abstractmethod
    def outside_frozen(self, frozen: PyTree, mesh: Mesh) -> PyTree:
        """The same of frozen parameters."""

    @abc.abstractmethod
    def inside(self, params: PyTree, mesh: Mesh) -> PyTree:
        """The inverse of `outside`; an array that is where it belongs already stays the caller's own."""

    @abc.abstractmethod
    def clip(self, grads: PyTree, max_norm: jax.Array, p: float, mesh: Mesh) -> tuple[PyTree, jax.Array]:
        """What `outside` gave of gradients, clipped by their p-norm; under `jit`."""

    def whole(self, variables: Variables, mesh: Mesh) -> Variables:
        """The variables without padding; where ranks keep their own, the first rank's."""
        params, frozen = self.outside(variables.params, mesh), self.outside_frozen(variables.frozen, mesh)
        state = variables.state if self.placement.buffer_axes is None else single(variables.state)
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

    @abc.abstractmethod
    def opt_tree(self, tx: optax.GradientTransformation, opt_state: PyTree) -> PyTree:
        """The optimizer's state as the tree that optax made, every array in the shape that it has on one device."""

    @abc.abstractmethod
    def opt_leaves(self, tx: optax.GradientTransformation, opt_state: PyTree) -> PyTree:
        """The optimizer's state as a tree of `Leaf`."""

    @abc.abstractmethod
    def resting_opt(self, tx: optax.GradientTransformation, like: PyTree, fill: Callable[[PyTree], PyTree]) -> PyTree:
        """The optimizer's resting state from arrays like those of `opt_leaves`; see `resting`."""


def single(tree: PyTree) -> PyTree:
    """A rank's own entries of values that are stacked by rank along dim 0."""
    return jax.tree.map(lambda x: x[0], tree)


def stacked(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Every leaf [...] as this rank's entry [1, ...] of a value stacked along dim 0 over mesh axes. The inverse of `single`."""
    return jax.tree.map(lambda x: vary(jnp.asarray(x), axes)[None], tree)
