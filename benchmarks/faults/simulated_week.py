"""A seeded simulation of a job that fails and comes back: what of a week was training that is kept."""

import heapq
import math

import numpy as np

from axonml_jax.planner.hardware import WEEK, Recovery


def simulate(
    way: Recovery, *, rate: float, interval: float, seed: int, replicas: int = 1, seconds: float = WEEK
) -> float:
    """Training kept over wall time in one simulated week.

    Failures come one by one, at times that are drawn. The job begins in full training; what it has done since its last copy
    counts at the end, as nothing has taken it.

    Args:
      way: of recovery.
      rate: failures of the whole job per second while all replicas live.
      interval: seconds of training between two copies; of a way that shrinks those of a step.
      seed: of the times of failures.
      replicas: of the model, of which each failure takes one if the way shrinks.
      seconds: of wall time.
    """
    numbers = np.random.default_rng(seed)
    if way.shrinks:
        return _shrinking(way, numbers, rate, interval, replicas, seconds)
    clock = kept = 0.0
    while True:
        lasting = _gap(numbers, rate)
        if clock + lasting >= seconds:
            return (kept + _trained(way, interval, seconds - clock)) / seconds
        kept += interval * _committed(way, interval, lasting)
        clock += lasting
        while (lasting := _gap(numbers, rate)) < way.pause:  # a failure in a recovery begins it anew
            clock += lasting
        # No failure has come for the pause; the next one's time is drawn from its end on, which failures do not remember.
        clock += way.pause
        if clock >= seconds:
            return kept / seconds


def _gap(numbers: np.random.Generator, rate: float) -> float:
    return float(numbers.exponential(1 / rate)) if rate else math.inf


def _stop(way: Recovery, interval: float) -> float:
    """Seconds for which a copy stops the training, the wait for the one before included."""
    return max(way.blocked, way.commit - interval)


def _committed(way: Recovery, interval: float, lasting: float) -> int:
    """Copies that can be returned to so many seconds after the training has begun with one."""
    stop = _stop(way, interval)
    return max(0, math.floor((lasting + stop - way.commit) / (interval + stop)))


def _trained(way: Recovery, interval: float, lasting: float) -> float:
    """Seconds of training in so many seconds."""
    rounds, rest = divmod(lasting, interval + _stop(way, interval))
    return rounds * interval + min(rest, interval)


def _shrinking(
    way: Recovery, numbers: np.random.Generator, rate: float, step: float, replicas: int, seconds: float
) -> float:
    """The same where the replicas that live go on: `coming` are the times at which the others are back."""
    clock, kept, alive = 0.0, 0.0, replicas
    coming: list[float] = []
    while clock < seconds:
        failing = clock + _gap(numbers, rate * alive / replicas)
        joining = max(coming[0], clock) if coming else math.inf
        until = min(failing, joining, seconds)
        trained = until - clock
        if failing < min(joining, seconds):
            trained -= trained % step  # the step under way is done again
        kept += trained * alive / replicas
        clock = until
        waiting, fails = (way.pause, True) if failing <= joining else (way.growing, False)
        while clock < seconds:
            if fails:
                alive -= 1
                heapq.heappush(coming, clock + way.replace)
            else:
                alive += 1
                heapq.heappop(coming)
            gap = _gap(numbers, rate * alive / replicas)
            if gap >= waiting:
                clock += waiting
                break
            clock, waiting, fails = (
                clock + gap,
                max(way.pause, waiting),
                True,
            )  # whoever fails meanwhile, all begin anew
    return kept / seconds
