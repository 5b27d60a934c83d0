"""PyTorch's DistributedSampler: which samples one rank draws, for loops that load their own data."""

from collections.abc import Iterator, Sized

import jax
import numpy as np

from axonml_jax.data.order import epoch_order, seed_offenders


class DistributedSampler:
    """Indices of one rank's samples: every rank draws the same number, and together they draw the whole dataset.

    The rules are those of `torch.utils.data.DistributedSampler`; only the permutation differs, since it comes from
    NumPy's Philox keyed by (seed, epoch). With W replicas, rank r takes entries r, r + W, ... of the epoch's order,
    which is first padded to a multiple of W by repeating it from the start, or cut to one with `drop_last`.

    >>> [list(DistributedSampler(5, num_replicas=2, rank=rank, shuffle=False)) for rank in range(2)]
    [[0, 2, 4], [1, 3, 0]]

    Args:
      dataset_or_n: anything with a length, or the length itself.
      num_replicas: number W of ranks; None: `jax.process_count()`, since loading is per process.
      rank: this rank; None: `jax.process_index()`.
      shuffle: whether every epoch has its own permutation (call `set_epoch`), or all the dataset's order.
      seed: the same on every rank.
      drop_last: cut the order to a multiple of W instead of padding it.

    Raises:
      TypeError: the dataset has no length.
      ValueError: lists every argument out of range.
    """

    def __init__(
        self,
        dataset_or_n: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ):
        self.num_replicas = jax.process_count() if num_replicas is None else num_replicas
        self.rank = jax.process_index() if rank is None else rank
        self.num_samples_total = _length(dataset_or_n)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        offenders = self._offenders()
        if offenders:
            raise ValueError("DistributedSampler: " + "; ".join(offenders))

    def _offenders(self) -> list[str]:
        offenders = seed_offenders(self.seed)
        if self.num_samples_total < 0:
            offenders.append(f"dataset length {self.num_samples_total} is negative")
        if self.num_replicas < 1:
            offenders.append(f"num_replicas={self.num_replicas}: must be at least 1")
        elif not 0 <= self.rank < self.num_replicas:
            offenders.append(f"rank={self.rank}: must be from 0 to num_replicas - 1 = {self.num_replicas - 1}")
        return offenders

    def __len__(self) -> int:
        whole, rest = divmod(self.num_samples_total, self.num_replicas)
        return whole if self.drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(self.num_samples_total, shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)
        if self.num_samples_total:
            order = np.resize(order, len(self) * self.num_replicas)  # cuts, or repeats from the start
        return iter(order[self.rank :: self.num_replicas].tolist())

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of an epoch. Without this call every epoch has the same order, as in PyTorch.

        Raises:
          ValueError: the epoch is negative.
        """
        if epoch < 0:
            raise ValueError(f"set_epoch({epoch}): epochs count from 0")
        self.epoch = epoch


def _length(dataset_or_n: Sized | int) -> int:
    if isinstance(dataset_or_n, int | np.integer):
        return int(dataset_or_n)
    if not hasattr(dataset_or_n, "__len__"):
        kind = type(dataset_or_n).__name__
        raise TypeError(f"DistributedSampler needs a dataset with a length, or the length itself; {kind} has none")
    return len(dataset_or_n)
