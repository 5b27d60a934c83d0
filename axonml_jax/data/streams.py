"""Iterable sources that are read from their start, and mixtures of sources; a position in them can be resumed."""

import copy
import functools
import math
import multiprocessing
import operator
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, count, islice, pairwise
from typing import Any

import jax
import numpy as np

from axonml_jax.data.sampler import Columns, LoadingError, MapDataset, collated, epoch_order, named, seed_offenders

# --------------------------------------------------------------------------------------------------
# Mixtures: samples of several sources in given shares, exact in the long run, in an order drawn from a seed.
# --------------------------------------------------------------------------------------------------

_BLOCK, _RAREST = 1024, 2**20


class Shares:
    """Computes the source of every sample of an endless mixture from the sample's number alone.

    Samples come in blocks. After every block the number drawn of a source is the one its share says, rounded; inside, the
    sources' order is drawn from the seed.

    >>> shares = Shares([3, 1], seed=0)
    >>> [np.bincount(shares.sources(np.arange(n))).tolist() for n in (1024, 4096)]
    [[768, 256], [3072, 1024]]

    Args:
      weights: positive, of any sum.
      seed: draws the orders.
    """

    def __init__(self, weights: Sequence[float], seed: int = 0):
        exact = [_exact(weight) for weight in weights]
        self._cumulative = [part / sum(exact) for part in accumulate(exact)]
        self._seed = seed
        # With at least one sample of every source in a block no rounded number ever falls.
        self.block = max(_BLOCK, -(-sum(exact) // min(exact)))
        self._drawn = functools.lru_cache(maxsize=8)(self._draw)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_drawn"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._drawn = functools.lru_cache(maxsize=8)(self._draw)

    def before(self, number: int) -> list[int]:
        """The number of samples of every source before sample `number`, at which a block begins."""
        ends = [0, *((number * part + Fraction(1, 2)).__floor__() for part in self._cumulative)]
        return [right - left for left, right in pairwise(ends)]

    def sources(self, numbers: np.ndarray) -> np.ndarray:
        """The sources of samples by number."""
        return self.places(numbers)[0]

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample, by number, and the sample's index in that source; int64 [n] both."""
        blocks, inside = np.divmod(np.asarray(numbers, np.int64), self.block)
        source, place = np.empty_like(inside), np.empty_like(inside)
        for block in np.unique(blocks):
            chosen = blocks == block
            sources, places = self._drawn(int(block))
            source[chosen], place[chosen] = sources[inside[chosen]], places[inside[chosen]]
        return source, place

    def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = self.before(block * self.block), self.before((block + 1) * self.block)
        counts = np.array(end, np.int64) - np.array(start, np.int64)
        key, counter = np.array([self._seed, block], np.uint64), np.array([0, 0, 0, 2], np.uint64)
        order = np.argsort(np.random.Philox(key=key, counter=counter).random_raw(self.block), kind="stable")
        sources = np.repeat(np.arange(len(counts)), counts)[order]
        places = np.empty(self.block, np.int64)
        for source, first in enumerate(start):
            places[sources == source] = first + np.arange(counts[source])
        return sources, places


def _exact(weight: Any) -> Fraction:
    """A weight without rounding; NumPy's and JAX's numbers too, which `Fraction` refuses, or keeps in their few bits."""
    return Fraction(weight) if isinstance(weight, int | float | Fraction) else Fraction(float(weight))


class Mixture:
    """Several datasets as one, whose epochs have samples of each in its share; an exhausted source restarts.

    As a dataset it is the sources one after the other, and its epochs are as long; `order_of` says which of them an epoch has.
    Made by `mix`.
    """

    def __init__(self, sources: Mapping[str, Any], weights: Sequence[float], seed: int = 0):
        self.sources, self._shares = dict(sources), Shares(weights, seed)
        self._about = f"{list(map(float, weights))} by {seed}"
        self._sizes = [len(source) for source in self.sources.values()]
        self._firsts = np.cumsum([0, *self._sizes])
        self._order = self._remembering()

    def _remembering(self) -> Callable[..., np.ndarray]:
        """A cached `epoch_order`, which keeps the two newest orders of every source for the mixture's lifetime."""
        return functools.lru_cache(maxsize=2 * len(self._sizes))(_order)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_order"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._order = self._remembering()

    @property
    def fingerprint(self) -> str:
        """Text that identifies this mixture."""
        contents = [f"{name}: {getattr(each, 'fingerprint', len(each))}" for name, each in self.sources.items()]
        return f"{', '.join(contents)} mixed {self._about}"

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Any:
        """Sample `index` of the concatenated sources."""
        index = range(len(self))[index]
        which = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return list(self.sources.values())[which][int(index - self._firsts[which])]

    def order_of(self, epoch: int, places: np.ndarray, *, shuffle: bool, seed: int) -> np.ndarray:
        """The indices of an epoch's samples at these places, int64 [n]."""
        source, drawn = self._shares.places(epoch * len(self) + np.asarray(places))
        indices = np.empty_like(drawn)
        for which, size in enumerate(self._sizes):
            epochs, inside = np.divmod(drawn, size)
            for own in np.unique(epochs[source == which]):
                chosen = (source == which) & (epochs == own)
                indices[chosen] = self._firsts[which] + self._drawn_of(which, int(own), inside[chosen], shuffle, seed)
        return indices

    def _drawn_of(self, which: int, epoch: int, places: np.ndarray, shuffle: bool, seed: int) -> np.ndarray:
        """The indices in a source of its samples at these places of its own epoch, by its own order where it has one."""
        own = getattr(list(self.sources.values())[which], "order_of", None)
        if own is not None:  # a mixture, whose shares hold within this one
            return own(epoch, places, shuffle=shuffle, seed=seed ^ which)
        return self._order(self._sizes[which], shuffle, seed ^ which, epoch)[places]


def checked_weights(weights: Mapping[str, float], seed: int) -> None:
    """Refuse invalid weights or seeds of a mixture.

    Raises:
      ValueError: lists every offender.
    """
    offenders = seed_offenders(seed)
    offenders += [
        f"the weight of {name!r} is {weight!r}: must be positive, and a finite number"
        for name, weight in weights.items()
        if isinstance(weight, str) or not 0 < weight < math.inf
    ]
    if not weights:
        offenders.append("there are no sources")
    if offenders:
        raise ValueError("mix: " + "; ".join(offenders))
    exact = {name: _exact(weight) for name, weight in weights.items()}
    if rare := [repr(name) for name, weight in exact.items() if weight * _RAREST < sum(exact.values())]:
        raise ValueError(
            f"mix: the shares of {' and '.join(rare)} are below one in {_RAREST:,}, and the order of so many samples is drawn "
            "at once: give them larger weights, or leave them out"
        )


def _order(size: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    return epoch_order(size, shuffle=shuffle, seed=seed, epoch=epoch)


# --------------------------------------------------------------------------------------------------
# A walk through an iterable source, whose place can be saved and found again: by the source's own state, or by
# counting.
# --------------------------------------------------------------------------------------------------

_DOORS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


@dataclass(frozen=True)
class Stream:
    """An iterable source, read from its start in every epoch.

    Attributes:
      source: something to iterate over again and again (`__iter__`), a function that returns such a thing or an iterator, or an
        iterator, which gives its samples once. Used when they are there too: `set_epoch(epoch)`, called before an epoch begins,
        and `state_dict()` with `load_state_dict(state)` (or `get_state` with `set_state`) of its iterator or of itself,
        by which a place is found again without reading what comes before it. A source that keeps its state in itself is set
        back to its first state at an epoch's start if it was not read to its end, or if a place was set and it has `set_epoch`.
      window: how many samples are permuted among each other; 1: they keep their order.
      seed: draws the permutations.
    """

    source: Iterable | Callable[[], Iterable]
    window: int = 1
    seed: int = 0

    @property
    def once(self) -> bool:
        """Whether the source is an iterator, which can be read only once."""
        return isinstance(self.source, Iterator)

    def open(self) -> Iterable:
        """The iterable: what the source function returns, or the source itself."""
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
        self._kept = _kept_of(self._source)
        self._tell_epoch()
        self._iterator = iter(()) if self._ended else self._found()
        self._window = self._read() if self._inside else []
        if len(self._window) < self._inside:
            raise ValueError(f"the source ends before sample {self._drawn + self._inside}, where reading was to resume")

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
        """The position of the next sample: samples before its window, the source's own state there, and the place inside."""
        if self._inside >= len(self._window):
            self._pass()
        return {"drawn": self._drawn, "inside": self._inside, "own": self._own, "ended": self._ended}

    def _pass(self) -> None:
        """Leave a window that has been read to its end."""
        if self._window:
            # A source that was read to its end may say that it is at its start: its state is not asked for.
            self._ended = len(self._window) < self._stream.window
            self._drawn, self._inside = self._drawn + len(self._window), 0
            self._own, self._window = None if self._ended else self._own_state(), []

    def _read(self) -> list[Any]:
        samples = list(islice(self._iterator, self._stream.window))
        self._kept.ended |= len(samples) < self._stream.window and not self._ended
        if self._stream.window == 1:
            return samples
        return [samples[i] for i in _window_order(len(samples), self._stream.seed, self._epoch, self._drawn)]

    def _found(self) -> Iterator[Any]:
        """An iterator at the saved position: by the source's own state, or by skipping what was drawn before."""
        iterator = iter(self._source)
        if self._own is not None and (load := _door(iterator, 1)) is not None:
            load(copy.deepcopy(self._own))
            return iterator
        load = _door(self._source, 1) if _door(iterator, 1) is None else None
        own = self._kept.to_load(hasattr(self._source, "set_epoch")) if self._own is None else self._own
        if load is not None and own is not None:
            load(copy.deepcopy(own))
            if self._own is None:
                self._tell_epoch()
            self._kept.loaded |= self._own is not None
            iterator = iter(self._source)
        self._kept.ended = False
        if load is not None and self._own is not None:
            return iterator
        skipped = sum(1 for _ in islice(iterator, self._drawn))
        if skipped < self._drawn:
            raise ValueError(
                f"the source has only {skipped} samples, and reading was to resume after {self._drawn} of them"
            )
        return iterator

    def _tell_epoch(self) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self._epoch)  # pyright: ignore[reportAttributeAccessIssue]

    def _own_state(self) -> Any:
        door = _door(self._iterator, 0) or _door(self._source, 0)
        return None if door is None else copy.deepcopy(door())


@dataclass
class _Kept:
    """What is remembered of a source that keeps its position in itself.

    Attributes:
      start: its state before it was walked; None: it has none.
      loaded: whether a place was set: some begin there again whenever they are iterated over (Hugging Face's, in one epoch).
      ended: whether it was read to its end, from where it begins again by itself.
    """

    start: Any = None
    loaded: bool = False
    ended: bool = True

    def to_load(self, told: bool) -> Any:
        """The state to set at an epoch's start; None for none: a source that is not `told` epochs may count them itself."""
        return self.start if (self.loaded and told) or not self.ended else None


_KEPT = "_axonml_jax_start"


def _kept_of(source: Any) -> _Kept:
    """The record kept on a source object, so that all its loaders and worker processes share it."""
    if _door(source, 0) is None or not hasattr(source, "__dict__"):
        return _Kept()
    if _KEPT not in vars(source):
        with suppress(Exception):  # some have no state before they are iterated over
            vars(source)[_KEPT] = _Kept(copy.deepcopy(_door(source, 0)()))  # pyright: ignore[reportOptionalCall]
    return vars(source).get(_KEPT) or _Kept()


def _door(what: Any, which: int) -> Callable | None:
    """The method that reads (0) or sets (1) a source's own state, if it has one."""
    return next((getattr(what, names[which]) for names in _DOORS if all(hasattr(what, name) for name in names)), None)


def _window_order(count: int, seed: int, epoch: int, start: int) -> np.ndarray:
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, start, 1], np.uint64)
    return np.argsort(np.random.Philox(key=key, counter=counter).random_raw(count), kind="stable")


# --------------------------------------------------------------------------------------------------
# Which contract a source keeps: random access or iteration.
# --------------------------------------------------------------------------------------------------


def as_dataset(given: Any) -> Any:
    """A dataset with `__len__` and `__getitem__`, or a `Stream` of what can only be iterated over.

    Args:
      given: a dataset, a dict of arrays, an iterable, or a function that returns one. A mapping from indices to samples is a
        dataset, a `torch.utils.data.IterableDataset` is none though it inherits `__getitem__`.

    Raises:
      TypeError: for anything else, with the remedy where it is nearly one.
      ValueError: for a dataset without end.
    """
    if isinstance(given, Stream):
        return given
    if wrong := _nearly_a_dataset(given):
        raise TypeError(wrong)
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return Columns(given)
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not _only_iterates(given):
        if len(given) > _ENDLESS:
            raise ValueError(
                f"a {type(given).__name__} of {len(given):,} samples has no end: leave .repeat() of Grain out, as "
                "num_epochs=None goes on with the next epoch"
            )
        return given
    if isinstance(given, Iterable) or callable(given):
        return Stream(given)  # pyright: ignore[reportArgumentType]  # any function
    raise TypeError(
        f"a dataset needs __len__ and __getitem__, or __iter__; {type(given).__name__} has neither. Give a dataset, a dict of "
        "arrays, an iterable, or a function that returns one"
    )


_ENDLESS = 2**60


def _nearly_a_dataset(given: Any) -> str:
    """A message for objects that have a dataset's methods but are not one; empty for all else."""
    if isinstance(given, type) and hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        return f"{given.__name__} is a class: give an object of it, {given.__name__}(...)"
    kind = type(given).__name__
    if hasattr(given, "columns") and (hasattr(given, "iloc") or hasattr(given, "schema")):
        return (
            f"a {kind} is read by columns, and a dataset by samples: give dict(frame), a dict of arrays, of pandas; "
            "frame.to_dict() of Polars; else {name: frame[name] for name in its names}"
        )
    if hasattr(given, "iloc") and hasattr(given, "index"):
        return f"a {kind} is read by its labels, and a dataset by places: give series.to_numpy()"
    if isinstance(given, str | os.PathLike):
        return f"a {kind} is no dataset: ax.open_dataset(path) reads files of text, JSON lines and Parquet"
    if isinstance(given, Mapping) and any(hasattr(each, "__getitems__") for each in given.values()):
        return f"a {kind} holds datasets by name: give one of them, or ax.mix(sources, weights)"
    if hasattr(given, "collate_fn") and hasattr(given, "dataset"):
        return (
            f"a {kind} gives batches, and a dataset gives samples: give its dataset, loader.dataset; or leave "
            "create_dataloader out, and train on what the loader gives"
        )
    if isinstance(given, tuple) and len(given) > 1 and all(getattr(each, "shape", ()) for each in given):
        lengths = {each.shape[0] for each in given}
        if len(lengths) == 1 and min(lengths) > len(given):  # list(given) says that each array is a sample
            return (
                f"a tuple of {len(given)} arrays of {min(lengths)} rows would be {len(given)} samples: give a dict of arrays, "
                '{"x": x, "y": y}, whose rows are the samples; or a list, where each array is one sample'
            )
    return ""


def _only_iterates(given: Any) -> bool:
    return any(kind.__name__ == "IterableDataset" for kind in type(given).__mro__)


# --------------------------------------------------------------------------------------------------
# Batches of an iterable source: every process walks all of it and keeps its own rows.
# --------------------------------------------------------------------------------------------------


class NoBatch(ValueError):
    """Raised when all samples of a source together fill no batch.

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
    """An epoch, the number of its samples already drawn by all processes, and the source's position there."""

    epoch: int = 0
    samples: int = 0
    place: dict[str, Any] | None = None


class StreamFeed:
    """Makes this process's rows of every batch of a stream; a sample's number decides whose it is.

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
        """The position at the start of an epoch."""
        return StreamPosition(epoch)

    def batch(
        self, start: StreamPosition, index: int, num_epochs: int | None, worker: int | None
    ) -> tuple[Any, StreamPosition | None, int | None]:
        """The batch `index` after a position, the position after it, and a checksum (see `Feed.batch`)."""
        if self._walking is None or self._walking[0] is not start or self._walking[1] > index:
            self._walking = (start, 0, self._batches(start, num_epochs, worker))
        _, at, batches = self._walking
        found = next(islice(batches, index - at, None), None)
        self._walking = None if found is None else (start, index + 1, batches)
        if found is None:
            return None, None, None
        samples, position = found
        seen = None if index else _checksum(samples)
        return collated(self.collate, [samples[row] for row in self.rows]), position(), seen

    def identity(self) -> dict[str, int | bool | str]:
        """The facts without which a position has no meaning: the source's fingerprint, window and seed."""
        content = getattr(self.stream.source, "fingerprint", None)
        known = {} if content is None else {"fingerprint": str(content)}
        return {"window": self.stream.window, "seed": self.stream.seed} | known

    def position(self, state: dict[str, Any]) -> StreamPosition:
        """Check and return a saved position."""
        place = state["place"]
        if place is not None and sorted(place) != ["drawn", "ended", "inside", "own"]:
            raise ValueError(f"load_state_dict: place={place} is no place in an iterable source")
        position = StreamPosition(operator.index(state["epoch"]), operator.index(state["samples"]), place)
        if position.epoch < 0 or position.samples < 0:
            raise ValueError(f"load_state_dict: {position} is no position in a source")
        return position

    def batches_per_epoch(self) -> int:
        """Raise a TypeError: the number is not known."""
        raise TypeError("an iterable source does not know how many batches an epoch has; it can only be iterated over")

    def _batches(self, start: StreamPosition, num_epochs: int | None, worker: int | None) -> Iterator:
        """Yield every batch as its samples, with a function that returns the position after it."""
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
        """Samples from the epoch's start that fill up its last batch."""
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
                f"a {type(self.stream.source).__name__} can be iterated over once, and its samples are needed again (another "
                "epoch, another iteration, a batch filled up): give the function that makes it instead, or num_epochs=1"
            )
        self._opened = True
        return StreamWalk(self.stream, epoch, place)


def _checksum(samples: Sequence) -> int:
    """The CRC-32 of the samples' arrays and texts, which is the same in every process."""
    found = 0
    with suppress(Exception):  # what another framework cannot give NumPy
        for leaf in map(np.asarray, jax.tree.leaves(samples)):
            found = found if leaf.dtype.hasobject else zlib.crc32(leaf.tobytes(), found)
    return found


def refuse_once_in_workers(stream: Stream, num_workers: int) -> None:
    """Refuse an iterator with worker processes, to which it cannot be sent."""
    if stream.once and num_workers and multiprocessing.parent_process() is None:
        raise TypeError(
            f"num_workers={num_workers}: a {type(stream.source).__name__} cannot be sent to worker processes; give the "
            "function that makes it instead"
        )


# --------------------------------------------------------------------------------------------------
# Mixtures with an iterable source among them: the same shares, walked from the start.
# --------------------------------------------------------------------------------------------------

_AT_ONCE = 256


def mix(
    sources: Mapping[str, MapDataset | Mapping[str, Any] | Iterable | Callable[[], Iterable]],
    weights: Mapping[str, float],
    *,
    seed: int = 0,
) -> "Mixture | StreamMixture":
    """Mix several sources into one, with samples of each in its share.

    After every block of samples (1,024, more where a share is smaller than one in 1,024) the number drawn of each source is
    what its share says, rounded; inside a block the order is drawn from the seed. A source that runs out
    begins again, in its next order. An epoch has as many samples as the sources together; with an iterable source among them
    it is endless.

    >>> mixed = mix({"a": ["a"] * 10, "b": ["b"] * 10}, {"a": 3, "b": 1})
    >>> len(mixed), mixed.order_of(0, np.arange(20), shuffle=False, seed=0).shape
    (20, (20,))

    Args:
      sources: by name; whatever `create_dataloader` takes.
      weights: positive, of any sum, by the same names.
      seed: draws the order of sources, the same on every process.

    Raises:
      TypeError: a source is nothing to read samples from, or sources or weights are not given by name.
      ValueError: names differ, a weight is not a positive and finite number, a share is below one in 1,048,576, or a source is
        empty.
    """
    if not (isinstance(sources, Mapping) and isinstance(weights, Mapping)):
        raise TypeError('mix takes sources and weights by name: mix({"web": a, "code": b}, {"web": 3, "code": 1})')
    if differing := sorted(set(sources) ^ set(weights)):
        raise ValueError(f"mix: {', '.join(map(repr, differing))} must be in both, sources and weights")
    checked_weights(weights, seed)
    found = {name: as_dataset(source) for name, source in sources.items()}
    if empty := [repr(name) for name, each in found.items() if not isinstance(each, Stream) and not len(each)]:
        raise ValueError(f"mix: {', '.join(empty)} must hold samples")
    ordered = [weights[name] for name in found]
    if any(isinstance(each, Stream) for each in found.values()):
        return StreamMixture(found, ordered, seed)
    return Mixture(found, ordered, seed)


class StreamMixture:
    """An endless iterable that mixes several sources; its iterator keeps a position in each. Made by `mix`."""

    def __init__(self, sources: Mapping[str, Any], weights: Sequence[float], seed: int = 0):
        self.shares = Shares(weights, seed)
        self._about = f"{list(map(float, weights))} by {seed}, each in an order of its own"
        self.streams = {
            name: source if isinstance(source, Stream) else Stream(InEpochOrder(source, seed ^ which))
            for which, (name, source) in enumerate(sources.items())
        }

    @property
    def fingerprint(self) -> str:
        """Text that identifies this mixture, as far as its sources identify themselves."""
        contents = {name: getattr(stream.source, "fingerprint", "unknown") for name, stream in self.streams.items()}
        return f"{', '.join(f'{name}: {content}' for name, content in contents.items())} mixed {self._about}"

    def __iter__(self) -> "MixedSamples":
        return MixedSamples(self)


class MixedSamples:
    """Iterator over the samples of a `StreamMixture`, from the start or from a saved position."""

    def __init__(self, mixture: StreamMixture):
        self._shares, self._streams = mixture.shares, list(mixture.streams.items())
        self._number, self._epochs = 0, [0] * len(self._streams)
        self._places: list[Any] = [None] * len(self._streams)
        self._walks: list[StreamWalk] | None = None
        self._ahead: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._walks is None:
            each = zip(self._streams, self._epochs, self._places, strict=True)
            self._walks = [StreamWalk(stream, epoch, place) for (_, stream), epoch, place in each]
        if not self._ahead:
            self._ahead = self._shares.sources(self._number + np.arange(_AT_ONCE)).tolist()[::-1]
        which = self._ahead.pop()
        for _ in range(2):
            for sample in self._walks[which]:
                self._number += 1
                return sample
            self._again(which)
        raise ValueError(
            f"the source {self._streams[which][0]!r} of a mixture gives no samples when it is iterated over again"
        )

    def state_dict(self) -> dict[str, Any]:
        """The number of samples drawn, and the position in every source."""
        places = self._places if self._walks is None else [walk.place() for walk in self._walks]
        return {"number": self._number, "epochs": list(self._epochs), "places": places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        self._number, self._epochs, self._places = state["number"], list(state["epochs"]), list(state["places"])
        self._walks, self._ahead = None, []

    def _again(self, which: int) -> None:
        name, stream = self._streams[which]
        if stream.once:
            raise ValueError(
                f"the source {name!r} of a mixture can be iterated over once, and its samples are needed again: give the "
                "function that makes it instead"
            )
        assert self._walks is not None
        self._epochs[which] += 1
        self._walks[which] = StreamWalk(stream, self._epochs[which])


class InEpochOrder:
    """A dataset with random access as an iterable: a new permutation every epoch, resumed without reading."""

    def __init__(self, dataset: MapDataset | Columns, seed: int):
        self.dataset, self.seed = dataset, seed
        self._epoch = 0

    @property
    def fingerprint(self) -> str:
        """Text that identifies the dataset."""
        return str(getattr(self.dataset, "fingerprint", len(self.dataset)))

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation that comes next."""
        self._epoch = epoch

    def __iter__(self) -> "OneEpoch":
        if (own := getattr(self.dataset, "order_of", None)) is not None:
            return OneEpoch(self.dataset, own(self._epoch, np.arange(len(self.dataset)), shuffle=True, seed=self.seed))
        order = epoch_order(len(self.dataset), shuffle=True, seed=self.seed, epoch=self._epoch)
        return OneEpoch(self.dataset, order)


class OneEpoch:
    """Iterator over the samples of one permutation."""

    def __init__(self, dataset: MapDataset | Columns, order: np.ndarray):
        self._dataset, self._order, self._at = dataset, order, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._at >= len(self._order):
            raise StopIteration
        self._at += 1
        index = int(self._order[self._at - 1])
        try:
            return self._dataset[index]
        except StopIteration as error:  # which would end the epoch here
            raise LoadingError(f"sample {index} of a mixture's source raised StopIteration: {error}") from error

    def state_dict(self) -> dict[str, int]:
        """The number of samples drawn."""
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after that number of samples."""
        self._at = state["at"]
