"""Leaving a job: at once because of an error, so that the others and the launcher learn of it; else not without a word.

JAX's own way out waits at a barrier for every process, up to five minutes; a process that fails while the others wait for it
in a collective would hang there with them.
"""

import atexit
import os
import sys
import threading
import time
from typing import NoReturn

_INTERRUPTED = 130
_LEFT = "axonml_jax/left/"
_QUIET = 20.0
_POLL = 0.2
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


def joined() -> bool:
    """Whether this process is one of a job's; asking does not import JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def say_goodbye(client, process_id: int, num_processes: int) -> None:
    """At the end of this program wait for the others', and say so when it takes long: they may wait for this one.

    Args:
      client: the connection to JAX's coordinator.
      process_id: which process this is.
      num_processes: of how many.
    """
    # Registered after JAX's own exit function, so it runs before that.
    atexit.register(_wait_for_others, client, process_id, num_processes)


def _wait_for_others(client, process_id: int, num_processes: int) -> None:
    import jax

    if not joined():
        return  # `shutdown` was called: the others have been waited for
    everyone, start = set(range(num_processes)), time.monotonic()
    try:
        client.key_value_set(f"{_LEFT}{process_id}", "")
        while running := everyone - {int(key.rsplit("/", 1)[1]) for key, _ in client.key_value_dir_get(_LEFT)}:
            if time.monotonic() - start > _QUIET:
                print(
                    f"axonml_jax: process {process_id} of {num_processes} has ended its program and waits for process(es) "
                    f"{sorted(running)} to end theirs. If they wait for it in a collective, they wait in vain: every "
                    "process must make the same number of steps",
                    file=sys.stderr,
                    flush=True,
                )
                return
            time.sleep(_POLL)
    except jax.errors.JaxRuntimeError:
        return  # the coordinator has gone; JAX says so
