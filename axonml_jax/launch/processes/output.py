"""One stream of one worker, passed on line by line: to the console with its rank, to a file, and the last lines kept."""

import os
import re
from collections import deque
from pathlib import Path
from typing import IO

KEPT_LINES = 200
_LONGEST = 2**16
# What gloo prints to standard output from C++ whenever a group of processes has found itself. It is kept where a peer lacks.
_CHATTER = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1\s*"
)


class Outlet:
    """Reads a worker's stream as it comes; a line is passed on when it is whole, so that lines of ranks never mix.

    Gloo's word that all its peers are connected goes to the file only.

    Args:
      pipe: what the worker writes.
      prefix: before every line on the console.
      console: where lines show; None: nowhere.
      log: a file that gets the stream as it is; None: none.
    """

    def __init__(self, pipe: IO[bytes], prefix: str, console: IO[bytes] | None, log: Path | None = None):
        self._pipe = pipe
        self._prefix = prefix.encode()
        self._console = console
        self._log = log.open("wb", buffering=0) if log else None
        self._part = b""
        self._last: deque[bytes] = deque(maxlen=KEPT_LINES)
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """The descriptor to select on."""
        return self._pipe.fileno()

    @property
    def closed(self) -> bool:
        """Whether nothing more can come."""
        return self._pipe.closed

    def pump(self) -> None:
        """Pass on what has come; at the end of the stream, close."""
        while not self.closed:
            try:
                chunk = os.read(self._pipe.fileno(), _LONGEST)
            except BlockingIOError:
                return
            if not chunk:
                self.close()
            elif self._log:
                self._log.write(chunk)
            *lines, self._part = (self._part + chunk).split(b"\n")
            if len(self._part) > _LONGEST:
                lines, self._part = [*lines, self._part], b""
            self._show(lines)

    def close(self) -> None:
        """Pass on an unfinished last line and let go of pipe and file."""
        if not self.closed:
            self._pipe.close()
            if self._log:
                self._log.close()
            lines, self._part = [self._part] if self._part else [], b""
            self._show(lines)

    def last_lines(self) -> list[str]:
        """The last lines, as text."""
        return [line.decode(errors="replace").rstrip("\r") for line in self._last]

    def _show(self, lines: list[bytes]) -> None:
        self._last.extend(lines)
        shown = [self._prefix + line + b"\n" for line in lines if not _CHATTER.fullmatch(line)]
        if self._console and shown:
            self._console.write(b"".join(shown))
            self._console.flush()
