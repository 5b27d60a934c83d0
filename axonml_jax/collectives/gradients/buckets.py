"""Which gradients are reduced together: buckets filled in the order gradients become ready, nothing ever dropped."""

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.synonyms import member

DEFAULT_BUCKET_SIZE = 25_000_000
"""Elements per bucket, as in AxonML's synchronizer (DDP's `bucket_size_mb` counts MiB)."""


class GradSyncStrategy(enum.Enum):
    """When gradients are averaged over the ranks.

    SYNCHRONOUS: after the last gradient is there. OVERLAPPED: each bucket as soon as it is full, while later gradients
    are still being computed. NO_SYNC: not at all; every rank keeps its own.
    """

    SYNCHRONOUS = "synchronous"
    OVERLAPPED = "overlapped"
    NO_SYNC = "no_sync"

    @classmethod
    def _missing_(cls, value: object) -> "GradSyncStrategy | None":
        return member(cls, "sync_strategy", value)


def assign_buckets(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Fill buckets with consecutive leaves, in the order given.

    Args:
      sizes: elements of each leaf, in the order in which they become ready (the last layer's first).
      capacity: elements that a bucket holds; a leaf larger than that gets a bucket of its own.

    Returns:
      Indices into `sizes` per bucket; every leaf is in exactly one, leaves of size 0 too.

    Raises:
      ValueError: when the capacity is not positive.

    >>> assign_buckets([3, 4, 10, 1, 2], capacity=7)
    [[0, 1], [2], [3, 4]]
    """
    _check_capacity(capacity)
    buckets: list[list[int]] = []
    room = -1
    for index, size in enumerate(sizes):
        if not buckets or size > room:
            buckets.append([])
            room = capacity
        buckets[-1].append(index)
        room -= size
    return buckets


def _check_capacity(capacity: int) -> None:
    if capacity <= 0:
        raise ValueError(f"a bucket's capacity is a positive number of elements, not {capacity!r}")


class GradientBucket:
    """Gradients that travel as one flat array per dtype.

    Args:
      capacity: elements it holds; a first gradient larger than that is taken nevertheless, alone.

    Raises:
      ValueError: when the capacity is not positive.

    >>> bucket = GradientBucket(capacity=4)
    >>> bucket.add(jnp.zeros((3,))), bucket.add(jnp.zeros((2,))), bucket.full
    (True, False, False)
    """

    def __init__(self, capacity: int):
        _check_capacity(capacity)
        self.capacity = capacity
        self._gradients: list[jax.Array] = []

    def __len__(self) -> int:
        return len(self._gradients)

    @property
    def size(self) -> int:
        """Elements it holds now."""
        return sum(gradient.size for gradient in self._gradients)

    @property
    def full(self) -> bool:
        """Whether not one more element fits."""
        return self.size >= self.capacity

    def add(self, gradient: jax.Array) -> bool:
        """Take a gradient if it fits.

        Returns:
          True when taken; False when it does not fit, and then the bucket is unchanged and the gradient still the
          caller's: reduce and clear this bucket, or open another.
        """
        gradient = jnp.asarray(gradient)
        if self._gradients and self.size + gradient.size > self.capacity:
            return False
        self._gradients.append(gradient)
        return True

    def flat(self) -> list[jax.Array]:
        """What travels: one [elements] array per dtype, dtypes in order of first appearance."""
        return [jnp.concatenate([self._gradients[i].ravel() for i in indices]) for indices in self._by_dtype()]

    def extract(self, flat: Sequence[jax.Array] | None = None) -> list[jax.Array]:
        """The gradients in the order added, each with its shape.

        Args:
          flat: arrays laid out as `flat()` gave them, such as their averages; None for the gradients as added.

        Raises:
          ValueError: when `flat` does not have that layout.
        """
        if flat is None:
            return list(self._gradients)
        groups = self._by_dtype()
        expected = [(sum(self._gradients[i].size for i in indices),) for indices in groups]
        if [array.shape for array in flat] != expected:
            raise ValueError(f"extract got shapes {[array.shape for array in flat]}, but flat() has {expected}")
        gradients = list(self._gradients)
        for indices, array in zip(groups, flat, strict=True):
            ends = np.cumsum([self._gradients[i].size for i in indices])[:-1]
            for i, part in zip(indices, jnp.split(array, ends), strict=True):
                gradients[i] = part.reshape(self._gradients[i].shape)
        return gradients

    def clear(self) -> None:
        """Forget the gradients; the capacity stays."""
        self._gradients = []

    def _by_dtype(self) -> list[list[int]]:
        groups: dict[np.dtype, list[int]] = {}
        for i, gradient in enumerate(self._gradients):
            groups.setdefault(jnp.dtype(gradient.dtype), []).append(i)
        return list(groups.values())
