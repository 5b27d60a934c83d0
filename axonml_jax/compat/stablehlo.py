"""StableHLO text as MLIR operations: `jax.jit(f).lower(...)` promises the text, not Python's access to what it says."""

from typing import Any

from jax.interpreters import mlir


def parsed(text: str) -> Any:
    """The module of a lowered program: operations with `name`, `attributes`, `operands`, `results` and `regions`.

    Keep it as long as its operations are read: they do not keep it alive, and without it some read as empty.

    Args:
      text: what `lowered.as_text()` returns.
    """
    return mlir.ir.Module.parse(text, context=mlir.make_ir_context())
