"""Watches a job from inside: step times, missing or slow ranks, and what each one is doing."""

import json
import logging
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import jax

from axonml_jax.base import logger
from axonml_jax.compat.order import is_compiling
from axonml_jax.compat.processes import coordinator_client
from axonml_jax.compat.versions import PACKAGES, installed
from axonml_jax.mesh.join import leave_now

# --------------------------------------------------------------------------------------------------
# Where a thread stands, in a line, and whether it is compiling.
# --------------------------------------------------------------------------------------------------


def where_is(thread: int) -> str:
    """The innermost place in the program where a thread is, outside of libraries if possible.

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
    """Whether a thread is tracing a program or waiting for its compiler."""
    return is_compiling(entry.filename for entry in _calls(thread))


def _calls(thread: int) -> list[traceback.FrameSummary]:
    """The stack of a thread, the innermost call last; source lines are not read from disk."""
    frame = sys._current_frames().get(thread)
    calls = (
        [] if frame is None else list(traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False))
    )
    return calls[::-1]


# --------------------------------------------------------------------------------------------------
# What a rank's steps take of its own time, and which ranks hold up the others.
#
# Devices meet in every step's collectives, so all ranks' steps last alike, and how long one waits inside of a step is
# not seen from the host. What is seen: how long its devices had nothing to do before it handed a step over, how much of
# that it waited for data, how long it did not run at all, and on CPUs, where the host's processors are the device, how
# long its threads ran or queued for one.
# --------------------------------------------------------------------------------------------------

_LEAST = 0.25
"""By which part of a step a rank must be slower than the others, and by which part of their own time, to be named."""


@dataclass(frozen=True)
class Pace:
    """The mean time per step of a rank's newest steps, and its parts, in seconds.

    Attributes:
      step: number of the newest step.
      steps: how many steps the mean is taken of.
      wall: from the end of one step to that of the next; alike in all ranks.
      late: its devices had no work, because it had not handed the step over.
      data: part of `late` in which it waited for its batch.
      stopped: it did not run while its devices had work.
      work: its threads ran, or waited for a processor; on CPUs alone, else 0.
    """

    step: int = 0
    steps: int = 0
    wall: float = 0.0
    late: float = 0.0
    data: float = 0.0
    stopped: float = 0.0
    work: float = 0.0

    @property
    def own(self) -> float:
        """Seconds per step that were not spent waiting for other ranks."""
        return self.late + self.stopped + self.work


@dataclass(frozen=True)
class Straggler:
    """A rank that slows the others down.

    Attributes:
      rank: which.
      times: its own time over the median of the others'.
      text: in words.
    """

    rank: int
    times: float
    text: str


def stragglers(paces: Mapping[int, Pace]) -> list[Straggler]:
    """Ranks slower than the others' median by a quarter of a step and of that median, the slowest first.

    >>> slow = Pace(step=40, steps=20, wall=1.0, late=0.75, data=0.75, work=0.1)
    >>> quick = Pace(step=40, steps=20, wall=1.0, late=0.15, work=0.1)
    >>> found = stragglers({0: quick, 1: quick, 2: slow})
    >>> print(*found[0].text.split(": "), sep="\\n")
    rank 2 takes 3.4 times the median of the others for the last 20 steps
    0.85 s of its own in a step, not 0.25
    0.75 s of it waiting for data
    """
    found = []
    for rank, pace in paces.items():
        others = [other for r, other in paces.items() if r != rank and other.steps]
        if not others or not pace.steps:
            continue
        usual = median(other.own for other in others)
        more = pace.own - usual
        if more < _LEAST * pace.wall or more < _LEAST * usual:
            continue
        times = pace.own / max(usual, 1e-9)
        text = (
            f"rank {rank} takes {_times(times)} the median of the others for the last {pace.steps} steps: {pace.own:.2f} s of "
            f"its own in a step, not {usual:.2f}: {_most(pace, others)}"
        )
        found.append((more, Straggler(rank, times, text)))
    return [each for _, each in sorted(found, key=lambda pair: -pair[0])]


def _times(times: float) -> str:
    return f"{times:.1f} times" if times < 100 else "over 100 times"


def _most(pace: Pace, others: list[Pace]) -> str:
    """Describe the largest part of a slow rank's extra time."""
    host = lambda each: each.late - each.data
    more = {
        "waiting for data": (pace.data, median(other.data for other in others)),
        "between two steps, its devices idle": (host(pace), median(host(other) for other in others)),
        "stopped or not scheduled": (pace.stopped, median(other.stopped for other in others)),
        "computing, or waiting for a processor": (pace.work, median(other.work for other in others)),
    }
    name = max(more, key=lambda each: more[each][0] - more[each][1])
    return f"{more[name][0]:.2f} s of it {name}"


def mean_pace(paces: list[Pace]) -> Pace:
    """The mean over single steps, in their order."""
    if not paces:
        return Pace()
    names = [field.name for field in fields(Pace) if field.name not in ("step", "steps")]
    means = {name: sum(getattr(pace, name) for pace in paces) / len(paces) for name in names}
    return Pace(step=paces[-1].step, steps=len(paces), **{name: round(value, 4) for name, value in means.items()})


# --------------------------------------------------------------------------------------------------
# A job that stands still, in words: who is missing, and where everybody is.
# --------------------------------------------------------------------------------------------------

_PLACES_SHOWN = 8


@dataclass(frozen=True)
class Said:
    """What a process reports about itself once a second.

    Attributes:
      count: how often it has said something.
      begun, done: the newest step that it has dispatched, and the newest that its devices have finished.
      at: where its main thread is.
      doing: what the main thread does for long, as "compiling"; empty: nothing of the kind.
      marks: how often `Watchdog.moved` was called meanwhile.
      still: seconds since the last progress.
      pace: what its newest steps took (see `Pace`).
    """

    count: int
    begun: int
    done: int
    at: str
    doing: str = ""
    marks: int = 0
    still: float = 0.0
    pace: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """What the process is doing, and where."""
        return f"{self.doing}, {self.at}" if self.doing else self.at


@dataclass(frozen=True)
class Standstill:
    """One process's conclusion about a job that makes no progress.

    Attributes:
      text: in words.
      missing: the ranks that the others wait for; empty: nobody is behind.
      alike: what all are doing for long, where nobody is behind; else empty.
      speaker: the one rank that reports it, lest all say the same.
    """

    text: str
    missing: tuple[int, ...] = ()
    alike: str = ""
    speaker: int = 0


def standstill(
    rank: int, size: int, before: Mapping[int, Said] | None, now: Mapping[int, Said] | None, own: Said
) -> Standstill:
    """Determine which ranks a job without progress waits for, from what all processes reported.

    Args:
      rank, size: of the process that asks.
      before, now: what all processes said, a few seconds apart; None: the coordinator did not answer.
      own: what the process that asks would say now.
    """
    head = (
        f"rank {rank} has made no progress for {own.still:.0f} s (step {own.begun} begun, {own.done} done, {own.place})"
    )
    if before is None or now is None:
        why = "process 0, which holds the coordinator, does not answer; it is stopped or cut off"
        return Standstill(f"{head}: rank(s) [0] are missing: {why}", (0,), speaker=rank)
    heard = {**now, rank: own}
    silent = [r for r in range(size) if r != rank and _count(now, r) == _count(before, r)]
    talking = {r: said for r, said in sorted(heard.items()) if r not in silent}
    behind = _behind(talking)
    missing = tuple(sorted([*silent, *behind]))
    speaker = min((r for r in talking if r not in missing), default=rank)
    if not missing:
        doing = {said.doing for said in talking.values()}
        why = (
            "all ranks have begun the same step, so it takes this long, the network or a device hangs, or a rank has not come "
            f"to the next one (its data, a save): {_places(talking)}"
        )
        return Standstill(f"{head}: {why}", alike=doing.pop() if len(doing) == 1 else "", speaker=speaker)
    lines = [_silent(r, heard.get(r)) for r in silent] + [behind[r] for r in sorted(behind)]
    left = len(lines) - _PLACES_SHOWN
    lines = [*lines[:_PLACES_SHOWN], f"and {left} more"] if left > 0 else lines
    return Standstill(f"{head}: rank(s) {list(missing)} are missing: " + "; ".join(lines), missing, speaker=speaker)


def _count(said: Mapping[int, Said], rank: int) -> int | None:
    return said[rank].count if rank in said else None


def _behind(talking: Mapping[int, Said]) -> dict[int, str]:
    """The ranks, with a description, that have not begun the newest step, or are behind in what all are doing."""
    newest = max(said.begun for said in talking.values())
    found = {
        r: f"rank {r} has begun step {said.begun} only and is {said.place}"
        for r, said in talking.items()
        if said.begun < newest
    }
    doing = {said.doing for said in talking.values()}
    if not found and len(doing) == 1 and "" not in doing:
        most = max(said.marks for said in talking.values())
        found = {
            r: f"rank {r} has come to {said.marks} of {most} and is {said.place}"
            for r, said in talking.items()
            if said.marks < most
        }
    return found


def _silent(rank: int, last: Said | None) -> str:
    text = f"rank {rank} says nothing any more: it is stopped, overloaded or cut off"
    return text if last is None else f"{text}; when it last spoke it had begun step {last.begun} and was {last.place}"


def _places(talking: Mapping[int, Said]) -> str:
    """Describe where each rank is, with ranks in the same place together."""
    by_place: dict[str, list[int]] = {}
    for r, said in talking.items():
        by_place.setdefault(said.place, []).append(r)
    return "; ".join(f"{ranks_in_words(ranks)} {place}" for place, ranks in list(by_place.items())[:_PLACES_SHOWN])


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as the subject of a sentence, such as "ranks 0, 1 are".

    >>> ranks_in_words([3]), ranks_in_words([0, 1, 2, 5])
    ('rank 3 is', 'ranks 0, 1, 2, 5 are')
    >>> ranks_in_words(range(64))
    '64 ranks (0, 1, ...) are'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    if len(ranks) > _PLACES_SHOWN:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ...) are"
    return f"ranks {', '.join(map(str, ranks))} are"


# --------------------------------------------------------------------------------------------------
# What a process of a dying job leaves: how far it was, where everybody stood, what the step sends, on what it ran.
# --------------------------------------------------------------------------------------------------

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "AXONML_JAX_RESTART_COUNT"),
    *("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
)
"""The environment variables that are written; all others may be secrets."""

_LINES = 100
_LIMIT = 30.0


class FlightRecord:
    """Writes `flight-rank{r}.json` into a folder when its job dies.

    Args:
      folder: the run's.
      about: further plain values for the record.
      collectives: returns the collectives of the step's program, in order, as plain values; called only when the record is
        written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        about: Mapping[str, Any] | None = None,
        collectives: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
    ):
        self._folder, self._about, self._collectives = folder, dict(about or {}), collectives
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._handler = _Keeping(self._lines)
        self._writing = threading.Lock()

    def __enter__(self) -> "FlightRecord":
        """Start to keep the last messages of the library's logger."""
        logger.addHandler(self._handler)
        return self

    def __exit__(self, *exception):
        logger.removeHandler(self._handler)

    def path(self, rank: int) -> Path:
        """The path of a rank's record."""
        return self._folder / f"flight-rank{rank}.json"

    def write(self, rank: int, size: int, why: str, error: BaseException | None = None, **parts: Any) -> bool:
        """Write the record and print where; a failure to write is only printed. Collectives, the slowest part, come last.

        The folder may be on a disk that hangs: after half a minute the record is waited for no longer.

        Args:
          rank, size: of this process.
          why: it dies.
          error: what was raised, if anything.
          parts: what else is known, as plain values.

        Returns:
          False when writing still hangs then; True also when it has failed.
        """
        found = {"rank": rank, "size": size, "why": why, **parts}
        writing = threading.Thread(target=self._write, args=(rank, found, error), name="flight record", daemon=True)
        writing.start()
        writing.join(_LIMIT)
        if hangs := writing.is_alive():
            _say(f"no whole flight record after {_LIMIT:g} s: {self.path(rank)} is waited for no longer")
        return not hangs

    def _write(self, rank: int, found: Mapping[str, Any], error: BaseException | None) -> None:
        with self._writing:
            try:
                whole = {
                    **found,
                    "error": _lines_of(error),
                    "threads": _threads(),
                    "memory": _memory(),
                    "log": list(self._lines),
                    **_surroundings(),
                    **self._about,
                }
                self._put(rank, whole)
                if self._collectives is not None:
                    self._put(rank, whole | {"collectives": list(self._collectives())})
            except Exception as failed:  # a job that dies must not change its reason here
                _say(f"no whole flight record: {type(failed).__name__}: {failed}")
                return
        _say(f"flight record: {self.path(rank)}")

    def _put(self, rank: int, found: Mapping[str, Any]) -> None:
        new = self.path(rank).with_name(self.path(rank).name + ".new")
        new.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
        new.replace(self.path(rank))


class _Keeping(logging.Handler):
    def __init__(self, lines: deque[str]):
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname} {record.getMessage()}")


def _say(text: str) -> None:
    print(f"axonml_jax: {text}", file=sys.stderr, flush=True)


def _lines_of(error: BaseException | None) -> list[str]:
    text = "" if error is None else "".join(traceback.format_exception(error))
    return text.splitlines()[-_LINES:]


def _threads() -> dict[str, list[str]]:
    """The stack of every Python thread, the innermost call last; the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    idents = dict.fromkeys((threading.main_thread().ident, *sys._current_frames()))
    return {f"{names.get(ident, 'unknown')} {ident}": stack_of(ident) for ident in idents if ident is not None}


def _memory() -> dict[str, Any]:
    """Memory of the process, as Linux tells it, and of its devices that report it, in bytes."""
    status, found = Path("/proc/self/status"), {}
    for line in status.read_text().splitlines() if status.exists() else ():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = 1024 * int(value.split()[0])
    for device in jax.local_devices():
        if stats := device.memory_stats():
            found[str(device)] = {name: stats[name] for name in ("bytes_in_use", "peak_bytes_in_use") if name in stats}
    return found


def _surroundings() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "devices": [f"{device} ({device.device_kind})" for device in jax.local_devices()],
        "versions": {"python": platform.python_version()} | {name: installed(name) for name in PACKAGES},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


# --------------------------------------------------------------------------------------------------
# Takes the times of a process's steps, from the host alone: nothing waits for the devices, and they do nothing for it.
# --------------------------------------------------------------------------------------------------

T = TypeVar("T")

WINDOW = 20
"""Steps of which the mean is taken."""

KEPT = 50
"""Steps of which it is known when they were begun and done."""

_TASKS = Path("/proc/self/task")
_SHORTEST, _LONGEST_TIMES, _GAP = 0.005, 0.1, 0.1


class StepTimes:
    """The times of this process's newest steps; a thread watches when they are done.

    Args:
      on_cpus: whether the devices are this process's processors.
    """

    def __init__(self, on_cpus: bool):
        self._on_cpus = on_cpus
        self._pending: deque[tuple[int, jax.Array, float, float, float]] = deque()
        self._steps: deque[Pace] = deque(maxlen=WINDOW)
        self._log: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._ready = self._drawn = time.monotonic()
        self._data = self._stopped = 0.0
        self._ran = self._ran_then = time.process_time()
        self._queued = self._queue()
        self._tick = _SHORTEST
        self.done, self.longest, self.moved = 0, 0.0, time.monotonic()

    def drawing(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and note the time that each takes."""
        source = iter(batches)
        while True:
            before = time.monotonic()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._drawn, self._ran = time.monotonic(), time.process_time()
            self._data = self._drawn - before
            yield batch

    def began(self, step: int, result: jax.Array) -> None:
        """Note a dispatched step; `result` is ready when the step is done."""
        self._pending.append((step, result, self._drawn, self._data, self._ran))
        self._log.append({"step": step, "begun": round(time.time(), 3), "done": None})
        self._data = 0.0

    def pace(self) -> Pace:
        """The mean pace of the newest steps."""
        return mean_pace(list(self._steps))

    def log(self) -> list[dict[str, Any]]:
        """The newest steps, in order: when they began and ended, in seconds since 1970; None for not done yet."""
        now = round(time.time(), 3)  # of steps that the thread has not looked at since they were done
        ready = {step for step, result, *_ in list(self._pending) if _is_ready(result)}
        return [
            each | ({"done": now} if each["done"] is None and each["step"] in ready else {}) for each in list(self._log)
        ]

    def watch(self, stop: threading.Event) -> None:
        """Note the steps that are done, until told to stop."""
        before = time.monotonic()
        while not stop.wait(self._tick):
            now = time.monotonic()
            if self._pending and (gap := now - before - self._tick) > _GAP:
                self._stopped += gap
            while self._pending and _is_ready(self._pending[0][1]):
                self._note(now)
            before = now

    def _note(self, now: float) -> None:
        step, _, handed, data, ran = self._pending.popleft()
        for each in list(self._log):
            if each["step"] == step:
                each["done"] = round(time.time(), 3)
        wall, ran_now, queued = now - self._ready, time.process_time(), self._queue()
        late = max(handed - self._ready, 0.0)
        since = ran if late else self._ran_then  # what it ran before is in `late`
        work = ran_now - since + queued - self._queued if self._on_cpus else 0.0
        if self.done:  # the first one compiles
            self._steps.append(Pace(step, 1, wall, late, min(data, late), self._stopped, work))
            self.longest = max(self.longest, wall)
        self._ready, self._ran_then, self._queued, self._stopped = now, ran_now, queued, 0.0
        self.done, self.moved = step, now
        self._tick = min(max(wall / 20, _SHORTEST), _LONGEST_TIMES)

    def _queue(self) -> float:
        """Seconds that this process's threads have waited for a processor, if Linux tells it."""
        queued = 0
        for task in _TASKS.iterdir() if self._on_cpus and _TASKS.exists() else ():
            try:
                queued += int((task / "schedstat").read_text().split()[1])
            except (OSError, IndexError, ValueError):
                continue  # it has just ended, or the kernel does not count
        return queued / 1e9


def _is_ready(array: Any) -> bool:
    return array.is_deleted() or array.is_ready()


# --------------------------------------------------------------------------------------------------
# A job whose processes wait for each other: who is slow is named, and who is missing; later the job ends, instead of
# hanging.
#
# Every process tells the coordinator once a second how far it is and where its main thread stands. Whoever has not
# moved for too long reads what the others say, and warns; later it reports, and ends its process; the launcher then
# ends the others.
# --------------------------------------------------------------------------------------------------

WARNING = 20.0
"""Seconds without progress after which a rank is named; to ask twice, or wait for an answer in vain, takes `SILENT` more."""

SILENT = 5.0
"""Seconds in which a process that is well says something."""


_FOLDER = "axonml_jax/watchdog/"
_DYING = "axonml_jax/dying/"
_TICK = 1.0
_MISSED = 2.5
_LONGEST_MESSAGE = 4096
_RANKS_SHOWN = 4
_STATUS = 1


class Watchdog:
    """Context that names missing ranks when a job makes no progress, ends it if that lasts, and names slow ranks.

    In a process that runs alone it does nothing.

    Args:
      timeout: seconds without any progress of this process after which it looks for the culprit and ends; None: it never ends.
      warning: seconds without progress after which one process names the culprit, once per standstill, and later reports that
        the job goes on. While all ranks compile, or are equally far in one `doing`, no warning comes; where no rank is behind,
        it comes only after twice the longest step so far. None: it does not warn.
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
        """Note a dispatched step.

        Args:
          step: its number.
          result: an array that is ready when the step is done.
        """
        if self._size > 1:
            self._begun, self._told = step, time.monotonic()
            self._times.began(step, result)

    def drawing(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield a training's batches; only with this can a rank that waits for its data be named.

        Args:
          batches: what the steps take, one each.
        """
        return self._times.drawing(batches)

    def slowest(self) -> dict[str, float]:
        """In process 0, while a rank slows the others down, its number and its own time over the others' median; else empty."""
        return {"slow_rank": self._slow[0].rank, "slow_rank_times": round(self._slow[0].times, 2)} if self._slow else {}

    def moved(self) -> None:
        """Note other progress of the program, in all processes alike: after a batch of a validation, for example."""
        self._told, self._marks = time.monotonic(), self._marks + 1

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Within this context the program does something long, such as "validating": all processes must enter it.

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
        """The time of this process's last progress."""
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
        """Print the reason before anything else: what follows may take long, or fail."""
        if self._end is _leave:
            _say(f"stuck: {text}")
        try:
            self._dies(f"stuck: {text}")
        except Exception as failed:  # the end comes in any case
            _say(f"no flight record: {type(failed).__name__}: {failed}")
        self._end(text)

    def _judge(self, heard: dict[int, Said]) -> None:
        """Name a rank once that was slow twice in a row, and report when it no longer is."""
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
        """Report the missing ranks when it is time, and that the job goes on when it does."""
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
        """Tell the others why the job dies here, if the reason is this process's own, and write the flight record."""
        if (record := self._record) is None:
            return
        said, heard, steps, first = asdict(self._said()), _heard() or {}, self._times.log(), self._recorded
        if not first:
            told = why[:_LONGEST_MESSAGE] if own else ""
            _within(_MISSED, lambda: coordinator_client().key_value_set(f"{_DYING}{self._rank}", told))
        others = {rank: asdict(each) for rank, each in sorted(heard.items()) if rank != self._rank}
        why = self._recorded = f"{why}; before: {first}" if first else why
        write = lambda *why: record.write(
            self._rank, self._size, "; ".join(why), error, own=said, others=others, steps=steps
        )
        lost = isinstance(error, jax.errors.JaxRuntimeError)  # most likely a connection
        ends = self._ends() if lost else []  # a process that dies by an error says so first
        if write(why, *ends) and lost and not ends:
            time.sleep(_MISSED)
            if ends := self._ends(heard):
                write(why, *ends)

    def _ends(self, heard: Mapping[int, Said] | None = None) -> list[str]:
        """Lines that say why other processes ended, and which have been silent since `heard`."""
        found = _within(SILENT, lambda: coordinator_client().key_value_dir_get(_DYING)) or []
        told = {int(key.rsplit("/", 1)[1]): why for key, why in found}
        now = (_heard() or {}) if heard else {}
        same = {rank for rank, said in now.items() if heard and rank in heard and said.count == heard[rank].count}
        silent = sorted(same - {*told, self._rank})
        lines = [f"rank {rank} has ended: {why}" for rank, why in sorted(told.items()) if why and rank != self._rank]
        return lines[:_RANKS_SHOWN] + ([f"rank(s) {silent} say nothing any more"] if silent else [])

    def _look(self) -> Standstill:
        if (before := _heard()) is None:  # asked again it takes as long
            return standstill(self._rank, self._size, None, None, self._said())
        time.sleep(min(SILENT, *(each for each in (self._timeout, self._warning) if each is not None), SILENT))
        return standstill(self._rank, self._size, before, _heard(), self._said())


def _heard() -> dict[int, Said] | None:
    """The last report of every process; None when the coordinator does not answer."""
    found = _within(SILENT, lambda: coordinator_client().key_value_dir_get(_FOLDER))
    return None if found is None else {int(key.rsplit("/", 1)[1]): Said(**json.loads(text)) for key, text in found}


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """The coordinator's answer if it comes in time; else None."""
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


def _leave(_: str) -> None:
    leave_now(_STATUS)
