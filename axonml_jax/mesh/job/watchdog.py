"""A job whose processes wait for each other in vain: who is missing is named, and the job ends, instead of hanging.

Every process tells the coordinator once a second how far it is and where its main thread stands. Whoever has not moved for too
long reads what the others say, reports, and ends its process; the launcher then ends the others.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from axonml_jax.compat.coordination import coordinator_client
from axonml_jax.mesh.job.leave import leave_now

_FOLDER = "axonml_jax/watchdog/"
_TICK = 1.0
_SILENT = 5.0
_STATUS = 1


class Watchdog:
    """A context in which a job that stands still ends with the ranks that are missing.

    In a process that runs alone it does nothing.

    Args:
      timeout: seconds without any progress of this process after which it looks for the culprit.
      end: what to do with the report; None prints it to standard error and ends this process.

    Raises:
      ValueError: when the timeout is not positive.
    """

    def __init__(self, timeout: float, *, end: Callable[[str], None] | None = None):
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r} must be a positive number of seconds")
        self._timeout, self._end = timeout, end or _print_and_leave
        self._size = jax.process_count() if jax.distributed.is_initialized() else 1
        self._rank = jax.process_index() if self._size > 1 else 0
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._begun, self._done, self._moved = 0, 0, time.monotonic()
        self._pending: deque[tuple[int, jax.Array]] = deque()

    def __enter__(self) -> "Watchdog":
        if self._size > 1:
            self._moved = time.monotonic()
            for work in (self._publish, self._check):
                threading.Thread(target=work, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._stop.set()

    def began(self, step: int, result: jax.Array) -> None:
        """Call it when a step has been dispatched.

        Args:
          step: its number.
          result: an array that is ready when the step is done.
        """
        if self._size > 1:
            self._begun, self._moved = step, time.monotonic()
            self._pending.append((step, result))

    def moved(self) -> None:
        """Call it wherever else the program gets on: after a batch of a validation, say."""
        self._moved = time.monotonic()

    def _publish(self) -> None:
        client, count = coordinator_client(), 0
        while not self._stop.wait(_TICK):
            count += 1
            said = {"count": count, "begun": self._begun, "done": self._done, "at": where_is(self._main)}
            try:
                client.key_value_set(f"{_FOLDER}{self._rank}", json.dumps(said), allow_overwrite=True)
            except jax.errors.JaxRuntimeError:
                return  # the coordinator has gone; JAX says so

    def _check(self) -> None:
        while not self._stop.wait(min(_TICK, self._timeout / 4)):
            while self._pending and _is_ready(self._pending[0][1]):
                self._done = self._pending.popleft()[0]
                self._moved = time.monotonic()
            if (still := time.monotonic() - self._moved) > self._timeout:
                text = self._report(still)
                if not self._stop.is_set():
                    self._end(text)
                return

    def _report(self, still: float) -> str:
        before = _heard()
        time.sleep(min(_SILENT, self._timeout))
        own = {"begun": self._begun, "done": self._done, "at": where_is(self._main)}
        return explain(self._rank, self._size, own, before, _heard(), still)


def explain(
    rank: int,
    size: int,
    own: Mapping[str, Any],
    before: Mapping[int, Mapping[str, Any]] | None,
    now: Mapping[int, Mapping[str, Any]] | None,
    still: float,
) -> str:
    """Who is missing, in words.

    Args:
      rank, size: of the process that asks.
      own: how far it is.
      before, now: what all processes said, a few seconds apart; None: the coordinator did not answer.
      still: seconds since this process last moved.
    """
    head = f"rank {rank} has made no progress for {still:.0f} s (step {own['begun']} begun, {own['done']} done, {own['at']})"
    if before is None or now is None:
        why = "process 0, which holds the coordinator, does not answer; it is stopped or cut off"
        return f"{head}: rank(s) [0] are missing: {why}"
    silent = [r for r in range(size) if r != rank and now.get(r, {}).get("count") == before.get(r, {}).get("count")]
    begun = {r: said["begun"] for r, said in now.items() if r != rank and r not in silent} | {rank: own["begun"]}
    behind = [r for r, step in sorted(begun.items()) if step < max(begun.values())]
    lines = [f"rank {r} says nothing any more: it is stopped, overloaded or cut off" for r in silent]
    lines += [
        f"rank {r} has begun step {begun[r]} only and is {now[r]['at'] if r != rank else own['at']}" for r in behind
    ]
    if not lines:
        places = "; ".join(f"rank {r} is {now[r]['at']}" for r in sorted(now))
        return f"{head}: all ranks have begun the same step, so the network or a device hangs: {places}"
    return f"{head}: rank(s) {sorted(silent + behind)} are missing: " + "; ".join(lines)


def where_is(thread: int) -> str:
    """Where in the program a thread stands, outside of libraries if possible.

    >>> where_is(threading.get_ident()).startswith("in ")
    True
    """
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    own = [entry for entry in stack if "site-packages" not in entry.filename and "/lib/python" not in entry.filename]
    if not (own or stack):
        return "ended"
    entry = (own or stack)[-1]
    return f"in {entry.name} at {os.path.basename(entry.filename)}:{entry.lineno}"


def _heard() -> dict[int, dict[str, Any]] | None:
    """What all processes last said; None when the coordinator does not answer."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(coordinator_client().key_value_dir_get(_FOLDER))
        except jax.errors.JaxRuntimeError:
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SILENT)
    return {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in found[0]} if found else None


def _is_ready(array: Any) -> bool:
    return array.is_deleted() or array.is_ready()


def _print_and_leave(text: str) -> None:
    print(f"axonml_jax: stuck: {text}", file=sys.stderr, flush=True)
    leave_now(_STATUS)
