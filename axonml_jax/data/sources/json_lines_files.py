"""JSON lines as a dataset: every line is a sample, found by its place in the file."""

import bisect
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from axonml_jax.data.sources.found_files import checksum, found_files, kept_fields

SUFFIXES = (".jsonl", ".ndjson")
_CHUNK = 1 << 24
_SPACE = np.frombuffer(b" \t\r\n", np.uint8)


class JsonLinesFiles:
    """One sample per line that is not blank: a dict. A line is read when it is asked for.

    Args:
      path: a file, or a folder of files ending in `.jsonl` or `.ndjson`, searched with its subfolders.
      fields: names of the fields to keep; None: all.

    Raises:
      ValueError: there is nothing to read.
    """

    def __init__(self, path: str | os.PathLike, *, fields: Sequence[str] | None = None):
        self.files = found_files(path, SUFFIXES)
        self.fields = fields
        self._lines = [_line_starts(file) for file in self.files]
        self._firsts = np.cumsum([0, *(len(starts) for starts, _ in self._lines)]).tolist()
        self._open: dict[int, np.memmap] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    @functools.cached_property
    def fingerprint(self) -> str:
        """What tells this content from another; checkpoints keep it."""
        return f"jsonl {checksum(self.files)} in {len(self.files)}"

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Line `index`, counted over all files."""
        index = range(len(self))[index]
        which = bisect.bisect_right(self._firsts, index) - 1
        starts, ends = self._lines[which]
        line = index - self._firsts[which]
        if which not in self._open:
            self._open[which] = np.memmap(self.files[which], np.uint8, "r")
        content = self._open[which][starts[line] : ends[line]].tobytes()
        try:
            sample = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.files[which]}, byte {starts[line]}: no JSON ({error}): {content[:60]!r}"
            ) from error
        return kept_fields(sample, self.fields, f"{self.files[which]}, byte {starts[line]}")


def _line_starts(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Where every line that is not blank begins and ends, int64."""
    if not file.stat().st_size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    data = np.memmap(file, np.uint8, "r")
    cuts = [np.flatnonzero(data[at : at + _CHUNK] == 10) + at for at in range(0, len(data), _CHUNK)]
    ends = np.concatenate([*cuts, [len(data)]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    filled = ends > starts
    starts, ends = starts[filled], ends[filled]
    # Lines of JSON begin with no space: only those that do are looked at whole.
    odd = np.isin(data[starts], _SPACE)
    blank = [i for i in np.flatnonzero(odd) if not data[starts[i] : ends[i]].tobytes().strip()]
    return np.delete(starts, blank), np.delete(ends, blank)
