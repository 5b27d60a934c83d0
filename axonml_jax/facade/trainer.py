"""A model, an optimizer and a loss as one object to call `step` on."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import numpy as np
import optax

from axonml_jax._types import LossFn, PyTree, named_leaves
from axonml_jax.facade.accepting import accepting
from axonml_jax.facade.saved_model import SavedModel
from axonml_jax.facade.state_dict import fitted
from axonml_jax.logging import logger
from axonml_jax.model.functional import Variables
from axonml_jax.sharding.check_batch import refuse_tracing
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.sharding.place import place, to_host
from axonml_jax.training.callbacks import Callback, TrainingEvent, checked, tell
from axonml_jax.training.evaluate import EvalStep
from axonml_jax.training.metrics import as_floats, mean_of
from axonml_jax.training.optimizer.checked_optimizer import averaging
from axonml_jax.training.same_everywhere import check_first_step, checksums
from axonml_jax.training.state.first_state import first_guard, init_state
from axonml_jax.training.state.learning_rate import injected_rate
from axonml_jax.training.state.named_state import averaged_variables, with_new_average
from axonml_jax.training.state.train_state import TrainState
from axonml_jax.training.step import Metrics, TrainStep
from axonml_jax.training.typed_errors import folding

M = TypeVar("M", bound=SavedModel)


class Trainer(Generic[M]):
    """The fused, donated training step of a parallel model; the pure form is `make_train_step`.

    Attributes:
      model: the parallel model; its variables are replaced after every step.
      hollow: whether the model was given as shapes and had no values yet, and no state was restored since: it takes no step.
    """

    def __init__(
        self,
        model: M,
        tx: optax.GradientTransformation,
        loss_fn: LossFn,
        *,
        accumulate: int | None = None,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        max_nonfinite: int | None = None,
        callbacks: Sequence[Callback] = (),
        ema: float | None = None,
        layer_norms: bool = False,
    ):
        placement = model._placement
        if accumulate is not None:
            placement = replace(placement, plan=replace(placement.plan, accumulate=accumulate))
        tx = averaging(tx, placement, ema)
        self._ema, self._averaged, self._loads = ema is not None, False, model.loads
        self.model, self._tx, self._loss_fn, self._placement = model, tx, loss_fn, placement
        self._max_grad_norm, self._norm_type, self._max_nonfinite = max_grad_norm, norm_type, max_nonfinite
        self._layer_norms, self._seen = layer_norms, None
        self._callbacks, self._made, self._ended = checked(callbacks), 0, False
        self._compared: int | None = None  # the model's loads when the processes compared what they begin with
        self._saves: list[Callable[[], None]] = []
        self._steps: dict[bool | None, TrainStep] = {}
        self._eval = EvalStep(model._functional, placement, model.mesh, loss_fn, model._accept)
        rest = self.train_step.rest  # refuses options that cannot work before anything is allocated
        self._state = init_state(model.variables, tx, rest, model.mesh, model._key)
        if max_nonfinite is not None:
            self._state = replace(self._state, guard=first_guard(rest, model.mesh))
        self.hollow = model.hollow

    def __repr__(self) -> str:
        accumulate, clips = self._placement.plan.accumulate, self._max_grad_norm
        return f"{type(self).__name__}({self.model!r}, accumulate={accumulate}, max_grad_norm={clips})"

    @property
    def state(self) -> TrainState:
        """Everything the run is between two steps; the next step gives its buffers up, `jax.tree.map(jnp.copy, ...)` keeps one.

        Assigning one (of this trainer or of another like it, on the devices or on the host) continues from a copy of it.

        Raises:
          ValueError: listing every leaf of an assigned state that does not fit.
        """
        if self._averaged:
            raise RuntimeError("within trainer.averaged() the model has other parameters than the run: leave it first")
        state = replace(self._state, variables=self.model.variables)
        if self._ema and self._loads != self.model.loads:
            logger.warning("the model's parameters were loaded: the moving average begins with them")
            step = self.train_step
            state = with_new_average(step.model, state, step.rest, self._tx)
            self._continue(state)
        if state.rounds is not None and state.params is not self._state.params:
            logger.warning("the model's parameters were changed: replicas go on from them and drop this round's")
            state = self._replicas_anew(state)
            self._continue(state)
        return state

    def _replicas_anew(self, state: TrainState) -> TrainState:
        """A state whose replicas have the outer parameters; all else stays."""
        first = self.train_step.rest.first_round(state.params, self.model.mesh)
        assert state.rounds is not None and first is not None
        return replace(state, rounds=replace(state.rounds, own=first.own))

    @state.setter
    def state(self, state: TrainState) -> None:
        rule = "trainer.state takes a TrainState of the same model, optimizer and plan"
        if not isinstance(state, TrainState):
            raise TypeError(f"{rule}, but a {type(state).__name__} was given")
        fitting = fitted(state, self.state, rule)
        specs = self.train_step.rest.between().state_specs(self._tx, fitting)
        self._continue(place(fitting, specs, self.model.mesh), restored=True)
        self.model._given = checksums(named_leaves(fitting))

    @property
    def opt_state(self) -> PyTree:
        """The optimizer's state as the tree that optax made, in the shapes of one device: for `optax.tree.get` and its like.

        So `optax.contrib.schedule_free_eval_params(trainer.opt_state, trainer.model.parameters())` works under every plan.
        Arrays stay split; under a pipeline, and where a split pads, they are copies. Replicas with optimizers of their own
        (NO_SYNC, DiLoCo) have entries along dim 0. `ema`'s average is left out; `trainer.state.opt_state` is how all rests.
        """
        tree = self.train_step.rest.opt_tree(self._tx, self.state.opt_state)
        return tree.inner if self._ema else tree

    @property
    def lr(self) -> float:
        """The learning rate of the last update (before any: of the first), where the optimizer's state says it.

        That is with `optax.inject_hyperparams(...)`; every process must ask.

        Raises:
          ValueError: when the state has no learning rate, or several that differ.
        """
        return injected_rate(self._state.opt_state)

    def _continue(self, state: TrainState, *, restored: bool = False) -> None:
        self._state, self._loads, self.hollow = state, self.model.loads, self.hollow and not restored
        self.model.variables = state.variables
        self._made = None  # read when somebody asks
        if restored:
            self._compared, self.model._given = None, {}

    # Callbacks

    @property
    def step_number(self) -> int:
        """Updates made so far; the first time after a restore every process must ask."""
        if self._made is None:
            self._made = int(np.ravel(to_host(self._state.step))[0])
        return self._made

    def _tell(self, method: str, **more: Any) -> None:
        if self._callbacks:
            tell(self._callbacks, method, TrainingEvent(**{"trainer": self, "step": self.step_number, **more}))

    def checkpoint_committed(self, step: int, folder: Path | str) -> None:
        """Tell callbacks of a checkpoint; a `CheckpointManager` calls it."""
        self._tell("on_save", step=step, path=folder)

    def checkpoint_begun(self, wait: Callable[[], None]) -> None:
        """Know of a save under way, for whose end `finish` waits; a `CheckpointManager` calls it."""
        if wait not in self._saves:
            self._saves.append(wait)

    def finish(self, reason: str = "finished") -> None:
        """Tell callbacks that the training is over, once, after a save under way; leaving `with trainer:` does it too."""
        if self._ended:
            return
        self._ended = True
        try:
            for wait in self._saves:
                wait()
        except BaseException:
            reason = "failed"
            raise
        finally:
            self._tell("on_end", reason=reason)

    def __enter__(self) -> "Trainer[M]":
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        self.finish("finished" if kind is None else "failed")

    # Checkpoints

    def checkpoint_leaves(self) -> dict[str, Leaf]:
        """Everything in the state by a name that is the same under every plan; what checkpoints hold."""
        return self.train_step.state_leaves(self.state)

    def take_leaves(self, arrays: Mapping[str, Any]) -> None:
        """Go on from arrays that rest as those of `checkpoint_leaves` do."""
        before = self.state
        state = self.train_step.state_of_leaves(before, arrays)
        if state.rounds is not None and before.rounds is not None:
            pairs = zip(jax.tree.leaves(state.rounds.own), jax.tree.leaves(before.rounds.own), strict=True)
            if any(new is old for new, old in pairs):
                logger.warning("no parameters of these replicas were restored: they begin with the outer ones")
                state = self._replicas_anew(state)
        self._continue(state, restored=True)

    def resting_arrays(self) -> dict[str, jax.Array]:
        """Everything in the state by its path in it, as it lies on the devices under this plan."""
        return named_leaves(self.state)

    def take_resting(self, arrays: Mapping[str, jax.Array]) -> None:
        """Go on from arrays that lie as those of `resting_arrays` do."""
        state, leaves = self.state, [arrays[name] for name in named_leaves(self.state)]
        self._continue(jax.tree.unflatten(jax.tree.structure(state), leaves), restored=True)

    def step(self, batch: PyTree) -> Metrics:
        """One update from the global batch.

        Returns:
          `loss` and `grad_norm` (before clipping) of this batch, and the loss function's own metrics; with `layer_norms` the
          2-norms `grad_norm/LAYER` and `param_norm/LAYER` (before the update). Under NO_SYNC each is stacked by rank.

        Raises:
          ValueError: when the batch does not divide, or, at the first step and the first after a load or restore, naming what
            is not the same in all processes: leaves, plan, program, first values, batch.
        """
        if self.hollow:
            raise ValueError("this trainer knows no values: load the model before it is made, or restore a checkpoint")
        refuse_tracing("trainer.step")
        if self._compared != self.model.loads:
            with folding:
                self._compare(batch)
        made, state = self._made, self.state
        with folding:
            state, metrics = self.train_step(replace(state, variables=self.model.give_up()), batch)
        self._continue(state)
        self._made = None if made is None else made + 1
        if self._seen is None:
            _warn_of_no_gradients(metrics["grad_norm"])
        self._seen = _shapes(batch)
        self._tell("on_step", metrics=metrics)
        return metrics

    def _compare(self, batch: PyTree) -> None:
        """Before the first step, and the first after a load or restore: do all processes begin alike?"""
        if jax.process_count() > 1:
            check_first_step(self.train_step, self.state, batch, self.model._given)
        self._compared = self.model.loads

    def evaluate(self, batch: PyTree) -> Metrics:
        """The loss and metrics of a global batch in evaluation mode, in the microbatches of `accumulate`; changes nothing."""
        with folding:
            return self._eval(self.model.values, batch)

    def validate(self, batches: Iterable[PyTree], weights: Sequence[float] | None = None) -> dict[str, float]:
        """The mean over batches, of these weights or of equal ones, of everything `evaluate` returns; callbacks hear of it.

        With `ema` the same of the averaged parameters too: `ema_loss` and so on. Within `averaged` it is of these alone.
        """
        both = self._ema and not self._averaged
        models = {"": self.model.values} | ({"ema_": self._average()} if both else {})

        def of(batch: PyTree) -> dict[str, float]:
            each = {before: as_floats(self._eval(variables, batch)) for before, variables in models.items()}
            return {f"{before}{name}": value for before, found in each.items() for name, value in found.items()}

        if isinstance(batches, Mapping) or hasattr(batches, "dtype"):
            raise TypeError(
                "trainer.validate takes batches, one after another: [batch], or a loader; trainer.evaluate takes one"
            )
        with folding:
            found = mean_of([of(batch) for batch in batches], weights)
        self._tell("on_eval", metrics=found)
        return found

    @contextmanager
    def averaged(self) -> Iterator[M]:
        """Within this context the model has the moving average in the place of its parameters: evaluate, generate, export.

        Raises:
          ValueError: when none is kept (`ema`).
        """
        own, self.model.variables, self._averaged = self.model.variables, self._average(), True
        try:
            yield self.model
        finally:
            self.model.variables, self._averaged = own, False
            self._loads = self.model.loads  # what was loaded meanwhile is gone

    def _average(self) -> Variables:
        if not self._ema:
            raise ValueError("no moving average is kept: make the trainer with ema=0.999 or another decay")
        step = self.train_step
        return averaged_variables(step.model, self.state, step.rest, self._tx)

    @property
    def train_step(self) -> TrainStep:
        """The pure step `(state, batch) -> (state, metrics)` in the model's current mode."""
        mode = self.model._mode
        if mode not in self._steps:
            self._steps[mode] = TrainStep(
                self.model._functional,
                self._placement,
                self.model.mesh,
                self._loss_fn,
                self._tx,
                max_grad_norm=self._max_grad_norm,
                norm_type=self._norm_type,
                max_nonfinite=self._max_nonfinite,
                training=mode,
                accept=accepting(self._placement, self.model.mesh),
                layer_norms=self._layer_norms,
            )
        return self._steps[mode]

    def trace(self, batch: PyTree) -> Any:
        """The step traced for batches like this one (arrays or shapes); nothing runs. `ax.explain(trainer, batch)` reads it.

        Raises:
          TypeError, ValueError: for a batch that `step` would not take.
        """
        self.train_step.check(batch)
        with folding:
            return self.train_step.trace(self.state, _shapes(batch))

    def compiled_memory(self) -> int | None:
        """Bytes per device that the compiled step plans: arguments, results beyond them, temporaries. None before a step."""
        if self._seen is None:
            return None
        planned = self.trace(self._seen).lower().compile().memory_analysis()
        more = planned.output_size_in_bytes - planned.alias_size_in_bytes
        return planned.argument_size_in_bytes + more + planned.temp_size_in_bytes

    def minimum_traffic(self) -> Fraction:
        """Bytes per rank and step that theory allows for this plan's gradients and parameters."""
        return self.train_step.minimum_traffic()


def _shapes(batch: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.numpy.result_type(x)), batch)


def _warn_of_no_gradients(norm: jax.Array) -> None:
    """Say it when the first step's gradients are zero everywhere; this waits for that step, and is asked of no other."""
    if not any(np.any(shard.data) for shard in norm.addressable_shards):
        logger.warning(
            "the gradients of the first step are zero everywhere, so parameters stay as they are. Does the loss use the model "
            "that it is given? One that calls a module or variables from outside reads constants; so does jax.lax.stop_gradient"
        )
