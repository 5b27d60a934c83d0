"""Telling what the user can mend from a bug: a refusal is one message on the command line, a bug keeps its traceback.

The library's own rule decides: what it finds wrong with what it was given it says by a `raise` statement, with the remedy, and
what it gets wrong itself ends in an `assert` or in somebody else's line of code.
"""

import dis
import os
from pathlib import Path

TRACEBACK = "AXONML_JAX_TRACEBACK"
"""Set it to 1 to see where a refusal was raised."""

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
_KINDS = (ValueError, TypeError, OSError, ImportError, RuntimeError)


def refusal(error: BaseException) -> str | None:
    """What to tell the user of an exception; None where it is a bug, whose traceback somebody must see.

    Args:
      error: as it was caught.

    Returns:
      The message of an exception that a `raise` statement of this package has raised, or the path and the reason of a file
      that the system did not give.

    >>> try:
    ...     int("two")
    ... except ValueError as error:
    ...     refusal(error) is None
    True
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if not isinstance(error, _KINDS) or not _raised_here(error):
        return None
    return str(getattr(error, "strerror", None) or error)


def traceback_wanted() -> bool:
    """Whether the user asks for the traceback of a refusal too."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def _raised_here(error: BaseException) -> bool:
    """Whether the innermost line is a `raise` statement of this package; a call that failed inside of C code is none."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None or not step.tb_frame.f_code.co_filename.startswith(_OURS):
        return False
    return dis.opname[step.tb_frame.f_code.co_code[step.tb_lasti]] == "RAISE_VARARGS"
