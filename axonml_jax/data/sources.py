"""Files as datasets: text, JSON lines, Parquet, folders."""

import bisect
import functools
import itertools
import json
import logging
import os
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# --------------------------------------------------------------------------------------------------
# The files of a folder in one order on every machine: regular ones only, with what was passed over by name and reason.
#
# Where text is asked for, a file whose first bytes are not text is passed over, and refused if it is the one file that was
# named.
# --------------------------------------------------------------------------------------------------

_SHOWN = 10
_HEAD = 8192
_BEGINS = {
    b"\x1f\x8b": "compressed by gzip", b"\x28\xb5\x2f\xfd": "compressed by zstd", b"\xfd7zXZ\0": "compressed by xz",
    b"\x04\x22\x4d\x18": "compressed by lz4", b"PK\3\4": "a zip archive", b"\xff\xfe": "UTF-16 or UTF-32, not UTF-8",
    b"\xfe\xff": "UTF-16, not UTF-8",
}  # fmt: skip
COMPRESSED = (".gz", ".zst", ".xz", ".bz2", ".lz4", ".br", ".zip")
"""Endings of names that compression adds."""
KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
"""Kinds of files that are neither regular files nor folders, in words."""


class Folder:
    """A folder, or one file, whose files are listed once and then read one by one.

    Opening a FIFO waits for a writer and a device may never end, so what a name is gets asked before anything is opened.

    Args:
      root: the folder with its subfolders, hidden ones left out, or one file.
      suffixes: endings of the names to find.
      skipped: names of subfolders to leave out.
      without: one more folder to leave out.
      text: whether files are read as text.

    Raises:
      ValueError: the root is a file that is no text, where text is asked for.

    Attributes:
      root: the folder.
      files: the regular files found, by their path under the folder.
      passed_over: why a name that was asked for is not read, by path.
    """

    def __init__(
        self,
        root: Path,
        suffixes: Sequence[str],
        skipped: Collection[str] = (),
        without: Path | None = None,
        *,
        text: bool = True,
    ):
        self.root, self.passed_over, self._text = root, {}, text
        self.files: list[Path] = []
        self._records: list[str] = []
        if root.is_dir():
            self._walk(tuple(suffixes), skipped, without)
        else:
            self._add(root)
        self.files.sort(key=lambda file: file.relative_to(root).as_posix())

    def read(self, file: Path, limit: int | None) -> bytes:
        """The first `limit` bytes of a listed file (None: all); a file that cannot be read is noted and gives nothing."""
        try:
            with file.open("rb") as opened:
                return opened.read(limit)
        except OSError as error:
            self._pass_over(file, f"cannot be read: {error.strerror}")
            return b""

    def words(self) -> str:
        """Describe the files that were passed over so far; empty if none was."""
        if not (self.passed_over or self._records):
            return ""
        lines = [f"  {path}: {reason}" for path, reason in sorted(self.passed_over.items())]
        more = [f"  and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
        if self._records:
            more.append(f"  {len(self._records)} of records ({', '.join(_TABLES)}), such as {min(self._records)}")
        return "\n".join(
            [f"passed over in {str(self.root)!r}, for only {self._kind} are read:", *lines[:_SHOWN], *more]
        )

    @property
    def _kind(self) -> str:
        return "regular files of text" if self._text else "regular files"

    def warn(self) -> None:
        """Log the files that were passed over."""
        if words := self.words():
            logging.getLogger("axonml_jax").warning("%s", words)  # our own `logging` imports JAX, which --help need not

    def _walk(self, suffixes: tuple[str, ...], skipped: Collection[str], without: Path | None) -> None:
        def unlisted(error: OSError) -> None:
            self._pass_over(Path(error.filename), f"a folder that cannot be listed: {error.strerror}")

        def kept(folder: Path) -> bool:
            named = folder.name not in skipped and not folder.name.startswith(".")
            return named and (without is None or folder.resolve() != without)

        for folder, subfolders, names in os.walk(self.root, onerror=unlisted):
            subfolders[:] = [name for name in subfolders if kept(Path(folder, name))]
            for name in subfolders:
                if (link := Path(folder, name)).is_symlink():
                    self._pass_over(link, "a link to a folder")
            for name in names:
                if name.endswith(suffixes):
                    self._add(Path(folder, name))
                elif name.endswith(tuple(suffix + more for suffix in suffixes for more in COMPRESSED)):
                    self._pass_over(Path(folder, name), "compressed: decompress it first")
                elif suffixes == TEXT_SUFFIXES and name.endswith(_TABLES):
                    self._records.append(Path(folder, name).relative_to(self.root).as_posix())

    def _add(self, file: Path) -> None:
        try:
            kind = stat.S_IFMT(file.stat().st_mode)
        except OSError as error:
            self._pass_over(file, "a dangling link" if file.is_symlink() else f"cannot be read: {error.strerror}")
            return
        if kind != stat.S_IFREG:
            self._pass_over(file, KINDS.get(kind, "not a regular file"))
        elif not self._text or (found := self._no_text(file)) is None:
            self.files.append(file)
        elif file == self.root:
            raise ValueError(
                f"{str(file)!r} is no text: {found}. Give text in UTF-8: decompress or convert the file first, or let a "
                "generator function of your own read it"
            )
        else:
            self._pass_over(file, found)

    def _no_text(self, file: Path) -> str | None:
        """The kind of a binary file, by its first bytes; None for text, which contains no zero byte (git's rule too)."""
        head = self.read(file, _HEAD)
        if (known := next((kind for begin, kind in _BEGINS.items() if head.startswith(begin)), None)) is not None:
            return known
        if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
            return "compressed by bzip2"
        return f"binary, with a zero at byte {head.index(0)}" if 0 in head else None

    def _pass_over(self, path: Path, reason: str) -> None:
        name = path.name if path == self.root else path.relative_to(self.root).as_posix()
        self.passed_over[name] = reason


# --------------------------------------------------------------------------------------------------
# The files of a source, and their checksum.
# --------------------------------------------------------------------------------------------------

_CHUNK = 1 << 24


def found_files(path: str | os.PathLike, suffixes: Sequence[str], *, text: bool = True) -> list[Path]:
    """List one file, whatever its name, or a folder's files with these endings, in the same order on every machine.

    Raises:
      ValueError: there is no such file or folder, the folder has no such files, or text is asked for and the one file is none.
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
    """The requested fields of a sample (None: all).

    Raises:
      ValueError: the sample is no mapping, or lacks a field.
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


# --------------------------------------------------------------------------------------------------
# Byte-level text: a folder of files as training and validation bytes, windows over them, and a bigram to beat.
# --------------------------------------------------------------------------------------------------

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
    """Bytes to train on and bytes to validate on, from different files (uint8, files concatenated).

    With a tokenizer they are token ids instead (int32).
    """

    train: np.ndarray
    valid: np.ndarray

    @property
    def fingerprint(self) -> str:
        """The CRC-32 of both parts, which identifies this text, or these tokens."""
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
        """Text that identifies these windows; checkpoints keep it."""
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
    """Non-overlapping windows of token ids, int32 [n], each with the next token of every position as its target."""

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


# --------------------------------------------------------------------------------------------------
# JSON lines as a dataset: every line is a sample, found by its place in the file.
# --------------------------------------------------------------------------------------------------

JSON_LINES = (".jsonl", ".ndjson")
_SPACE = np.frombuffer(b" \t\r\n", np.uint8)
_MOST_OPEN = 64


class JsonLinesFiles:
    """A dataset of JSON lines: one dict per line that is not blank, read on demand.

    Args:
      path: a file, or a folder of files ending in `.jsonl` or `.ndjson`, searched with its subfolders.
      fields: names of the fields to keep; None: all.

    Raises:
      ValueError: there is nothing to read.
    """

    def __init__(self, path: str | os.PathLike, *, fields: Sequence[str] | None = None):
        self.files = found_files(path, JSON_LINES)
        self.fields = fields
        self._lines = [_line_starts(file) for file in self.files]
        self._firsts = np.cumsum([0, *(len(starts) for starts, _ in self._lines)]).tolist()
        self._open: dict[int, np.memmap] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Text that identifies this content; checkpoints keep it."""
        return f"jsonl {checksum(self.files)} in {len(self.files)}"

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Line `index`, counted over all files."""
        index = range(len(self))[index]
        which = bisect.bisect_right(self._firsts, index) - 1
        starts, ends = self._lines[which]
        line = index - self._firsts[which]
        content = self._mapped(which)[starts[line] : ends[line]].tobytes()
        try:
            sample = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.files[which]}, byte {starts[line]}: no JSON ({error}): {content[:60]!r}"
            ) from error
        return kept_fields(sample, self.fields, f"{self.files[which]}, byte {starts[line]}")

    def _mapped(self, which: int) -> np.memmap:
        """A file's bytes; of the files that stay open, each with a handle, the one opened first makes room."""
        if which not in self._open:
            if len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
            self._open[which] = np.memmap(self.files[which], np.uint8, "r")
        return self._open[which]


def _line_starts(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """The start and end offsets of every line that is not blank, int64."""
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


# --------------------------------------------------------------------------------------------------
# Parquet files as a dataset: every row is a sample, read by row groups.
# --------------------------------------------------------------------------------------------------

PARQUET = (".parquet",)


class ParquetFiles:
    """A dataset of Parquet rows, one dict each; the last row's group stays in memory, so that neighbours are cheap to read.

    Args:
      path: a file, or a folder of files ending in `.parquet`, searched with its subfolders.
      fields: names of the columns to keep; None: all.

    Raises:
      ImportError: pyarrow is not installed.
      ValueError: there is nothing to read, a column is not there, or a file is no Parquet that pyarrow can read.
    """

    def __init__(self, path: str | os.PathLike, *, fields: Sequence[str] | None = None):
        self.files = found_files(path, PARQUET, text=False)
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
        """Text that identifies this content; checkpoints keep it."""
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
    """Turn pyarrow's errors about a file's content into one kind of error that names the file.

    Errors of the disk stay as they are; pyarrow's own of the same kind have no number.
    """
    try:
        yield
    except (ValueError, LookupError, NotImplementedError, TypeError, OverflowError, MemoryError, OSError) as error:
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


# --------------------------------------------------------------------------------------------------
# Text files as a dataset: every file is a document.
# --------------------------------------------------------------------------------------------------


class TextFiles:
    """A dataset of text files: one {"text": content, "path": name under the folder} per file.

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
        """Text that identifies this content; checkpoints keep it."""
        return f"text {checksum(self.files)} in {len(self.files)}"

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, str]:
        """File `index`, in the order of names; invalid UTF-8 becomes U+FFFD."""
        file = self.files[index]
        name = file.name if file == self.root else file.relative_to(self.root).as_posix()
        return kept_fields({"text": file.read_bytes().decode(errors="replace"), "path": name}, self.fields, str(file))


# --------------------------------------------------------------------------------------------------
# `open_dataset`: files as a dataset, by their format.
# --------------------------------------------------------------------------------------------------

FORMATS: dict[str, Any] = {"text": TextFiles, "jsonl": JsonLinesFiles, "parquet": ParquetFiles}
"""The class of each format's datasets, by the format's name."""

_SUFFIXES = {"jsonl": JSON_LINES, "parquet": PARQUET}
_TABLES = (".json", ".csv", ".tsv")


def records_beside_text(path: str | os.PathLike, without: str | os.PathLike | None = None) -> list[str]:
    """The JSON lines and Parquet files of a folder (none for a file); `without`: a folder in it to ignore.

    Raises:
      ValueError: it is a file whose name leaves its format open (see `guessed_format`).
    """
    if not Path(path).is_dir():
        guessed_format(path)
        return []
    left_out = None if without is None else Path(without).resolve()
    found = Folder(Path(path), (*JSON_LINES, *PARQUET), without=left_out, text=False).files
    return [file.relative_to(path).as_posix() for file in found]


def open_dataset(
    path: str | os.PathLike, format: str | None = None, *, fields: Sequence[str] | None = None
) -> TextFiles | JsonLinesFiles | ParquetFiles:
    """Open files as a dataset of dicts with random access; only an index is kept in memory.

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
    """The format that a file's name implies, or the names in a folder.

    Raises:
      ValueError: it is a `.json`, `.csv` or `.tsv` file, which may be meant as records or as text.
    """
    path = Path(path)
    if path.suffix in _TABLES and path.is_file():
        raise ValueError(
            f"{path} holds records more often than text: give format=jsonl where every line is a JSON object, make such a file "
            "where none is, or take its characters as they are by format=text, in a configuration by data.pack=windows"
        )
    for name, suffixes in _SUFFIXES.items():
        endings = [suffix + more for suffix in suffixes for more in ("", *COMPRESSED)]
        if path.name.endswith(tuple(endings)):
            return name
        if path.is_dir() and any(_shown(path, found) for ending in endings for found in path.rglob(f"*{ending}")):
            return name
    return "text"


def _shown(root: Path, found: Path) -> bool:
    """Whether no folder on the way to a file is hidden: hidden ones are not read."""
    return not any(part.startswith(".") for part in found.relative_to(root).parts[:-1])
