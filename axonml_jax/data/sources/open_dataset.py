"""`open_dataset`: files as a dataset, by their format."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonml_jax.data.folder import COMPRESSED
from axonml_jax.data.sources import json_lines_files, parquet_files
from axonml_jax.data.sources.json_lines_files import JsonLinesFiles
from axonml_jax.data.sources.parquet_files import ParquetFiles
from axonml_jax.data.sources.text_files import TextFiles

FORMATS: dict[str, Any] = {"text": TextFiles, "jsonl": JsonLinesFiles, "parquet": ParquetFiles}
"""What files may be."""

_SUFFIXES = {"jsonl": json_lines_files.SUFFIXES, "parquet": parquet_files.SUFFIXES}


def open_dataset(
    path: str | os.PathLike, format: str | None = None, *, fields: Sequence[str] | None = None
) -> TextFiles | JsonLinesFiles | ParquetFiles:
    """Files as a dataset with random access, whose samples are dicts; nothing but an index is kept in memory.

    Args:
      path: a file, or a folder, searched with its subfolders.
      format: "text" (every file is a sample {"text": ..., "path": ...}), "jsonl" (every line) or "parquet" (every row; needs
        pyarrow); None: what the names say, text when they say nothing.
      fields: names of the fields to keep; None: all.

    Raises:
      ImportError: for Parquet without pyarrow.
      ValueError: there is no such format, file or field, or nothing to read.
    """
    chosen = format or guessed_format(path)
    if chosen not in FORMATS:
        raise ValueError(f"format={format!r}: must be one of {', '.join(FORMATS)}, or None to go by the names")
    return FORMATS[chosen](path, fields=fields)


def guessed_format(path: str | os.PathLike) -> str:
    """The format that the name of a file says, or the names in a folder."""
    path = Path(path)
    for name, suffixes in _SUFFIXES.items():
        endings = [suffix + more for suffix in suffixes for more in ("", *COMPRESSED)]
        if path.name.endswith(tuple(endings)):
            return name
        if path.is_dir() and any(next(path.rglob(f"*{ending}"), None) for ending in endings):
            return name
    return "text"
