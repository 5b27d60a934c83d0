"""Batches from here or from worker processes, which leave Ctrl-C and SIGTERM to their parent and end with it."""

import functools
import multiprocessing
import os
import re
import signal
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np

from axonml_jax.data.loading_error import LoadingError

ENDLESS = 2**62
"""More batches than any run draws."""

_NAME = "grain-process-prefetch"
_LOST = re.compile(r"Worker process was terminated unexpectedly with exit code (-?\d+)")
_TICK = 0.5
_UNGUARDED = 91  # the status of a worker that runs the script again and comes to its loader
_IN_VAIN = 92  # what grain is told in the place of status 0, which it takes for a good end

_open: "weakref.WeakSet[Generator]" = weakref.WeakSet()

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
    """Batches of this process's rows, each with the position after it, in order; closing it stops the workers.

    Raises:
      LoadingError: for a sample that cannot be read, or a worker that ends before its time, whatever its status.
    """
    drawn = _drawn(made, prefetch)
    if made.num_workers:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            os._exit(_UNGUARDED)  # a worker that runs the script anew, to find its dataset in it; its parent says so
        _open.add(drawn)
        _end_at_exit()
    return drawn


def _drawn(made: FromStart, prefetch: int) -> Generator[tuple[Any, Any]]:
    import grain  # half a second that `import axonml_jax` should not cost

    batches = grain.MapDataset.range(ENDLESS).map(made)
    inline = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # a dataset need not be thread-safe
    stream = batches.to_iter_dataset(inline)
    if made.num_workers:
        _settle_flags()
        options = grain.MultiprocessingOptions(made.num_workers, max(prefetch, 1))
        small = grain.experimental.DatasetOptions(min_shm_size=_SHARED)
        stream = grain.experimental.WithOptionsIterDataset(stream, small)
        stream = stream.mp_prefetch(options, worker_init_fn=_belong_to_parent)
    iterator, over = iter(stream), threading.Event()
    try:
        with _held_from_children(signal.SIGTERM) if made.num_workers else nullcontext():
            if made.num_workers:
                threading.Thread(target=_notice_ends, args=(over,), daemon=True, name="worker watch").start()
            found = _next(iterator)  # starts the workers
        while found[1] is not None:
            yield found
            found = _next(iterator)
    finally:
        over.set()
        iterator.close()


def _next(iterator: Iterator[tuple[Any, Any]]) -> tuple[Any, Any]:
    """The next batch, where a worker that has gone is named in one line."""
    try:
        return next(iterator)
    except RuntimeError as error:
        if (lost := _LOST.search(str(error))) is None:
            raise
        status = int(lost[1])
    if status == _UNGUARDED:
        raise LoadingError(
            "the workers of a loader (num_workers) import this script again, which started them while it was imported: put "
            'what it does under `if __name__ == "__main__":`, or give num_workers=0'
        )
    said = {
        _IN_VAIN: "0: the dataset or collate, or what they call, has ended it (sys.exit, os._exit)",
        -signal.SIGKILL: "-9: it was killed, most often by the out-of-memory killer (see `dmesg`)",
    }.get(status, f"{status}: what it said last stands above")
    raise LoadingError(f"a worker of the loader ended with status {said}")


def _notice_ends(over: threading.Event) -> None:
    """Until it is over, tell grain of workers that have ended with status 0 too: it would wait for their batches for ever.

    Of workers that grain has asked to end it no longer reads the status.
    """
    seen: set[Any] = set()
    while not over.is_set():
        seen |= {child for child in multiprocessing.active_children() if child.name.startswith(_NAME)}
        wait([child.sentinel for child in seen], _TICK) if seen else over.wait(_TICK)
        for child in [child for child in seen if child.exitcode is not None]:
            seen.remove(child)
            if child.exitcode == 0:
                child._popen.returncode = _IN_VAIN  # multiprocessing knows the status from here on


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
    """Close what is still open while everything that grain needs for it is there, and leave no worker.

    Python ends what is left of its children by SIGTERM at its exit, and waits for them; grain's last try comes before.
    """
    util.Finalize(None, _close_open, exitpriority=10)
    util.Finalize(None, _kill_left, exitpriority=0)


def _close_open() -> None:
    for drawn in list(_open):
        with suppress(ValueError):  # another thread draws from it right now
            drawn.close()


def _kill_left() -> None:
    for child in multiprocessing.active_children():
        if child.name.startswith(_NAME):
            child.kill()
