"""One process of a launched job: started in a session of its own, listened to, and its end told."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from axonml_jax.launch.processes.output import Outlet
from axonml_jax.launch.processes.ready.standby import go

STDOUT, STDERR = 1, 2


@dataclass(frozen=True)
class Failure:
    """How a worker ended that should not have.

    Attributes:
      rank: which process of the job.
      host: where it ran.
      pid: its process id there.
      returncode: its exit code, or minus the signal that ended it.
      seconds: how long it ran.
      lines: the last lines of its standard error.
    """

    rank: int
    host: str
    pid: int
    returncode: int
    seconds: float
    lines: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """As a shell gives it: 128 plus the number for a signal."""
        return self.returncode if self.returncode > 0 else 128 - self.returncode

    @property
    def how(self) -> str:
        """Exit code or signal in words."""
        if self.returncode > 0:
            return f"exit code {self.returncode}"
        number = -self.returncode
        known = {member.value: member.name for member in signal.Signals}
        return f"signal {number} ({known.get(number, 'real-time')})"


class Worker:
    """A running worker.

    Args:
      rank: which process of the job it is.
      command: the program and its arguments.
      environ: all its variables.
      tee: which streams go to files too (`STDOUT`, `STDERR`, both, 0).
      quiet: which streams do not show on the console.
      logs: the folder of those files; None: there are none.
      files: open files that it gets under the same numbers.
      spare: a process that stands by to be it; None: a new one is started.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        tee: int = 0,
        quiet: int = 0,
        logs: Path | None = None,
        files: Sequence[int] = (),
        spare: subprocess.Popen | None = None,
    ):
        self.rank = rank
        self._started = time.monotonic()
        self._ended = 0.0
        ready = spare is not None and _ordered(spare, environ)
        self._process = spare if ready and spare else started(command, environ, files)
        self.pid = self._process.pid
        self.outlets: list[Outlet] = []
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
        streams = ((STDOUT, "stdout", self._process.stdout), (STDERR, "stderr", self._process.stderr))
        for bit, name, pipe in streams:
            assert pipe is not None
            console: IO[bytes] | None = None if quiet & bit else getattr(sys, name).buffer
            log = logs / f"{name}.log" if logs and (tee | quiet) & bit else None
            self.outlets.append(Outlet(pipe, f"[rank {rank}] ", console, log))

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the signal that ended it, or None while it runs."""
        code = self._process.poll()
        if code is not None and not self._ended:
            self._ended = time.monotonic()
        return code

    def failure(self) -> Failure:
        """How it failed. Call it once it has ended and its streams are drained."""
        assert self.returncode
        lines = tuple(self.outlets[-1].last_lines())
        seconds = self._ended - self._started
        return Failure(self.rank, socket.gethostname(), self.pid, self.returncode, seconds, lines)


def started(
    command: Sequence[str], environ: Mapping[str, str], files: Sequence[int], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen:
    """A process in a session of its own, whose output comes through pipes.

    Args:
      command: the program and its arguments.
      environ: all its variables.
      files: open files that it gets under the same numbers.
      stdin: its input, as `subprocess` has it.
    """
    return subprocess.Popen(
        command,
        env=dict(environ),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        pass_fds=files,
    )


def _ordered(spare: subprocess.Popen, environ: Mapping[str, str]) -> bool:
    """Make a process that stands by the worker; whether it still was there."""
    assert spare.stdin is not None
    try:
        with spare.stdin:
            spare.stdin.write(go(environ))
    except BrokenPipeError:
        return False
    return True
