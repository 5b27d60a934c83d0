"""Parquet files as a dataset: every row is a sample, read by row groups."""

import bisect
import functools
import itertools
import os
from collections.abc import Sequence
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
      ValueError: there is nothing to read, or a column is not there.
    """

    def __init__(self, path: str | os.PathLike, *, fields: Sequence[str] | None = None):
        self.files = found_files(path, SUFFIXES)
        self.fields = fields
        self._groups: list[tuple[int, int]] = []
        self._firsts = [0]
        for number, file in enumerate(self.files):
            metadata = _parquet().ParquetFile(file).metadata
            if fields is not None:
                names = dict.fromkeys(_parquet().ParquetFile(file).schema_arrow.names)
                kept_fields(names, fields, str(file))
            for group in range(metadata.num_row_groups):
                self._groups.append((number, group))
                self._firsts.append(self._firsts[-1] + metadata.row_group(group).num_rows)
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
        """Several rows, each row group read once (the protocol of PyTorch's fetcher)."""
        whole, found = range(len(self)), {}
        rows = sorted({whole[index] for index in indices})
        for group, members in itertools.groupby(rows, lambda row: bisect.bisect_right(self._firsts, row) - 1):
            own = list(members)
            taken = self._table(group).take([row - self._firsts[group] for row in own])
            found.update(zip(own, taken.to_pylist(), strict=True))
        return [found[whole[index]] for index in indices]

    def _table(self, group: int) -> Any:
        if self._read is None or self._read[0] != group:
            number, inside = self._groups[group]
            columns = None if self.fields is None else list(self.fields)
            self._read = group, _parquet().ParquetFile(self.files[number]).read_row_group(inside, columns=columns)
        return self._read[1]


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install 'axonml-jax[parquet]'") from error
    return pyarrow.parquet
