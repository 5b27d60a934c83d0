"""`TrainState`, and what it holds for loss scales, guards, strategies and rounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax.base import PyTree, named_leaves, path_name
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.model.view import Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Layout, Leaf, is_layout, shardings, to_host
from axonml_jax.strategies.strategy import AbstractStrategy

# --------------------------------------------------------------------------------------------------
# Gradients of every batch shard by itself (`no_sync`): stacked by rank along dim 0, whole but for what layers split.
# --------------------------------------------------------------------------------------------------


def each_ranks_specs(placement: Placement) -> PyTree:
    """The specs of gradients stacked by rank: dim 0 over the batch axes, the others as the model's layers split them.

    Raises:
      ValueError: listing parameters that are split over an axis that splits the batch too (`depth`, `expert`), whose ranks
        share one.
    """
    both = set(placement.batch_axes) & set(placement.layer_axes)
    shared = [
        path_name(path)
        for path, layout in jax.tree_util.tree_leaves_with_path(placement.params, is_leaf=is_layout)
        if both.intersection(layout.axes)
    ]
    if shared:
        more = ", ..." if len(shared) > 8 else ""
        raise ValueError(
            "every rank's own values are stacked along the batch axes, but ranks along "
            f"{', '.join(sorted(both))}, which split the batch, share these parameters: {', '.join(shared[:8])}{more}. "
            "Accumulate inside the step (accumulate=) instead"
        )

    def spec(layout: Layout) -> PartitionSpec:
        axes = [
            tuple(axis for axis in layout.axes_of(dim) if axis in placement.layer_axes)
            for dim in range(min(len(layout.spec), len(layout.shape)))
        ]
        return PartitionSpec(placement.batch_axes, *(entry[0] if len(entry) == 1 else entry or None for entry in axes))

    return jax.tree.map(spec, placement.params, is_leaf=is_layout)


# --------------------------------------------------------------------------------------------------
# Counts of updates that were skipped because something was not finite.
# --------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NonFinite:
    """How often updates were skipped. After `limit` in a row nothing is updated any more, until the host looks.

    Attributes:
      skipped: int32 scalar, updates skipped so far.
      in_a_row: int32 scalar, those since the last good one.
      since: int32 scalar, `TrainState.step` before the first of those.
    """

    skipped: jax.Array
    in_a_row: jax.Array
    since: jax.Array

    @staticmethod
    def first() -> "NonFinite":
        """At a run's first step."""
        return NonFinite(jnp.int32(0), jnp.int32(0), jnp.int32(0))

    def after(self, bad: jax.Array, skipped: jax.Array, step: jax.Array, limit: int) -> "NonFinite":
        """The counts after a step.

        Args:
          bad: whether it counts towards the limit.
          skipped: whether its update was skipped.
          step: `TrainState.step` before it.
          limit: how many in a row end the training.
        """
        halted = self.in_a_row >= limit
        row = jnp.where(halted, self.in_a_row, jnp.where(bad, self.in_a_row + 1, 0))
        since = jnp.where(self.in_a_row == 0, step, self.since)
        return NonFinite(self.skipped + jnp.where(halted | ~skipped, 0, 1), row, since)


# --------------------------------------------------------------------------------------------------
# Dynamic loss scaling for float16 (Micikevicius et al. 2018): gradients are scaled up so that small ones do not vanish.
# --------------------------------------------------------------------------------------------------

T = TypeVar("T")

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 200


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The factor by which losses are multiplied, and how it has been faring.

    Attributes:
      scale: float32 scalar. It starts at 2^16, doubles after 200 clean steps, and halves when gradients overflow.
      clean: int32 scalar, steps without overflow since it last changed.
      skipped: int32 scalar, updates that were skipped because gradients overflowed.
    """

    scale: jax.Array
    clean: jax.Array
    skipped: jax.Array

    @staticmethod
    def first() -> "LossScale":
        """The scale of a run's first step."""
        return LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0), jnp.int32(0))

    def after(self, finite: jax.Array) -> "LossScale":
        """The scale of the next step, given whether this one's gradients were finite."""
        grown = self.clean + 1 >= GROWTH_INTERVAL
        up = jnp.where(grown, self.scale * 2, self.scale)
        return LossScale(
            jnp.where(finite, up, jnp.maximum(self.scale / 2, 1.0)),
            jnp.where(finite & ~grown, self.clean + 1, 0),
            self.skipped + jnp.where(finite, 0, 1),
        )


def unscaled(grads: PyTree, scale: jax.Array) -> PyTree:
    """Gradients of the loss itself."""
    return jax.tree.map(lambda g: g / scale.astype(g.dtype), grads)


def chosen(finite: jax.Array, new: T, old: T) -> T:
    """The new values, or the old ones bit for bit when an update is skipped."""
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


# --------------------------------------------------------------------------------------------------
# The learning rate of a run, where its optimizer's state says it.
# --------------------------------------------------------------------------------------------------

_INJECTED = "hyperparams/learning_rate"


def injected_rate(opt_state: Any) -> float:
    """The learning rate that `optax.inject_hyperparams` keeps in an optimizer's state. Every process must call it.

    Args:
      opt_state: the state as it rests, under any plan.

    Raises:
      ValueError: when the state has none, or several that differ.

    >>> import optax
    >>> injected_rate(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5).init({"w": 1.0}))
    0.5
    """
    names = {name: leaf for name, leaf in named_leaves(opt_state).items() if f"/{name}".endswith(f"/{_INJECTED}")}
    found = {name: np.asarray(value).ravel() for name, value in to_host(names).items()}
    if not found:
        raise ValueError(
            "the optimizer's state does not say its learning rate: a schedule or number given to optax stays inside of its "
            "functions. Make the optimizer as optax.inject_hyperparams(optax.adamw)(learning_rate=...)"
        )
    rates = sorted({float(rate) for value in found.values() for rate in value})
    if len(rates) > 1:
        said = ", ".join(f"{name}={value.tolist()}" for name, value in found.items())
        raise ValueError(
            f"the optimizer has several learning rates: {said}. Read the one you mean from the trainer's state"
        )
    return rates[0]


# --------------------------------------------------------------------------------------------------
# What a run whose ranks train parameters of their own for rounds of steps (`LocalRounds`) keeps beside the outer ones.
# --------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundState:
    """Beside the outer parameters, which are the model's variables.

    Attributes:
      own: the trained parameters of every replica, stacked along dim 0.
      kept: what replicas keep together of each outer parameter, such as its momentum.
    """

    own: PyTree
    kept: PyTree


# --------------------------------------------------------------------------------------------------
# What strategies keep between steps beside parameters, such as the error of a lossy gather or the anchor of local
# steps.
#
# It lives as the optimizer's state does: a leaf of a parameter's shape rests as the parameter does.
# --------------------------------------------------------------------------------------------------


def stateful(placement: Placement) -> dict[AxisNames, AbstractStrategy]:
    """The strategies of a plan that act between steps, outermost first."""
    return {axis: each for axis, each in placement.strategies.items() if each.acts_between_steps}


def keeping(placement: Placement) -> optax.GradientTransformation | None:
    """Something whose `init` makes the strategies' first state, to rest as an optimizer's does; None: there is none."""
    strategies = stateful(placement)
    if not strategies:
        return None

    def first(params: PyTree) -> dict[str, PyTree]:
        return {_name(axis): jax.tree.map(each.init_state, params) for axis, each in strategies.items()}

    return optax.GradientTransformation(first, lambda updates, state, params=None: (updates, state))


def to_read(placement: Placement, params: PyTree, state: Mapping[str, PyTree]) -> PyTree:
    """What is gathered in the place of resting shards, inside `shard_map` (`AbstractStrategy.to_read`)."""
    for axis, each in stateful(placement).items():
        call = lambda shard, own, layout, axis=axis, each=each: each.to_read(shard, own, layout, axis)
        params = _per_leaf(placement, call, (params,), state[_name(axis)])[0]
    return params


def after_update(
    placement: Placement, params: PyTree, before: PyTree, state: Mapping[str, PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    """Parameters and the strategies' state after an update, inside `shard_map` (`AbstractStrategy.after_update`)."""
    new = dict(state)
    for axis, each in stateful(placement).items():

        def call(shard, before, own, layout, axis=axis, each=each):
            return each.after_update(shard, own, layout, axis, before=before)

        params, new[_name(axis)] = _per_leaf(placement, call, (params, before), state[_name(axis)], pairs=True)
    return params, new


def _per_leaf(placement: Placement, call: Callable, trees: tuple, state: PyTree, pairs: bool = False) -> tuple:
    """`call(leaves, state, layout)` of every parameter: results, or results and states, as trees."""
    leaves, treedef = jax.tree.flatten(trees[0])
    others = [jax.tree.leaves(tree) for tree in trees[1:]]
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    made = [call(*each) for each in zip(leaves, *others, treedef.flatten_up_to(state), layouts, strict=True)]
    if not pairs:
        return (treedef.unflatten(made),)
    return treedef.unflatten([shard for shard, _ in made]), treedef.unflatten([own for _, own in made])


def _name(axis: AxisNames) -> str:
    return "*".join(as_axes(axis))


# --------------------------------------------------------------------------------------------------
# What sums of gradients lack of every rank's own, kept from step to step: stacked by rank, as no two ranks' are alike.
# --------------------------------------------------------------------------------------------------

LEFT_OUT = "left_out/"
"""What the names of these arrays start with in checkpoints; the rest is their parameter's name."""


def left_out_specs(placement: Placement) -> PyTree:
    """Of every parameter, with a dim of ranks in front; None: the plan feeds nothing back."""
    return each_ranks_specs(placement) if _feeds_back(placement) else None


def nothing_left_out(placement: Placement) -> PyTree:
    """Zeros: of a run that begins, [ranks, *shape] for every parameter, in the dtype in which its gradients accumulate."""
    if not _feeds_back(placement):
        return None
    kind = placement.plan.precision.accumulate_dtype
    zeros = lambda layout: jnp.zeros((placement.batch_degree, *layout.shape), kind(layout.dtype))
    return jax.tree.map(zeros, placement.params, is_leaf=is_layout)


def first_left_out(placement: Placement, mesh: Mesh) -> PyTree:
    """The same where they live, made there."""
    if not _feeds_back(placement):
        return None
    wanted = shardings(left_out_specs(placement), mesh)
    return jax.jit(lambda: nothing_left_out(placement), out_shardings=wanted)()


def left_out_leaves(placement: Placement, left_out: PyTree) -> dict[str, Leaf]:
    """By name: what checkpoints hold."""
    entries = f"one entry for each of {placement.batch_degree} ranks"
    return {LEFT_OUT + name: Leaf(array, entries=entries) for name, array in named_leaves(left_out).items()}


def left_out_of(like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
    """The inverse; what is missing begins with nothing."""
    found = [arrays.get(LEFT_OUT + name) for name in named_leaves(like)]
    leaves, treedef = jax.tree.flatten(like)
    zeros = lambda leaf: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)
    return treedef.unflatten([zeros(leaf) if own is None else own for leaf, own in zip(leaves, found, strict=True)])


def _feeds_back(placement: Placement) -> bool:
    return any(strategy.feeds_back for strategy in placement.strategies.values())


# --------------------------------------------------------------------------------------------------
# Everything a training run is between two steps, as one value.
# --------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run: save it and the run can go on as if it had never stopped.

    Attributes:
      step: int32 scalar, the number of updates made.
      variables: the model's arrays.
      opt_state: the optimizer's state.
      key: the run's randomness; step i draws from `fold_in(key, i)`.
      loss_scale: of float16 training, else None.
      strategies: what strategies keep between steps, by axis (see `AbstractStrategy.init_state`); None: nothing.
      guard: counts of skipped updates where non-finite ones are skipped (`max_nonfinite`), else None.
      rounds: replicas' own parameters where they train by themselves for rounds of steps (`ax.DiLoCo`), and what they keep
        together; `variables` are then the outer ones. Else None.
      left_out: what the sums of the last step lacked of every rank's gradients, [ranks, *shape] for every trained parameter,
        where a strategy feeds it back (`AbstractStrategy.feeds_back`), else None.
    """

    step: jax.Array
    variables: Variables
    opt_state: Any
    key: jax.Array
    loss_scale: LossScale | None = None
    guard: NonFinite | None = None
    strategies: Any = None
    rounds: RoundState | None = None
    left_out: Any = None

    @property
    def params(self) -> PyTree:
        """The trained parameters."""
        return self.variables.params
