"""Processes of the fault campaign that are forks of one with its imports made, where the launcher would start Python anew.

Of the 20 seconds of processor time that a fault of two processes took, 10 were imports. `begin` makes them, once; within
`forking` every process that this one or its forks start for a module or a script is a fork of whoever starts it: with a
process id, session, pipes, signals, variables and exit status of its own, and with its own command and variables in /proc, by
which the launcher and the campaign find it. Whatever else is started (`mount`, the launcher's guard), or has other variables
that JAX reads when imported, is started as ever.
"""

import atexit
import contextlib
import ctypes
import gc
import inspect
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

IMPORTS = (
    "flax.nnx", "optax", "orbax.checkpoint", "jax.experimental.multihost_utils", "axonml_jax.facade.facades",
    "axonml_jax.checkpoint.memory", "axonml_jax.cli.run", "axonml_jax.cli.records",
    "axonml_jax.launch.launcher", "axonml_jax.mesh.watch",
)  # fmt: skip
ROOM = "FAULT_ROOM"
"""A long variable in whose place the command and the variables of a fork are written."""

_READ_ONCE = ("JAX_", "OMP_", "MKL_", "OPENBLAS_")
_start = subprocess.Popen._execute_child  # pyright: ignore[reportAttributeAccessIssue]
_read: dict[str, str] = {}


def begin(environ: Mapping[str, str]) -> None:
    """Start this program again with variables that JAX reads, unless it has them, and make the imports.

    Args:
      environ: the variables.
    """
    if ROOM not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | dict(environ) | {ROOM: "-" * (1 << 15)})
    for name in IMPORTS:
        import_module(name)
    _read.update(_seen(os.environ))
    gc.collect()
    gc.freeze()  # or the first collection in every fork would copy all of it


@contextlib.contextmanager
def forking(asked: bool) -> Iterator[None]:
    """Whether processes that are started meanwhile are forks. `begin` comes before."""
    if asked:
        subprocess.Popen._execute_child = _execute_child  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _start  # pyright: ignore[reportAttributeAccessIssue]


def _seen(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_ONCE)}


def _execute_child(self, *args, **options):
    """In the place of what `subprocess.Popen` does to start a program."""
    given = inspect.signature(_start).bind(self, *args, **options).arguments
    command, environ = given["args"], given["env"] if given["env"] is not None else os.environ
    if not _is_ours(command) or _seen(environ) != _read:
        return _start(self, *args, **options)
    ends = given["p2cread"], given["c2pwrite"], given["errwrite"]
    sys.stdout.flush()
    sys.stderr.flush()
    self.pid = os.fork()
    if not self.pid:
        _become(command, dict(environ), ends, given["pass_fds"], given["start_new_session"])
    self._child_created = True
    names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(given[name] for name in names))
    return None


def _is_ours(command) -> bool:
    """Whether it is `python -m MODULE ...` or `python SCRIPT.py ...`."""
    if isinstance(command, str) or len(command) < 2 or command[0] != sys.executable:
        return False
    return command[1] == "-m" or str(command[1]).endswith(".py")


def _become(command: Sequence, environ: dict[str, str], ends: Sequence[int], kept: Sequence[int], session: bool):
    """Be the program that the command names, from its first line to its end."""
    status = 1
    try:
        weakref.finalize._registry.clear()  # pyright: ignore[reportAttributeAccessIssue]  # of whoever forked: its folders
        if session:
            os.setsid()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        _take(ends, kept)
        os.environ.clear()
        os.environ.update(environ)
        program = [os.fspath(word) for word in command[1:]]
        _be_called(" ".join([sys.executable, *program]), environ)
        status = _ended(program)
    finally:
        os._exit(status)


def _take(ends: Sequence[int], kept: Sequence[int]) -> None:
    """Have these ends of pipes as standard input, output and error (-1: as they are), and no other files but those kept."""
    copies = [os.dup(end if end >= 0 else number) for number, end in enumerate(ends)]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            try:
                os.close(number)
            except OSError:
                continue  # it was the listing's own
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(number, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115
        for number in (1, 2)
    )


def _be_called(title: str, environ: Mapping[str, str]) -> None:
    """Write a command and variables where /proc reads those with which a program was started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, variables, end = int(fields[45]), int(fields[46]), int(fields[48])
    # A command that runs into the variables is read to its first zero.
    content = title.encode().ljust(variables - arguments + 1) + b"\0"
    content += b"\0".join(f"{name}={value}".encode() for name, value in environ.items() if name != ROOM)
    assert len(content) < end - arguments, f"{len(content)} bytes of command and variables in {end - arguments}"
    ctypes.memmove(arguments, content.ljust(end - arguments, b"\0"), end - arguments)


def _ended(program: list[str]) -> int:
    """Run a module or a script as Python would, and take leave as Python would; the exit status."""
    status = 0
    try:
        _run(program)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status & 0xFF


def _run(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = str(Path(program[0]).parent)
        runpy.run_path(program[0], run_name="__main__")
