"""The file that makes a folder a checkpoint: what is in it, what belongs to it, and the checksum of every file."""

import json
import math
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from axonml_jax.checkpoint.fields import wrong_fields
from axonml_jax.checkpoint.names import checkpoints_in, newest_below

NAME = "checkpoint.json"
SAVED_AT = "saved_at"
"""The entry of `about` that says when a checkpoint was saved: seconds since 1970 by the clock of the main process."""

ARRAYS = "arrays"
"""The folder with the arrays, an Orbax checkpoint of its own."""

FORMAT = 1
_CHUNK = 1 << 24
_READERS = 4  # reading and summing both leave Python's lock alone


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files are not what was written."""


@dataclass(frozen=True)
class Entry:
    """One array of a checkpoint.

    Attributes:
      shape: of the whole array.
      dtype: its name; for a key that of its words.
      key: the implementation of a typed random key, else None.
    """

    shape: tuple[int, ...]
    dtype: str
    key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
      step: updates made.
      entries: its arrays by name.
      data: the data loader's position.
      metrics: of the step.
      about: plan, mesh, package versions and time, for people.
      files: size in bytes and CRC-32 of every other file.
    """

    step: int | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def saved_at(self) -> float | None:
        """When it was saved, in seconds since 1970; None where it does not say."""
        said = self.about.get(SAVED_AT)
        return said if isinstance(said, float) and math.isfinite(said) else None

    def write(self, folder: Path) -> None:
        """Write it; on disk when this returns."""
        content = {"format": FORMAT, **asdict(self)}
        text = _readable({"crc32": _text_sum(content), **content})
        with (folder / NAME).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """The manifest of a checkpoint.

        Raises:
          FileNotFoundError: when the folder is no checkpoint.
          DamagedCheckpoint: when the file is not what was written, naming every field that is wrong.
          ValueError: when a newer version wrote it.
        """
        path = folder / NAME
        if not path.is_file():
            other = "it has no " + NAME if folder.is_dir() else "there is no such folder"
            newest = newest_below(folder)
            near = f"; the newest that is in it is {newest}: give that" if newest else ""
            raise FileNotFoundError(f"{folder} is no checkpoint: {other}{near}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            expected, version = content.pop("crc32"), content.pop("format")
            damaged = expected != _text_sum({"format": version, **content})
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            damaged, content, version = True, {}, FORMAT
        if damaged:
            raise DamagedCheckpoint(f"{folder} is damaged:\n  {NAME}: its checksum does not fit its content")
        if version != FORMAT:
            raise ValueError(f"{folder} has format {version!r:.60}, this version reads {FORMAT}: update axonml-jax")
        if lines := wrong_fields(content):
            raise DamagedCheckpoint("\n".join([f"{folder} is damaged:", *(f"  {NAME}: {line}" for line in lines)]))
        entries = {name: Entry(tuple(e["shape"]), e["dtype"], e["key"]) for name, e in content.pop("entries").items()}
        return Manifest(entries=entries, **content)


def manifests_in(folder: Path) -> dict[int, Manifest]:
    """What every checkpoint of a folder says about itself, by step; one whose manifest cannot be read says nothing."""
    found = {}
    for step, path in checkpoints_in(folder).items():
        try:
            found[step] = Manifest.read(path)
        except (OSError, ValueError):
            found[step] = Manifest()
    return found


def checksums(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of every file under a folder, by its path there; all are on disk when this returns."""
    for each in folder.rglob("*"):
        sync(each)  # Orbax syncs the arrays, and not what describes them
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    with ThreadPoolExecutor(_READERS) as pool:
        return {
            path.relative_to(folder).as_posix(): found
            for path, found in zip(paths, pool.map(_file_sum, paths), strict=True)
        }


def damage(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """What is wrong with the named files of a checkpoint; each line names one."""
    whole = folder.resolve()

    def problem(name: str) -> str | None:
        size, crc = manifest.files[name]
        try:
            path = (folder / name).resolve(strict=True)
            if not path.is_relative_to(whole):
                return f"{name}: leads out of the checkpoint"
            if not path.is_file():
                return f"{name}: is no ordinary file"
            found, sum_ = _file_sum(path)
        except OSError as error:
            return f"{name}: {error.strerror}"
        except (ValueError, RuntimeError) as error:  # a name that no file can have, a link to itself
            return f"{name!r}: {error}"
        if found != size:
            return f"{name}: {found} bytes instead of {size}"
        return f"{name}: its checksum is {sum_:08x} instead of {crc:08x}" if sum_ != crc else None

    with ThreadPoolExecutor(_READERS) as pool:
        return [line for line in pool.map(problem, names) if line]


def sync(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _readable(content: dict[str, Any]) -> str:
    """JSON with a line for every entry of the first two levels."""

    def lines(value: Any) -> str:
        if not isinstance(value, dict) or not value:
            return json.dumps(value)
        return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {lines(value)}" for key, value in content.items()) + "\n}\n"


def _file_sum(path: Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _text_sum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
