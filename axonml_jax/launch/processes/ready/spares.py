"""A second set of processes on one machine, started while the workers are at work, for the attempt after a failure."""

import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from axonml_jax.launch.processes.ready.standby import command

_LEAVE = 5.0


class Spares:
    """Starts them some time after an attempt has begun, which is when their imports cost it least. A context.

    They read their orders from a pipe that the launcher holds: when the launcher ends, however, they end too.

    Args:
      count: how many.
      program: whether it is a module, which, and its arguments.
      start: starts a command line for one of this machine's workers, by its number, with a pipe as its input.
      delay: seconds.
    """

    def __init__(
        self,
        count: int,
        program: tuple[bool, str, Sequence[str]],
        start: Callable[[int, Sequence[str]], subprocess.Popen],
        delay: float,
    ):
        self._count, self._program, self._start, self._delay = count, program, start, delay
        self._waiting: dict[int, subprocess.Popen] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "Spares":
        return self

    def __exit__(self, *exception):
        self.dismiss()

    def dismiss(self) -> None:
        """End those that stand by, and start no more until asked again."""
        self.hold()
        for process in self._waiting.values():
            process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        deadline = time.monotonic() + _LEAVE
        for process in self._waiting.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdout, process.stderr):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]
        self._waiting.clear()

    def prepare(self) -> None:
        """Start those that are not there, some time from now."""
        self._timer = threading.Timer(self._delay, self._fill)
        self._timer.daemon = True
        self._timer.start()

    def hold(self) -> None:
        """Start no more, until asked again; none is half started when this returns."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def take(self, local_rank: int) -> subprocess.Popen | None:
        """One that stands by for a worker; None where there is none, or it has died."""
        process = self._waiting.pop(local_rank, None)
        return process if process is not None and process.poll() is None else None

    def _fill(self) -> None:
        for local_rank in range(self._count):
            if local_rank not in self._waiting:
                self._waiting[local_rank] = self._start(local_rank, command(*self._program))
