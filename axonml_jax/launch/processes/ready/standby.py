"""A process that waits to be a worker, with its imports made: a restart need not wait for them.

Also its program: it imports what every run needs, waits for a line that says which worker it is, and runs the script as Python
would have. It has started no device and joined nothing until then.
"""

import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
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


def command(module: bool, target: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a process that stands by for a script or module, which it names for whoever reads `ps`."""
    return [sys.executable, "-m", __name__, "module" if module else "script", target, *arguments]


def go(environ: Mapping[str, str]) -> bytes:
    """The line that makes it a worker with these variables."""
    return json.dumps(dict(environ)).encode() + b"\n"


def stand_by(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Import, wait, and be the worker. Ends without a word when nobody needs it."""
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
    if kind == "module":
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    stand_by(sys.argv[1], sys.argv[2], sys.argv[3:])
