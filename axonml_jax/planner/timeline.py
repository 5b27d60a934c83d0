"""A predicted step on a line of time: what every device computes, what it sends meanwhile, and where it waits."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.ledger.table import aligned
from axonml_jax.parallel.pipeline.estimates.events import tick_times, trace_ticks
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable
from axonml_jax.planner.assumptions import Assumptions
from axonml_jax.planner.hardware import Hardware
from axonml_jax.planner.phases import Phase, Sending, phases
from axonml_jax.planner.price import price

COLUMNS = 64
"""Characters of a printed lane."""

HARDLY = 0.02
"""A printed part that is taken for less is shown as idle."""

WORDS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
"""What a pipeline's slots are called (see `parallel/pipeline/schedules/schedule.py`)."""


class Span(NamedTuple):
    """Something that takes from `start` to `end`, in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Lane:
    """One line: a device's work ("compute", or a pipeline's "rank 0", ...), or the network along mesh axes ("fsdp", ...).

    Attributes:
      name: of the lane.
      spans: in order of time, none over another. Work is forward, backward, update or host; what is sent has the names of the
        ledger's labels.
    """

    name: str
    spans: tuple[Span, ...]

    @property
    def busy(self) -> float:
        """Seconds taken."""
        return sum(span.end - span.start for span in self.spans)


@dataclass(frozen=True)
class Timeline:
    """A step as the cost model has it: it ends when the step's price says.

    The network carries one thing at a time, each as soon as its phase begins; what nothing hides makes the phase longer, by
    the same in every run of it. Within a phase the order is not modelled.

    Attributes:
      lanes: work first, then the network.
      seconds: of the step.
    """

    lanes: tuple[Lane, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Lanes by name, with their spans: what, and from when to when in seconds."""
        return {lane.name: [list(span) for span in lane.spans] for lane in self.lanes}

    def __str__(self) -> str:
        rows = [
            [lane.name, f"{1e3 * lane.busy:,.2f}", f"{lane.busy / self.seconds:.0%}", self._strip(lane)]
            for lane in self.lanes
        ]
        shown = sorted({span.name for lane in self.lanes for span in lane.spans})
        legend = ", ".join(f"{name[0].upper()} {name}" for name in shown)
        header = ["lane", "busy ms", "of the step", f"{1e3 * self.seconds:,.2f} ms".ljust(COLUMNS)]
        return f"{aligned(header, rows, left=1)}\n{legend}; small letters: less than half of the time"

    def _strip(self, lane: Lane) -> str:
        """A character per part of the step: what takes most of it."""
        parts: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
        wide = self.seconds / COLUMNS
        for name, start, end in lane.spans:
            for i in range(int(start / wide), min(COLUMNS, math.ceil(end / wide))):
                part = min(end, (i + 1) * wide) - max(start, i * wide)
                parts[i][name] = parts[i].get(name, 0.0) + part
        return "".join(self._letter(part, wide) for part in parts)

    def _letter(self, part: dict[str, float], wide: float) -> str:
        taken = sum(part.values()) / wide
        if taken < HARDLY:
            return "."
        first = max(part, key=part.__getitem__)[0]
        return first.upper() if taken >= 0.5 else first


def timeline(found: Prediction, hardware: Hardware, assumptions: Assumptions | None = None) -> Timeline:
    """A predicted step on a line of time.

    Args:
      found: what the plan holds, sends and computes.
      hardware: on what.
      assumptions: how well; None: the defaults.

    Returns:
      A `Timeline`; `print` it, or draw it with `Answer.save_picture`.
    """
    given = assumptions or Assumptions.on(hardware)
    cost, run = price(found, hardware, given), phases(found, hardware, given)
    work = {f"rank {rank}": [] for rank in range(found.timetable.num_ranks)} if found.timetable else {"compute": []}
    drawing = _Drawing(work, {}, 0.0, 0.0)
    if found.timetable is None:
        drawing.microbatches(run[:-1])
    else:
        drawing.alone(run[0])
        drawing.ticks(run[1], found, found.timetable, hardware.idle(found.bubble))
    drawing.alone(run[-1])
    drawing.both("host", cost.host)
    drawing.both("update", cost.update)
    lanes = {name: spans for name, spans in (drawing.work | drawing.network).items() if spans}
    return Timeline(tuple(Lane(name, tuple(spans)) for name, spans in lanes.items()), cost.time)


@dataclass
class _Drawing:
    """Lanes while they are drawn: up to when work and network are taken."""

    work: dict[str, list[Span]]
    network: dict[str, list[Span]]
    clock: float
    sent: float

    def send(self, sendings: tuple[Sending, ...], share: float = 1.0) -> None:
        """Put a share of these on the network, from now on or when it is free."""
        self.sent = max(self.sent, self.clock)
        for each in sendings:
            end = self.sent + share * each.seconds
            self.network.setdefault(each.axes, []).append(Span(each.name, self.sent, end))
            self.sent = end

    def alone(self, phase: Phase) -> None:
        """A phase without compute."""
        self.send(phase.every)
        self.clock += phase.exposed

    def both(self, name: str, seconds: float) -> None:
        """All devices do one thing."""
        if seconds:
            for spans in self.work.values():
                spans.append(Span(name, self.clock, self.clock + seconds))
        self.clock += seconds

    def microbatches(self, run: tuple[Phase, ...]) -> None:
        """Forward and backward of every microbatch; what a step sends once goes with the first or the last."""
        times = run[0].times
        for i in range(times):
            for phase in run:
                special = i == (0 if phase is run[0] else times - 1)
                sendings = (*phase.every, *phase.once) if special else phase.every
                self.send(sendings)
                self.both(phase.name, phase.compute)
                self.clock += phase.waits(sendings)

    def ticks(self, phase: Phase, found: Prediction, timetable: Timetable, bubble: float) -> None:
        """The ticks of a pipeline, each longer by its part of what nothing hides."""
        assert found.stage_costs is not None
        _, ends = tick_times(timetable, found.stage_costs)
        useful = phase.compute * (1 + bubble) / float(ends[-1])  # seconds of one unit of the stages' costs
        wait = phase.exposed / len(ends)
        begins = np.concatenate([[0.0], ends[:-1]])
        for rank, events in enumerate(trace_ticks(timetable, found.stage_costs)):
            for event in events:
                tick = int(np.searchsorted(begins, (event.start + event.end) / 2, side="right")) - 1
                shift = self.clock + tick * wait
                span = Span(WORDS[event.action.work], shift + useful * event.start, shift + useful * event.end)
                self.work[f"rank {rank}"].append(span)
        start = self.clock
        for tick, begin in enumerate(begins):
            self.clock = start + useful * float(begin) + tick * wait
            self.send(phase.every, 1 / len(ends))
        self.clock = start + useful * float(ends[-1]) + phase.exposed
