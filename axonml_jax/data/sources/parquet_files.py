"""Parquet files as a dataset: every row is a sample, read by row groups."""

import bisect
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axonml_jax.data.sources.found_files import checksum, found_files, kept_fields

SUFFIXES = (".parquet",)


class ParquetFiles:
    """One sample per row: a dict. The row group of the last row stays in memory, so that neighbours come cheap.

    Args:
      path: a file, or a folder of files ending in `.parquet`, searched with its subfolders.
      fields: names of the columns to keep; None: all.

    Raises:
      ImportError: pyarrow is not installed.
      ValueError: there is nothing to read, a column is not there, or a file is no Parquet that pyarrow can read.
    """

    def __init__(self, path: str | os.PathLike, *, fields: Sequence[str] | None = None):
        self.files = found_files(path, SUFFIXES, text=False)
        self.fields = fields
        self._groups: list[tuple[int, int]] = []
        self._firsts = [0]
        for number, file in enumerate(self.files):
            with _naming(file):
                opened = _opened(file)
                if fields is not None:
                    kept_fields(dict.fromkeys(opened.schema_arrow.names), fields, str(file))
                rows = [opened.metadata.row_group(group).num_rows for group in range(opened.metadata.num_row_groups)]
                if min(rows, default=0) < 0 or sum(rows) != opened.metadata.num_rows:
                    raise ValueError(
                        f"row groups of {rows[:8]} rows do not make the {opened.metadata.num_rows} that it says"
                    )
            for group, count in enumerate(rows):
                self._groups.append((number, group))
                self._firsts.append(self._firsts[-1] + count)
        self._read: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_read": None}

    @functools.cached_property
    def fingerprint(self) -> str:
        """What tells this content from another; checkpoints keep it."""
        return f"parquet {checksum(self.files)} in {len(self.files)}"

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`, counted over all files."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several rows, each row group read once (the protocol of PyTorch's fetcher).

        Raises:
          ValueError: naming the file that is not what its footer says.
        """
        whole, found = range(len(self)), {}
        rows = sorted({whole[index] for index in indices})
        for group, members in itertools.groupby(rows, lambda row: bisect.bisect_right(self._firsts, row) - 1):
            own = list(members)
            with _naming(self.files[self._groups[group][0]]):
                taken = self._table(group).take([row - self._firsts[group] for row in own])
                found.update(zip(own, taken.to_pylist(), strict=True))
        return [found[whole[index]] for index in indices]

    def _table(self, group: int) -> Any:
        if self._read is None or self._read[0] != group:
            number, inside = self._groups[group]
            columns = None if self.fields is None else list(self.fields)
            table = _opened(self.files[number]).read_row_group(inside, columns=columns)
            if table.num_rows != (said := self._firsts[group + 1] - self._firsts[group]):
                raise ValueError(f"row group {inside} has {table.num_rows} rows, and its footer says {said}")
            self._read = group, table
        return self._read[1]


def _opened(file: Path) -> Any:
    return _parquet().ParquetFile(file, page_checksum_verification=True)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Whatever pyarrow says of a file's content becomes one kind of error, with its name.

    Errors of the disk stay as they are; pyarrow's own of the same kind have no number.
    """
    try:
        yield
    except (
        ValueError,
        KeyError,
        IndexError,
        NotImplementedError,
        TypeError,
        OverflowError,
        MemoryError,
        OSError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = str(error)[:1000] or type(error).__name__
        raise ValueError(said if str(file) in said else f"{file} cannot be read as Parquet: {said}") from error


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install 'axonml-jax[parquet]'") from error
    return pyarrow.parquet
