"""Whether a thread traces or compiles, told by the files that its calls are in."""

import os
from collections.abc import Iterable

import jax

_FOLDER = os.path.join(os.path.dirname(jax.__file__), "_src")
_FILES = tuple(
    os.path.join(_FOLDER, *name.split("/"))
    for name in ("compiler.py", "interpreters/partial_eval.py", "interpreters/mlir.py")
)


def is_compiling(files: Iterable[str]) -> bool:
    """Whether one of the files of a thread's calls is one in which JAX traces a program, lowers it or has XLA compile it.

    While a compiled program runs, none of them is among the calls.
    """
    return any(file in _FILES for file in files)
