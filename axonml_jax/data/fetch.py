"""Batches of a dataset with random access: this process's rows of the batch at a position."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from axonml_jax.data.loading_error import collated, named
from axonml_jax.data.order import epoch_order
from axonml_jax.data.position import Batching, Position


class MapDataset(Protocol):
    """What a dataset must have.

    Used when they are there too: `__getitems__(indices) -> list` (PyTorch's protocol); `fingerprint`, a string that tells
    this content from any other, which checkpoints keep; and `order_of(epoch, places, *, shuffle, seed) -> indices`, an order of
    its own, of epochs as long as the dataset.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Fetch:
    """This process's rows of every batch of a dataset.

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

    @property
    def batch_size(self) -> int:
        """B, over all processes."""
        return self.batching.batch_size

    def first(self, epoch: int = 0) -> Position:
        """The position at the beginning of an epoch."""
        return Position(epoch)

    def batch(self, start: Position, index: int, num_epochs: int | None, worker: int | None) -> tuple[Any, Any]:
        """The batch `index` after a position, and the position after it; (None, None) after the last epoch."""
        if num_epochs is not None and index >= self.batching.until(start, num_epochs):
            return None, None
        indices = self.indices(position := self.batching.advance(start, index))
        many = getattr(self.dataset, "__getitems__", None)
        if many is not None:
            with named(lambda: f"samples {indices} of epoch {position.epoch}", worker):
                samples = many(indices)
        else:
            samples = []
            with named(lambda: f"sample {indices[len(samples)]} of epoch {position.epoch}", worker):
                for i in indices:
                    samples.append(self.dataset[i])
        return collated(self.collate, samples), self.batching.advance(start, index + 1)

    def indices(self, position: Position) -> list[int]:
        """Of this process's rows of the batch at a position."""
        places = self.batching.places(position)[self.rows]
        if (own := getattr(self.dataset, "order_of", None)) is not None:
            return own(position.epoch, places, shuffle=self.shuffle, seed=self.seed).tolist()
        return _cached_order(self.batching.num_samples, self.shuffle, self.seed, position.epoch)[places].tolist()

    def identity(self) -> dict[str, int | bool | str]:
        """What gives a position its meaning."""
        content = getattr(self.dataset, "fingerprint", None)
        known = {} if content is None else {"fingerprint": str(content)}
        return {"num_samples": self.batching.num_samples, "shuffle": self.shuffle, "seed": self.seed} | known

    def position(self, state: dict[str, Any]) -> Position:
        """A saved position, checked."""
        position = Position(operator.index(state["epoch"]), operator.index(state["samples"]))
        total = self.batching.num_samples
        if position.epoch < 0 or not 0 <= position.samples <= total:
            raise ValueError(f"load_state_dict: {position} is no position among {total} samples")
        # A last part smaller than this loader's batch is its end of the epoch.
        return position if self.batching.left(position.samples) else Position(position.epoch + 1)

    def batches_per_epoch(self) -> int:
        """How many there are."""
        return self.batching.left()


@functools.lru_cache(maxsize=2)
def _cached_order(num_samples: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    return epoch_order(num_samples, shuffle=shuffle, seed=seed, epoch=epoch)
