"""Global batches from any dataset: the same samples in the same order whatever the mesh or the number of processes."""

import operator
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, cast

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.data.collate import local_rows, place_rows, stack_samples
from axonml_jax.data.columns import as_dataset
from axonml_jax.data.fetch import Fetch, FromStart, MapDataset
from axonml_jax.data.order import seed_offenders
from axonml_jax.data.position import Batching, Position
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.batch import BatchLayout

ENDLESS = 2**62
"""More batches than any run draws."""
END = object()


def create_dataloader(
    dataset: MapDataset | Mapping[str, Any],
    global_batch_size: int,
    mesh: Mesh,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = True,
    num_epochs: int | None = None,
    num_workers: int = 0,
    prefetch: int = 2,
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
        [samples, ...], whose rows are the samples. A string `fingerprint` that it
        has is kept with the position, and a position of other content is refused.
      global_batch_size: samples per step over all devices; divisible by the product of the mesh's batch axes.
      mesh: where batches live; a mesh without batch axes gets them replicated.
      shuffle: a new permutation every epoch, drawn from (seed, epoch), or the dataset's own order.
      seed: the same on every process.
      drop_last: leave out what does not fill a batch at an epoch's end; otherwise the last batch is filled up from the
        epoch's start, so that some samples count twice there (as PyTorch's DistributedSampler does).
      num_epochs: epochs to draw; None: without end.
      num_workers: processes that load batches ahead (started by spawning: the script needs the usual
        `if __name__ == "__main__":`, the dataset and collate must pickle); 0: this process loads.
      prefetch: batches placed on the devices ahead of the one in use; workers load as many more each.
      collate: samples of this process's rows -> pytree of arrays with one row per sample; None: `stack_samples`.
      plan: says over which mesh axes rows are split; None: over those of the library's own that do.

    Raises:
      TypeError: the dataset lacks `__len__` or `__getitem__`.
      ValueError: lists every argument out of range, or every array of a dict when lengths differ, before anything is loaded.
    """
    samples = as_dataset(dataset)
    _check_dataset(samples)
    offenders = seed_offenders(seed)
    layout = BatchLayout.of(dict(mesh.shape)) if plan is None else plan.batch_layout(dict(mesh.shape))
    offenders += _batch_offenders(global_batch_size, layout, len(samples), drop_last)
    limits = {"num_workers": (num_workers, 0), "prefetch": (prefetch, 0), "num_epochs": (num_epochs, 1)}
    offenders += [f"{k}={v}: must be at least {low}" for k, (v, low) in limits.items() if v is not None and v < low]
    sharding = NamedSharding(mesh, PartitionSpec(layout.rows or None))
    rows = [] if offenders else local_rows(sharding, global_batch_size)
    if not offenders and not len(rows):
        offenders = ["this process holds no device of the mesh; call it on the mesh's processes only"]
    if offenders:
        raise ValueError("create_dataloader: " + "; ".join(offenders))
    batching = Batching(len(samples), global_batch_size, drop_last)
    fetch = Fetch(samples, batching, np.asarray(rows), shuffle, seed, collate or stack_samples)
    return DataLoader(fetch, sharding, num_epochs=num_epochs, num_workers=num_workers, prefetch=prefetch)


def _check_dataset(dataset: Any) -> None:
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise TypeError(
            f"a dataset needs __len__ and __getitem__; {type(dataset).__name__} lacks {' and '.join(missing)}"
        )


class DataLoader:
    """Iterates over global batches and knows its position; made by `create_dataloader`.

    Iterating continues from the position, which moves when a batch is handed out, not when it is loaded ahead. A loader
    that has drawn its last epoch starts over when it is iterated again. Only one iterator at a time makes sense.
    """

    def __init__(
        self, fetch: Fetch, sharding: NamedSharding, *, num_epochs: int | None, num_workers: int, prefetch: int
    ):
        self.sharding = sharding
        self.num_epochs = num_epochs
        self._fetch = fetch
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._position = Position()
        self._finished = False

    def __len__(self) -> int:
        """Batches per epoch."""
        return self._fetch.batching.left()

    def __iter__(self) -> Iterator[Any]:
        batching, size = self._fetch.batching, self._fetch.batching.batch_size
        if self._finished:
            self._position, self._finished = Position(), False
        start = self._position
        count = ENDLESS if self.num_epochs is None else batching.until(start, self.num_epochs)
        ahead = deque()
        with closing(self._host_batches(start, count)) as host:
            for drawn in range(1, count + 1):
                while len(ahead) <= self._prefetch and (batch := next(host, END)) is not END:
                    ahead.append(place_rows(batch, self.sharding, size, self._fetch.rows))
                self._position = batching.advance(start, drawn)
                yield ahead.popleft()
        self._finished = True

    def _host_batches(self, start: Position, count: int) -> Generator[Any]:
        """Batches of this process's rows, in order; closing it stops the workers."""
        import grain  # half a second that `import axonml_jax` should not cost

        batches = grain.MapDataset.range(count).map(FromStart(self._fetch, start))
        inline = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # a dataset need not be thread-safe
        stream = batches.to_iter_dataset(inline)
        if self._num_workers:
            _settle_flags()
            stream = stream.mp_prefetch(grain.MultiprocessingOptions(self._num_workers, max(self._prefetch, 1)))
        iterator = iter(stream)
        try:
            yield from iterator
        finally:
            iterator.close()

    def state_dict(self) -> dict[str, int | bool | str]:
        """The position, and what gives it meaning: small, plain values to keep in a checkpoint."""
        return asdict(self._position) | self._identity()

    def load_state_dict(self, state: dict[str, int | bool | str]) -> None:
        """Continue from a saved position, exactly; the mesh, the processes and the batch size may have changed.

        Raises:
          ValueError: the state is incomplete, of other samples (another number of them, or another `fingerprint` where the
            dataset has one and had one), of another seed or order, or out of range.
        """
        identity = self._identity()
        missing = sorted({"epoch", "samples", *identity} - set(state) - {"fingerprint"})
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
        total, saved = self._fetch.batching.num_samples, cast(dict[str, Any], state)
        try:
            position = Position(operator.index(saved["epoch"]), operator.index(saved["samples"]))
        except TypeError:
            raise ValueError(
                f"load_state_dict: epoch and samples must be whole numbers, not those of {state}"
            ) from None
        if position.epoch < 0 or not 0 <= position.samples <= total:
            raise ValueError(f"load_state_dict: {position} is no position among {total} samples")
        # A last part smaller than this loader's batch is its end of the epoch.
        done = not self._fetch.batching.left(position.samples)
        self._position, self._finished = Position(position.epoch + 1) if done else position, False

    def _identity(self) -> dict[str, int | bool | str]:
        fetch = self._fetch
        content = getattr(fetch.dataset, "fingerprint", None)
        known = {} if content is None else {"fingerprint": str(content)}
        return {"num_samples": fetch.batching.num_samples, "shuffle": fetch.shuffle, "seed": fetch.seed} | known


def _settle_flags() -> None:
    """Grain's workers read absl flags, which only `absl.app.run` parses: without it, settle on their defaults."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _batch_offenders(size: int, layout: BatchLayout, num_samples: int, drop_last: bool) -> list[str]:
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
    elif drop_last and num_samples < size:
        offenders.append(
            f"the dataset's {num_samples} samples fill no batch of {size}: give drop_last=False or a smaller batch"
        )
    return offenders
