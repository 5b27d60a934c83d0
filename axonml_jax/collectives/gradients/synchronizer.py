"""`GradientSynchronizer`: averages gradients handed to it one by one, bucket after bucket, traced or eager."""

import jax

from axonml_jax.collectives.gradients.buckets import DEFAULT_BUCKET_SIZE, GradientBucket, GradSyncStrategy
from axonml_jax.collectives.gradients.sync import sync_gradients
from axonml_jax.collectives.scope import Group


class GradientSynchronizer:
    """Collects a step's gradients in the order they become ready and averages them over a group.

    Every rank adds gradients of the same shapes in the same order.

    Args:
      group: the ranks to average over; axis names inside `shard_map`.
      strategy: when. OVERLAPPED dispatches a bucket's reduction as soon as the bucket is full or the next gradient does
        not fit, without waiting for it: later gradients are computed meanwhile (ranks that are threads meet there).
      bucket_size: elements per bucket.

    Example:
      >>> synchronizer = GradientSynchronizer(group)           # doctest: +SKIP
      >>> synchronizer.prepare(len(gradients))                 # doctest: +SKIP
      >>> for i in reversed(range(len(gradients))):            # doctest: +SKIP
      ...     synchronizer.add_gradient(i, gradients[i])
      >>> synchronizer.sync_all()                              # doctest: +SKIP
      >>> gradients = synchronizer.results()                   # doctest: +SKIP
    """

    def __init__(
        self,
        group: Group,
        strategy: GradSyncStrategy = GradSyncStrategy.SYNCHRONOUS,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
    ):
        self.group = group
        self.strategy = GradSyncStrategy(strategy)
        self.bucket_size = bucket_size
        self._results: list[jax.Array | None] = []
        self._synced = False
        self.clear()

    def prepare(self, num_gradients: int) -> None:
        """Begin a step that has this many gradients; what an earlier step left is forgotten."""
        self.clear()
        self._results = [None] * num_gradients

    def add_gradient(self, index: int, gradient: jax.Array) -> None:
        """Hand over gradient `index` of 0..num_gradients-1, in the order gradients become ready.

        Raises:
          ValueError: when the index was not prepared or was added before.
        """
        if not 0 <= index < len(self._results):
            raise ValueError(f"gradient {index} was not prepared: prepare({len(self._results)}) allows 0..n-1")
        if index in self._added or self._synced:
            raise ValueError(f"gradient {index} came twice, or after sync_all: call prepare() to begin a new step")
        self._added.add(index)
        if self._num_reduced == len(self._buckets) or not self._buckets[-1].add(gradient):
            self._reduce_early()
            self._buckets.append(GradientBucket(self.bucket_size))
            self._indices.append([])
            self._buckets[-1].add(gradient)
        self._indices[-1].append(index)
        if self._buckets[-1].full:
            self._reduce_early()

    def sync_all(self) -> None:
        """Average what has not been averaged yet, and make `results` available.

        Raises:
          ValueError: when gradients are missing; all of them are named.
        """
        missing = [i for i in range(len(self._results)) if i not in self._added]
        if missing:
            raise ValueError(
                f"gradients {missing} of {len(self._results)} were not added: an unused parameter's gradient is zeros, "
                "add those, so that every rank reduces the same buckets"
            )
        for position in range(self._num_reduced, len(self._buckets)):
            self._reduce(position)
        self._synced = True

    def results(self) -> list[jax.Array]:
        """The gradients by index: averages, or with NO_SYNC this rank's own.

        Raises:
          ValueError: before `sync_all`.
        """
        if not self._synced:
            raise ValueError("results are there after sync_all()")
        return [result for result in self._results if result is not None]

    def clear(self) -> None:
        """Forget every gradient, bucket and result."""
        self._buckets: list[GradientBucket] = []
        self._indices: list[list[int]] = []
        self._added: set[int] = set()
        self._num_reduced = 0
        self._results = []
        self._synced = False

    @property
    def num_buckets(self) -> int:
        """Buckets opened since `prepare`."""
        return len(self._buckets)

    def _reduce_early(self) -> None:
        if self.strategy is GradSyncStrategy.OVERLAPPED and self._num_reduced < len(self._buckets):
            self._reduce(len(self._buckets) - 1)

    def _reduce(self, position: int) -> None:
        bucket = self._buckets[position]
        if self.strategy is GradSyncStrategy.NO_SYNC:
            averages = bucket.extract()
        else:
            averages = bucket.extract(sync_gradients(bucket.flat(), self.group))
        bucket.clear()
        for index, average in zip(self._indices[position], averages, strict=True):
            self._results[index] = average
        self._num_reduced = position + 1
