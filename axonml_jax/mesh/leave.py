"""Leaving a job because of an error: at once, so that the others (and the launcher) learn of it.

JAX's own way out waits at a barrier for every process, up to five minutes; a process that fails while the others wait for it
in a collective would hang there with them.
"""

import os
import sys
import threading
from typing import NoReturn

_INTERRUPTED = 130
_installed = threading.Event()


def leave_on_error() -> None:
    """From now on an uncaught exception ends this process as soon as its traceback is printed."""
    if _installed.is_set():
        return
    _installed.set()
    before = sys.excepthook

    def hook(kind, error, traceback):
        before(kind, error, traceback)
        leave_now(_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def leave_now(status: int) -> NoReturn:
    """End this process without waiting for the others; what it has printed is not lost."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # its reader has gone
    os._exit(status)
