"""Which contract a source keeps: random access or iteration."""

from collections.abc import Iterable, Mapping
from typing import Any

from axonml_jax.data.columns import Columns
from axonml_jax.data.streams.stream_walk import Stream


def as_dataset(given: Any) -> Any:
    """A dataset with `__len__` and `__getitem__`, or a `Stream` of what can only be iterated over.

    Args:
      given: a dataset, a dict of arrays, an iterable, or a function that returns one. A mapping from indices to samples is a
        dataset, a `torch.utils.data.IterableDataset` is none though it inherits `__getitem__`.

    Raises:
      TypeError: for anything else.
    """
    if isinstance(given, Stream):
        return given
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return Columns(given)
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not _only_iterates(given):
        return given
    if isinstance(given, Iterable) or callable(given):
        return Stream(given)  # pyright: ignore[reportArgumentType]  # any function
    raise TypeError(
        f"a dataset needs __len__ and __getitem__, or __iter__; {type(given).__name__} has neither. Give a dataset, a dict of "
        "arrays, an iterable, or a function that returns one"
    )


def _only_iterates(given: Any) -> bool:
    return any(kind.__name__ == "IterableDataset" for kind in type(given).__mro__)
