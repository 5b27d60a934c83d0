"""Code of one's own that a training calls: after steps, validations and saves, and at the end."""

import difflib
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingEvent:
    """What a callback is told.

    Attributes:
      trainer: the trainer, whose state and model may be read.
      step: updates made so far; of `on_save` those that the checkpoint holds.
      metrics: of `on_step` what `Trainer.step` returned: arrays on the devices, and whoever reads one waits for the step. Of
        `on_eval` the means over the validation, plain numbers. Else empty.
      path: of `on_save` the checkpoint, which is whole on disk, or of one at a URL that; else None.
      reason: of `on_end`: "finished", "stopped" (by a signal), "diverged" or "failed" (by an error); else None.
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
        """After every update, before the devices have finished it."""

    def on_eval(self, event: TrainingEvent) -> None:
        """After every validation."""

    def on_save(self, event: TrainingEvent) -> None:
        """After a checkpoint is committed, and before `on_end`.

        Of an asynchronous one at the next point at which all processes know it: in one process the next step or save, in
        several the next save or `CheckpointManager.wait`.
        """

    def on_end(self, event: TrainingEvent) -> None:
        """Once, when the training is over, however it ended."""


class CallbackError(RuntimeError):
    """A callback has raised; its own exception is the cause."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def checked(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """The callbacks.

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
                problems.append(f"callbacks[{number}]: nobody calls {kind}.{name}; {hint}")
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
