"""Loading this process's rows of a batch, here or in a worker process, which leaves Ctrl-C to its parent and ends with it."""

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np

from axonml_jax.data.order import epoch_order
from axonml_jax.data.position import Batching, Position


class MapDataset(Protocol):
    """What a dataset must have.

    Used when they are there too: `__getitems__(indices) -> list` (PyTorch's protocol), and `fingerprint`, a string that tells
    this content from any other, which checkpoints keep.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Fetch:
    """Loads this process's rows of the batch at a position. Runs in worker processes, so it knows no devices.

    Attributes:
      dataset: the samples.
      batching: how an epoch of them is cut.
      rows: which rows of a batch are this process's.
      shuffle, seed: see `epoch_order`.
      collate: samples -> pytree of arrays.
    """

    dataset: MapDataset
    batching: Batching
    rows: np.ndarray
    shuffle: bool
    seed: int
    collate: Callable[[Sequence], Any]

    def __call__(self, position: Position) -> Any:
        """This process's rows, collated."""
        order = _cached_order(self.batching.num_samples, self.shuffle, self.seed, position.epoch)
        indices = order[self.batching.places(position)[self.rows]].tolist()
        many = getattr(self.dataset, "__getitems__", None)
        return self.collate(many(indices) if many else [self.dataset[index] for index in indices])


@dataclass(frozen=True)
class FromStart:
    """The batch so many after a position."""

    fetch: Fetch
    start: Position

    def __call__(self, index: int) -> Any:
        """This process's rows of it."""
        if multiprocessing.parent_process() is not None:
            _belong_to_parent()
        return self.fetch(self.fetch.batching.advance(self.start, int(index)))


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


@functools.lru_cache(maxsize=2)
def _cached_order(num_samples: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    return epoch_order(num_samples, shuffle=shuffle, seed=seed, epoch=epoch)
