"""Which samples each rank reads, in which order, and how samples become a batch."""

import functools
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from axonml_jax.base import PyTree, host_arrays, named_leaves, path_name, refuse_not_held

# --------------------------------------------------------------------------------------------------
# From samples to batches: stacking them on the host, and placing rows on the mesh.
# --------------------------------------------------------------------------------------------------


def stack_samples(samples: Sequence) -> object:
    """Stack samples of equal structure, leaf by leaf, along a new leading dim; the default `collate`.

    Args:
      samples: pytrees (dicts, tuples, lists, ...) whose leaves are numbers, NumPy arrays, or anything with `__array__`,
        such as CPU tensors of PyTorch. A list of Python's numbers, or of such lists, is an array.

    Returns:
      The same pytree of arrays [len(samples), ...].

    Raises:
      ValueError: a sample is None, or structures or shapes differ between samples; lists every such leaf by path.
    """
    if any(sample is None for sample in samples):
        raise ValueError(
            "a sample is None. A filtered MapDataset of Grain gives None for samples that the filter removed: give "
            "dataset.to_iter_dataset()"
        )
    leaves, structure = jax.tree.flatten(samples[0], is_leaf=_is_numbers)
    columns = [leaves]
    for i, sample in enumerate(samples[1:], start=1):
        leaves, other = jax.tree.flatten(sample, is_leaf=_is_numbers)
        if other != structure:
            raise ValueError(
                f"samples of one batch differ in structure: {structure} and, {i} later, {other}. Give a collate"
            )
        columns.append(leaves)
    paths = [path_name(path) or "the sample" for path, _ in jax.tree.leaves_with_path(samples[0], is_leaf=_is_numbers)]
    columns = [list(map(_host, host_arrays(column))) for column in zip(*columns, strict=True)]
    named = list(zip(paths, columns, strict=True))
    refuse_not_held({path: next(filter(np.ma.is_masked, each), each[0]) for path, each in named}, keys=False)
    shapes = [(path, sorted({array.shape for array in each})) for path, each in named]
    if ragged := [f"{path}: {found}" for path, found in shapes if len(found) > 1]:
        raise ValueError(
            f"samples of one batch differ in shape: {'; '.join(ragged)}. Pad them, or give a collate that does"
        )
    return jax.tree.unflatten(structure, list(map(np.stack, columns)))


def _host(x: Any) -> Any:
    """Convert to a NumPy array; masked arrays and key arrays stay as they are, to be refused by name later."""
    kept = isinstance(x, np.ma.MaskedArray) or (isinstance(x, jax.Array) and not isinstance(x.dtype, np.dtype))
    return x if kept else np.asarray(x)


def _is_numbers(x: Any) -> bool:
    """Whether a value is a list of Python numbers, or nested lists of one shape, as JSON and Hugging Face rows have."""
    return type(x) is list and _shape(x) is not None


def _shape(x: Any) -> tuple[int, ...] | None:
    if isinstance(x, int | float):
        return ()
    shapes = set(map(_shape, x)) if type(x) is list else {None}
    return None if None in shapes or len(shapes) > 1 else (len(x), *(next(iter(shapes), None) or ()))


@dataclass(frozen=True)
class OwnMemory:
    """A collate function whose result is copied, so that it may reuse its arrays.

    Attributes:
      collate: samples -> pytree of arrays.
    """

    collate: Callable[[Sequence], Any]

    def __call__(self, samples: Sequence) -> Any:
        """Collate into memory that is not shared with the collate function."""
        made = host_arrays(self.collate(samples))
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf, subok=True), made)


def local_rows(sharding: NamedSharding, global_batch_size: int) -> np.ndarray:
    """The rows of the global batch that this process's devices hold: ascending indices, int64 [n]."""
    slices = sharding.addressable_devices_indices_map((global_batch_size,)).values()
    held = np.zeros(global_batch_size, bool)
    for index in slices:
        held[index] = True
    return np.flatnonzero(held)


def place_rows(batch, sharding: NamedSharding, global_batch_size: int, rows: np.ndarray):
    """Turn a host batch of this process's rows into global arrays; nothing is sent between processes.

    Args:
      batch: pytree of arrays [len(rows), ...].
      sharding: splits dim 0 over the batch axes.
      global_batch_size: B.
      rows: what `local_rows` says.

    Returns:
      The same pytree of `jax.Array` [B, ...].

    Raises:
      TypeError: leaves that no device can hold, such as strings; all by path.
      ValueError: leaves whose leading dim is not the number of rows; all by path.
    """
    batch = host_arrays(batch)
    _check_leaves(batch, len(rows))
    offset = {int(row): i for i, row in enumerate(rows)}

    def place(leaf):
        # What jax.numpy does to 64-bit values unless jax_enable_x64 is set, here without a warning per batch.
        leaf = np.asarray(leaf)
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)

        def local(index):
            start, stop, _ = index[0].indices(global_batch_size)
            return leaf[offset[start] : offset[start] + stop - start]

        return jax.make_array_from_callback((global_batch_size, *leaf.shape[1:]), sharding, local)

    return jax.tree.map(place, batch)


def _check_leaves(batch, num_rows: int) -> None:
    leaves = named_leaves(batch)
    refuse_not_held(leaves, keys=False)
    shapes = {name or "the batch": np.shape(leaf) for name, leaf in leaves.items()}
    wrong = "; ".join(f"{name}: shape {shape}" for name, shape in shapes.items() if shape[:1] != (num_rows,))
    if wrong:
        raise ValueError(f"collate was given {num_rows} samples and must return arrays with as many rows, not {wrong}")


# --------------------------------------------------------------------------------------------------
# A dict of arrays as a dataset: sample i holds row i of each.
# --------------------------------------------------------------------------------------------------


class Columns:
    """A dataset whose samples are the rows of arrays of equal length.

    >>> columns = Columns({"x": np.arange(6).reshape(3, 2), "y": [7, 8, 9]})
    >>> len(columns), columns[1]["x"].tolist(), int(columns[1]["y"])
    (3, [2, 3], 8)

    Args:
      arrays: a dict, or a nest of dicts, of arrays [n, ...] on the host (NumPy's, memory-mapped ones too, or what becomes one).

    Raises:
      ValueError: the lengths differ, or there is none; lists every array by path.
    """

    def __init__(self, arrays: Mapping[str, Any]):
        self.arrays: PyTree = jax.tree.map(_host, dict(arrays), is_leaf=lambda x: not isinstance(x, Mapping))
        shapes = {name: array.shape for name, array in named_leaves(self.arrays).items()}
        lengths = {shape[:1] for shape in shapes.values()}
        if len(lengths) != 1 or () in lengths:
            given = ", ".join(f"{name}: {shape[0] if shape else 'a scalar'}" for name, shape in shapes.items())
            raise ValueError(
                f"a dict of arrays must hold one row per sample in each, but their lengths are {given or 'none'}. "
                "Give arrays of one length"
            )
        [(self._length,)] = lengths

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> PyTree:
        """Row `index` of every array."""
        return jax.tree.map(lambda array: array[index], self.arrays)

    def __getitems__(self, indices: Sequence[int]) -> list[PyTree]:
        """Several samples by one copy of each array's rows (the protocol of PyTorch's fetcher)."""
        rows = jax.tree.map(lambda array: array[np.asarray(indices)], self.arrays)
        return [jax.tree.map(lambda array, i=i: array[i], rows) for i in range(len(indices))]


# --------------------------------------------------------------------------------------------------
# What went wrong where: the error of one sample, named by worker and sample.
# --------------------------------------------------------------------------------------------------


class LoadingError(RuntimeError):
    """Raised for a sample that could not be read; the message names the worker, the sample and the error's origin."""


class named:  # used as a function
    """Turn errors in the block into a `LoadingError` that names what was read, and the worker (None: this process).

    A worker's own error may not pickle, so that its traceback travels as text. (No `contextmanager`: one takes an error whose
    cause is a StopIteration for that, and lets it through, which ends whatever iterates.)
    """

    def __init__(self, what: Callable[[], str], worker: int | None):
        self._what, self._worker = what, worker

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends_a_worker = isinstance(error, SystemExit) and self._worker is not None
        if not (isinstance(error, Exception) or ends_a_worker) or isinstance(error, LoadingError):
            return  # in this process an exit ends the program
        cause = f"{type(error).__name__}: {error}"
        if self._worker is None:
            raise LoadingError(f"reading {self._what()}: {cause}") from error
        where = "".join(traceback.format_exception(error)).rstrip()
        raise LoadingError(
            f"worker {self._worker}, reading {self._what()}: {cause}\n\nin the worker:\n{where}"
        ) from None


def collated(collate: Callable[[Sequence], Any], samples: Sequence) -> Any:
    """Call a collate function; a StopIteration of it, which would silently end an iteration, becomes a `LoadingError`."""
    try:
        return collate(samples)
    except StopIteration as error:
        raise LoadingError(f"collate of {len(samples)} samples raised StopIteration: {error}") from error


# --------------------------------------------------------------------------------------------------
# The order of a dataset in one epoch: the same on every process, mesh and machine.
# --------------------------------------------------------------------------------------------------


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
    """The problem with a seed, as a list for the caller's error message."""
    legal = isinstance(seed, int | np.integer) and 0 <= seed < 2**64
    return [] if legal else [f"seed={seed!r}: must be a whole number of at least 0 and below 2**64"]


# --------------------------------------------------------------------------------------------------
# Where a loader stands, counted in global samples, so that it means the same on every mesh and batch size.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """An epoch, and the number of its samples already drawn by all processes together."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Batching:
    """How an epoch of n samples is cut into global batches of size B.

    Attributes:
      num_samples: n.
      batch_size: B.
      drop_last: leave out the samples after the last whole batch, instead of filling it up from the epoch's start.
    """

    num_samples: int
    batch_size: int
    drop_last: bool

    def left(self, samples: int = 0) -> int:
        """Number of batches left in an epoch of which `samples` are already drawn."""
        whole, rest = divmod(max(self.num_samples - samples, 0), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def advance(self, start: Position, num_batches: int) -> Position:
        """The position `num_batches` after `start`; the end of an epoch is the start of the next."""
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
        """The places in the epoch's order of the batch at `position`, int64 [B], wrapping around at the end."""
        return (position.samples + np.arange(self.batch_size)) % self.num_samples


# --------------------------------------------------------------------------------------------------
# PyTorch's DistributedSampler: which samples one rank draws, for loops that load their own data.
# --------------------------------------------------------------------------------------------------


class DistributedSampler:
    """Yields the sample indices of one rank: all ranks draw equally many, together the whole dataset (but see `drop_last`).

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


# --------------------------------------------------------------------------------------------------
# Batches of a dataset with random access: this process's rows of the batch at a position.
# --------------------------------------------------------------------------------------------------


class MapDataset(Protocol):
    """Protocol of a dataset with random access.

    Used when they are there too: `__getitems__(indices) -> list` (PyTorch's protocol); `fingerprint`, a string that tells
    this content from any other, which checkpoints keep; and `order_of(epoch, places, *, shuffle, seed) -> indices`, an order of
    its own, of epochs as long as the dataset.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Fetch:
    """Makes this process's rows of every batch of a dataset with random access.

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
        """The global batch size B, over all processes."""
        return self.batching.batch_size

    def first(self, epoch: int = 0) -> Position:
        """The position at the start of an epoch."""
        return Position(epoch)

    def batch(self, start: Position, index: int, num_epochs: int | None, worker: int | None) -> tuple[Any, Any, None]:
        """The batch `index` after a position, and the position after it; None for both after the last epoch."""
        if num_epochs is not None and index >= self.batching.until(start, num_epochs):
            return None, None, None
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
        return collated(self.collate, samples), self.batching.advance(start, index + 1), None

    def indices(self, position: Position) -> list[int]:
        """The dataset indices of this process's rows of the batch at a position."""
        places = self.batching.places(position)[self.rows]
        if (own := getattr(self.dataset, "order_of", None)) is not None:
            return own(position.epoch, places, shuffle=self.shuffle, seed=self.seed).tolist()
        return _cached_order(self.batching.num_samples, self.shuffle, self.seed, position.epoch)[places].tolist()

    @property
    def drop_last(self) -> bool:
        """Whether samples that fill no batch are left out."""
        return self.batching.drop_last

    def identity(self) -> dict[str, int | bool | str]:
        """The facts without which a position has no meaning: the data's size and fingerprint, and the order."""
        content = getattr(self.dataset, "fingerprint", None)
        known = {} if content is None else {"fingerprint": str(content)}
        return {"num_samples": self.batching.num_samples, "shuffle": self.shuffle, "seed": self.seed} | known

    def position(self, state: dict[str, Any]) -> Position:
        """Check and return a saved position."""
        position = Position(operator.index(state["epoch"]), operator.index(state["samples"]))
        total = self.batching.num_samples
        if position.epoch < 0 or not 0 <= position.samples <= total:
            raise ValueError(f"load_state_dict: {position} is no position among {total} samples")
        # A last part smaller than this loader's batch is its end of the epoch.
        return position if self.batching.left(position.samples) else Position(position.epoch + 1)

    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return self.batching.left()


@functools.lru_cache(maxsize=2)
def _cached_order(num_samples: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    return epoch_order(num_samples, shuffle=shuffle, seed=seed, epoch=epoch)
