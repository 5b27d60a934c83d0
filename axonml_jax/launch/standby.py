"""Standby processes, which become the workers of the next attempt."""

import builtins
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from axonml_jax.mesh.environment import GENERATIONS, NAME, Handed, kept_by

# --------------------------------------------------------------------------------------------------
# Memory of the launcher that its workers write: it stays when a worker dies, and is freed when the launcher ends, in any
# way.
#
# Linux gives files that are in memory only and have no name (`memfd_create`): nobody else can open them, and nothing
# can be left behind. An empty one costs nothing.
# --------------------------------------------------------------------------------------------------


class HostMemory:
    """The memory files of all workers of one machine, whose number of workers is constant. A context, which closes them.

    Args:
      sizes: workers of every machine.
      node_rank: which machine this is.
    """

    def __init__(self, sizes: Sequence[int], node_rank: int):
        self._own = [_files(f"worker {local}") for local in range(sizes[node_rank])]
        self._kept: list[list[tuple[int, ...]]] = [[] for _ in self._own]
        self.arrange(sizes, node_rank)

    def __enter__(self) -> "HostMemory":
        return self

    def __exit__(self, *exception):
        for handed in self._handed:
            for handle in handed.all:
                os.close(handle)

    def arrange(self, sizes: Sequence[int], node_rank: int, keep: bool = True) -> bool:
        """Assign files to workers for the next world; their contents stay, as each copy says which state it holds.

        Args:
          sizes: workers of every machine.
          node_rank: which machine this is.
          keep: false empties all files, as what they hold is of a training that has gone on without this machine.

        Returns:
          Whether there are more files than before.
        """
        grown, first, self._handed = False, sum(sizes[:node_rank]), list[Handed]()
        for local, (own, files) in enumerate(zip(self._own, self._kept, strict=True)):
            whose = kept_by(first + local, sizes)
            while len(files) < len(whose):
                files.append(_files(f"another machine's, kept by worker {local}"))
                grown = True
            # Files that no rank needs now are handed on too, for their contents, under negative numbers: no rank has one.
            labels = [*whose, *(-number for number in range(1, len(files) - len(whose) + 1))]
            self._handed.append(Handed(own, dict(zip(labels, files, strict=True))))
        if not keep:
            for handle in (each for handed in self._handed for each in handed.all):
                os.ftruncate(handle, 0)
        return grown

    def of(self, local_rank: int) -> Handed:
        """The descriptors that a worker is given."""
        return self._handed[local_rank]


def can_outlive() -> bool:
    """Whether this system has memory files (`memfd_create`)."""
    return hasattr(os, "memfd_create")


def _files(whose: str) -> tuple[int, ...]:
    return tuple(os.memfd_create(f"{NAME} of {whose}") for _ in range(GENERATIONS))


# --------------------------------------------------------------------------------------------------
# A process that stands by to be a worker, with its imports made: a restart need not wait for them.
#
# This module is also its program: it imports what every run needs, waits for a line with a worker's variables, and runs
# the script as Python would. Until then it has started no device and joined no job.
# --------------------------------------------------------------------------------------------------

NEEDED = (
    "jax",
    "flax.nnx",
    "optax",
    "orbax.checkpoint",
    "jax.experimental.multihost_utils",
    "axonml_jax.facade.facades",
    "axonml_jax.checkpoint.manager",
)
"""Modules that a standby process imports."""

TRAIN = "axonml_jax.cli.train"
"""The module that it imports besides if `axonml-jax train` is launched."""

_READ = ("JAX_", "OMP_", "MKL_", "OPENBLAS_")
"""Prefixes of the environment variables that these imports read."""

_READERS = {"axonml_jax", *(name.partition(".")[0] for name in NEEDED)}


def command(module: bool, target: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a standby process; it names the script or module for readers of `ps`."""
    return [sys.executable, "-m", __name__, "module" if module else "script", target, *arguments]


def go(environ: Mapping[str, str]) -> bytes:
    """The line that turns a standby process into a worker with these variables."""
    return json.dumps(dict(environ)).encode() + b"\n"


def stand_by(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Import, wait for a worker's variables on standard input, and run its program; end silently if none come.

    Args:
      kind: "module" or "script".
      target: the module's name or the script's path.
      arguments: of the program.
    """
    seen = _read(os.environ)
    trains = kind == "module" and target == "axonml_jax" and list(arguments[:1]) == ["train"]
    for name in (*NEEDED, *([TRAIN] if trains else [])):
        with suppress(ImportError):  # the script will say so, if it needs it
            import_module(name)
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(0)
    os.environ.clear()
    os.environ.update(json.loads(line))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = [target, *arguments]
    program = [*(["-m"] if kind == "module" else []), target, *arguments]
    watch_imports(seen, lambda changed: _start_again(changed, program))
    if kind == "module":
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")


def watch_imports(seen: Mapping[str, str], start_again: Callable[[list[str]], None]) -> None:
    """At the program's first import of JAX, Flax, optax, orbax or this package, check for changes of variables that they read.

    Args:
      seen: the variables when this process imported them.
      start_again: called with the names of those that differ now, if any do. Later imports are not watched.
    """
    usual = builtins.__import__

    def watched(name, globals=None, locals=None, fromlist=(), level=0):
        if level == 0 and name.partition(".")[0] in _READERS:
            builtins.__import__ = usual
            now = _read(os.environ)
            if changed := sorted(each for each in {*seen, *now} if seen.get(each) != now.get(each)):
                start_again(changed)
        return usual(name, globals, locals, fromlist, level)

    builtins.__import__ = watched


def _read(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ)}


def _start_again(changed: list[str], arguments: Sequence[str]) -> None:
    """Replace this process by a new one for the script, which runs as in a first attempt."""
    said = f"{', '.join(changed)} set before the import of JAX, which this process has made while it stood by: it starts again"
    print(f"axonml_jax: {said}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    stand_by(sys.argv[1], sys.argv[2], sys.argv[3:])


# --------------------------------------------------------------------------------------------------
# A second set of processes on one machine, started while the workers are at work, for the attempt after a failure.
# --------------------------------------------------------------------------------------------------

_LEAVE = 5.0


class Spares:
    """Starts standby processes some time after an attempt has begun, when their imports disturb it least. A context.

    They read from a pipe that the launcher holds, so that they end when it does, in any way.

    Args:
      count: workers of this machine.
      program: whether it is a module, the module or script, and its arguments.
      start: starts a command line for the worker of a local rank, with a pipe as its input.
      delay: seconds from `prepare` to the start.
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
        """End the standby processes, and start no more until asked again."""
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
        """Start the missing standby processes after a delay."""
        self._timer = threading.Timer(self._delay, self._fill)
        self._timer.daemon = True
        self._timer.start()

    def hold(self) -> None:
        """Start no more until asked again; none is half started when this returns."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def take(self, local_rank: int) -> subprocess.Popen | None:
        """Hand over a worker's standby process; None if there is none, or it has died."""
        process = self._waiting.pop(local_rank, None)
        return process if process is not None and process.poll() is None else None

    def _fill(self) -> None:
        for local_rank in range(self._count):
            if local_rank not in self._waiting:
                self._waiting[local_rank] = self._start(local_rank, command(*self._program))
