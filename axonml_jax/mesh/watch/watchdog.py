"""A job whose processes wait for each other: who is slow is named, and who is missing; later the job ends, instead of hanging.

Every process tells the coordinator once a second how far it is and where its main thread stands. Whoever has not moved for too
long reads what the others say, and warns; later it reports, and ends its process; the launcher then ends the others.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, TypeVar

import jax

from axonml_jax.compat.processes.coordination import coordinator_client
from axonml_jax.logging import logger
from axonml_jax.mesh.job.leave import leave_now
from axonml_jax.mesh.watch.flight import FlightRecord
from axonml_jax.mesh.watch.pace import Pace, Straggler, stragglers
from axonml_jax.mesh.watch.standstill import Said, Standstill, standstill
from axonml_jax.mesh.watch.step_times import WINDOW, StepTimes
from axonml_jax.mesh.watch.where import compiles, where_is

WARNING = 20.0
"""Seconds without progress after which a rank is named; to ask twice, or wait for an answer in vain, takes `SILENT` more."""

SILENT = 5.0
"""Seconds in which a process that is well says something."""

T = TypeVar("T")

_FOLDER = "axonml_jax/watchdog/"
_DYING = "axonml_jax/dying/"
_TICK = 1.0
_MISSED = 2.5
_LONGEST = 4096
_SHOWN = 4
_STATUS = 1


class Watchdog:
    """A context in which a job that stands still says which ranks are missing, and ends if that lasts; so are slow ranks named.

    In a process that runs alone it does nothing.

    Args:
      timeout: seconds without any progress of this process after which it looks for the culprit and ends; None: it never ends.
      warning: seconds after which it looks for the culprit and says who it is, once a standstill, in one process; then also
        when it goes on. Nothing is said while all ranks compile, or do alike what `doing` tells of, and where nobody is
        behind only after twice the longest step so far. None: it does not warn.
      end: what to do with the report; None prints it to standard error and ends this process.
      warn: what to do with a warning; None hands it to the library's logger.
      record: what to write when the job dies, by an error here or in another process that can still say so, or because it
        stood still for too long; None: nothing.

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
        record: FlightRecord | None = None,
    ):
        for name, seconds in (("timeout", timeout), ("warning", warning)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name}={seconds!r} must be a positive number of seconds")
        self._timeout, self._warning = timeout, warning
        self._record, self._recorded = record, ""
        self._end, self._warn = end or _leave, warn or logger.warning
        self._size = jax.process_count() if jax.distributed.is_initialized() else 1
        self._rank = jax.process_index() if self._size > 1 else 0
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._begun, self._told, self._count = 0, time.monotonic(), 0
        self._doing, self._marks = "", 0
        self._times = StepTimes(self._size > 1 and jax.default_backend() == "cpu")
        self._looked, self._warned = 0.0, None
        self._judged, self._named = 0, set()
        self._slow: list[Straggler] = []

    def __enter__(self) -> "Watchdog":
        if self._size > 1:
            self._told = time.monotonic()
            for work in (self._publish, self._check, self._times.watch):
                threading.Thread(target=work, args=(self._stop,), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if self._size > 1 and error is not None:
                self._dies(f"{type(error).__name__}: {error}", error)
        finally:
            self._stop.set()

    def began(self, step: int, result: jax.Array) -> None:
        """Call it when a step has been dispatched.

        Args:
          step: its number.
          result: an array that is ready when the step is done.
        """
        if self._size > 1:
            self._begun, self._told = step, time.monotonic()
            self._times.began(step, result)

    def drawing(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches of a training; only with it is a rank named that waits for its data.

        Args:
          batches: what the steps take, one each.
        """
        return self._times.drawing(batches)

    def slowest(self) -> dict[str, float]:
        """In process 0 the rank that holds up the others, `slow_rank`, and `slow_rank_times` the median of the others."""
        return {"slow_rank": self._slow[0].rank, "slow_rank_times": round(self._slow[0].times, 2)} if self._slow else {}

    def moved(self) -> None:
        """Call it wherever else the program gets on, in all processes alike: after a batch of a validation, say."""
        self._told, self._marks = time.monotonic(), self._marks + 1

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Within this context the program does something that may take long, as "validating": all processes must enter it.

        While all are in it, and as far as each other by `moved`, no warning comes.
        """
        before = self._doing, self._marks
        self._doing, self._marks, self._told = what, 0, time.monotonic()
        try:
            yield
        finally:
            (self._doing, self._marks), self._told = before, time.monotonic()

    @property
    def _moved(self) -> float:
        """When this process has last got on."""
        return max(self._told, self._times.moved)

    def _said(self) -> Said:
        doing, marks = ("compiling", 0) if compiles(self._main) else (self._doing, self._marks)
        still = round(time.monotonic() - self._moved, 1)
        pace = asdict(self._times.pace())
        return Said(self._count, self._begun, self._times.done, where_is(self._main), doing, marks, still, pace)

    def _publish(self, stop: threading.Event) -> None:
        client = coordinator_client()
        while True:
            self._count += 1
            with suppress(jax.errors.JaxRuntimeError):  # it may answer again; where it has gone JAX says so
                said = json.dumps(asdict(self._said()))
                client.key_value_set(f"{_FOLDER}{self._rank}", said, allow_overwrite=True)
                if self._record is not None and not self._recorded and (ends := self._ends()):
                    self._dies("; ".join(ends), own=False)
            if stop.wait(_TICK):
                return

    def _check(self, stop: threading.Event) -> None:
        tick = min(_TICK, *(each / 4 for each in (self._timeout, self._warning) if each is not None), _TICK)
        while not stop.wait(tick):
            still = time.monotonic() - self._moved
            if self._timeout is not None and still > self._timeout:
                text = self._look().text
                if not stop.is_set():
                    self._ends_with(text)
                return
            self._warn_of(still)
            if self._rank == 0 and self._times.done >= self._judged + WINDOW:
                self._judged = self._times.done
                self._judge(_heard() or {})

    def _ends_with(self, text: str) -> None:
        """Say it first: what is written after that may be long in coming, or fail."""
        if self._end is _leave:
            _print(f"stuck: {text}")
        try:
            self._dies(f"stuck: {text}")
        except Exception as failed:  # the end comes in any case
            _print(f"no flight record: {type(failed).__name__}: {failed}")
        self._end(text)

    def _judge(self, heard: dict[int, Said]) -> None:
        """Name who was slow twice in a row, once; and say when it is no longer."""
        paces = {rank: Pace(**said.pace) for rank, said in heard.items() if said.pace.get("steps") == WINDOW}
        before, self._slow = {each.rank for each in self._slow}, stragglers(paces)
        for each in self._slow:
            if each.rank in before and each.rank not in self._named:
                self._named.add(each.rank)
                self._warn(each.text)
        for rank in self._named - before - {each.rank for each in self._slow}:
            self._named.discard(rank)
            self._warn(f"rank {rank} is no slower than the others any more")

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
        alike = not found.missing and (found.alike or still < 2 * self._times.longest)
        if found.speaker == self._rank and not alike and self._moved == since and not self._stop.is_set():
            self._warned = since, found.missing
            ends = "" if self._timeout is None else f". After {self._timeout:g} s the job ends"
            self._warn(f"{found.text}{ends}")

    def _dies(self, why: str, error: BaseException | None = None, *, own: bool = True) -> None:
        """Tell the others why the job dies here, if it is a reason of one's own, and write what is known."""
        if (record := self._record) is None:
            return
        said, heard, steps, first = asdict(self._said()), _heard() or {}, self._times.log(), self._recorded
        if not first:
            told = why[:_LONGEST] if own else ""
            _within(_MISSED, lambda: coordinator_client().key_value_set(f"{_DYING}{self._rank}", told))
        others = {rank: asdict(each) for rank, each in sorted(heard.items()) if rank != self._rank}
        why = self._recorded = f"{why}; before: {first}" if first else why
        write = lambda *why: record.write(
            self._rank, self._size, "; ".join(why), error, own=said, others=others, steps=steps
        )
        lost = isinstance(error, jax.errors.JaxRuntimeError)  # most likely a connection
        ends = self._ends() if lost else []  # who dies by an error says so before
        if write(why, *ends) and lost and not ends:
            time.sleep(_MISSED)
            if ends := self._ends(heard):
                write(why, *ends)

    def _ends(self, heard: Mapping[int, Said] | None = None) -> list[str]:
        """Why other processes die, as they have said, and who has said nothing since `heard`."""
        found = _within(SILENT, lambda: coordinator_client().key_value_dir_get(_DYING)) or []
        told = {int(key.rsplit("/", 1)[1]): why for key, why in found}
        now = (_heard() or {}) if heard else {}
        same = {rank for rank, said in now.items() if heard and rank in heard and said.count == heard[rank].count}
        silent = sorted(same - {*told, self._rank})
        lines = [f"rank {rank} has ended: {why}" for rank, why in sorted(told.items()) if why and rank != self._rank]
        return lines[:_SHOWN] + ([f"rank(s) {silent} say nothing any more"] if silent else [])

    def _look(self) -> Standstill:
        if (before := _heard()) is None:  # asked again it takes as long
            return standstill(self._rank, self._size, None, None, self._said())
        time.sleep(min(SILENT, *(each for each in (self._timeout, self._warning) if each is not None), SILENT))
        return standstill(self._rank, self._size, before, _heard(), self._said())


def _heard() -> dict[int, Said] | None:
    """What all processes last said; None when the coordinator does not answer."""
    found = _within(SILENT, lambda: coordinator_client().key_value_dir_get(_FOLDER))
    return None if found is None else {int(key.rsplit("/", 1)[1]): Said(**json.loads(text)) for key, text in found}


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What the coordinator answers in time; None: nothing."""
    found: list[T] = []

    def work() -> None:
        try:
            found.append(ask())
        except jax.errors.JaxRuntimeError:
            return

    asking = threading.Thread(target=work, daemon=True)
    asking.start()
    asking.join(seconds)
    return found[0] if found else None


def _print(text: str) -> None:
    print(f"axonml_jax: {text}", file=sys.stderr, flush=True)


def _leave(_: str) -> None:
    leave_now(_STATUS)
