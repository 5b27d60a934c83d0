"""Batches from here or from worker processes, which leave Ctrl-C to their parent and end with it."""

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np

ENDLESS = 2**62
"""More batches than any run draws."""


class Feed(Protocol):
    """What makes this process's rows of every batch; it runs in worker processes too, so it knows no devices.

    A position is a frozen dataclass of plain values. Its fields `epoch` and `samples` count over all processes together.
    """

    @property
    def rows(self) -> np.ndarray:
        """Which rows of a batch are this process's."""
        ...

    @property
    def batch_size(self) -> int:
        """B, over all processes."""
        ...

    def first(self) -> Any:
        """The position at the beginning."""
        ...

    def batch(self, start: Any, index: int, num_epochs: int | None, worker: int | None) -> tuple[Any, Any]:
        """The batch `index` after a position, and the position after it; (None, None) after the last epoch."""
        ...

    def identity(self) -> dict[str, int | bool | str]:
        """What gives a position its meaning."""
        ...

    def position(self, state: dict[str, Any]) -> Any:
        """A saved position, checked."""
        ...

    def batches_per_epoch(self) -> int:
        """How many there are; a TypeError where nobody knows."""
        ...


@dataclass(frozen=True)
class FromStart:
    """The batch so many after a position, with the position after it.

    Attributes:
      feed: makes it.
      start: the position.
      num_epochs: after which nothing follows.
      num_workers: processes among which batches go round; 0: this one makes all.
    """

    feed: Feed
    start: Any
    num_epochs: int | None
    num_workers: int

    def __call__(self, index: int) -> tuple[Any, Any]:
        """This process's rows of it."""
        worker = None
        if multiprocessing.parent_process() is not None:
            _belong_to_parent()
            worker = int(index) % self.num_workers if self.num_workers else None
        return self.feed.batch(self.start, int(index), self.num_epochs, worker)


def host_batches(made: FromStart, prefetch: int) -> Generator[tuple[Any, Any]]:
    """Batches of this process's rows, each with the position after it, in order; closing it stops the workers."""
    import grain  # half a second that `import axonml_jax` should not cost

    batches = grain.MapDataset.range(ENDLESS).map(made)
    inline = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # a dataset need not be thread-safe
    stream = batches.to_iter_dataset(inline)
    if made.num_workers:
        _settle_flags()
        stream = stream.mp_prefetch(grain.MultiprocessingOptions(made.num_workers, max(prefetch, 1)))
    iterator = iter(stream)
    try:
        for batch, position in iterator:
            if position is None:
                return
            yield batch, position
    finally:
        iterator.close()


def _settle_flags() -> None:
    """Grain's workers read absl flags, which only `absl.app.run` parses: without it, settle on their defaults."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


@functools.cache
def _belong_to_parent() -> None:
    # Ctrl-C in a terminal reaches workers too: the parent decides what it means, and needs them until then.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True, name="parent watch").start()


def _end_with_parent() -> None:
    """A parent that is killed cannot stop its workers, which would wait for room in their queue for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
