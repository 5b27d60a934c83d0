"""A profiler trace of a few steps."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from axonml_jax._types import PyTree

FIRST, COUNT = 3, 5
"""The steps traced: past compilation, and few enough to open in a browser."""


def traced(batches: Iterator[PyTree], folder: Path, wait: Callable[[], object]) -> Iterator[PyTree]:
    """The same batches; while the third to seventh are in use, `jax.profiler` writes a trace, in which each is a `step`.

    Args:
      batches: what a training loop draws from.
      folder: where the trace goes (docs/guides/profiling.md says how to read it).
      wait: returns when the steps so far are done.
    """
    running = False
    try:
        for number, batch in enumerate(batches, start=1):
            if number == FIRST + COUNT:
                running = _stop(wait)
            if number == FIRST:
                wait()
                jax.profiler.start_trace(folder)
                running = True
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                yield batch
    finally:
        if running:
            _stop(wait)


def _stop(wait: Callable[[], object]) -> bool:
    wait()
    jax.profiler.stop_trace()
    return False
