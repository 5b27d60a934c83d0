"""What a rank cannot do with its part of a parameter, and whose code asked for it."""

from collections.abc import Sequence

from axonml_jax.compat.operation import Operation


class Mixing(Exception):
    """What a rank cannot do with its part of a parameter.

    Attributes:
      what: the operation.
      frames: names of the functions that called it, innermost first.
    """

    def __init__(self, what: str, frames: Sequence[str] = ()):
        super().__init__(what)
        self.what, self.frames = what, tuple(frames)


def frames_of(op: Operation, outer: Sequence[str]) -> list[str]:
    """Names of the functions around an operation: those around the outermost call first, as inner ones may be cached."""
    return [*outer, *op.functions]
