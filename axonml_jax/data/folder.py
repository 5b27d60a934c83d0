"""The files of a folder in one order on every machine: regular ones only, with what was passed over by name and reason.

What begins as no text does is passed over where text is asked for, and refused where it is the one file that was named.
"""

import logging
import os
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

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
"""What a name may be beside a file and a folder."""


class Folder:
    """A folder, or one file, whose files are found once and then read one by one.

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
        if root.is_dir():
            self._walk(tuple(suffixes), skipped, without)
        else:
            self._add(root)
        self.files.sort(key=lambda file: file.relative_to(root).as_posix())

    def read(self, file: Path, limit: int | None) -> bytes:
        """The first `limit` bytes of a file that was found, all of them for None; nothing where it cannot be read."""
        try:
            with file.open("rb") as opened:
                return opened.read(limit)
        except OSError as error:
            self._pass_over(file, f"cannot be read: {error.strerror}")
            return b""

    def words(self) -> str:
        """What was passed over, as far as the folder was read; empty when nothing was."""
        if not self.passed_over:
            return ""
        lines = [f"  {path}: {reason}" for path, reason in sorted(self.passed_over.items())]
        more = [f"  and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
        return "\n".join(
            [f"passed over in {str(self.root)!r}, for only {self._kind} are read:", *lines[:_SHOWN], *more]
        )

    @property
    def _kind(self) -> str:
        return "regular files of text" if self._text else "regular files"

    def warn(self) -> None:
        """Log what was passed over."""
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
        """What a file is by its first bytes, if that is no text. Text has no zeros, by which git tells it too."""
        head = self.read(file, _HEAD)
        if (known := next((kind for begin, kind in _BEGINS.items() if head.startswith(begin)), None)) is not None:
            return known
        if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
            return "compressed by bzip2"
        return f"binary, with a zero at byte {head.index(0)}" if 0 in head else None

    def _pass_over(self, path: Path, reason: str) -> None:
        name = path.name if path == self.root else path.relative_to(self.root).as_posix()
        self.passed_over[name] = reason
