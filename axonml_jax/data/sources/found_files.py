"""The files of a source, and their checksum."""

import os
import zlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from axonml_jax.data.folder import Folder

_CHUNK = 1 << 24


def found_files(path: str | os.PathLike, suffixes: Sequence[str], *, text: bool = True) -> list[Path]:
    """One file, whatever it is called, or those of a folder with these endings, in one order on every machine.

    Raises:
      ValueError: there is no such file or folder, or nothing in it, or it is one file and, where text is asked for, none.
    """
    path = Path(path)
    try:
        path.stat()
    except OSError as error:
        wrong = "no such file or folder" if isinstance(error, FileNotFoundError) else error.strerror
        raise ValueError(f"{wrong}: {str(path)!r}") from error
    folder = Folder(path, suffixes, text=text)
    if not folder.files:
        raise ValueError(
            f"no files ending in {', '.join(suffixes)} in {str(path)!r}"
            + (f"; {folder.words()}" * bool(folder.words()))
        )
    folder.warn()
    return folder.files


def checksum(files: Sequence[Path]) -> str:
    """The CRC-32 of the contents of files, one after the other."""
    found = 0
    for file in files:
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                found = zlib.crc32(chunk, found)
    return f"{found:08x}"


def kept_fields(sample: Any, fields: Sequence[str] | None, where: str) -> Any:
    """The fields of a sample that are asked for; None: all.

    Raises:
      ValueError: one is not there.
    """
    if not isinstance(sample, Mapping):
        raise ValueError(f'{where} holds a {type(sample).__name__}, not named fields such as {{"text": ...}}')
    if fields is None:
        return dict(sample)
    if missing := [name for name in fields if name not in sample]:
        near = get_close_matches(missing[0], list(map(str, sample)), n=1)
        raise ValueError(
            f"{where} has no field {', '.join(map(repr, missing))}: there are {', '.join(map(repr, sample)) or 'none'}"
            + (f". Did you mean {near[0]!r}?" if near else "")
        )
    return {name: sample[name] for name in fields}
