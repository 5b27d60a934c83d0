"""Batches from here or from worker processes, which leave Ctrl-C and SIGTERM to their parent and end with it."""

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np

ENDLESS = 2**62
"""More batches than any run draws."""

_NAME = "grain-process-prefetch"

_SHARED = 2**20
"""Arrays of fewer bytes come through a pipe. Shared memory is freed in `__del__`, where Python drops a KeyboardInterrupt."""


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

    def first(self, epoch: int = 0) -> Any:
        """The position at the beginning of an epoch."""
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
        in_worker = self.num_workers and multiprocessing.parent_process() is not None
        worker = int(index) % self.num_workers if in_worker else None
        return self.feed.batch(self.start, int(index), self.num_epochs, worker)


def host_batches(made: FromStart, prefetch: int) -> Generator[tuple[Any, Any]]:
    """Batches of this process's rows, each with the position after it, in order; closing it stops the workers."""
    import grain  # half a second that `import axonml_jax` should not cost

    batches = grain.MapDataset.range(ENDLESS).map(made)
    inline = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # a dataset need not be thread-safe
    stream = batches.to_iter_dataset(inline)
    if made.num_workers:
        _settle_flags()
        _end_at_exit()
        options = grain.MultiprocessingOptions(made.num_workers, max(prefetch, 1))
        small = grain.experimental.DatasetOptions(min_shm_size=_SHARED)
        stream = grain.experimental.WithOptionsIterDataset(stream, small)
        stream = stream.mp_prefetch(options, worker_init_fn=_belong_to_parent)
    iterator = iter(stream)
    try:
        with _held_from_children(signal.SIGTERM) if made.num_workers else nullcontext():
            found = next(iterator)  # starts the workers
        while found[1] is not None:
            yield found
            found = next(iterator)
    finally:
        iterator.close()


@contextmanager
def _held_from_children(number: signal.Signals) -> Iterator[None]:
    """Processes that are started meanwhile, from here or from threads that are made here, begin with a signal held back."""
    resource_tracker.ensure_running()  # Python starts it with the first worker otherwise, and lets signals through after that
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _settle_flags() -> None:
    """Grain's workers read absl flags, which only `absl.app.run` parses: without it, settle on their defaults."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _belong_to_parent(worker: int, num_workers: int) -> None:
    """A worker's first deed. Ctrl-C and SIGTERM reach it too: the parent decides what they mean, and needs it until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # programs that a dataset starts would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_with_parent, daemon=True, name="parent watch").start()


def _end_with_parent() -> None:
    """A parent that is killed cannot stop its workers, which would wait for room in their queue for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@functools.cache
def _end_at_exit() -> None:
    """Python ends what is left of its children by SIGTERM at its exit, and waits for them; grain's last try comes before."""
    util.Finalize(None, _kill_left, exitpriority=0)


def _kill_left() -> None:
    for child in multiprocessing.active_children():
        if child.name.startswith(_NAME):
            child.kill()
