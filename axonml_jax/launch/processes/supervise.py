"""Watching the workers of one machine: output passed on, the first failure found, everybody stopped, nobody left behind."""

import selectors
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from axonml_jax.launch.processes.interrupts import Interrupts
from axonml_jax.launch.processes.leftovers import members, signal_all
from axonml_jax.launch.processes.post_mortem import flight_records, looks_like_a_consequence, root_cause
from axonml_jax.launch.processes.worker import Failure, Worker

FAILURE_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for those that must stop because another worker failed."""

RESTART_GRACE = 1.0
"""The same where all start again: nobody can go on without the one that failed, and every second is lost."""

_TICK = 0.1
# A worker that lost another may die before the one that caused it, which is still taking its leave.
_SETTLE = 2.0
_DRAIN = 2.0
_LONELY = 30.0
_UNKILLABLE = 10.0


class Others(Protocol):
    """What a launcher hears from the launchers on the job's other machines, and tells them."""

    def sockets(self) -> Iterable:
        """What to select on."""
        ...

    def poll(self, done: bool) -> bool:
        """Whether workers here must stop because of another machine. `done`: all workers here have ended well."""
        ...

    def waiting(self) -> bool:
        """Whether workers elsewhere still run."""
        ...

    def alarm(self) -> None:
        """Tell the others at once that a worker here has failed."""
        ...

    @property
    def gently(self) -> bool:
        """Whether all workers shall end by themselves, because machines come or go."""
        ...

    def beat(self) -> None:
        """Show them, at least once a second, that this launcher does not stand still."""
        ...

    def stopping(self) -> None:
        """Tell the others that workers here end because their launcher was asked to."""
        ...


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: with a failure here or elsewhere, by a signal to the launcher, or (none of them) well.

    Attributes:
      failure: what failed first of this machine's workers.
      elsewhere: whether something else failed on another machine, or machines come or go.
      well: whether all of this machine's workers ended with 0 when machines come or go.
      received: the signal that asked for the end.
      stopped: ranks that were stopped because of it.
      early: ranks that had ended well when others failed.
      records: files in which workers have left their flight records.
    """

    failure: Failure | None = None
    elsewhere: bool = False
    well: bool = False
    received: signal.Signals | None = None
    stopped: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    records: tuple[str, ...] = ()


class Supervisor:
    """Watches workers until all have ended; a context that leaves none behind, used once.

    Args:
      workers: a list; workers may be added before `watch`, and are stopped too if that fails.
      interrupts: the launcher's signals.
      run_id: the launch's mark in the workers' environment.
      patience: seconds the workers have to end by themselves after the launcher was told to stop.
      others: the launchers of other machines; None on a single one.
      restarts: whether all start again when one fails.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        interrupts: Interrupts,
        run_id: str,
        patience: float,
        others: Others | None = None,
        restarts: bool = False,
    ):
        self._workers = workers
        self._interrupts = interrupts
        self._run_id = run_id
        self._patience = patience
        self._others = others
        self._grace = RESTART_GRACE if restarts else FAILURE_GRACE
        self._first_end: float | None = None

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *exception):
        """However this is left, no process of the launch stays behind."""
        self._end_all(signal.SIGTERM, self._grace)
        self._drain()

    def watch(self) -> Ended:
        """Wait for the end, whatever it is."""
        while True:
            self._pump()
            if self._interrupts.received:
                return self._obey(self._interrupts.received[0])
            failed = [worker for worker in self._workers if worker.returncode]
            done = all(worker.returncode == 0 for worker in self._workers)
            elsewhere = self._others is not None and self._others.poll(done)
            if self._others and self._others.gently:
                stopped = self._running()
                self._end_all(signal.SIGTERM, self._patience)
                well = all(worker.returncode == 0 for worker in self._workers)
                return Ended(elsewhere=True, stopped=stopped, well=well)
            if failed:
                if self._others:
                    self._others.alarm()
                return self._explain(failed)
            if elsewhere:
                return Ended(elsewhere=True, stopped=self._running())
            if done and not (self._others and self._others.waiting()):
                return Ended()
            self._tell_of_lonely_workers()

    def _explain(self, failed: list[Worker]) -> Ended:
        """Which worker failed first, once it is clear."""
        deadline = time.monotonic() + _SETTLE
        while time.monotonic() < deadline and not self._interrupts.received:
            self._pump()
            failed += [worker for worker in self._workers if worker.returncode and worker not in failed]
            if len(failed) == len(self._workers) or not looks_like_a_consequence(failed[-1].failure()):
                break
            if self._others and self._others.poll(False):
                break  # it has lost one on another machine
        stopped = self._running()
        early = tuple(worker.rank for worker in self._workers if worker.returncode == 0)
        self._end_all(signal.SIGTERM, self._grace)
        self._drain()
        records = [path for worker in self._workers for path in flight_records(worker.outlets[-1].last_lines())]
        cause = root_cause([worker.failure() for worker in failed])
        return Ended(cause, stopped=stopped, early=early, records=tuple(dict.fromkeys(records)))

    def _obey(self, received: signal.Signals) -> Ended:
        """Pass a signal on, and let the workers end by themselves for a while."""
        stopped = self._running()
        if self._others:
            self._others.stopping()
        self._end_all(received, self._patience)
        return Ended(received=received, stopped=stopped)

    def _end_all(self, number: int, patience: float) -> None:
        """Signal all, wait, kill what is left. Once one worker has ended, the others have no more than `FAILURE_GRACE`."""
        if not self._left():
            return
        signal_all(self._groups(), self._run_id, number)
        heard, deadline = len(self._interrupts.received), time.monotonic() + patience
        running = len(self._running())
        while self._left() and time.monotonic() < deadline:
            self._pump(hear=False)
            if len(self._interrupts.received) > heard:
                break  # asked again: now
            if len(self._running()) < running:
                running, deadline = 0, min(deadline, time.monotonic() + FAILURE_GRACE)
        deadline = time.monotonic() + _UNKILLABLE
        while self._left() and time.monotonic() < deadline:
            signal_all(self._groups(), self._run_id, signal.SIGKILL)
            self._pump(hear=False)
        if stuck := sorted(members(self._groups(), self._run_id)):
            print_note(f"process(es) {stuck} do not end even by SIGKILL: they wait for a device or a file system")

    def _groups(self) -> set[int]:
        return {worker.pid for worker in self._workers}

    def _left(self) -> bool:
        return bool(self._running() or members(self._groups(), self._run_id))

    def _running(self) -> tuple[int, ...]:
        return tuple(worker.rank for worker in self._workers if worker.returncode is None)

    def _pump(self, *, hear: bool = True) -> None:
        """Wait a moment for output, signals, ends of workers or, unless nobody listens, other launchers; pass the output on."""
        outlets = [outlet for worker in self._workers for outlet in worker.outlets if not outlet.closed]
        with selectors.PollSelector() as selector:
            for source in (self._interrupts, *outlets, *(self._others.sockets() if self._others and hear else ())):
                selector.register(source, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(_TICK)]
        if self._others:
            self._others.beat()
        self._interrupts.drain()
        for outlet in outlets:
            if outlet in ready:
                outlet.pump()

    def _drain(self) -> None:
        """The rest of the output. A pipe stays open only where an unkillable process holds it."""
        deadline = time.monotonic() + _DRAIN
        outlets = [outlet for worker in self._workers for outlet in worker.outlets]
        while any(not outlet.closed for outlet in outlets) and time.monotonic() < deadline:
            self._pump(hear=False)
        for outlet in outlets:
            outlet.close()

    def _tell_of_lonely_workers(self) -> None:
        """Say once that some have ended well while others still run: those may wait for them in a collective for ever."""
        running = self._running()
        if len(running) in (0, len(self._workers)) or self._first_end == -1:
            return
        now = time.monotonic()
        self._first_end = self._first_end or now
        if now - self._first_end > _LONELY:
            ended = sorted({worker.rank for worker in self._workers} - set(running))
            print_note(
                f"rank(s) {ended} ended {_LONELY:g} s ago with exit code 0, rank(s) {list(running)} still run; if those "
                "wait for them in a collective, they wait for ever"
            )
            self._first_end = -1


def print_note(text: str) -> None:
    """A line of the launcher's own, on standard error."""
    print(f"axonml-jax launch: {text}", file=sys.stderr, flush=True)
