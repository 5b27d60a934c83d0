"""A process that waits to be a worker, with its imports made: a restart need not wait for them.

Also its program: it imports what every run needs, waits for a line that says which worker it is, and runs the script as Python
would have. It has started no device and joined nothing until then.
"""

import builtins
import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

NEEDED = (
    "jax",
    "flax.nnx",
    "optax",
    "orbax.checkpoint",
    "jax.experimental.multihost_utils",
    "axonml_jax.facade.parallelize",
    "axonml_jax.checkpoint.manager",
)
"""What a standing-by process has imported."""

TRAIN = "axonml_jax.launch.commands.train_command"
"""What it has imported besides where `axonml-jax train` is launched."""

_READ = ("JAX_", "OMP_", "MKL_", "OPENBLAS_")
"""How the variables begin that the imports read."""

_READERS = {"axonml_jax", *(name.partition(".")[0] for name in NEEDED)}


def command(module: bool, target: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a process that stands by for a script or module, which it names for whoever reads `ps`."""
    return [sys.executable, "-m", __name__, "module" if module else "script", target, *arguments]


def go(environ: Mapping[str, str]) -> bytes:
    """The line that makes it a worker with these variables."""
    return json.dumps(dict(environ)).encode() + b"\n"


def stand_by(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Import, wait, and be the worker. Ends without a word when nobody needs it."""
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
    """Look at the script's first import of JAX, or of what imports it, whether it has set variables that JAX read long ago.

    Args:
      seen: the variables that JAX read.
      start_again: called with the names of those that are others now; then nothing is watched any more.
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
    """Become a new process for the script, which then runs as in a first attempt."""
    said = f"{', '.join(changed)} set before the import of JAX, which this process has made while it stood by: it starts again"
    print(f"axonml_jax: {said}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    stand_by(sys.argv[1], sys.argv[2], sys.argv[3:])
