"""The loop: draw a batch, make a step, measure, validate; what happens with the records is up to the caller."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.facade.trainer import Trainer
from axonml_jax.mesh.watch.watchdog import Watchdog
from axonml_jax.training.metrics import Throughput, as_floats, mean_of


@dataclass(frozen=True)
class Record:
    """What was measured at a step.

    Attributes:
      step: number of updates made so far.
      metrics: by name: `loss`, `grad_norm` and the loss function's own of this step's batch, `learning_rate` of the last
        update where it is known, `tokens` (or `examples`) seen since the run began, `wall_time` (seconds since it began, those
        of the process before a resumption included), speeds since the record before (`compile_time` instead for the first
        step), `valid_*` after a validation, and `slow_rank` with `slow_rank_times` while one holds up the others.
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
    """Train for `steps` updates, yielding a record after the first, every `log_every`-th, every validated and the last.

    Between records nothing waits for the devices. Stop iterating, and the training stops.

    Args:
      trainer: makes the steps.
      batches: global batches, at least `steps` of them.
      steps: number of updates.
      throughput: turns durations into speeds.
      validate: metrics of the model as it is now; its time counts in no speed.
      validate_every: validate after every this many steps, besides the last; None only after the last.
      log_every: steps between records.
      learning_rate: the optimizer's schedule, of the number of updates made before; None: it is not known.
      start: updates made already; the records of a resumed run are those it would have had uninterrupted.
      elapsed: seconds that the run had taken until then.
      watchdog: told of every step, and of validations and what `after` does.
      seen: called with the number of every step and its loss on the devices, before `after`.
      after: called after every step with its number and the metrics of its record (none where it has no record); true
        stops the training. In a process alone it is called when the validation fails too, before that is raised.
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
            metrics |= {f"valid_{name}": value for name, value in valid.items()}
            metrics |= {} if watchdog is None else watchdog.slowest()
            yield Record(step, metrics)
            before, clock = step, time.perf_counter()
        elif first:  # compiling counts in no speed
            jax.block_until_ready(measured)
            before, clock = step, time.perf_counter()
        with doing("saving"):
            if after is not None and after(step, metrics):
                return


def evaluate(trainer: Trainer, batches: Iterator[PyTree], weights: Sequence[float] | None = None) -> dict[str, float]:
    """The mean over batches, of these weights or of equal ones, of everything `trainer.evaluate` returns."""
    return mean_of([as_floats(trainer.evaluate(batch)) for batch in batches], weights)
