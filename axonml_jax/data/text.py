"""Byte-level text: a folder of files as training and validation bytes, windows over them, and a bigram to beat."""

import functools
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from axonml_jax.data.folder import Folder

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".tex", ".html", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".ts", ".java")
"""File names that count as text in a folder of your own."""

# The first two rows are no part of the standard library proper, the last is tables rather than text.
SKIPPED_FOLDERS = frozenset({
    "site-packages", "dist-packages", "__pycache__", "lib-dynload",
    "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo",
    "encodings", "pydoc_data",
})  # fmt: skip
"""Folders of the standard library that `load_text` leaves out."""


class TextSplit(NamedTuple):
    """Bytes to train on and bytes to validate on, from different files (uint8, each one file after the other).

    Their tokens take their place where a tokenizer reads them (int32).
    """

    train: np.ndarray
    valid: np.ndarray

    @property
    def fingerprint(self) -> str:
        """The CRC-32 of both parts: what tells this text, or these tokens, from others."""
        return f"{zlib.crc32(self.train):08x}-{zlib.crc32(self.valid):08x}"


def load_text(
    path: str | os.PathLike | None = None,
    *,
    max_bytes: int | None = 8_000_000,
    valid_fraction: float = 0.1,
    suffixes: Sequence[str] | None = None,
    without: str | os.PathLike | None = None,
    seed: int = 0,
) -> TextSplit:
    """Read a folder of text, split by file into training and validation bytes, the same on every machine and run.

    Args:
      path: a folder, searched with its subfolders, or one file; None: the source text of the standard library of the
        running Python, without its tests. Only regular files are read; what is passed over (dangling links, links to
        folders, FIFOs, sockets, devices, compressed and binary files, what may not be read) is logged by name.
      max_bytes: read no more than this, whole files in an order drawn from `seed`, the last one cut; None: everything.
      valid_fraction: share of the bytes to validate on, approached by whole files; a single file is cut near its end.
      suffixes: endings of the files to read; None: ".py" for the standard library, else `TEXT_SUFFIXES`.
      without: a folder under `path` that is no part of the text, such as the one that runs are written to.
      seed: draws the files.

    Raises:
      ValueError: the folder is missing or has no text, the file is compressed or binary, there are fewer than two bytes, or a
        fraction or limit is out of range.
    """
    _check_limits(max_bytes, valid_fraction)
    folder = _library(suffixes or (".py",)) if path is None else _given(Path(path), suffixes or TEXT_SUFFIXES, without)
    contents = _read(folder, max_bytes, np.random.Generator(np.random.Philox(key=seed)))
    total = sum(map(len, contents))
    if total < 2:
        where = "the standard library" if path is None else f"{os.fspath(path)!r}"
        endings = ", ".join(suffixes or TEXT_SUFFIXES)
        raise ValueError(
            f"no text in {where}: {len(folder.files)} files ending in {endings}, {total} bytes. Give a folder of text"
            + (f"; {words}" if (words := folder.words()) else "")
        )
    folder.warn()
    return _split(contents, int(total * valid_fraction))


class ByteWindows:
    """Non-overlapping windows of a byte string, each with the next byte of every position as its target.

    >>> windows = ByteWindows(np.frombuffer(b"abcdefg", np.uint8), 3)
    >>> len(windows), bytes(windows[1]["tokens"].tolist()), bytes(windows[1]["targets"].tolist())
    (2, b'def', b'efg')

    Args:
      data: uint8 [n].
      length: bytes per window; n must be at least length + 1.
      fingerprint: of the text that the data is a part of; None: the data's own checksum.

    Raises:
      ValueError: the data is not one-dimensional bytes or too short for one window.
    """

    unit, dtype = "byte", np.dtype(np.uint8)

    def __init__(self, data: np.ndarray, length: int, fingerprint: str | None = None):
        if data.ndim != 1 or data.dtype != self.dtype or length < 1 or len(data) <= length:
            raise ValueError(
                f"{type(self).__name__} of {data.dtype} {data.shape} with length={length}: give one-dimensional "
                f"{self.dtype} data of at least length + 1 {self.unit}s and a length of at least 1"
            )
        self.data = data
        self.length = length
        self._text = fingerprint

    @functools.cached_property
    def fingerprint(self) -> str:
        """What tells these windows from others; checkpoints keep it."""
        return f"{self._text or format(zlib.crc32(self.data), '08x')} by {self.length}"

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Window `index`: {"tokens": int32 [length], "targets": int32 [length]}."""
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Several windows by one copy (the protocol of PyTorch's fetcher)."""
        starts = np.asarray(indices)[:, None] * self.length
        rows = self.data[starts + np.arange(self.length + 1)].astype(np.int32)
        return [{"tokens": row[:-1], "targets": row[1:]} for row in rows]


class TokenWindows(ByteWindows):
    """The same of token ids, int32 [n]."""

    unit, dtype = "token", np.dtype(np.int32)


def bigram_nats(train: np.ndarray, valid: np.ndarray, smoothing: float = 1.0) -> float:
    """Cross entropy on `valid`, in nats per byte, of a bigram model fitted on `train`: what a language model must beat.

    Args:
      train: uint8 [n].
      valid: uint8 [m], m >= 2.
      smoothing: added to the count of every pair, so that unseen ones keep a probability; positive.

    Raises:
      ValueError: smoothing is not positive, or `valid` has no pair.
    """
    if smoothing <= 0 or len(valid) < 2:
        raise ValueError(
            f"bigram_nats: smoothing={smoothing} must be positive and valid ({len(valid)} bytes) hold a pair"
        )
    counts = _pair_counts(train) + smoothing
    log_probs = np.log(counts / counts.sum(axis=1, keepdims=True))
    seen = _pair_counts(valid)
    return float(-(seen * log_probs).sum() / seen.sum())


def _pair_counts(data: np.ndarray) -> np.ndarray:
    pairs = data[:-1].astype(np.int64) * 256 + data[1:]
    return np.bincount(pairs, minlength=256 * 256).reshape(256, 256).astype(np.float64)


def _check_limits(max_bytes: int | None, valid_fraction: float) -> None:
    if max_bytes is not None and max_bytes < 2:
        raise ValueError(f"max_bytes={max_bytes}: give at least 2 (one byte to train on, one to validate on), or None")
    if not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction={valid_fraction}: give a share between 0 and 1, such as 0.1")


def _library(suffixes: Sequence[str]) -> Folder:
    return Folder(Path(os.__file__).parent, suffixes, SKIPPED_FOLDERS)


def _given(path: Path, suffixes: Sequence[str], without: str | os.PathLike | None) -> Folder:
    try:
        path.stat()
    except OSError as error:
        wrong = "no such folder" if isinstance(error, FileNotFoundError) else error.strerror
        raise ValueError(
            f"{wrong}: {str(path)!r}. Give an existing folder of text, or no path for the built-in one"
        ) from error
    return Folder(path, suffixes, without=None if without is None else Path(without).resolve())


def _read(folder: Folder, max_bytes: int | None, rng: np.random.Generator) -> list[bytes]:
    contents, left = [], max_bytes
    for i in rng.permutation(len(folder.files)):
        content = folder.read(folder.files[i], left)
        contents.append(content)
        if left is not None and (left := left - len(content)) <= 0:
            break
    return [content for content in contents if content]


def _split(contents: list[bytes], wanted: int) -> TextSplit:
    if len(contents) == 1:
        cut = len(contents[0]) - max(wanted, 1)
        return TextSplit(_array([contents[0][:cut]]), _array([contents[0][cut:]]))
    chosen, size = set(), 0
    for i, content in enumerate(contents):
        if size + len(content) <= wanted:
            chosen.add(i)
            size += len(content)
    chosen = chosen or {min(range(len(contents)), key=lambda i: len(contents[i]))}
    valid = [content for i, content in enumerate(contents) if i in chosen]
    return TextSplit(_array([content for i, content in enumerate(contents) if i not in chosen]), _array(valid))


def _array(contents: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(contents), np.uint8)
