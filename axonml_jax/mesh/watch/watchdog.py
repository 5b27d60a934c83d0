"""A job whose processes wait for each other in vain: who is missing is named soon, and later the job ends, instead of hanging.

Every process tells the coordinator once a second how far it is and where its main thread stands. Whoever has not moved for too
long reads what the others say, and warns; later it reports, and ends its process; the launcher then ends the others.
"""

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import jax

from axonml_jax.compat.coordination import coordinator_client
from axonml_jax.logging import logger
from axonml_jax.mesh.job.leave import leave_now
from axonml_jax.mesh.watch.standstill import Said, Standstill, standstill
from axonml_jax.mesh.watch.where import compiles, where_is

WARNING = 20.0
"""Seconds without progress after which a rank is named; to ask twice takes `SILENT` more."""

SILENT = 5.0
"""Seconds in which a process that is well says something."""

_FOLDER = "axonml_jax/watchdog/"
_TICK = 1.0
_STATUS = 1


class Watchdog:
    """A context in which a job that stands still says which ranks are missing, and ends if that lasts.

    In a process that runs alone it does nothing.

    Args:
      timeout: seconds without any progress of this process after which it looks for the culprit and ends; None: it never ends.
      warning: seconds after which it looks for the culprit and says who it is, once a standstill, in one process; then also
        when it goes on. Nothing is said while all ranks compile, or do alike what `doing` tells of, and where nobody is
        behind only after twice the longest step so far. None: it does not warn.
      end: what to do with the report; None prints it to standard error and ends this process.
      warn: what to do with a warning; None hands it to the library's logger.

    Raises:
      ValueError: when a number of seconds is not positive.
    """

    def __init__(
        self,
        timeout: float | None,
        *,
        warning: float | None = WARNING,
        end: Callable[[str], None] | None = None,
        warn: Callable[[str], None] | None = None,
    ):
        for name, seconds in (("timeout", timeout), ("warning", warning)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name}={seconds!r} must be a positive number of seconds")
        self._timeout, self._warning = timeout, warning
        self._end, self._warn = end or _print_and_leave, warn or logger.warning
        self._size = jax.process_count() if jax.distributed.is_initialized() else 1
        self._rank = jax.process_index() if self._size > 1 else 0
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._begun, self._done, self._moved, self._count = 0, 0, time.monotonic(), 0
        self._doing, self._marks = "", 0
        self._longest, self._finished = 0.0, time.monotonic()
        self._pending: deque[tuple[int, jax.Array, float]] = deque()
        self._looked, self._warned = 0.0, None

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
            self._pending.append((step, result, self._moved))

    def moved(self) -> None:
        """Call it wherever else the program gets on, in all processes alike: after a batch of a validation, say."""
        self._moved, self._marks = time.monotonic(), self._marks + 1

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Within this context the program does something that may take long, as "validating": all processes must enter it.

        While all are in it, and as far as each other by `moved`, no warning comes.
        """
        before = self._doing, self._marks
        self._doing, self._marks, self._moved = what, 0, time.monotonic()
        try:
            yield
        finally:
            (self._doing, self._marks), self._moved = before, time.monotonic()

    def _said(self) -> Said:
        doing, marks = ("compiling", 0) if compiles(self._main) else (self._doing, self._marks)
        still = round(time.monotonic() - self._moved, 1)
        return Said(self._count, self._begun, self._done, where_is(self._main), doing, marks, still)

    def _publish(self) -> None:
        client = coordinator_client()
        while not self._stop.wait(_TICK):
            self._count += 1
            try:
                said = json.dumps(asdict(self._said()))
                client.key_value_set(f"{_FOLDER}{self._rank}", said, allow_overwrite=True)
            except jax.errors.JaxRuntimeError:
                return  # the coordinator has gone; JAX says so

    def _check(self) -> None:
        tick = min(_TICK, *(each / 4 for each in (self._timeout, self._warning) if each is not None), _TICK)
        while not self._stop.wait(tick):
            self._read_results()
            still = time.monotonic() - self._moved
            if self._timeout is not None and still > self._timeout:
                text = self._look().text
                if not self._stop.is_set():
                    self._end(text)
                return
            self._warn_of(still)

    def _read_results(self) -> None:
        """Take note of the steps that are done."""
        while self._pending and _is_ready(self._pending[0][1]):
            self._done, _, begun = self._pending.popleft()
            self._moved = time.monotonic()
            self._longest = max(self._longest, self._moved - max(begun, self._finished))
            self._finished = self._moved

    def _warn_of(self, still: float) -> None:
        """Say who is missing when it is time, and that it goes on when it does."""
        now = time.monotonic()
        if self._warned is not None:
            since, missing = self._warned
            if self._moved > since:
                self._warned = None
                who = f"; rank(s) {list(missing)} had been missing" if missing else ""
                self._warn(f"it goes on after {self._moved - since:.0f} s without progress, at step {self._begun}{who}")
            return
        if self._warning is None or still <= self._warning or now - self._looked < self._warning:
            return
        since, self._looked = self._moved, now
        found = self._look()
        self._read_results()
        alike = not found.missing and (found.alike or still < 2 * self._longest)
        if found.speaker == self._rank and not alike and self._moved == since and not self._stop.is_set():
            self._warned = since, found.missing
            ends = "" if self._timeout is None else f". After {self._timeout:g} s the job ends"
            self._warn(f"{found.text}{ends}")

    def _look(self) -> Standstill:
        before = _heard()
        time.sleep(min(SILENT, *(each for each in (self._timeout, self._warning) if each is not None), SILENT))
        return standstill(self._rank, self._size, before, _heard(), self._said())


def _heard() -> dict[int, Said] | None:
    """What all processes last said; None when the coordinator does not answer."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(coordinator_client().key_value_dir_get(_FOLDER))
        except jax.errors.JaxRuntimeError:
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SILENT)
    return {int(key.rsplit("/", 1)[1]): Said(**json.loads(text)) for key, text in found[0]} if found else None


def _is_ready(array: Any) -> bool:
    return array.is_deleted() or array.is_ready()


def _print_and_leave(text: str) -> None:
    print(f"axonml_jax: stuck: {text}", file=sys.stderr, flush=True)
    leave_now(_STATUS)
