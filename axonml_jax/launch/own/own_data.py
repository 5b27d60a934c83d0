"""Data of one's own, as a configuration names it: to train on, to validate on, and the shapes of a batch of it."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import numpy as np

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.data.collate import stack_samples
from axonml_jax.data.loading_error import named
from axonml_jax.data.streams.kinds import as_dataset
from axonml_jax.data.streams.stream_walk import Stream
from axonml_jax.launch.config.sections.data_config import DataConfig
from axonml_jax.launch.objects.named_object import find, made_by


@dataclass(frozen=True)
class OwnSplit:
    """What to train on and to validate on.

    Attributes:
      train: a dataset or a `Stream`.
      valid: the same; None: there is nothing to validate on.
      batch: shapes of a global batch.
    """

    train: Any
    valid: Any
    batch: PyTree

    def checksums(self) -> dict[str, str]:
        """What tells this data from other data, as far as it says: its fingerprint, length and shapes."""
        parts = {"train": self.train, "valid": self.valid}
        return {name: f"{_said(part)} {batch_words(self.batch)}" for name, part in parts.items()}


class SomeSamples:
    """Some samples of a dataset.

    Args:
      dataset: with `__len__` and `__getitem__`.
      indices: which.
    """

    def __init__(self, dataset: Any, indices: np.ndarray):
        self._dataset, self._indices = dataset, indices
        if (content := getattr(dataset, "fingerprint", None)) is not None:
            self.fingerprint = f"{content} {len(indices)} of {len(dataset)}"

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._indices[index])]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several at once, as the dataset gives several where it can."""
        own = self._indices[np.asarray(indices)].tolist()
        many = getattr(self._dataset, "__getitems__", None)
        return [self._dataset[i] for i in own] if many is None else many(own)


def read_own(config: DataConfig, batch_size: int) -> OwnSplit:
    """The data that the section `data` names. One sample is read, which tells the shapes of a batch.

    Raises:
      ValueError: for a path or arguments that do not fit, what is no data, or a sample that is not made of numbers.
    """
    described = {"class_path": config.class_path, "init_args": config.init_args or {}}
    train = _source(described, "data")
    valid = None if config.valid is None else _source(config.valid, "data.valid")
    if valid is None and not isinstance(train, Stream):
        train, valid = _divided(train, config.valid_fraction)
    return OwnSplit(train, valid, _batch(train, batch_size, config))


def batch_words(batch: PyTree) -> str:
    """Its leaves with their shapes: `x [64, 28] float32, y [64] int32`."""
    leaves = {name or "batch": leaf for name, leaf in named_leaves(batch).items()}
    return ", ".join(f"{name} {list(leaf.shape)} {leaf.dtype}" for name, leaf in leaves.items())


def length_of(source: Any) -> int | None:
    """Samples, where that is known."""
    return None if source is None or isinstance(source, Stream) else len(source)


def _source(described: Mapping[str, Any], key: str) -> Any:
    """A described dataset or stream; a generator function is kept, to be called in every epoch."""
    if "class_path" not in described:
        raise ValueError(f"{key}={dict(described)}: must be a class_path and its init_args")
    make = made_by(described, key)
    found = make if inspect.isgeneratorfunction(find(described["class_path"], key)) else make()
    try:
        source = as_dataset(found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}.class_path={described['class_path']}: {error}") from error
    if isinstance(source, Stream) and source.once:
        raise ValueError(
            f"{key}.class_path={described['class_path']}: makes an iterator, which gives its samples once; name a generator "
            "function, or what can be iterated over again"
        )
    return source


def _divided(dataset: Any, fraction: float) -> tuple[Any, Any]:
    """Samples to train on and to validate on, drawn in an order that is the same everywhere."""
    count = max(1, int(len(dataset) * fraction))
    if len(dataset) <= count:
        raise ValueError(f"data: {len(dataset)} samples are too few to train and to validate on")
    order = np.argsort(np.random.Philox(key=np.array([0, 0], np.uint64)).random_raw(len(dataset)), kind="stable")
    return SomeSamples(dataset, np.sort(order[count:])), SomeSamples(dataset, np.sort(order[:count]))


def _batch(source: Any, batch_size: int, config: DataConfig) -> PyTree:
    with named(lambda: f"the first sample of data.class_path={config.class_path}", None):
        first = list(islice(_first(source), 1))
    if not first:
        raise ValueError(f"data.class_path={config.class_path}: gives no samples")
    try:
        one = stack_samples(first)
    except (TypeError, ValueError) as error:
        raise ValueError(f"data.class_path={config.class_path}: {error}") from error
    if strange := [name or "the sample" for name, leaf in named_leaves(one).items() if leaf.dtype.kind not in "biufcV"]:
        raise ValueError(
            f"data.class_path={config.class_path}: a sample must be made of numbers and arrays of numbers, but "
            f"{', '.join(strange)} is not"
        )
    kind = jax.dtypes.canonicalize_dtype
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((batch_size, *leaf.shape[1:]), kind(leaf.dtype)), one)


def _first(source: Any) -> Iterator[Any]:
    yield from source.open() if isinstance(source, Stream) else [source[0]]


def _said(source: Any) -> str:
    content = getattr(source.source if isinstance(source, Stream) else source, "fingerprint", None)
    return f"{content} {length_of(source)}"
