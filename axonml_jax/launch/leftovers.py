"""Finds and ends processes of a run that its launcher has left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

MARK = "AXONML_JAX_RUN_ID"
"""The variable that marks this launch's processes, also those that have left their process group."""

_TRACKER = b"multiprocessing.resource_tracker"
"""In the command of the process that Python starts to unlink shared memory whose owners have been killed."""

_LOADERS = (
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
)  # where the system finds libpython, if Python was built with a shared one

_PROC = Path("/proc")
_GUARD_GRACE = 2.0


def signal_all(groups: Collection[int], run_id: str, number: int) -> None:
    """Send a signal to every process of the groups, and to those outside of them that carry the run's mark.

    SIGKILL spares Python's resource trackers. When all others have ended they unlink what these had in /dev/shm, such as the
    batches that a loader's workers had made, and end by themselves.

    Args:
      groups: process group ids.
      run_id: value of `MARK`.
      number: the signal.
    """
    found = members(groups, run_id)
    if number == signal.SIGKILL and (trackers := [pid for pid in found if _tracks(pid)]):
        groups, outside = (), [pid for pid in found if pid not in trackers]
    else:
        outside = [pid for pid, group in found.items() if group not in groups]
    for send, targets in ((os.killpg, groups), (os.kill, outside)):
        for target in targets:
            try:
                send(target, number)
            except (ProcessLookupError, PermissionError):
                continue  # it has ended, or (macOS) only a zombie is left


def members(groups: Collection[int], run_id: str) -> dict[int, int]:
    """Map every living process of the groups, or with the mark, to its process group; zombies do not count.

    This process itself is left out. Without `/proc` (macOS) a group counts as one process and the mark is not seen.
    """
    if not (_PROC / "self" / "stat").exists():
        return {group: group for group in groups if _responds(group)}
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state, group = _state_and_group(entry)
                if state not in "ZX" and (group in groups or _marked(entry, run_id)):
                    found[int(entry.name)] = group
            except OSError:
                continue  # it has ended meanwhile, or is another user's
    return found


class Guard:
    """Starts a process that ends a launcher's workers if the launcher is killed, or leaves this context by an exception.

    Args:
      run_id: value of `MARK`.
    """

    def __init__(self, run_id: str):
        # No other variables: the guard must not carry the mark of a launch that this launcher itself belongs to.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _LOADERS if name in os.environ},
            cwd="/",
            start_new_session=True,
        )

    def __enter__(self) -> "Guard":
        return self

    def watch(self, group: int) -> None:
        """Add a process group to those to end."""
        self._say(f"{group}\n")

    def __exit__(self, kind: type[BaseException] | None, *exception):
        if kind is None:  # after an error the workers may still run: the launcher may have failed while it ended them
            self._say("done")
        self._process.communicate()

    def _say(self, words: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(words.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # somebody has killed it; the launch does not depend on it


def guard(run_id: str) -> None:
    """Read until the launcher's end of the pipe closes; unless it said `done`, end everything it had started."""
    said = sys.stdin.read().split()
    if said[-1:] == ["done"]:
        return
    groups = [int(word) for word in said]
    signal_all(groups, run_id, signal.SIGTERM)
    deadline = time.monotonic() + _GUARD_GRACE
    while members(groups, run_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    while members(groups, run_id) and time.monotonic() < deadline + _GUARD_GRACE:
        signal_all(groups, run_id, signal.SIGKILL)
        time.sleep(0.1)


def _state_and_group(entry: Path) -> tuple[str, int]:
    # The command's name, in parentheses, may itself contain spaces and parentheses.
    fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[2])


def _marked(entry: Path, run_id: str) -> bool:
    return f"{MARK}={run_id}".encode() in (entry / "environ").read_bytes().split(b"\0")


def _tracks(pid: int) -> bool:
    try:
        return _TRACKER in (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False  # it has ended meanwhile, or there is no `/proc`


def _responds(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    guard(sys.argv[1])
