"""`ProgressBar`: a callback that shows how far a training is, and waits for no device to do so."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TextIO

import numpy as np

from axonml_jax.training.callbacks import Callback, TrainingEvent
from axonml_jax.training.progress.one_line import OneLine, rewrites

WIDTH = 24
"""Characters of the bar."""
PAUSE = 0.1
"""Seconds between two states of the bar."""


class ProgressBar(Callback):
    """Shows steps, loss and speed on one line of a terminal or of a notebook's cell, and as plain lines anywhere else.

    The loss is that of the newest step that the devices have finished: nothing waits for them, but for the last step's. The
    main process alone shows something, and of its own ranks.

    Args:
      steps: the number of updates at which the training is over.
      every: steps between plain lines; None: a tenth of all.
      file: where it shows; None: standard output.

    Raises:
      ValueError: for a number of steps below 1.

    >>> bar = ProgressBar(200)
    >>> bar.line(50, 1.25, speed=10.0)
    '######------------------  50/200  loss 1.2500  10.0 steps/s  0:00:15 left'
    """

    def __init__(self, steps: int, *, every: int | None = None, file: TextIO | None = None):
        for name, value in (("steps", steps), ("every", every)):
            if value is not None and value < 1:
                raise ValueError(f"ProgressBar({name}={value}): must be at least 1")
        self.steps, self.every = steps, every or max(1, steps // 10)
        self._file = file
        self._line: OneLine | None = None
        self._pending: list[Mapping[str, Any]] = []
        self._loss: float | None = None
        self._began, self._shown = (0, 0.0), 0.0

    def line(self, step: int, loss: float | None, *, speed: float | None = None) -> str:
        """What is shown after a step, with the loss and the speed, in steps per second, where they are known."""
        full = round(WIDTH * min(step / self.steps, 1.0))
        words = ["#" * full + "-" * (WIDTH - full), f"{step:>{len(str(self.steps))}}/{self.steps}"]
        words += [] if loss is None else [f"loss {loss:.4f}"]
        if speed:
            words += [f"{speed:.1f} steps/s"]
            words += [f"{timedelta(seconds=round((self.steps - step) / speed))} left"] if step < self.steps else []
        return "  ".join(words)

    def on_step(self, event: TrainingEvent) -> None:
        """Show the step, at most every tenth of a second or as a plain line when one is due."""
        if not event.is_main_process:
            return
        now, last = time.perf_counter(), event.step == self.steps
        self._began = self._began if self._began[0] else (event.step, now)
        self._pending.append(event.metrics)
        self._read(wait=last)
        file = self._file or sys.stdout
        rewritten = rewrites(file)
        if not (last or now - self._shown > PAUSE if rewritten else last or event.step % self.every == 0):
            return
        made, since = event.step - self._began[0], time.perf_counter() - self._began[1]
        text = self.line(event.step, self._loss, speed=made / since if made and since else None)
        self._shown = now
        if not rewritten:
            print(text, file=file, flush=True)
            return
        self._line = self._line or OneLine(file)
        self._line.show(text)
        if last:
            self._line.end()

    def on_eval(self, event: TrainingEvent) -> None:
        """Leave a line with the validation's means."""
        if event.is_main_process:
            found = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
            self._keep(f"step {event.step}: validation {found}")

    def on_end(self, event: TrainingEvent) -> None:
        """Leave the bar as it is, and say how the training ended where it is not at its end."""
        if event.is_main_process:
            if self._line is not None:
                self._line.end()
            if event.reason != "finished":
                self._keep(f"{event.reason} after step {event.step}")

    def _keep(self, text: str) -> None:
        if self._line is not None:
            self._line.keep(text)
        else:
            print(text, file=self._file or sys.stdout, flush=True)

    def _read(self, *, wait: bool) -> None:
        """Take the loss of the newest step that is finished."""
        ready = [n for n, metrics in enumerate(self._pending) if wait or metrics["loss"].is_ready()]
        if ready:
            parts = self._pending[ready[-1]]["loss"].addressable_shards
            self._loss = float(np.mean([np.mean(np.asarray(part.data), dtype=np.float64) for part in parts]))
            del self._pending[: ready[-1] + 1]
