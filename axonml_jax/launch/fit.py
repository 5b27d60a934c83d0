"""The loop: draw a batch, make a step, measure, validate; what happens with the records is up to the caller."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from axonml_jax._types import PyTree
from axonml_jax.facade.trainer import Trainer
from axonml_jax.sharding.place import to_host
from axonml_jax.training.metrics import Throughput


@dataclass(frozen=True)
class Record:
    """What was measured at a step.

    Attributes:
      step: number of updates made so far.
      metrics: by name: `loss`, `grad_norm` and the loss function's own of this step's batch, speeds since the record
        before (`compile_time` instead for the first step), and `valid_*` after a validation.
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
    """
    before, start = 0, time.perf_counter()
    for step, batch in zip(range(1, steps + 1), batches, strict=False):
        measured = trainer.step(batch)
        due = step == steps or (validate_every is not None and step % validate_every == 0)
        if not due and step > 1 and step % log_every:
            continue
        metrics = as_floats(measured)
        seconds = time.perf_counter() - start
        speeds = throughput.of(num_steps=step - before, seconds=seconds) if step > 1 else {"compile_time": seconds}
        valid = {f"valid_{name}": value for name, value in validate().items()} if due and validate else {}
        yield Record(step, {**metrics, **speeds, **valid})
        before, start = step, time.perf_counter()


def evaluate(trainer: Trainer, batches: Iterator[PyTree]) -> dict[str, float]:
    """The mean over batches of equal weight of everything `trainer.evaluate` returns."""
    results = [as_floats(trainer.evaluate(batch)) for batch in batches]
    return {name: float(np.mean([result[name] for result in results])) for name in results[0]}


def as_floats(metrics: dict[str, jax.Array]) -> dict[str, float]:
    """Metrics as floats; the mean over ranks where each rank has its own (NO_SYNC). Every process must call it."""
    return {name: float(np.mean(value, dtype=np.float64)) for name, value in to_host(metrics).items()}
