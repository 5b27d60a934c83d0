"""The order of a dataset in one epoch: the same on every process, mesh and machine."""

import numpy as np


def epoch_order(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """Sample indices of one epoch, in global order: 0, 1, ... or a permutation drawn from (seed, epoch).

    The permutation ranks raw Philox bits, a stream NumPy guarantees across versions (a Generator's methods may change).

    Args:
      num_samples: size n of the dataset.
      shuffle: whether to permute.
      seed: non-negative, below 2**64.
      epoch: non-negative; every epoch has its own order.

    Returns:
      int64 [n].
    """
    if not shuffle:
        return np.arange(num_samples)
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_samples)
    return np.argsort(bits, kind="stable")


def seed_offenders(seed: int) -> list[str]:
    """What is wrong with a seed, for the caller's error message."""
    return [] if 0 <= seed < 2**64 else [f"seed={seed}: must be at least 0 and below 2**64"]
