"""Saves that fail while a run goes on: which causes may pass, how many in a row, and what is said of them."""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from axonml_jax.checkpoint.keeping.retention import require_count
from axonml_jax.logging import logger

REMEDIES = {
    errno.ENOSPC: "delete something there, or keep fewer checkpoints",
    errno.EDQUOT: "the quota is used up: delete something of yours there, keep fewer checkpoints, or ask for more",
    errno.EROFS: "it is mounted read-only, often by the system after an error of the disk: read its log (dmesg), mount it anew",
    errno.EHOSTDOWN: "the object store is busy or cannot be reached: look at its state and at the network; until it answers, "
    "checkpoints wait in that folder",
    errno.EIO: "the disk, or the server that it is on, fails: read the system's log (dmesg), and save to another",
}
"""Causes that another try may find gone, and what to do against each."""


class Failures:
    """The saves that have failed, in all and since the last good one. All processes hear of the same ones.

    Args:
      folder: the checkpoints'.
      steps: those that are good, in order.
      most: that many in a row end the run; 1: the first does.

    Attributes:
      total: saves that failed and were passed over.
      in_a_row: of them those since the last good one.
    """

    def __init__(self, folder: Path, steps: Callable[[], Sequence[int]], most: int):
        require_count("max_failures", most, ": the first failure ends the run")
        self.total = self.in_a_row = 0
        self._folder, self._steps, self._most = folder, steps, most
        self._last: OSError | None = None
        self._said: set[int] = set()

    def fatal(self, error: BaseException | None) -> bool:
        """Whether there is an error, and one that ends the run at once."""
        return error is not None and (self._most == 1 or cause_of(error) is None)

    def take(self, error: OSError, tell: bool) -> None:
        """Count a save that failed.

        Args:
          error: why.
          tell: whether this process warns, once for each cause until a save is good again.

        Raises:
          OSError: the error itself where its cause may not pass, or where the first one ends the run; another one after
            too many in a row.
        """
        cause = cause_of(error)
        if cause is None or self._most == 1:
            raise error
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        if self.in_a_row >= self._most:
            self._last = None
            raise OSError(f"{self.in_a_row} saves in a row failed, the last: {error}\n{self._state(cause)}") from error
        self._last = error
        if tell and cause not in self._said:
            logger.warning(
                "%s\n%s. The run goes on and saves at the next step that is due; %d failures in a row end it",
                *(error, self._state(cause), self._most),
            )
        self._said.add(cause)

    def passed(self, tell: bool) -> None:
        """After a good save."""
        if self.in_a_row and tell:
            logger.warning("%s: saved again, after %d that failed", self._folder, self.in_a_row)
        self._last, self.in_a_row = None, 0
        self._said.clear()

    def tell(self) -> None:
        """Raise the error of the newest save where it has failed: nothing comes after it that could pass it over."""
        last, self._last = self._last, None
        if last is not None:
            raise last

    def _state(self, cause: int) -> str:
        """What is left, how much room there is, what to do."""
        steps = self._steps()
        kept = f"the last good checkpoint is that of step {steps[-1]}" if steps else "there is no good checkpoint yet"
        return f"{kept}; {_room(self._folder)}: {REMEDIES[cause]}"


def cause_of(error: BaseException) -> int | None:
    """The number of the error that made a save fail, if another try may find it gone; else None.

    It is read from the text, which is the same in every process, and which TensorStore's errors have too.

    >>> cause_of(OSError(errno.ENOSPC, "No space left on device")) == errno.ENOSPC
    True
    >>> cause_of(ValueError("NOT_FOUND: Read-only file system [OS error 30: EROFS]")) == errno.EROFS
    True
    >>> cause_of(PermissionError(errno.EACCES, "Permission denied"))
    """
    text = str(error)
    return next((n for n in REMEDIES if os.strerror(n) in text or f"[Errno {n}]" in text), None)


def _room(folder: Path) -> str:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        usage = shutil.disk_usage(there)
    except OSError as error:
        return f"the file system of {folder} does not answer ({error.strerror})"
    return f"{usage.free:,} of {usage.total:,} bytes are free for {folder}"
