"""Callbacks of a trainer, the line that shows how far a training is, and its figures: metrics as floats, speeds."""

import difflib
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from axonml_jax.sharding.layout import to_host

# --------------------------------------------------------------------------------------------------
# Code of one's own that a training calls: after steps, validations and saves, and at the end.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingEvent:
    """What a callback is told.

    Attributes:
      trainer: the trainer, whose state and model may be read.
      step: updates made so far; of `on_save` those that the checkpoint holds.
      metrics: of `on_step` what `Trainer.step` returned: arrays on the devices, and whoever reads one waits for the step. Of
        `on_eval` the means over the validation, floats, or NumPy arrays of metrics that are arrays. Else empty.
      path: for `on_save`, the checkpoint's folder, which is complete on disk, or its URL in an object store; else None.
      reason: for `on_end`, "finished", "stopped" (by a signal), "diverged" or "failed" (by an error); else None.
    """

    trainer: Any
    step: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    path: Path | str | None = None
    reason: str | None = None

    @property
    def is_main_process(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return jax.process_index() == 0


class Callback:
    """Override what you want to hear of. Every process calls every method, at the same points of the training.

    An exception in a method ends the training as a `CallbackError`, after a checkpoint under way is committed. Metrics and
    arrays of the trainer may be spread over processes: read them in all, and write in the main one.
    """

    def on_step(self, event: TrainingEvent) -> None:
        """Called after every update, before the devices have finished it."""

    def on_eval(self, event: TrainingEvent) -> None:
        """Called after every validation."""

    def on_save(self, event: TrainingEvent) -> None:
        """Called after a checkpoint is committed, and before `on_end`.

        For an asynchronous checkpoint that is the next point at which all processes know of it: in one process the next step or
        save, in several the next save or `CheckpointManager.wait`.
        """

    def on_end(self, event: TrainingEvent) -> None:
        """Called once, when the training is over, however it ended."""


class CallbackError(RuntimeError):
    """Raised where a callback has raised; its own exception is the cause."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def checked(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """Checks a list of callbacks, and returns them as a tuple.

    Raises:
      TypeError: naming what is none, and methods that nobody would call.
    """
    if not isinstance(callbacks, (tuple, list)):
        raise TypeError(f"callbacks={callbacks!r} must be a list of ax.Callback")
    problems = []
    for number, each in enumerate(callbacks):
        kind = each.__name__ if isinstance(each, type) else type(each).__name__
        if not isinstance(each, Callback):
            is_class = isinstance(each, type) and issubclass(each, Callback)
            given = f"the class {kind}: give an object of it" if is_class else f"a {kind}: derive it from ax.Callback"
            problems.append(f"callbacks[{number}] is {given}")
            continue
        for name in dir(each):
            if name.startswith("on_") and name not in METHODS:
                near = difflib.get_close_matches(name, METHODS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(METHODS)}"
                problems.append(f"callbacks[{number}]: {kind}.{name} is never called; {hint}")
    if problems:
        raise TypeError("; ".join(problems))
    return tuple(callbacks)


def tell(callbacks: Sequence[Callback], method: str, event: TrainingEvent) -> None:
    """Call a method of all callbacks, in their order.

    Raises:
      CallbackError: naming the callback and the line that raised.
    """
    for each in callbacks:
        try:
            getattr(each, method)(event)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise CallbackError(
                f"callback {type(each).__qualname__}.{method} failed after step {event.step}: {type(error).__name__}: {error} "
                f"({where.filename}:{where.lineno}). The training ends here; checkpoints that were begun are committed"
            ) from error


# --------------------------------------------------------------------------------------------------
# A line of output that is written over, on terminals and in notebooks.
# --------------------------------------------------------------------------------------------------


def rewrites(file: TextIO) -> bool:
    """Whether a carriage return takes a stream back to the start of its line: on a terminal and in a notebook's cell."""
    notebook = any(kind.__module__.split(".")[0] == "ipykernel" for kind in type(file).__mro__)
    return notebook or file.isatty()


class OneLine:
    """Texts on one line of output, each written over the last; some are kept above it.

    Args:
      file: a stream that `rewrites`.
    """

    def __init__(self, file: TextIO):
        self._file, self._shown = file, ""

    def show(self, text: str) -> None:
        """Write a text over the one that is seen. A terminal gets one line of it at most: going back reaches no second line."""
        if self._file.isatty():
            text = text[: max(shutil.get_terminal_size().columns - 1, 0)]
        self._write("\r" + text + " " * (len(self._shown) - len(text)))
        self._shown = text

    def keep(self, text: str) -> None:
        """Put a text above the one that is seen."""
        shown, above = self._shown, text + " " * (len(self._shown) - len(text))
        self._write(f"\r{above}\n{shown}" if shown else f"{text}\n")

    def end(self) -> None:
        """Leave what is seen, and begin a line below it."""
        if self._shown:
            self._write("\n")
        self._shown = ""

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


# --------------------------------------------------------------------------------------------------
# `ProgressBar`: a callback that shows how far a training is, and waits for no device to do so.
# --------------------------------------------------------------------------------------------------

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
            found = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items() if np.ndim(value) == 0)
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


# --------------------------------------------------------------------------------------------------
# What was measured, as numbers, and how fast a run is: tokens or examples per second, time per step, share of the peak.
# --------------------------------------------------------------------------------------------------


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as floats; the mean over models where there are several (NO_SYNC). Every process must call it."""
    return {name: float(np.mean(value, dtype=np.float64)) for name, value in to_host(dict(metrics)).items()}


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Turns a step's duration into speeds: tokens per second, and model FLOPs utilization.

    Attributes:
      tokens_per_step: tokens (or other units) of a global batch.
      flops_per_token: model FLOPs of one training token (see `TransformerConfig.flops_per_token`); None where it is not known,
        and then there is no MFU.
      num_devices: devices that share the work.
      peak_flops: peak FLOP/s of one device; None where it is not known, and then there is no MFU.
      unit: what is counted: "tokens", or "examples".
      before: the units that earlier steps, of batches of another size, had beyond `tokens_per_step` each.

    >>> speed = Throughput(tokens_per_step=1000, flops_per_token=6e9, num_devices=2, peak_flops=12e12)
    >>> speed.of(num_steps=10, seconds=5.0)
    {'step_time': 0.5, 'tokens_per_second': 2000.0, 'mfu': 0.5}
    """

    tokens_per_step: int
    flops_per_token: float | None
    num_devices: int
    peak_flops: float | None = None
    unit: str = "tokens"
    before: int = 0

    def total(self, step: int) -> int:
        """The number of tokens in all steps up to `step`."""
        return self.before + step * self.tokens_per_step

    def of(self, *, num_steps: int, seconds: float) -> dict[str, float]:
        """Metrics of steps that took `seconds` together.

        Returns:
          `step_time` (seconds), `tokens_per_second` (all devices; or `examples_per_second`) and, where the peak is known,
          `mfu`: model FLOPs per second over peak FLOP/s (Chowdhery et al. 2022).
        """
        tokens_per_second = num_steps * self.tokens_per_step / seconds
        speeds = {"step_time": seconds / num_steps, f"{self.unit}_per_second": tokens_per_second}
        if self.peak_flops is not None and self.flops_per_token is not None:
            speeds["mfu"] = self.flops_per_token * tokens_per_second / (self.num_devices * self.peak_flops)
        return speeds
