"""Mixtures with an iterable source among them: the same shares, walked from the start."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from axonml_jax.data.columns import Columns
from axonml_jax.data.fetch import MapDataset
from axonml_jax.data.loading_error import LoadingError
from axonml_jax.data.mixture import Mixture, Shares, checked_weights
from axonml_jax.data.order import epoch_order
from axonml_jax.data.streams.kinds import as_dataset
from axonml_jax.data.streams.stream_walk import Stream, StreamWalk

_AT_ONCE = 256


def mix(
    sources: Mapping[str, MapDataset | Mapping[str, Any] | Iterable | Callable[[], Iterable]],
    weights: Mapping[str, float],
    *,
    seed: int = 0,
) -> "Mixture | StreamMixture":
    """Several sources as one, with samples of each in its share.

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
      TypeError: a source is none.
      ValueError: names differ, a weight is not positive, a source is empty.
    """
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
    """An endless iterable of several sources' samples; its iterator keeps its place in each. Made by `mix`."""

    def __init__(self, sources: Mapping[str, Any], weights: Sequence[float], seed: int = 0):
        self.shares = Shares(weights, seed)
        self._about = f"{list(map(float, weights))} by {seed}, each in an order of its own"
        self.streams = {
            name: source if isinstance(source, Stream) else Stream(InEpochOrder(source, seed ^ which))
            for which, (name, source) in enumerate(sources.items())
        }

    @property
    def fingerprint(self) -> str:
        """What tells this mixture from another, as far as its sources say."""
        contents = {name: getattr(stream.source, "fingerprint", "unknown") for name, stream in self.streams.items()}
        return f"{', '.join(f'{name}: {content}' for name, content in contents.items())} mixed {self._about}"

    def __iter__(self) -> "MixedSamples":
        return MixedSamples(self)


class MixedSamples:
    """The samples of a `StreamMixture`, from the start or from a saved place."""

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
        """How many samples were drawn, and the place in every source."""
        places = self._places if self._walks is None else [walk.place() for walk in self._walks]
        return {"number": self._number, "epochs": list(self._epochs), "places": places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._number, self._epochs, self._places = state["number"], list(state["epochs"]), list(state["places"])
        self._walks, self._ahead = None, []

    def _again(self, which: int) -> None:
        name, stream = self._streams[which]
        if stream.once:
            raise ValueError(
                f"the source {name!r} of a mixture gives its samples once, and they are asked for again: give the function "
                "that makes it in its place"
            )
        assert self._walks is not None
        self._epochs[which] += 1
        self._walks[which] = StreamWalk(stream, self._epochs[which])


class InEpochOrder:
    """A dataset with random access as an iterable: a new permutation in every epoch, a place found without reading."""

    def __init__(self, dataset: MapDataset | Columns, seed: int):
        self.dataset, self.seed = dataset, seed
        self._epoch = 0

    @property
    def fingerprint(self) -> str:
        """What tells the dataset from another."""
        return str(getattr(self.dataset, "fingerprint", len(self.dataset)))

    def set_epoch(self, epoch: int) -> None:
        """Which permutation comes next."""
        self._epoch = epoch

    def __iter__(self) -> "OneEpoch":
        order = epoch_order(len(self.dataset), shuffle=True, seed=self.seed, epoch=self._epoch)
        return OneEpoch(self.dataset, order)


class OneEpoch:
    """The samples of one permutation."""

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
        """How many were drawn."""
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after so many."""
        self._at = state["at"]
