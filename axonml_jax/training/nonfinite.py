"""Skipping updates that are not finite, on every rank alike and without asking the host, and float16's loss scale."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.sharding.layout import Leaf, place
from axonml_jax.training.compose import Differentiate, Gradients, Kept, Metrics, Reading, StepTransform, Update, filled
from axonml_jax.training.rest import Rest
from axonml_jax.training.state import TrainState

# --------------------------------------------------------------------------------------------------
# Counts of updates that were skipped because something was not finite.
# --------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NonFinite:
    """Counts of skipped updates. After `limit` in a row nothing is updated any more, until the host looks.

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
        """The counts before a run's first step."""
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
    """The loss scale of float16, and its record so far.

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
    """Divides the loss scale out of gradients, in at least float32, which can hold the scale; each keeps its dtype."""

    def divided(g: jax.Array) -> jax.Array:
        wide = jnp.promote_types(g.dtype, scale.dtype)
        return (g.astype(wide) / scale.astype(wide)).astype(g.dtype)

    return jax.tree.map(divided, grads)


def chosen(finite: jax.Array, new: T, old: T) -> T:
    """The new values, or the old ones bit for bit when an update is skipped."""
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


# --------------------------------------------------------------------------------------------------
# Skipping a step's update: of float16, and of runs with `max_nonfinite`.
# --------------------------------------------------------------------------------------------------


def skip_nonfinite(
    state: TrainState, new: Any, old: Any, loss: jax.Array, norm: jax.Array, limit: int | None
) -> tuple[Any, LossScale | None, NonFinite | None, dict[str, jax.Array]]:
    """Keeps the old values where a step's update is not finite: under float16, and where a run has a limit.

    Overflow while float16 looks for its scale is no fault: it counts towards the limit only once the scale is at 1.

    Args:
      state: before the step.
      new, old: what the update changes, after it and before it.
      loss, norm: those of the step, unscaled; the same on all ranks that train one model.
      limit: how many skipped updates in a row end the training; None: there is no guard.

    Returns:
      What is kept, the next loss scale, the next counts, metrics: counts with this step in them, and the scale that it used.
    """
    scale, guard = state.loss_scale, state.guard
    if scale is None and guard is None:
        return new, None, None, {}
    finite, metrics = jnp.isfinite(norm), {}
    good = finite
    if guard is not None:
        assert limit is not None
        good = finite & jnp.isfinite(loss)
        kept = chosen(good & (guard.in_a_row < limit), new, old)
        bad = ~good if scale is None else ~jnp.isfinite(loss) | (~finite & (scale.scale <= 1))
        guard = guard.after(bad, ~good, state.step, limit)
        metrics = {"skipped": guard.skipped, "skipped_in_a_row": guard.in_a_row}
    else:
        kept = chosen(finite, new, old)
    if scale is not None:
        used, scale = scale.scale, scale.after(finite)
        metrics = {"skipped": scale.skipped, **metrics, "loss_scale": used}
    return kept, scale, guard, metrics


@dataclass(frozen=True)
class SkipNonFinite(StepTransform):
    """Skips updates that are not finite: under float16, whose losses are scaled, and where a run has a limit.

    One transform for both, since what overflows while float16 looks for its scale is no fault that counts.

    Attributes:
      rest: how a step's state rests.
      scales: whether losses are scaled.
      limit: how many skipped updates in a row end the training; None: there is no guard.
    """

    rest: Rest
    scales: bool
    limit: int | None

    def kept(self) -> dict[str, Kept]:
        """The loss scale, and the guard's counts, of every model that is trained."""
        kept: dict[str, Kept] = {}
        if self.scales:
            kept["loss_scale"] = Counts(self.rest, "loss_scale", LossScale.first)
        if self.limit is not None:
            kept["guard"] = Counts(self.rest, "guard", NonFinite.first, per_model=True)
        return kept

    def around_gradients(self, run: Differentiate) -> Differentiate:
        """Differentiates the loss times its scale, and divides the gradients by it."""
        if not self.scales:
            return run

        def scaled(reading: Reading) -> Gradients:
            scale = reading.state.loss_scale.scale
            made = run(reading._replace(options={**reading.options, "scale": scale}))
            return made._replace(grads=unscaled(made.grads, scale))

        return scaled

    def around_update(self, run: Update) -> Update:
        """Undoes all that an update has changed where it is skipped."""

        def skipping(made: Gradients, before: TrainState) -> tuple[TrainState, Metrics]:
            after, metrics = run(made, before)
            new, old = self._changed(after), self._changed(before)
            chosen, scale, guard, counts = skip_nonfinite(before, new, old, made.loss, made.norm, self.limit)
            params, opt_state, buffers, extras = chosen
            variables = replace(after.variables, params=params, state=buffers)
            after = replace(after, variables=variables, opt_state=opt_state, extras=extras)
            return after.keeping(loss_scale=scale, guard=guard), metrics | counts

        return skipping

    @staticmethod
    def _changed(state: TrainState) -> tuple:
        extras = state.keeping(loss_scale=None, guard=None).extras
        return state.params, state.opt_state, state.variables.state, extras


@dataclass(frozen=True)
class Counts(Kept):
    """A few scalars of a run: the same on all ranks, or one for each model that is trained (NO_SYNC).

    Attributes:
      rest: how a step's state rests.
      name: what their names in checkpoints begin with.
      make: makes the scalars of a run's first step.
      per_model: whether each model that is trained has its own scalars.
    """

    rest: Rest
    name: str
    make: Callable[[], PyTree]
    per_model: bool = False

    def first(self, params: PyTree, mesh: Mesh) -> PyTree:
        """The scalars of a run's first step, one for each model with `per_model`."""
        axes = self.rest.placement.axes.independent if self.per_model else ()
        shape = (self.rest.placement.ranks(axes),) if axes else ()
        counts = jax.tree.map(lambda count: jnp.broadcast_to(count, shape), self.make())
        return place(counts, self.specs(counts, between=True), mesh)

    def shapes(self, shapes: Any) -> PyTree:
        """The scalars of a run's first step; their shapes are one model's."""
        return self.make()

    def specs(self, value: PyTree, *, between: bool) -> PyTree:
        """Specs of scalars: replicated, or one for each model that is trained."""
        return jax.tree.map(lambda _: self.rest.means if self.per_model else PartitionSpec(), value)

    def enter(self, value: PyTree) -> PyTree:
        """The scalars of this rank's model, inside `shard_map`."""
        return self.rest.local(value) if self.per_model else value

    def leave(self, value: PyTree) -> PyTree:
        """The inverse of `enter`."""
        return self.rest.stored(value) if self.per_model else value

    def leaves(self, value: PyTree) -> dict[str, Leaf]:
        """The scalars by their names in checkpoints."""
        return {f"{self.name}/{name}": Leaf(leaf) for name, leaf in named_leaves(value).items()}

    def filled(self, like: PyTree, arrays: Mapping[str, Any]) -> PyTree:
        """The scalars from arrays by their names in checkpoints."""
        return filled(f"{self.name}/", like, arrays)
