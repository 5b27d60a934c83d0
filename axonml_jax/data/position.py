"""Where a loader stands, counted in global samples, so that it means the same on every mesh and batch size."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Position:
    """An epoch and the number of its samples already drawn, over all processes together."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Batching:
    """How an epoch of n samples is cut into global batches of B.

    Attributes:
      num_samples: n.
      batch_size: B.
      drop_last: leave out the samples after the last whole batch, instead of filling it up from the epoch's start.
    """

    num_samples: int
    batch_size: int
    drop_last: bool

    def left(self, samples: int = 0) -> int:
        """Number of batches in an epoch of which `samples` are drawn already."""
        whole, rest = divmod(max(self.num_samples - samples, 0), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def advance(self, start: Position, num_batches: int) -> Position:
        """The position `num_batches` after `start`. The end of an epoch is the start of the next."""
        left = self.left(start.samples)
        if num_batches < left:
            return Position(start.epoch, start.samples + num_batches * self.batch_size)
        epochs, batches = divmod(num_batches - left, self.left())
        return Position(start.epoch + 1 + epochs, batches * self.batch_size)

    def until(self, start: Position, num_epochs: int) -> int:
        """Number of batches from `start` to the end of the last of `num_epochs`."""
        if start.epoch >= num_epochs:
            return 0
        return self.left(start.samples) + (num_epochs - start.epoch - 1) * self.left()

    def places(self, position: Position) -> np.ndarray:
        """Places in the epoch's order of the batch at `position`: int64 [B], wrapping round at the end."""
        return (position.samples + np.arange(self.batch_size)) % self.num_samples
