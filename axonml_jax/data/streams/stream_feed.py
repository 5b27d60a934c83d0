"""Batches of an iterable source: every process walks all of it and keeps its own rows."""

import multiprocessing
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from axonml_jax.data.loading_error import collated, named
from axonml_jax.data.streams.stream_walk import Stream, StreamWalk


class NoBatch(ValueError):
    """All samples of a source together fill no batch.

    Args:
      num_samples: how many there are.
      batch_size: how many a batch has.
    """

    def __init__(self, num_samples: int, batch_size: int):
        super().__init__(num_samples, batch_size)
        self.num_samples, self.batch_size = num_samples, batch_size

    def __str__(self) -> str:
        return (
            f"the source's {self.num_samples} samples fill no batch of {self.batch_size}: give drop_last=False or a smaller "
            "batch"
        )


@dataclass(frozen=True)
class StreamPosition:
    """An epoch, the number of its samples already drawn over all processes together, and the source's place there."""

    epoch: int = 0
    samples: int = 0
    place: dict[str, Any] | None = None


class StreamFeed:
    """This process's rows of every batch of a stream. A sample's number in the stream says whose it is.

    What lies between the batches that are asked for is walked over, and not collated: worker processes share the batches, and
    each walks the whole stream.

    Args:
      stream: the source.
      batch_size: B, over all processes.
      drop_last: leave out the samples after the last whole batch, instead of filling it up from the epoch's start.
      rows: which rows of a batch are this process's.
      collate: samples -> pytree of arrays.
    """

    def __init__(
        self,
        stream: Stream,
        batch_size: int,
        drop_last: bool,
        rows: np.ndarray,
        collate: Callable[[Sequence], Any],
    ):
        self.stream, self.batch_size, self.drop_last = stream, batch_size, drop_last
        self.rows, self.collate = rows, collate
        self._walking: tuple[Any, int, Iterator] | None = None
        self._opened = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_walking": None}

    def first(self, epoch: int = 0) -> StreamPosition:
        """The position at the beginning of an epoch."""
        return StreamPosition(epoch)

    def batch(
        self, start: StreamPosition, index: int, num_epochs: int | None, worker: int | None
    ) -> tuple[Any, StreamPosition | None]:
        """The batch `index` after a position, and the position after it; (None, None) after the last epoch."""
        if self._walking is None or self._walking[0] is not start or self._walking[1] > index:
            self._walking = (start, 0, self._batches(start, num_epochs, worker))
        _, at, batches = self._walking
        found = next(islice(batches, index - at, None), None)
        self._walking = None if found is None else (start, index + 1, batches)
        if found is None:
            return None, None
        samples, position = found
        return collated(self.collate, [samples[row] for row in self.rows]), position()

    def identity(self) -> dict[str, int | bool | str]:
        """What gives a position its meaning."""
        content = getattr(self.stream.source, "fingerprint", None)
        known = {} if content is None else {"fingerprint": str(content)}
        return {"window": self.stream.window, "seed": self.stream.seed} | known

    def position(self, state: dict[str, Any]) -> StreamPosition:
        """A saved position, checked."""
        place = state["place"]
        if place is not None and sorted(place) != ["drawn", "ended", "inside", "own"]:
            raise ValueError(f"load_state_dict: place={place} is no place in an iterable source")
        position = StreamPosition(operator.index(state["epoch"]), operator.index(state["samples"]), place)
        if position.epoch < 0 or position.samples < 0:
            raise ValueError(f"load_state_dict: {position} is no position in a source")
        return position

    def batches_per_epoch(self) -> int:
        """Unknown."""
        raise TypeError("an iterable source does not know how many batches an epoch has; it can only be iterated over")

    def _batches(self, start: StreamPosition, num_epochs: int | None, worker: int | None) -> Iterator:
        """Every batch as its samples, and a function that gives the position after it."""
        epochs = count(start.epoch) if num_epochs is None else range(start.epoch, num_epochs)
        for epoch in epochs:
            samples, place = (start.samples, start.place) if epoch == start.epoch else (0, None)
            walk, drawn = self._open(epoch, place), samples
            while len(batch := self._take(walk, self.batch_size, epoch, drawn, worker)) == self.batch_size:
                drawn += self.batch_size
                yield batch, lambda epoch=epoch, drawn=drawn, walk=walk: StreamPosition(epoch, drawn, walk.place())
            if batch and not self.drop_last:
                again = self._start_again(epoch, len(batch), worker)
                yield batch + again, lambda epoch=epoch: StreamPosition(epoch + 1)
            elif not drawn:
                raise NoBatch(len(batch), self.batch_size)

    def _start_again(self, epoch: int, had: int, worker: int | None) -> list[Any]:
        """Samples from the epoch's start that fill its last batch up."""
        samples: list[Any] = []
        while len(samples) < self.batch_size - had:
            more = self._take(self._open(epoch, None), self.batch_size - had - len(samples), epoch, 0, worker)
            if not more:
                raise ValueError("the source gives no samples when it is iterated over again")
            samples += more
        return samples

    def _take(self, walk: StreamWalk, wanted: int, epoch: int, drawn: int, worker: int | None) -> list[Any]:
        samples: list[Any] = []
        with named(lambda: f"sample {drawn + len(samples)} of epoch {epoch}", worker):
            for sample in walk:
                samples.append(sample)
                if len(samples) == wanted:
                    break
        return samples

    def _open(self, epoch: int, place: dict[str, Any] | None) -> StreamWalk:
        if self.stream.once and self._opened:
            raise ValueError(
                f"a {type(self.stream.source).__name__} gives its samples once, and they are asked for again (another epoch, "
                "another iteration, a batch filled up): give the function that makes it in its place, or num_epochs=1"
            )
        self._opened = True
        return StreamWalk(self.stream, epoch, place)


def refuse_once_in_workers(stream: Stream, num_workers: int) -> None:
    """An iterator cannot be sent to another process."""
    if stream.once and num_workers and multiprocessing.parent_process() is None:
        raise TypeError(
            f"num_workers={num_workers}: a {type(stream.source).__name__} cannot be sent to worker processes; give the "
            "function that makes it in its place"
        )
