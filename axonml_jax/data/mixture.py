"""Mixtures: samples of several sources in given shares, exact in the long run, in an order drawn from a seed."""

import functools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from axonml_jax.data.order import epoch_order, seed_offenders

_BLOCK = 1024


class Shares:
    """Which source every sample of an endless mixture comes from, by its number alone.

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
        exact = [Fraction(weight) for weight in weights]
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
        """How many samples of every source come before sample `number`, where a block begins."""
        ends = [0, *((number * part + Fraction(1, 2)).__floor__() for part in self._cumulative)]
        return [right - left for left, right in pairwise(ends)]

    def sources(self, numbers: np.ndarray) -> np.ndarray:
        """The sources of samples by number."""
        return self.places(numbers)[0]

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sources of samples by number, and which of the source's samples each is: int64 [n] both."""
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


class Mixture:
    """Datasets as one, whose epochs have samples of each in its share; a source that runs out begins again.

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
        """`epoch_order`, which keeps the newest two of every source as long as the mixture lives."""
        return functools.lru_cache(maxsize=2 * len(self._sizes))(_order)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_order"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._order = self._remembering()

    @property
    def fingerprint(self) -> str:
        """What tells this mixture from another."""
        contents = [f"{name}: {getattr(each, 'fingerprint', len(each))}" for name, each in self.sources.items()]
        return f"{', '.join(contents)} mixed {self._about}"

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Any:
        """Sample `index` of the sources one after the other."""
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
                order = self._order(size, shuffle, seed ^ which, int(own))
                indices[chosen] = self._firsts[which] + order[inside[chosen]]
        return indices


def checked_weights(weights: Mapping[str, float], seed: int) -> None:
    """Refuse what is no mixture.

    Raises:
      ValueError: lists every offender.
    """
    offenders = seed_offenders(seed)
    offenders += [
        f"the weight of {name!r} is {weight}: must be positive" for name, weight in weights.items() if not weight > 0
    ]
    if not weights:
        offenders.append("there are no sources")
    if offenders:
        raise ValueError("mix: " + "; ".join(offenders))


def _order(size: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    return epoch_order(size, shuffle=shuffle, seed=seed, epoch=epoch)
