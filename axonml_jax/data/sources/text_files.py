"""Text files as a dataset: every file is a document."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from axonml_jax.data.sources.found_files import checksum, found_files, kept_fields
from axonml_jax.data.text import TEXT_SUFFIXES


class TextFiles:
    """One sample per file: {"text": its content, "path": its name under the folder}.

    Args:
      path: a folder, searched with its subfolders, or one file.
      fields: names of the fields to keep; None: all.
      suffixes: endings of the files to read in a folder; None: those of text (`.txt`, `.md`, `.py`, ...).

    Raises:
      ValueError: there is nothing to read.
    """

    def __init__(
        self, path: str | os.PathLike, *, fields: Sequence[str] | None = None, suffixes: Sequence[str] | None = None
    ):
        self.root = Path(path)
        self.files = found_files(path, suffixes or TEXT_SUFFIXES)
        self.fields = fields

    @functools.cached_property
    def fingerprint(self) -> str:
        """What tells this content from another; checkpoints keep it."""
        return f"text {checksum(self.files)} in {len(self.files)}"

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, str]:
        """File `index`, in the order of names. Bytes that are no UTF-8 become U+FFFD."""
        file = self.files[index]
        name = file.name if file == self.root else file.relative_to(self.root).as_posix()
        return kept_fields({"text": file.read_bytes().decode(errors="replace"), "path": name}, self.fields, str(file))
