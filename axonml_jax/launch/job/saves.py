"""What happens between two steps of `train`: checkpoints, stopping when asked to, stopping when updates are not finite."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from axonml_jax.checkpoint.manager import CheckpointManager
from axonml_jax.checkpoint.memory.memory_copies import MemoryCopies
from axonml_jax.checkpoint.store import manifest_of, save
from axonml_jax.data.loader import DataLoader
from axonml_jax.facade.trainer import Trainer
from axonml_jax.launch.config.run_config import RunConfig
from axonml_jax.launch.job.preemption import Preemption
from axonml_jax.launch.watched.spikes import Spikes
from axonml_jax.sharding.place import replicated, to_host
from axonml_jax.training.state.first_state import first_guard
from axonml_jax.training.state.train_state import TrainState

NONFINITE = "nonfinite"
"""Where in a run's folder the step is saved from which updates were not finite."""


class Saves:
    """Called after every step by `fit`.

    Args:
      manager: None saves nothing.
      trainer: the run.
      loader: its training data, whose position is saved too.
      config: `train.steps` is saved in any case; `train.max_nonfinite` stops the run.
      preemption: asked after every step.
      inspection: where to save the first of too many updates in a row that were not finite.
      spikes: asked before anything is saved whether the loss has spiked; None: nobody looks.
      memory: copies of the state in memory; None: there are none.

    Attributes:
      stopped: the step after which SIGTERM or Ctrl-C has stopped the run, else None.
      diverged: why the run was stopped when its updates were not finite, else None.
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
        """Save if it is time.

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
            return True  # what is here now is not to be kept
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
        """Whether this step is saved in any case, as the run ends here; the same in all processes, and asked by all."""
        if self._asked != step and self._preemption.stop_after(step):
            self.stopped = step
        self._asked = step
        return step == self._steps or self.stopped is not None

    @property
    def goes_back(self) -> bool:
        """Whether the training has ended to go on from the checkpoint before a spike."""
        return self._spikes is not None and self._spikes.found is not None and not (self.stopped or self.diverged)

    @property
    def reason(self) -> str:
        """How the training has ended, where it is over: "finished", "stopped" or "diverged"."""
        return "diverged" if self.diverged else "finished" if self.stopped is None else "stopped"

    @property
    def failures(self) -> dict[str, int]:
        """For records: how many saves of this process have failed and were passed over, where any may."""
        return {} if self._manager is None or self._most == 1 else {"failed_saves": self._manager.failed_saves}

    def _in_a_row(self) -> int:
        guard = self._trainer.state.guard
        return 0 if guard is None else int(np.max(to_host(guard.in_a_row)))

    def _save_for_inspection(self) -> None:
        """The state before the first bad update, which it still is, and the position of that update's batch."""
        state, mesh = self._trainer.state, self._trainer.model.mesh
        assert state.guard is not None and self._limit is not None
        counts = to_host(state.guard)
        halted = np.flatnonzero(counts.in_a_row >= self._limit)
        since = int(np.ravel(counts.since)[halted[0]])
        if np.ndim(counts.since):
            return self._save_replicas(state, halted, since)
        guard = first_guard(self._trainer.train_step.rest, mesh)
        self._inspect(replace(state, step=replicated(state.guard.since, mesh), guard=guard), since)
        self.diverged = (
            f"stopped: {self._limit} updates in a row were not finite, the first after step {since}. The run as it was "
            f"before that one is saved for inspection in {self._inspection}: restore it, and the next step repeats it"
        )

    def _save_replicas(self, state: TrainState, halted: np.ndarray, since: int) -> None:
        """Where each rank trains by itself, the others have gone on: the state as it is now."""
        guard = first_guard(self._trainer.train_step.rest, self._trainer.model.mesh)
        self._inspect(replace(state, guard=guard), self._positions[-1][0])
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
    """A loader's position of some steps ago."""

    def __init__(self, position: dict[str, Any]):
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state
