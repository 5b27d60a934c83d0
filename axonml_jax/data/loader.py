"""Global batches from any dataset: the same samples in the same order whatever the mesh or the number of processes."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.data.collate import OwnMemory, local_rows, place_rows, stack_samples
from axonml_jax.data.fetch import Fetch, MapDataset
from axonml_jax.data.order import seed_offenders
from axonml_jax.data.position import Batching
from axonml_jax.data.streams.kinds import as_dataset
from axonml_jax.data.streams.stream_feed import StreamFeed, refuse_once_in_workers
from axonml_jax.data.streams.stream_walk import Stream
from axonml_jax.data.workers import Feed, FromStart, host_batches
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.batch import BatchLayout


def create_dataloader(
    dataset: MapDataset | Mapping[str, Any] | Iterable | Callable[[], Iterable],
    global_batch_size: int,
    mesh: Mesh,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = True,
    num_epochs: int | None = None,
    num_workers: int = 0,
    prefetch: int = 2,
    shuffle_window: int = 1024,
    collate: Callable[[Sequence], Any] | None = None,
    plan: Plan | None = None,
) -> "DataLoader":
    """Batches of a dataset as global arrays, dim 0 split over the mesh's batch axes (`data`, `fsdp`, `depth`).

    With axes of your own (`ax.Plan(axes=...)`) give the plan: rows are split as it says. Positions are whole in a batch, and
    are split as a step takes it.

    Batch i of an epoch holds places i*B to (i+1)*B of the epoch's order, the one `DistributedSampler` uses; a process
    loads only the rows its devices hold.

    >>> import jax
    >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    >>> loader = create_dataloader([{"x": float(i)} for i in range(6)], 3, mesh, shuffle=False, num_epochs=1)
    >>> [batch["x"].tolist() for batch in loader]
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]

    Args:
      dataset: anything with `__len__` and `__getitem__`, a `torch.utils.data.Dataset` too, or a dict of arrays
        [samples, ...], whose rows are the samples; or something to iterate over (`__iter__`), such as a stream of Hugging Face
        or PyTorch, or a function that returns it, such as a generator function. A string `fingerprint` that it
        has is kept with the position, and a position of other content is refused. Of an iterable source every process reads
        all samples and keeps its rows; its place is found again by its own state (`state_dict`, `load_state_dict` of it or of
        its iterator), else by counting.
      global_batch_size: samples per step over all devices; divisible by the product of the mesh's batch axes.
      mesh: where batches live; a mesh without batch axes gets them replicated.
      shuffle: a new permutation every epoch, drawn from (seed, epoch), or the dataset's own order; of an iterable source
        permutations of `shuffle_window` samples after the other.
      seed: the same on every process.
      drop_last: leave out what does not fill a batch at an epoch's end; otherwise the last batch is filled up from the
        epoch's start, so that some samples count twice there (as PyTorch's DistributedSampler does).
      num_epochs: epochs of one walk through the loader, after which iterating ends; the next walk goes on with the epochs that
        follow, newly permuted. None: without end.
      num_workers: processes that load batches ahead (started by spawning: the script needs the usual
        `if __name__ == "__main__":`, the dataset and collate must pickle); 0: this process loads. Batches come in order.
      prefetch: batches placed on the devices ahead of the one in use; workers load as many more each.
      shuffle_window: how many samples of an iterable source are permuted among each other, and are in memory.
      collate: samples of this process's rows -> pytree of arrays with one row per sample; None: `stack_samples`.
      plan: says over which mesh axes rows are split; None: over those of the library's own that do.

    Raises:
      TypeError: the dataset has neither `__len__` and `__getitem__` nor `__iter__`, or is a generator that workers should read.
      ValueError: lists every argument out of range, or every array of a dict when lengths differ, before anything is loaded.

    While iterating, an error of the dataset is a `RuntimeError` that names the worker and the sample.
    """
    samples = as_dataset(dataset)
    offenders = seed_offenders(seed)
    layout = BatchLayout.of(dict(mesh.shape)) if plan is None else plan.batch_layout(dict(mesh.shape))
    length = None if isinstance(samples, Stream) else len(samples)
    offenders += _batch_offenders(global_batch_size, layout, length, drop_last)
    limits = {"num_workers": (num_workers, 0), "prefetch": (prefetch, 0), "num_epochs": (num_epochs, 1)}
    limits |= {"shuffle_window": (shuffle_window, 1)}
    offenders += [f"{k}={v}: must be at least {low}" for k, (v, low) in limits.items() if v is not None and v < low]
    sharding = NamedSharding(mesh, PartitionSpec(layout.rows or None))
    rows = [] if offenders else local_rows(sharding, global_batch_size)
    if not offenders and not len(rows):
        offenders = ["this process holds no device of the mesh; call it on the mesh's processes only"]
    if offenders:
        raise ValueError("create_dataloader: " + "; ".join(offenders))
    # What a collate of one's own returns it may fill again for the next batch, and devices may have its memory by then.
    rows, collate = np.asarray(rows), stack_samples if collate is None else OwnMemory(collate)
    if isinstance(samples, Stream):
        refuse_once_in_workers(samples, num_workers)
        stream = replace(samples, window=shuffle_window if shuffle else 1, seed=seed)
        feed: Feed = StreamFeed(stream, global_batch_size, drop_last, rows, collate)
    else:
        batching = Batching(len(samples), global_batch_size, drop_last)
        feed = Fetch(samples, batching, rows, shuffle, seed, collate)
    return DataLoader(feed, sharding, num_epochs=num_epochs, num_workers=num_workers, prefetch=prefetch)


class DataLoader:
    """Iterates over global batches and knows its position; made by `create_dataloader`.

    A loader has one position, whoever walks. It moves when a batch is handed out, not when it is loaded ahead. Every iterator
    hands out the batch at the position: one that lives goes on from where another or `load_state_dict` left it. The end of a
    walk of `num_epochs` is the start of the next one, which has other permutations, also for a loader that was restored there.
    """

    def __init__(self, feed: Feed, sharding: NamedSharding, *, num_epochs: int | None, num_workers: int, prefetch: int):
        self.sharding = sharding
        self.num_epochs = num_epochs
        self._feed = feed
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._position = feed.first()
        self._walker: object = None  # whose batch moved the position
        self._loaded: tuple[int | None, object] = (
            None,
            object(),
        )  # where the walk ends after the last load, and which it was

    def __len__(self) -> int:
        """Batches per epoch.

        Raises:
          TypeError: of an iterable source, where nobody knows.
        """
        return self._feed.batches_per_epoch()

    def __iter__(self) -> Iterator[Any]:
        end, loaded, begins = self._end(), self._loaded, True
        while end is None or self._position.epoch < end:
            walker, drew = object(), False
            self._walker = walker
            with closing(self._from_position(end)) as batches:
                for batch, self._position in batches:
                    drew = True
                    yield batch
                    if self._walker is not walker:  # the position was moved: what is ahead is not next
                        break
                else:
                    assert end is not None and self.num_epochs is not None
                    self._position = self._feed.first(end)
                    # Samples too few for a batch were left of a source, which nobody could know when the position was taken.
                    end += self.num_epochs if begins and not drew else 0
            begins = loaded is not self._loaded and self._walker is None
            if loaded is not self._loaded:
                end, _ = loaded = self._loaded

    def _end(self) -> int | None:
        """The epoch before which the walk from the position ends."""
        return self.num_epochs and (self._position.epoch // self.num_epochs + 1) * self.num_epochs

    def _from_position(self, end: int | None) -> Generator[tuple[Any, Any]]:
        """Global batches, each with the position after it."""
        made = FromStart(self._feed, self._position, end, self._num_workers)
        ahead, rows, size = deque(), self._feed.rows, self._feed.batch_size
        with closing(host_batches(made, self._prefetch)) as host:
            while True:
                while len(ahead) <= self._prefetch and (found := next(host, None)) is not None:
                    ahead.append((place_rows(found[0], self.sharding, size, rows), found[1]))
                if not ahead:
                    break
                yield ahead.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The position, and what gives it meaning: small, plain values to keep in a checkpoint.

        An iterable source's own state is among them, where it has one.
        """
        return asdict(self._position) | self._feed.identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, exactly; the mesh, the processes and the batch size may have changed.

        Raises:
          ValueError: the state is incomplete, of other samples (another number of them, or another `fingerprint` where the
            dataset has one and had one), of another seed or order, or out of range.
        """
        identity = self._feed.identity()
        missing = sorted({*asdict(self._feed.first()), *identity} - set(state) - {"fingerprint"})
        if missing:
            raise ValueError(f"load_state_dict: the state lacks {', '.join(missing)}; give what state_dict() returned")
        changed = [
            f"{name}: saved {state[name]}, here {value}"
            for name, value in identity.items()
            if state.get(name, value) != value
        ]
        if changed:
            raise ValueError(
                f"load_state_dict: the saved position is of other data or another order. {'; '.join(changed)}. Give the "
                "data that it was saved with, or leave the position out"
            )
        try:
            self._position = self._feed.position(state)
        except TypeError:
            raise ValueError(
                f"load_state_dict: epoch and samples must be whole numbers, not those of {state}"
            ) from None
        self._walker, self._loaded = None, (self._end(), object())


def _batch_offenders(size: int, layout: BatchLayout, num_samples: int | None, drop_last: bool) -> list[str]:
    degrees, product = {axis: dict(layout.degrees)[axis] for axis in layout.rows}, layout.row_degree
    if size < 1:
        return [f"global_batch_size={size}: must be at least 1"]
    offenders = []
    if size % product:
        below, named = size // product * product, ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
        nearest = " or ".join(str(legal) for legal in (below, below + product) if legal)
        offenders.append(
            f"global_batch_size={size} does not divide over the batch axes {named} ({product} in all): {nearest} do"
        )
    if num_samples == 0:
        offenders.append("the dataset is empty")
    elif drop_last and num_samples is not None and num_samples < size:
        offenders.append(
            f"the dataset's {num_samples} samples fill no batch of {size}: give drop_last=False or a smaller batch"
        )
    return offenders
