"""The loader: global batches built from process-local rows, by workers or in this process."""

import functools
import multiprocessing
import os
import re
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import resource_tracker, util
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.base import logger
from axonml_jax.data.sampler import (
    Batching,
    Fetch,
    LoadingError,
    MapDataset,
    OwnMemory,
    local_rows,
    place_rows,
    seed_offenders,
    stack_samples,
)
from axonml_jax.data.streams import Stream, StreamFeed, as_dataset, refuse_once_in_workers
from axonml_jax.mesh.join import unlike
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.batch import BatchLayout

# --------------------------------------------------------------------------------------------------
# Batches from here or from worker processes, which leave Ctrl-C and SIGTERM to their parent and end with it.
# --------------------------------------------------------------------------------------------------

ENDLESS = 2**62
"""More batches than any run draws."""

_NAME = "grain-process-prefetch"
_LOST = re.compile(r"Worker process was terminated unexpectedly with exit code (-?\d+)")
_TICK = 0.5
_UNGUARDED = 91  # the status of a worker that runs the script again and comes to its loader
_IN_VAIN = 92  # given to grain instead of status 0, which it takes for a good end

_open: "weakref.WeakSet[Generator]" = weakref.WeakSet()

_SHARED = 2**20
"""Arrays of fewer bytes come through a pipe. Shared memory is freed in `__del__`, where Python drops a KeyboardInterrupt."""


class Feed(Protocol):
    """Protocol of what makes this process's rows of every batch; it runs in worker processes too, and knows no devices.

    A position is a frozen dataclass of plain values. Its fields `epoch` and `samples` count over all processes together.
    """

    @property
    def rows(self) -> np.ndarray:
        """The rows of a global batch that this process makes."""
        ...

    @property
    def batch_size(self) -> int:
        """The global batch size B, over all processes."""
        ...

    @property
    def drop_last(self) -> bool:
        """Whether samples that fill no batch are left out."""
        ...

    def first(self, epoch: int = 0) -> Any:
        """The position at the start of an epoch."""
        ...

    def batch(self, start: Any, index: int, num_epochs: int | None, worker: int | None) -> tuple[Any, Any, int | None]:
        """The batch `index` after a position, the position after it (None, and no batch, after the last epoch), and a checksum.

        The checksum is of all samples of the global batch, for the first batch of an iterable source, of which every process
        reads all samples; else None.
        """
        ...

    def identity(self) -> dict[str, int | bool | str]:
        """The facts without which a position has no meaning, such as the data's fingerprint and seed."""
        ...

    def position(self, state: dict[str, Any]) -> Any:
        """Check and return a saved position."""
        ...

    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch; a TypeError if it is not known."""
        ...


@dataclass(frozen=True)
class FromStart:
    """Makes the batch that is `index` batches after a start position.

    Attributes:
      feed: makes it.
      start: the position.
      num_epochs: after which nothing follows.
      num_workers: processes among which batches go round; 0: this one makes all.
    """

    feed: Feed
    start: Any
    num_epochs: int | None
    num_workers: int

    def __call__(self, index: int) -> tuple[Any, Any, int | None]:
        """This process's rows of the batch, with the position after it and a checksum (see `Feed.batch`)."""
        in_worker = self.num_workers and multiprocessing.parent_process() is not None
        worker = int(index) % self.num_workers if in_worker else None
        return self.feed.batch(self.start, int(index), self.num_epochs, worker)


def host_batches(made: FromStart, prefetch: int) -> Generator[tuple[Any, Any, int | None]]:
    """Yield this process's rows of each batch, with what else `Feed.batch` returns, in order; closing it stops the workers.

    Raises:
      LoadingError: for a sample that cannot be read, or a worker that ends before its time, whatever its status.
    """
    drawn = _drawn(made, prefetch)
    if made.num_workers:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            os._exit(_UNGUARDED)  # a worker that runs the script anew, to find its dataset in it; its parent says so
        _open.add(drawn)
        _end_at_exit()
    return drawn


def _drawn(made: FromStart, prefetch: int) -> Generator[tuple[Any, Any, int | None]]:
    import grain  # half a second that `import axonml_jax` should not cost

    batches = grain.MapDataset.range(ENDLESS).map(made)
    inline = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # a dataset need not be thread-safe
    stream = batches.to_iter_dataset(inline)
    if made.num_workers:
        _settle_flags()
        options = grain.MultiprocessingOptions(made.num_workers, max(prefetch, 1))
        small = grain.experimental.DatasetOptions(min_shm_size=_SHARED)
        stream = grain.experimental.WithOptionsIterDataset(stream, small)
        stream = stream.mp_prefetch(options, worker_init_fn=_belong_to_parent)
    iterator, over = iter(stream), threading.Event()
    try:
        with _held_from_children(signal.SIGTERM) if made.num_workers else nullcontext():
            if made.num_workers:
                threading.Thread(target=_notice_ends, args=(over,), daemon=True, name="worker watch").start()
            found = _next(iterator)  # starts the workers
        while found[1] is not None:
            yield found
            found = _next(iterator)
    finally:
        over.set()
        iterator.close()


def _next(iterator: Iterator[tuple[Any, Any, int | None]]) -> tuple[Any, Any, int | None]:
    """The next batch; the error of a worker that has ended is raised in one line."""
    try:
        return next(iterator)
    except RuntimeError as error:
        if (lost := _LOST.search(str(error))) is None:
            raise
        status = int(lost[1])
    if status == _UNGUARDED:
        raise LoadingError(
            "the workers of a loader (num_workers) import this script again, which started them while it was imported: put "
            'what it does under `if __name__ == "__main__":`, or give num_workers=0'
        )
    said = {
        _IN_VAIN: "0: the dataset or collate, or what they call, has ended it (sys.exit, os._exit)",
        -signal.SIGKILL: "-9: it was killed, most often by the out-of-memory killer (see `dmesg`)",
    }.get(status, f"{status}: what it said last stands above")
    raise LoadingError(f"a worker of the loader ended with status {said}")


def _notice_ends(over: threading.Event) -> None:
    """Report workers that ended with status 0 as failed, because grain would wait for their batches for ever.

    Grain no longer reads the status of workers that it has asked to end itself.
    """
    seen: set[Any] = set()
    while not over.is_set():
        seen |= {child for child in multiprocessing.active_children() if child.name.startswith(_NAME)}
        wait([child.sentinel for child in seen], _TICK) if seen else over.wait(_TICK)
        for child in [child for child in seen if child.exitcode is not None]:
            seen.remove(child)
            if child.exitcode == 0:
                child._popen.returncode = _IN_VAIN  # multiprocessing knows the status from here on


@contextmanager
def _held_from_children(number: signal.Signals) -> Iterator[None]:
    """Block a signal in processes that are started meanwhile, from this thread or threads made here."""
    resource_tracker.ensure_running()  # Python starts it with the first worker otherwise, and lets signals through after that
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _settle_flags() -> None:
    """Mark absl flags, which grain's workers read, as parsed: only `absl.app.run` does so otherwise."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _belong_to_parent(worker: int, num_workers: int) -> None:
    """Make a worker ignore Ctrl-C and SIGTERM, which reach it too: its parent acts on them, and needs it until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # programs that a dataset starts would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_with_parent, daemon=True, name="parent watch").start()


def _end_with_parent() -> None:
    """End this worker when its parent is gone, as it would wait for room in its queue for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@functools.cache
def _end_at_exit() -> None:
    """At exit, close open loaders while grain can still do so, and leave no worker.

    Python ends what is left of its children by SIGTERM at its exit, and waits for them; grain's last try comes before.
    """
    util.Finalize(None, _close_open, exitpriority=10)
    util.Finalize(None, _kill_left, exitpriority=0)


def _close_open() -> None:
    for drawn in list(_open):
        with suppress(ValueError):  # another thread draws from it right now
            drawn.close()


def _kill_left() -> None:
    for child in multiprocessing.active_children():
        if child.name.startswith(_NAME):
            child.kill()


# --------------------------------------------------------------------------------------------------
# Global batches from any dataset: the same samples in the same order whatever the mesh or the number of processes.
# --------------------------------------------------------------------------------------------------


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
    """Load batches of a dataset as global arrays, dim 0 split over the mesh's batch axes (`data`, `fsdp`, `depth`).

    With axes of your own (`ax.Plan(axes=...)`) give the plan: rows are split as it says. The sequence dim is not split here:
    a step splits it.

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
        epoch's start, so that some samples count twice there (as PyTorch's DistributedSampler does), of which it warns.
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

    While iterating, an error of the dataset is a `RuntimeError` that names the worker and the sample. Before the first batch,
    and the first after `load_state_dict`, processes whose arguments, lengths or positions differ raise a `ValueError` that
    names them.
    """
    samples = as_dataset(dataset)
    layout = BatchLayout.of(dict(mesh.shape)) if plan is None else plan.batch_layout(dict(mesh.shape))
    length = None if isinstance(samples, Stream) else len(samples)
    limits = {"num_workers": (num_workers, 0), "prefetch": (prefetch, 0), "shuffle_window": (shuffle_window, 1)}
    limits |= {"num_epochs": (1 if num_epochs is None else num_epochs, 1), "global_batch_size": (global_batch_size, 1)}
    wrong = {k: low for k, (v, low) in limits.items() if not (isinstance(v, int | np.integer) and v >= low)}
    offenders = [f"{k}={limits[k][0]!r}: must be a whole number of at least {low}" for k, low in wrong.items()]
    offenders += seed_offenders(seed)
    if "global_batch_size" not in wrong:
        offenders += _batch_offenders(global_batch_size, layout, length, drop_last)
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
        if not drop_last:
            logger.warning(
                "create_dataloader(drop_last=False) of an iterable source: where an epoch does not divide by %d, its last "
                "batch is filled up from the epoch's start with samples that count twice. trainer.validate and trainer.predict "
                "take a short last batch as it is",
                global_batch_size,
            )
        stream = replace(samples, window=shuffle_window if shuffle else 1, seed=seed)
        feed: Feed = StreamFeed(stream, global_batch_size, drop_last, rows, collate)
    else:
        if not drop_last and (rest := len(samples) % global_batch_size):
            logger.warning(
                "create_dataloader(drop_last=False): the last batch of an epoch has %d samples, and is filled up with %d from "
                "the epoch's start, which count twice. trainer.validate and trainer.predict take a short last batch as it is",
                *(rest, global_batch_size - rest),
            )
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
        self._compared = self._asks = False
        # Where the walk ends after the last load, and which it was.
        self._loaded: tuple[int | None, object] = (None, object())

    def __len__(self) -> int:
        """The number of batches per epoch.

        Raises:
          TypeError: for an iterable source, whose length is not known.
        """
        return self._feed.batches_per_epoch()

    def __iter__(self) -> Iterator[Any]:
        if not self._compared:
            self._compare()
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

    def _compare(self) -> None:
        """Refuse processes that would make rows of different batches; at the first walk, and the first after a load."""
        own = {name: value for name, value in asdict(self._position).items() if name != "place"}
        said = self._feed.identity() | own | {"batch size": self._feed.batch_size, "drop_last": self._feed.drop_last}
        said |= {"num_epochs": self.num_epochs}
        devices = self.sharding.device_set
        if found := unlike({name: str(value) for name, value in said.items()}, devices, "data loaders"):
            raise ValueError(
                f"the processes do not load rows of the same batches: {'; '.join(found)}. Give create_dataloader the same "
                "data and arguments in every process, and load_state_dict the same position: each loads its own rows by itself"
            )
        self._compared = self._asks = True

    def _compare_samples(self, seen: int | None) -> None:
        """Warn if processes read different samples of an iterable source; at the first batch after `_compare`."""
        asks, self._asks = self._asks and seen is not None, False
        if asks and unlike({"samples": str(seen)}, self.sharding.device_set, "samples"):
            logger.warning(
                "the processes read different samples from their sources. Each process iterates over a full source and keeps "
                "its own rows: give every process the full source, in the same order. A source that is already divided among "
                "processes (split_dataset_by_node, shard, a node splitter), or shuffled without a common seed, loses samples; "
                "only values drawn at random for each sample may differ"
            )

    def _end(self) -> int | None:
        """The epoch before which the iteration from the current position ends."""
        return self.num_epochs and (self._position.epoch // self.num_epochs + 1) * self.num_epochs

    def _from_position(self, end: int | None) -> Generator[tuple[Any, Any]]:
        """Yield global batches, each with the position after it."""
        made = FromStart(self._feed, self._position, end, self._num_workers)
        ahead, rows, size = deque(), self._feed.rows, self._feed.batch_size
        with closing(host_batches(made, self._prefetch)) as host:
            while True:
                while len(ahead) <= self._prefetch and (found := next(host, None)) is not None:
                    self._compare_samples(found[2])
                    ahead.append((place_rows(found[0], self.sharding, size, rows), found[1]))
                if not ahead:
                    break
                yield ahead.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The position, with the facts that give it meaning: small, plain values to keep in a checkpoint.

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
        self._walker, self._loaded, self._compared = None, (self._end(), object()), False


def _batch_offenders(size: int, layout: BatchLayout, num_samples: int | None, drop_last: bool) -> list[str]:
    degrees, product = {axis: dict(layout.degrees)[axis] for axis in layout.rows}, layout.row_degree
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
