"""Where a thread stands, in a line, and whether it is compiling."""

import os
import sys
import traceback

from axonml_jax.compat.compiling import is_compiling


def where_is(thread: int) -> str:
    """Where in the program a thread stands, outside of libraries if possible.

    >>> import threading
    >>> where_is(threading.get_ident()).startswith("in ")
    True
    """
    stack = _calls(thread)
    own = [entry for entry in stack if "site-packages" not in entry.filename and "/lib/python" not in entry.filename]
    if not (own or stack):
        return "ended"
    entry = (own or stack)[-1]
    return f"in {entry.name} at {os.path.basename(entry.filename)}:{entry.lineno}"


def stack_of(thread: int) -> list[str]:
    """All calls of a thread as `file:line function`, the innermost last."""
    return [f"{entry.filename}:{entry.lineno} {entry.name}" for entry in _calls(thread)]


def compiles(thread: int) -> bool:
    """Whether a thread traces a program or waits for its compiler."""
    return is_compiling(entry.filename for entry in _calls(thread))


def _calls(thread: int) -> list[traceback.FrameSummary]:
    """The calls that a thread is in, the innermost last; their lines are not read from disk."""
    frame = sys._current_frames().get(thread)
    calls = (
        [] if frame is None else list(traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False))
    )
    return calls[::-1]
