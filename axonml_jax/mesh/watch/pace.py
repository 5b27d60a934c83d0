"""What a rank's steps take of its own time, and which ranks hold up the others.

Devices meet in every step's collectives, so all ranks' steps last alike, and how long one waits inside of a step is not seen
from the host. What is seen: how long its devices had nothing to do before it handed a step over, how much of that it waited
for data, how long it did not run at all, and on CPUs, where the host's processors are the device, how long its threads ran or
queued for one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import median

_LEAST = 0.25
"""By which part of a step a rank must be slower than the others, and by which part of their own time, to be named."""


@dataclass(frozen=True)
class Pace:
    """What a rank's newest steps took, in seconds a step.

    Attributes:
      step: the newest of them.
      steps: how many they are.
      wall: from one to the next; alike in all ranks.
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
        """Seconds a step that were not spent on waiting for others."""
        return self.late + self.stopped + self.work


@dataclass(frozen=True)
class Straggler:
    """A rank that holds up the others.

    Attributes:
      rank: which.
      times: its own time over the median of the others'.
      text: in words.
    """

    rank: int
    times: float
    text: str


def stragglers(paces: Mapping[int, Pace]) -> list[Straggler]:
    """The ranks that are slower than the median of the others by a quarter of a step, and of that median, the slowest first.

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
    """Where most of what is more than the others' goes."""
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
    """The mean of single steps, in their order."""
    if not paces:
        return Pace()
    names = [field.name for field in fields(Pace) if field.name not in ("step", "steps")]
    means = {name: sum(getattr(pace, name) for pace in paces) / len(paces) for name in names}
    return Pace(step=paces[-1].step, steps=len(paces), **{name: round(value, 4) for name, value in means.items()})
