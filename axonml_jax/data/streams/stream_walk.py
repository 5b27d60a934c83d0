"""A walk through an iterable source, whose place can be saved and found again: by the source's own state, or by counting."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

_DOORS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


@dataclass(frozen=True)
class Stream:
    """An iterable source, walked from its start in every epoch.

    Attributes:
      source: something to iterate over again and again (`__iter__`), a function that returns such a thing or an iterator, or an
        iterator, which gives its samples once. Used when they are there too: `set_epoch(epoch)`, called before an epoch begins,
        and `state_dict()` with `load_state_dict(state)` (or `get_state` with `set_state`) of its iterator or of itself,
        by which a place is found again without reading what comes before it.
      window: how many samples are permuted among each other; 1: they keep their order.
      seed: draws the permutations.
    """

    source: Iterable | Callable[[], Iterable]
    window: int = 1
    seed: int = 0

    @property
    def once(self) -> bool:
        """Whether the samples can be read one single time."""
        return isinstance(self.source, Iterator)

    def open(self) -> Iterable:
        """What can be iterated over."""
        return self.source() if callable(self.source) and not isinstance(self.source, Iterable) else self.source


class StreamWalk:
    """One epoch of a stream, from a place in it; an iterator over its samples.

    Args:
      stream: the source.
      epoch: which epoch.
      place: what `place()` returned, plain values; None: from the start.
    """

    def __init__(self, stream: Stream, epoch: int, place: dict[str, Any] | None = None):
        self._stream, self._epoch = stream, epoch
        place = place or {"drawn": 0, "inside": 0, "own": None, "ended": False}
        self._drawn, self._inside, self._own = place["drawn"], place["inside"], place["own"]
        self._ended = place["ended"]
        self._source = stream.open()
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        self._iterator = iter(()) if self._ended else self._found()
        self._window = self._read() if self._inside else []
        if len(self._window) < self._inside:
            raise ValueError(f"the source ends before sample {self._drawn + self._inside}, the place to go on from")

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._inside >= len(self._window):
            self._pass()
            self._window = self._read()
            if not self._window:
                raise StopIteration
        sample, self._inside = self._window[self._inside], self._inside + 1
        return sample

    def place(self) -> dict[str, Any]:
        """Where the next sample is: samples before its window, the source's own state there if it keeps one, places inside."""
        if self._inside >= len(self._window):
            self._pass()
        return {"drawn": self._drawn, "inside": self._inside, "own": self._own, "ended": self._ended}

    def _pass(self) -> None:
        """Leave a window that is read to its end."""
        if self._window:
            # A source that was read to its end may say that it is at its start: its state is not asked for.
            self._ended = len(self._window) < self._stream.window
            self._drawn, self._inside = self._drawn + len(self._window), 0
            self._own, self._window = None if self._ended else self._own_state(), []

    def _read(self) -> list[Any]:
        samples = list(islice(self._iterator, self._stream.window))
        if self._stream.window == 1:
            return samples
        return [samples[i] for i in _window_order(len(samples), self._stream.seed, self._epoch, self._drawn)]

    def _found(self) -> Iterator[Any]:
        """An iterator at the place: by the source's own state, or past what was drawn before."""
        iterator = iter(self._source)
        for holder in (iterator, self._source):
            if self._own is not None and (load := _door(holder, 1)) is not None:
                load(copy.deepcopy(self._own))
                return iterator if holder is iterator else iter(self._source)
        skipped = sum(1 for _ in islice(iterator, self._drawn))
        if skipped < self._drawn:
            raise ValueError(
                f"the source has {skipped} samples, and the place to go on from is after {self._drawn} of them"
            )
        return iterator

    def _own_state(self) -> Any:
        door = _door(self._iterator, 0) or _door(self._source, 0)
        return None if door is None else copy.deepcopy(door())


def _door(what: Any, which: int) -> Callable | None:
    """How a source's own state is read (0) or set (1), if it has one."""
    return next((getattr(what, names[which]) for names in _DOORS if all(hasattr(what, name) for name in names)), None)


def _window_order(count: int, seed: int, epoch: int, start: int) -> np.ndarray:
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, start, 1], np.uint64)
    return np.argsort(np.random.Philox(key=key, counter=counter).random_raw(count), kind="stable")
