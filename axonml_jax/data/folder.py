"""The files of a folder in one order on every machine: regular ones only, with what was passed over by name and reason."""

import os
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

from axonml_jax.logging import logger

_SHOWN = 10
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class Folder:
    """A folder, or one file, whose files are found once and then read one by one.

    Opening a FIFO waits for a writer and a device may never end, so what a name is gets asked before anything is opened.

    Args:
      root: the folder with its subfolders, hidden ones left out, or one file.
      suffixes: endings of the names to find.
      skipped: names of subfolders to leave out.
      without: one more folder to leave out.

    Attributes:
      root: the folder.
      files: the regular files found, by their path under the folder.
      passed_over: why a name that was asked for is not read, by path.
    """

    def __init__(self, root: Path, suffixes: Sequence[str], skipped: Collection[str] = (), without: Path | None = None):
        self.root, self.passed_over = root, {}
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
            [f"passed over in {str(self.root)!r}, for only regular files are read:", *lines[:_SHOWN], *more]
        )

    def warn(self) -> None:
        """Log what was passed over."""
        if words := self.words():
            logger.warning("%s", words)

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

    def _add(self, file: Path) -> None:
        try:
            kind = stat.S_IFMT(file.stat().st_mode)
        except OSError as error:
            self._pass_over(file, "a dangling link" if file.is_symlink() else f"cannot be read: {error.strerror}")
            return
        if kind == stat.S_IFREG:
            self.files.append(file)
        else:
            self._pass_over(file, _KINDS.get(kind, "not a regular file"))

    def _pass_over(self, path: Path, reason: str) -> None:
        name = path.name if path == self.root else path.relative_to(self.root).as_posix()
        self.passed_over[name] = reason
