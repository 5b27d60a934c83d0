"""Takes the times of a process's steps, from the host alone: nothing waits for the devices, and they do nothing for it."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from axonml_jax.mesh.watch.pace import Pace, mean_pace

T = TypeVar("T")

WINDOW = 20
"""Steps of which the mean is taken."""

KEPT = 50
"""Steps of which it is known when they were begun and done."""

_TASKS = Path("/proc/self/task")
_SHORTEST, _LONGEST, _GAP = 0.005, 0.1, 0.1


class StepTimes:
    """The newest steps of this process; a thread of its own looks when they are done.

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
        """The batches; the time that each takes is noted."""
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
        """A step has been handed over; `result` is ready when it is done."""
        self._pending.append((step, result, self._drawn, self._data, self._ran))
        self._log.append({"step": step, "begun": round(time.time(), 3), "done": None})
        self._data = 0.0

    def pace(self) -> Pace:
        """The mean of the newest steps."""
        return mean_pace(list(self._steps))

    def log(self) -> list[dict[str, Any]]:
        """The newest steps, in order: when they were begun and done, in seconds since 1970; None: not done yet."""
        return [dict(each) for each in list(self._log)]

    def watch(self, stop: threading.Event) -> None:
        """Take note of steps as they get done, until told to stop."""
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
        self._tick = min(max(wall / 20, _SHORTEST), _LONGEST)

    def _queue(self) -> float:
        """Seconds that this process's threads have waited for a processor, where Linux tells."""
        queued = 0
        for task in _TASKS.iterdir() if self._on_cpus and _TASKS.exists() else ():
            try:
                queued += int((task / "schedstat").read_text().split()[1])
            except (OSError, IndexError, ValueError):
                continue  # it has just ended, or the kernel does not count
        return queued / 1e9


def _is_ready(array: Any) -> bool:
    return array.is_deleted() or array.is_ready()
