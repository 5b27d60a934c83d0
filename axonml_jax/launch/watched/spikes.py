"""Loss spikes: a run goes back to the checkpoint before, and on past the batches that made it, as PaLM's did.

What is a spike depends on the losses alone, and where a run goes back to on the steps at which it saves: a run that is
interrupted anywhere finds the same spikes and goes the same way. Losses are read where the host waits for the devices anyway.
"""

import math
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import jax

from axonml_jax.checkpoint.manager import CheckpointManager
from axonml_jax.checkpoint.team import Team
from axonml_jax.data.loader import DataLoader
from axonml_jax.facade.trainer import Trainer
from axonml_jax.launch.config.run_config import RunConfig
from axonml_jax.logging import print0
from axonml_jax.training.metrics import as_floats

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
    """Told of every step; asked before anything is saved.

    Args:
      config: of the run; the section `spikes` says what is one.
      trainer: the run.
      loader: its training data.
      manager: of its checkpoints; where there is none yet, the first state is saved, so that there is one to go back to.
      about: what the checkpoint says that the run goes on from.

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
        """What a checkpoint keeps of this."""
        return {_ABOUT: {"losses": list(self._losses), "rollbacks": self._rollbacks, "skipped": self._skipped}}

    def _go_on(self, about: Mapping[str, Any]) -> None:
        """Take what a checkpoint has kept, where it has kept it: of a run that did not look for spikes there is nothing."""
        kept = about.get(_ABOUT, {})
        self._losses.clear()
        self._losses.extend(kept.get("losses", ()))
        self._rollbacks = max(self._rollbacks, kept.get("rollbacks", 0))
        self._skipped = max(self._skipped, kept.get("skipped", 0))

    def metrics(self) -> dict[str, float]:
        """How often the run has gone back, and how many batches it has left out."""
        return {"rollbacks": self._rollbacks, "skipped_batches": self._skipped}

    def seen(self, step: int, loss: jax.Array) -> None:
        """A step has been made; nothing waits for its loss here."""
        self._pending.append((step, loss, self._loader.state_dict()))

    def good(self) -> bool:
        """Read the losses since the last time; whether none is a spike. All processes read the same ones."""
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
        """Go back to the last checkpoint before the spike that a run saves by itself, and past the spike in the data.

        Returns:
          The updates that are made now.
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
