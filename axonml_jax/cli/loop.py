"""The loop of `train`, and what happens between two steps: saves, stops, spikes of the loss, replicas compared."""

import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from axonml_jax.base import PyTree, logger, print0
from axonml_jax.checkpoint.format import Team
from axonml_jax.checkpoint.manager import CheckpointManager, manifest_of, save
from axonml_jax.checkpoint.memory import MemoryCopies
from axonml_jax.cli.run import RunSetup
from axonml_jax.config.config import RunConfig, as_dict
from axonml_jax.data.loader import DataLoader
from axonml_jax.facade.trainer import Trainer
from axonml_jax.ledger.count import collectives_in
from axonml_jax.mesh.watch import FlightRecord, Watchdog
from axonml_jax.sharding.layout import replicated, to_host
from axonml_jax.training.callbacks import Throughput, as_floats
from axonml_jax.training.run_state import CompareReplicas, ReplicasDiffer, in_words
from axonml_jax.training.state import TrainState

# --------------------------------------------------------------------------------------------------
# The loop: draw a batch, make a step, measure, validate; the caller writes the records.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """The measurements at a step.

    Attributes:
      step: number of updates made so far.
      metrics: by name: `loss`, `grad_norm` and the loss function's own of this step's batch, `learning_rate` of the last
        update where it is known, `tokens` (or `examples`) seen since the run began, `wall_time` (seconds since it began, those
        of the process before a resumption included), speeds since the record before without what is done after a step, such
        as saves (`compile_time` instead for the first step), `valid_*` after a validation, and `slow_rank` with
        `slow_rank_times` while one holds up the others.
    """

    step: int
    metrics: dict[str, float]


def fit(
    trainer: Trainer,
    batches: Iterator[PyTree],
    *,
    steps: int,
    throughput: Throughput,
    validate: Callable[[], dict[str, float]] | None = None,
    validate_every: int | None = None,
    log_every: int = 10,
    learning_rate: Callable[[int], Any] | None = None,
    start: int = 0,
    elapsed: float = 0.0,
    watchdog: Watchdog | None = None,
    seen: Callable[[int, jax.Array], None] | None = None,
    after: Callable[[int, dict[str, float]], bool] | None = None,
) -> Iterator[Record]:
    """Train up to update `steps`, yielding a record after update 1, every `log_every`-th, every validated and the last.

    Between records nothing waits for the devices. Stop iterating, and the training stops.

    Args:
      trainer: makes the steps.
      batches: global batches, at least `steps - start` of them.
      steps: updates of the whole run, those before `start` included.
      throughput: turns durations into speeds.
      validate: metrics of the model as it is now; its time counts in no speed.
      validate_every: validate after every this many steps, besides the last; None only after the last.
      log_every: steps between records.
      learning_rate: the optimizer's schedule, called with the number of updates made before; None: it is not known.
      start: updates made already; the records of a resumed run are those it would have had uninterrupted.
      elapsed: seconds that the run had taken until then.
      watchdog: hears of every step, and of the beginning and end of validations and of `after`.
      seen: called with the number of every step and its loss on the devices, before `after`.
      after: called after every step with its number and the metrics of its record (none where it has no record); true
        stops the training. If there is one process it is also called when a validation fails, before that is raised.
    """
    before, clock = start, time.perf_counter()
    began = clock - elapsed
    doing = (lambda what: nullcontext()) if watchdog is None else watchdog.doing
    batches = batches if watchdog is None else watchdog.drawing(batches)
    for step, batch in zip(range(start + 1, steps + 1), batches, strict=False):
        measured, first, metrics = trainer.step(batch), step == start + 1, {}
        if watchdog is not None:
            watchdog.began(step, measured["loss"])
        if seen is not None:
            seen(step, measured["loss"])
        due = step == steps or (validate_every is not None and step % validate_every == 0)
        if due or step == 1 or step % log_every == 0:
            metrics = as_floats(measured)
            seconds = time.perf_counter() - clock
            if learning_rate is not None:
                metrics["learning_rate"] = float(learning_rate(max(step - int(metrics.get("skipped", 0)) - 1, 0)))
            metrics |= {throughput.unit: throughput.total(step), "wall_time": time.perf_counter() - began}
            metrics |= {"compile_time": seconds} if first else throughput.of(num_steps=step - before, seconds=seconds)
            try:
                with doing("validating"):
                    valid = validate() if due and validate else {}
            except Exception:
                # What was trained is kept. Other processes may be in the validation's collectives: they could not save with us.
                if after is not None and jax.process_count() == 1:
                    after(step, metrics)
                raise
            metrics |= {f"valid_{name}": value for name, value in as_floats(valid).items()}
            metrics |= {} if watchdog is None else watchdog.slowest()
            yield Record(step, metrics)
        elif first:
            jax.block_until_ready(measured)
        done = time.perf_counter()
        with doing("saving"):
            if after is not None and after(step, metrics):
                return
        # Neither compiling counts in a speed, nor a validation, nor what is done after a step.
        now = time.perf_counter()
        before, clock = (step, now) if metrics or first else (before, clock + now - done)


# --------------------------------------------------------------------------------------------------
# SIGTERM and Ctrl-C: asked for between two steps, with the same answer in all processes.
# --------------------------------------------------------------------------------------------------

_SAID = b"\naxonml_jax: Ctrl-C: the run stops after this step and is saved, if it saves at all; Ctrl-C again ends it at once\n"


class Preemption:
    """While entered, SIGTERM and the first Ctrl-C do not end the process, but ask the run to stop after a step.

    Among several processes JAX's coordinator agrees on the step: a signal to one of them is enough.

    Attributes:
      asked: whether the run was asked to stop.
      interrupted: whether it was Ctrl-C, in this process.
    """

    def __init__(self):
        self.asked = self.interrupted = False
        self._alone = jax.process_count() == 1
        self._before = {}

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is not threading.main_thread():
            return self
        # With several processes JAX has a handler of its own, in C++, that tells the coordinator; one in Python would hide it.
        if self._alone:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a shell's background
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exception):
        for number, handler in self._before.items():
            if handler is not None:  # None: C code had set it, and Python cannot put it back
                signal.signal(number, handler)

    def stop_after(self, step: int) -> bool:
        """Whether to stop after this step; equal in all processes, which must all ask after every step."""
        if not self._alone:
            from jax.experimental import multihost_utils

            self.asked = self.asked or multihost_utils.reached_preemption_sync_point(step)
        return self.asked

    def _note(self, number, frame):
        self.asked = True

    def _interrupt(self, number, frame):
        self.interrupted = True
        # The next one needs no Python, which may be waiting for a device.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with suppress(OSError):  # a full disk, or a reader that has gone
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _SAID)
        if self._alone:
            self.asked = True
        else:
            os.kill(os.getpid(), signal.SIGTERM)


# --------------------------------------------------------------------------------------------------
# Loss spikes: a run goes back to the checkpoint before, and on past the batches that made it, as PaLM's did.
#
# What is a spike depends on the losses alone, and where a run goes back to on the steps at which it saves: a run that
# is interrupted anywhere finds the same spikes and goes the same way. Losses are read where the host waits for the
# devices anyway.
# --------------------------------------------------------------------------------------------------

_ABOUT = "spikes"


@dataclass(frozen=True)
class Spike:
    """A loss that is far above those before it.

    Attributes:
      step: that made it.
      loss: of that step.
      usual: the median of those before; None: it was not finite before there were enough.
      position: of the data, after that step's batch.
    """

    step: int
    loss: float
    usual: float | None
    position: Mapping[str, Any]

    def __str__(self) -> str:
        usual = "" if self.usual is None else f", the median before it {self.usual:.4g}"
        return f"the loss of step {self.step} was {self.loss:.4g}{usual}"


class Spikes:
    """Detects spikes of the loss: `seen` takes every step, and `good` is asked before anything is saved.

    Args:
      config: the run's; the section `spikes` says what a spike is.
      trainer: the run.
      loader: its training data.
      manager: of its checkpoints; where there is none yet, the first state is saved, so that there is one to go back to.
      about: what the checkpoint that the run goes on from says about itself.

    Attributes:
      found: a spike that the run has not gone back for yet.
      diverged: why the run has stopped, where it has gone back too often, else None.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        loader: DataLoader,
        manager: CheckpointManager,
        about: Mapping[str, Any],
    ):
        self._rule, self._every = config.spikes, config.checkpoint.every
        self._skips_nonfinite = config.train.max_nonfinite is not None
        self._trainer, self._loader, self._manager = trainer, loader, manager
        self._pending: list[tuple[int, jax.Array, dict[str, Any]]] = []
        self._losses: deque[float] = deque(maxlen=self._rule.window)
        self._rollbacks = self._skipped = 0
        self.found: Spike | None = None
        self.diverged: str | None = None
        self._go_on(about)
        if trainer.step_number == 0:
            manager.save(0, trainer, data=loader, about=self.about(), force=True)

    def about(self) -> dict[str, Any]:
        """Returns the losses and counts that a checkpoint keeps, so that a resumed run finds the same spikes."""
        return {_ABOUT: {"losses": list(self._losses), "rollbacks": self._rollbacks, "skipped": self._skipped}}

    def _go_on(self, about: Mapping[str, Any]) -> None:
        """Restore this state from a checkpoint; a run that did not look for spikes has none."""
        kept = about.get(_ABOUT, {})
        self._losses.clear()
        self._losses.extend(kept.get("losses", ()))
        self._rollbacks = max(self._rollbacks, kept.get("rollbacks", 0))
        self._skipped = max(self._skipped, kept.get("skipped", 0))

    def metrics(self) -> dict[str, float]:
        """The number of rollbacks, and of batches left out."""
        return {"rollbacks": self._rollbacks, "skipped_batches": self._skipped}

    def seen(self, step: int, loss: jax.Array) -> None:
        """Note a step, without waiting for its loss."""
        self._pending.append((step, loss, self._loader.state_dict()))

    def good(self) -> bool:
        """Read the new losses; whether none is a spike. All processes read the same ones."""
        for step, loss, position in self._pending:
            value = as_floats({"loss": loss})["loss"]
            usual = median(self._losses) if len(self._losses) == self._rule.window else None
            if self._is_spike(value, usual):
                self.found = Spike(step, value, usual, position)
                break
            if math.isfinite(value):
                self._losses.append(value)
        self._pending.clear()
        if self.found is not None and self._rollbacks == self._rule.limit:
            self.diverged = f"stopped: {self.found}, and the run has gone back {self._rollbacks} times (spikes.limit)"
        return self.found is None

    def _is_spike(self, value: float, usual: float | None) -> bool:
        if not math.isfinite(value):
            return not self._skips_nonfinite
        assert self._rule.factor is not None
        return usual is not None and 0 < self._rule.factor * usual < value

    def roll_back(self) -> int:
        """Restore the last regular checkpoint before the spike, and put the loader `spikes.skip` batches past the spike's.

        Returns:
          The step of that checkpoint.

        Raises:
          RuntimeError: when there is no checkpoint of before the spike.
        """
        spike, self.found = self.found, None
        assert spike is not None and self._every is not None
        self._manager.settle()
        every = self._every
        before = lambda: max((s for s in self._manager.steps if s < spike.step and s % every == 0), default=None)
        step = Team().decide("find the checkpoint before the spike", before)
        if step is None:
            raise RuntimeError(f"{spike}, and {self._manager.place} has no checkpoint of before to go back to")
        restored = self._manager.restore(self._trainer, step=step)
        assert restored is not None
        self._go_on(restored.about)
        self._loader.load_state_dict(dict(spike.position))
        with closing(iter(self._loader)) as batches:  # pyright: ignore[reportArgumentType]
            drawn = sum(1 for _ in islice(batches, self._rule.skip))
        self._rollbacks, self._skipped = self._rollbacks + 1, self._skipped + spike.step - step + drawn
        print0(
            f"{spike}: back to step {step}, and on with other data: {spike.step - step + drawn} batches are left out "
            f"(rollback {self._rollbacks} of {self._rule.limit})",
            flush=True,
        )
        return step


# --------------------------------------------------------------------------------------------------
# Replicas compared every so many steps of a run, before anything is saved.
# --------------------------------------------------------------------------------------------------


class ReplicasCompared:
    """Compares replicas when due; `fit` calls it after every step.

    Args:
      config: `train.compare_replicas` says how often, `train.replicas_differ` what happens then.
      trainer: the run.
      after: called then, as `fit` has it; not after a step whose replicas differ, if that stops the run.
      last: tells whether the run ends after a step, which is then compared too; None: only when due.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        after: Callable[[int, dict[str, float]], bool],
        last: Callable[[int], bool] | None = None,
    ):
        self._every, self._stops = config.train.compare_replicas, config.train.replicas_differ == "stop"
        self._trainer, self._after, self._compare = trainer, after, CompareReplicas()
        self._told, self._last = set[int](), last

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        """Compare the replicas if it is due.

        Returns:
          Whether to stop, as `after` says.

        Raises:
          ReplicasDiffer: in every process, naming the devices and the arrays, if `train.replicas_differ` is "stop".
        """
        if self._every is not None and (step % self._every == 0 or (self._last is not None and self._last(step))):
            found = self._compare(self._trainer.state)
            if found and self._stops:
                raise ReplicasDiffer(in_words(found, step))
            if jax.process_index() == 0 and {each.device for each in found} - self._told:
                logger.warning("%s", in_words(found, step))
            self._told |= {each.device for each in found}
        return self._after(step, metrics)


# --------------------------------------------------------------------------------------------------
# What happens between two steps of `train`: checkpoints, stopping when asked to, stopping when updates are not finite.
# --------------------------------------------------------------------------------------------------

NONFINITE = "nonfinite"
"""Where in a run's folder the step is saved from which updates were not finite."""


class Saves:
    """Saves checkpoints when due; `fit` calls it after every step.

    Args:
      manager: of the checkpoints; None saves nothing.
      trainer: the run.
      loader: its training data, whose position is saved too.
      config: step `train.steps` is saved in any case; after `train.max_nonfinite` updates in a row that are not finite the run
        stops.
      preemption: asked after every step whether to stop.
      inspection: where to save the first of too many updates in a row that were not finite.
      spikes: asked before anything is saved whether the loss has spiked; None: nobody looks.
      memory: copies of the state in memory; None: there are none.

    Attributes:
      stopped: the step after which SIGTERM or Ctrl-C has stopped the run, else None.
      diverged: why the run was stopped when its updates were not finite or its loss spiked too often, else None.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        trainer: Trainer,
        loader: DataLoader,
        config: RunConfig,
        preemption: Preemption,
        inspection: Path,
        spikes: Spikes | None = None,
        memory: MemoryCopies | None = None,
    ):
        self._manager, self._trainer, self._loader = manager, trainer, loader
        if manager is not None:
            manifest_of(trainer, {}, data=loader)  # what a save would refuse, before the first step
        self._steps, self._preemption, self._inspection = config.train.steps, preemption, inspection
        self._limit, self._spikes, self._memory = config.train.max_nonfinite, spikes, memory
        self._most = config.checkpoint.max_failures
        self._positions: deque[tuple[int, dict[str, Any]]] = deque(
            maxlen=config.train.log_every + (self._limit or 0) + 2
        )
        self._asked = -1
        self.stopped: int | None = None
        self.diverged: str | None = None

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        """Save if it is due.

        Args:
          step: updates made.
          metrics: of the step's record, empty where it has none.

        Returns:
          Whether to stop.
        """
        last = self.ends_after(step)
        due = self._manager is not None and (last or self._manager.due(step))
        self._positions.append((step, self._loader.state_dict()))
        if self._spikes is not None and (due or metrics) and not self._spikes.good():
            self.diverged = self._spikes.diverged
            return True  # a state after a spike is not saved
        # Only where the host waits for the step anyway is it asked how the step went.
        in_a_row = self._in_a_row() if due or metrics else 0
        if self._memory is not None and step < self._steps:  # before a disk is waited for, or fails
            self._memory.keep(step, self._trainer, data=self._loader, now=self.stopped is not None)
        if self._limit is not None and in_a_row >= self._limit:
            self._save_for_inspection()
        elif self._manager is not None:
            # In the middle of a row of skipped updates there is nothing new to save, unless this is the end.
            if last or not in_a_row:
                about = None if self._spikes is None else self._spikes.about()
                self._manager.save(step, self._trainer, data=self._loader, metrics=metrics, about=about, force=last)
            self._manager.check()
        return self.stopped is not None or self.diverged is not None

    def ends_after(self, step: int) -> bool:
        """Whether the run ends after this step, which is then saved; equal in all processes, which must all ask."""
        if self._asked != step and self._preemption.stop_after(step):
            self.stopped = step
        self._asked = step
        return step == self._steps or self.stopped is not None

    @property
    def goes_back(self) -> bool:
        """Whether training has stopped to resume from the checkpoint before a spike."""
        return self._spikes is not None and self._spikes.found is not None and not (self.stopped or self.diverged)

    @property
    def reason(self) -> str:
        """How the training ended: "finished", "stopped" or "diverged"."""
        return "diverged" if self.diverged else "finished" if self.stopped is None else "stopped"

    @property
    def failures(self) -> dict[str, int]:
        """For records: the number of this process's failed saves that were passed over, if that is allowed."""
        return {} if self._manager is None or self._most == 1 else {"failed_saves": self._manager.failed_saves}

    def _in_a_row(self) -> int:
        guard = self._trainer.state.guard
        return 0 if guard is None else int(np.max(to_host(guard.in_a_row)))

    def _save_for_inspection(self) -> None:
        """Save the state before the first bad update, which is still the current one, and that update's batch position."""
        state, mesh = self._trainer.state, self._trainer.model.mesh
        assert state.guard is not None and self._limit is not None
        counts = to_host(state.guard)
        halted = np.flatnonzero(counts.in_a_row >= self._limit)
        since = int(np.ravel(counts.since)[halted[0]])
        if np.ndim(counts.since):
            return self._save_replicas(state, halted, since)
        guard = self._trainer.train_step.at_rest.kept["guard"].first(None, mesh)
        self._inspect(replace(state, step=replicated(state.guard.since, mesh)).keeping(guard=guard), since)
        self.diverged = (
            f"stopped: {self._limit} updates in a row were not finite, the first after step {since}. The run as it was "
            f"before that one is saved for inspection in {self._inspection}: restore it, and the next step repeats it"
        )

    def _save_replicas(self, state: TrainState, halted: np.ndarray, since: int) -> None:
        """Save the current state if ranks train independently, as the other replicas have gone on."""
        guard = self._trainer.train_step.at_rest.kept["guard"].first(None, self._trainer.model.mesh)
        self._inspect(state.keeping(guard=guard), self._positions[-1][0])
        self.diverged = (
            f"stopped: {self._limit} updates in a row of replica {', '.join(map(str, halted))} were not finite, the first "
            f"after step {since}. The run as it is now is saved for inspection in {self._inspection}: this replica is as it "
            "was before that update, the others have gone on"
        )

    def _inspect(self, state: TrainState, step: int) -> None:
        # From the newest: after a rollback there may be two, and the first is of before it.
        position = next((saved for at, saved in reversed(self._positions) if at == step), None)
        self._inspection.parent.mkdir(parents=True, exist_ok=True)
        loader = None if position is None else _Position(position)
        save(self._inspection, state, step=self._trainer.train_step, data=loader, replace=True)


class _Position:
    """A loader's position a few steps ago."""

    def __init__(self, position: dict[str, Any]):
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state


# --------------------------------------------------------------------------------------------------
# The watchdog of a run, and what its flight records say of the run: its configuration's hash, and its step's
# collectives.
# --------------------------------------------------------------------------------------------------


@contextmanager
def run_watchdog(config: RunConfig, ground: RunSetup, trainer: Trainer, folder: Path) -> Iterator[Watchdog]:
    """Watch a run for steps that never end; if it dies, its processes write flight records in its folder.

    Args:
      config: the run's; `train.stuck_timeout` and `train.stuck_warning` are in seconds.
      ground: its mesh and the shapes of its batches.
      trainer: the one whose steps are watched.
      folder: the run's.
    """
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.state)
    collectives = lambda: in_order(lambda: trainer.train_step.trace(state, ground.batch))
    about = {"configuration": configuration_hash(config), "mesh": dict(ground.mesh.shape)}
    with (
        FlightRecord(folder, about=about, collectives=collectives) as record,
        Watchdog(config.train.stuck_timeout, warning=config.train.stuck_warning, record=record) as watchdog,
    ):
        yield watchdog


def configuration_hash(config: RunConfig) -> str:
    """A hash of all settings, equal in processes that were started alike."""
    return hashlib.sha256(json.dumps(as_dict(config), sort_keys=True, default=str).encode()).hexdigest()[:16]


def in_order(trace: Callable[[], Any]) -> list[dict[str, Any]]:
    """The collectives of a traced step in program order, as plain values; `bytes` are those of the full arrays."""
    return [
        {
            "kind": each.kind,
            "op": each.op,
            "axes": list(each.axes),
            "ranks": each.group_size,
            "arrays": each.leaves,
            "dtype": each.dtype,
            "bytes": each.itemsize * each.elements,
            "where": each.where,
            "moves": each.label,
        }
        for each in collectives_in(trace().jaxpr)
    ]
