"""Compiled programs on the CPU that every process of a job keeps, where JAX has process 0 alone keep them."""

import inspect
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any


def keep_in_every_process() -> None:
    """Have JAX's persistent cache take what any process compiles for the CPU, not what process 0 compiles alone.

    JAX lets process 0 write, for all. But the key of a program on the CPU holds which devices are the process's own, so the
    others never find what process 0 has written, and compile everything anew whenever they start. On other platforms, where
    keys agree, process 0 goes on to write alone.
    """
    from jax._src import compiler

    if not isinstance(compiler._cache_write, _Write):
        compiler._cache_write = _Write(compiler._cache_write)


class _Write:
    """JAX's function that writes a program, and the same for a process that takes itself for process 0."""

    def __init__(self, usual: Callable):
        assert isinstance(usual, FunctionType)
        first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
        self._usual, self._takes = usual, inspect.signature(usual)
        self._as_first = FunctionType(usual.__code__, usual.__globals__ | {"distributed": first}, usual.__name__)

    @property
    def __signature__(self) -> inspect.Signature:
        return self._takes

    def __call__(self, *args: Any, **options: Any) -> None:
        backend = self._takes.bind(*args, **options).arguments["backend"]
        write = self._as_first if backend.platform == "cpu" else self._usual
        write(*args, **options)
