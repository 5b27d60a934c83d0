"""Timetables of a pipeline: actions in ticks, the slots of each rank's values, checks and drawings; no JAX here."""

import functools
import heapq
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from numbers import Real
from typing import Literal, NamedTuple, Protocol

import numpy as np

from axonml_jax.base import lines, section

# --------------------------------------------------------------------------------------------------
# One piece of a pipeline's work, printed as papers and PyTorch print it: `2F0` is stage 2's forward of microbatch 0.
# --------------------------------------------------------------------------------------------------

Work = Literal["F", "B", "I", "W"]
PATTERN = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One piece of work of a rank: a forward, a backward or a part of one, of one microbatch in one stage.

    >>> str(Action(2, "F", 0)), Action.parse("2F0") == Action(2, "F", 0)
    ('2F0', True)

    Attributes:
      stage: which stage, counted over the whole model from 0.
      work: "F" forward; "B" the whole backward; "I" the gradient of the input alone, "W" of the weights alone (B = I + W).
      microbatch: which microbatch, from 0.
    """

    stage: int
    work: Work
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parses the action that prints as `text`.

        Raises:
          ValueError: for anything that is not stage, one of F, B, I, W, and microbatch.
        """
        found = PATTERN.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no action: write stage, one of F, B, I, W, and microbatch, as in 2F0")
        stage, work, microbatch = found.groups()
        return cls(int(stage), work, int(microbatch))  # pyright: ignore[reportArgumentType]

    def __str__(self):
        return f"{self.stage}{self.work}{self.microbatch}"

    def needs(self, num_stages: int) -> tuple["Action", ...]:
        """The actions that must be done before; `B` stands for whatever gives the gradient of the input (`B` or `I`).

        >>> [str(action) for action in Action(1, "B", 0).needs(4)]
        ['1F0', '2B0']
        """
        return _needs(self, num_stages)

    def gives(self) -> "Action":
        """The action under which others wait for this one: `I` counts as `B`, as it gives the gradient of the input too."""
        return Action(self.stage, "B", self.microbatch) if self.work == "I" else self


@functools.lru_cache(maxsize=2**14)  # a simulation asks for the same few over and over
def _needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    stage, work, microbatch = action
    if work == "F":
        return (Action(stage - 1, "F", microbatch),) if stage else ()
    if work == "W":
        return (Action(stage, "B", microbatch),)
    own = Action(stage, "F", microbatch)
    return (own,) if stage == num_stages - 1 else (own, Action(stage + 1, "B", microbatch))


def format_orders(orders: Sequence[Sequence[Action]]) -> str:
    """Orders as text: a line per rank, actions separated by spaces.

    >>> print(format_orders([parse_orders("0F0 0B0")[0], ()]))
    0F0 0B0
    -
    """
    return "\n".join(" ".join(map(str, order)) or "-" for order in orders)


def parse_orders(text: str) -> tuple[tuple[Action, ...], ...]:
    """Parses orders: a line per rank, "-" for a rank without work; blank lines are skipped.

    Raises:
      ValueError: for anything that is no action, naming the line.
    """
    orders = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            orders.append(tuple(Action.parse(word) for word in line.split() if word != "-"))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return tuple(orders)


# --------------------------------------------------------------------------------------------------
# At which tick of the executed loop every action of a pipeline happens.
# --------------------------------------------------------------------------------------------------


class Ticks(NamedTuple):
    """The ticks of all actions in the executed loop: integers [stage, microbatch].

    Attributes:
      forward: the tick of F.
      backward: the tick of B, or of I where `weight` is given; None: forwards only.
      weight: the tick of W; None: a backward is whole.
    """

    forward: np.ndarray
    backward: np.ndarray | None
    weight: np.ndarray | None = None


# --------------------------------------------------------------------------------------------------
# Timetables and orders as text: rows of labels over a ruler, broken into blocks that fit the line.
# --------------------------------------------------------------------------------------------------


def draw_grid(rows: Mapping[str, Sequence[str]], *, ruler: str = "tick", width: int = 120) -> str:
    """Draws labels in columns of one width, with the number of each column above.

    >>> print(draw_grid({"rank 0": ["0F0", "", "0B0"], "rank 1": ["", "1F0"]}))
    tick      0   1   2
    rank 0  0F0   . 0B0
    rank 1    . 1F0   .

    Args:
      rows: labels by column for every row's name; "" and columns behind the end are idle, drawn as a dot.
      ruler: what is counted by the columns.
      width: the longest line; more columns go into another block below.
    """
    length = max(map(len, rows.values()), default=0)
    head = max(map(len, (ruler, *rows)), default=0)
    cell = max([len(str(length - 1)), *(len(label) for labels in rows.values() for label in labels)])
    step = max(1, (width - head - 1) // (cell + 1))
    blocks = []
    for start in range(0, length, step):
        columns = range(start, min(start + step, length))
        lines = [(ruler, [str(column) for column in columns])]
        lines += [(name, [labels[c] if c < len(labels) else "" for c in columns]) for name, labels in rows.items()]
        blocks.append("\n".join(_text_line(name, labels, head, cell) for name, labels in lines))
    return "\n\n".join(blocks)


def _text_line(name: str, labels: Sequence[str], head: int, cell: int) -> str:
    return f"{name:<{head}} " + "".join(f" {label or '.':>{cell}}" for label in labels)


# --------------------------------------------------------------------------------------------------
# Interval colouring: the fewest slots in which values live without one overwriting another.
# --------------------------------------------------------------------------------------------------


def colour(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """Assigns a slot to every interval, such that intervals in one slot do not overlap.

    Args:
      intervals: (first, last) tick at which each value is held, both included.

    Returns:
      The slot of each interval. Their number is the largest number of values held at once, which no method undercuts.

    >>> colour([(0, 3), (1, 2), (3, 4), (4, 5)])
    [0, 1, 1, 0]
    """
    slots = [0] * len(intervals)
    held: list[tuple[int, int]] = []
    free: list[int] = []
    for index in sorted(range(len(intervals)), key=intervals.__getitem__):
        first, last = intervals[index]
        while held and held[0][0] < first:
            heapq.heappush(free, heapq.heappop(held)[1])
        slots[index] = heapq.heappop(free) if free else len(held)
        heapq.heappush(held, (last, slots[index]))
    return slots


def colour_by_rank(
    first: np.ndarray, last: np.ndarray, rank: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Assigns slots to the values of every rank (`colour`).

    Args:
      first: first tick of each value, [stage, microbatch].
      last: last tick, [stage, microbatch].
      rank: where each stage's values are, [stage].
      num_ranks: S.

    Returns:
      The slots, [stage, microbatch], and how many each rank needs.
    """
    slots, counts = np.zeros(first.shape, np.int32), []
    for here in range(num_ranks):
        mine = rank == here
        coloured = colour(list(zip(first[mine].ravel().tolist(), last[mine].ravel().tolist(), strict=True)))
        slots[mine] = np.reshape(np.asarray(coloured, np.int32), slots[mine].shape)
        counts.append(max(coloured, default=-1) + 1)
    return slots, tuple(counts)


def held_by_rank(first: np.ndarray, last: np.ndarray, rank: np.ndarray, num_ranks: int) -> tuple[int, ...]:
    """The most values that every rank holds at once: the slots that `colour_by_rank` finds, without finding them.

    Args:
      first, last, rank, num_ranks: as there.
    """
    changes = np.zeros((num_ranks, int(last.max(initial=0)) + 2), np.int64)
    where = np.broadcast_to(rank[:, None], first.shape)
    np.add.at(changes, (where, first), 1)
    np.add.at(changes, (where, last + 1), -1)
    return tuple(changes.cumsum(axis=1).max(axis=1).tolist())


# --------------------------------------------------------------------------------------------------
# What a pipeline's actions cost: times per stage of F, I, W and of sending.
# --------------------------------------------------------------------------------------------------

Times = float | Sequence[float]


@dataclass(frozen=True)
class StageCosts:
    """Times of a stage's actions, in any one unit; a number stands for every stage, a sequence holds one per stage.

    Attributes:
      forward: F.
      input_gradient: I, the gradient of the stage's input alone.
      weight_gradient: W, the gradient of its weights; a whole backward is B = I + W.
      communication: from the end of an action to its result on the neighbouring rank. A classic order hides it behind
        other work; a row of a timetable ends with it, once for both directions.
    """

    forward: Times = 1.0
    input_gradient: Times = 1.0
    weight_gradient: Times = 1.0
    communication: float = 0.0

    def __post_init__(self):
        problems = []
        for name in ("forward", "input_gradient", "weight_gradient", "communication"):
            value = getattr(self, name)
            if hasattr(value, "__array__"):
                value = np.asarray(value).tolist()
            value = tuple(value) if isinstance(value, Sequence) else value
            object.__setattr__(self, name, value)
            times = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(time, Real) and 0 <= float(time) < math.inf for time in times):
                problems.append(f"{name}={value!r}: a time is a finite number, 0 or more")
        if len({len(times) for times in self._sequences()}) > 1:
            given = {name: len(times) for name, times in vars(self).items() if isinstance(times, tuple)}
            problems.append(f"{given} must have one time per stage each")
        if problems:
            raise ValueError(f"StageCosts: {'; '.join(problems)}")

    def tables(self, num_stages: int) -> dict[str, Sequence[float]]:
        """The time of every kind of work, F, B, I and W, per stage.

        Raises:
          ValueError: for sequences of another length.
        """
        forward, given, weight = (
            list(times) if isinstance(times, Sequence) else [times] * num_stages
            for times in (self.forward, self.input_gradient, self.weight_gradient)
        )
        if any(len(times) != num_stages for times in (forward, given, weight)):
            raise ValueError(
                f"StageCosts has times for {len(self._sequences()[0])} stages, the pipeline has {num_stages}"
            )
        whole = [one + other for one, other in zip(given, weight, strict=True)]
        return {"F": forward, "B": whole, "I": given, "W": weight}

    def merged(self, num_stages: int, neighbours: int) -> "StageCosts":
        """The costs of a pipeline whose stages are `neighbours` successive stages of this one.

        Raises:
          ValueError: for sequences of another length than `num_stages`.
        """
        tables = self.tables(num_stages)
        forward, given, weight = (
            tuple(sum(tables[work][at : at + neighbours]) for at in range(0, num_stages, neighbours)) for work in "FIW"
        )
        return StageCosts(forward, given, weight, self.communication)

    def _sequences(self) -> list[Sequence[float]]:
        fields = (self.forward, self.input_gradient, self.weight_gradient)
        return [times for times in fields if isinstance(times, Sequence)]


# --------------------------------------------------------------------------------------------------
# Whether ticks can be kept: inputs have arrived, and no rank does two things of a kind in one tick.
# --------------------------------------------------------------------------------------------------


def violations(num_ranks: int, ticks: Ticks) -> list[str]:
    """Lists the reasons why an executor cannot keep these ticks; empty when it can.

    Args:
      num_ranks: S; stage p lives on rank p mod S.
      ticks: when every action happens.
    """
    shapes = {np.shape(grid) for grid in ticks if grid is not None}
    if len(shapes) > 1 or any(len(shape) != 2 or 0 in shape for shape in shapes):
        return [f"ticks of F, B and W must be [stage, microbatch] of one shape, not {sorted(shapes)}"]
    if num_ranks < 1:
        return [f"num_ranks={num_ranks} must be at least 1"]
    if len(ticks.forward) % num_ranks:
        return [f"{len(ticks.forward)} stages do not divide over {num_ranks} ranks"]
    if ticks.weight is not None and ticks.backward is None:
        return ["weight gradients need the ticks of input gradients"]
    before = [f"{work} before tick 0" for work, grid in _kinds(ticks).items() if grid.min() < 0]
    return before + _too_early(ticks) + _at_once(num_ranks, ticks)


def _kinds(ticks: Ticks) -> dict[Work, np.ndarray]:
    given: Work = "B" if ticks.weight is None else "I"
    found: dict[Work, np.ndarray | None] = {"F": ticks.forward, given: ticks.backward, "W": ticks.weight}
    return {work: grid for work, grid in found.items() if grid is not None}


def _too_early(ticks: Ticks) -> list[str]:
    kinds = _kinds(ticks)
    forward, found = ticks.forward, _waits("F", ticks.forward[1:], "F", ticks.forward[:-1], stage=1, step=-1)
    if ticks.backward is not None:
        given: Work = "B" if "B" in kinds else "I"
        found += _waits(given, ticks.backward, "F", forward, sent=0)
        found += _waits(given, ticks.backward[:-1], given, ticks.backward[1:], step=1)
    if ticks.weight is not None and ticks.backward is not None:
        found += _waits("W", ticks.weight, "I", ticks.backward, sent=0)
    return found


def _waits(
    work: Work, at: np.ndarray, needs: Work, done: np.ndarray, *, stage: int = 0, step: int = 0, sent: int = 1
) -> list[str]:
    """Lists actions that stand before what they need, or in its tick where that must still be `sent`."""
    return [
        f"{Action(row + stage, work, m)} at tick {at[row, m]} needs {Action(row + stage + step, needs, m)} "
        f"{'of an earlier tick' if sent else 'before'}, which is at tick {done[row, m]}"
        for row, m in np.argwhere(at < done + sent).tolist()
    ]


def _at_once(num_ranks: int, ticks: Ticks) -> list[str]:
    found = []
    for work, grid in _kinds(ticks).items():
        for rank in range(num_ranks):
            mine = grid[rank::num_ranks].ravel()
            values, counts = np.unique(mine, return_counts=True)
            for tick in values[counts > 1].tolist():
                chunk, m = np.nonzero(grid[rank::num_ranks] == tick)
                both = ", ".join(
                    str(Action(c * num_ranks + rank, work, i)) for c, i in zip(chunk.tolist(), m.tolist(), strict=True)
                )
                found.append(f"rank {rank} cannot do {both} in one tick ({tick})")
    return found


# --------------------------------------------------------------------------------------------------
# When every action starts and ends, on paper: ranks in a classic order, or ticks of a timetable.
# --------------------------------------------------------------------------------------------------

Done = dict[Action, tuple[float, int]]


class DeadlockError(ValueError):
    """Raised where the actions of an order wait for each other, or for one that nobody does."""


class Event(NamedTuple):
    """One action of one rank, from `start` to `end`."""

    action: Action
    rank: int
    start: float
    end: float


class Ticking(Protocol):
    """The interface of a timetable that times and drawings read."""

    @property
    def num_ranks(self) -> int:
        """S, the ranks."""
        ...

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        ...

    @property
    def num_ticks(self) -> int:
        """Length of the loop."""
        ...

    @property
    def kinds(self) -> Mapping[Work, np.ndarray]:
        """The tick of every stage and microbatch, by kind of work."""
        ...


def trace_orders(orders: Sequence[Sequence[Action]], costs: StageCosts) -> list[list[Event]]:
    """The events of every rank, which starts its actions in order, as soon as it is free and their inputs have arrived.

    Raises:
      DeadlockError: when that never comes, naming who waits where for what.
      ValueError: for an order that holds something twice, or costs for another number of stages.
    """
    return [
        [Event(action, rank, *span) for action, span in zip(order, spans, strict=True)]
        for rank, (order, spans) in enumerate(zip(orders, order_spans(orders, costs), strict=True))
    ]


def order_spans(orders: Sequence[Sequence[Action]], costs: StageCosts) -> list[list[tuple[float, float]]]:
    """The (start, end) of every action of every rank, as `trace_orders` times them."""
    num_stages = 1 + max((action.stage for order in orders for action in order), default=-1)
    times, done = costs.tables(num_stages), {}
    spans: list[list[tuple[float, float]]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, (order, here) in enumerate(zip(orders, spans, strict=True)):
            free = here[-1][1] if here else 0.0
            for position in range(len(here), len(order)):
                action = order[position]
                start = _start(action.needs(num_stages), rank, free, done, costs.communication)
                if start is None:
                    break
                free = start + times[action.work][action.stage]
                here.append((start, free))
                done[action.gives()] = free, rank
                moved = True
    if len(done) < sum(map(len, orders)):
        _refuse_twice(orders)
        raise DeadlockError(_who_waits(orders, [len(here) for here in spans], done, num_stages))
    return spans


def trace_ticks(timetable: Ticking, costs: StageCosts) -> list[list[Event]]:
    """The events of every rank, where all ranks start a tick together and do F, B, W in this order."""
    spent, ends = tick_times(timetable, costs)
    until = np.concatenate([[0.0], ends[:-1]])[None, :, None] + np.cumsum(spent, axis=0)
    events: list[list[Event]] = [[] for _ in range(timetable.num_ranks)]
    for row, (work, grid) in enumerate(timetable.kinds.items()):
        for (stage, microbatch), tick in np.ndenumerate(grid):
            rank = stage % timetable.num_ranks
            end, took = float(until[row, tick, rank]), float(spent[row, tick, rank])
            events[rank].append(Event(Action(stage, work, microbatch), rank, end - took, end))
    return [sorted(here, key=lambda event: event.end) for here in events]


def tick_times(timetable: Ticking, costs: StageCosts) -> tuple[np.ndarray, np.ndarray]:
    """The time that every rank works in every tick, and the ends of the ticks.

    Returns:
      Times by kind of work, [kind, tick, rank], and ends, [tick]: a tick takes as long as the slowest rank's work and the
      shift behind it.
    """
    times, kinds = costs.tables(timetable.num_stages), timetable.kinds
    spent = np.zeros((len(kinds), timetable.num_ticks, timetable.num_ranks))
    rank = np.arange(timetable.num_stages)[:, None] % timetable.num_ranks
    for row, (work, grid) in enumerate(kinds.items()):
        spent[row, grid, rank] = np.asarray(times[work])[:, None]
    return spent, np.cumsum(spent.sum(axis=0).max(axis=1) + costs.communication)


def _start(needs: tuple[Action, ...], rank: int, free: float, done: Done, communication: float) -> float | None:
    """The time at which a rank that is free from `free` on has all that an action needs; None while some of it is not done."""
    for need in needs:
        if need not in done:
            return None
        end, where = done[need]
        if where != rank:
            end += communication
        if end > free:
            free = end
    return free


def _refuse_twice(orders: Sequence[Sequence[Action]]) -> None:
    given = [action.gives() for order in orders for action in order]
    if len(set(given)) < len(given):
        twice = sorted({str(action) for action in given if given.count(action) > 1})
        raise ValueError(f"done twice (I is a part of B): {', '.join(twice)}; orders hold every action once")


def _who_waits(orders: Sequence[Sequence[Action]], positions: Sequence[int], done: Done, num_stages: int) -> str:
    places = enumerate(zip(orders, positions, strict=True))
    stands = {rank: order[position] for rank, (order, position) in places if position < len(order)}
    planned = {action.gives(): (action, rank) for rank, order in enumerate(orders) for action in order}
    lines = []
    for rank, action in stands.items():
        for need in action.needs(num_stages):
            if need in done:
                continue
            found, where = planned.get(need, (need, None))
            if where is None:
                place = "which nobody does"
            elif stands[where] == found:
                place = f"where rank {where} stands"
            else:
                place = f"which rank {where} does after {stands[where]}"
            lines.append(f"rank {rank} stands at {action} and waits for {found}, {place}")
    return "deadlock: " + "; ".join(lines)


# --------------------------------------------------------------------------------------------------
# Events of a pipeline on a line of time, as a picture (SVG) that needs nothing but a browser.
# --------------------------------------------------------------------------------------------------

WORDS: dict[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of inputs",
    "W": "gradient of weights",
}
IDLE = "idle; numbers are microbatches"
WAITING = "; dashed: all ranks wait for each other"
# From light to dark, one shade per chunk; text turns white on dark ones.
SHADES: dict[str, tuple[str, ...]] = {
    "F": ("#bcd5f0", "#7fb0e3", "#3f83c9", "#1f5a9c"),
    "B": ("#bfe3c0", "#85c788", "#4a9f50", "#2a7332"),
    "I": ("#c3e8dc", "#86cdb6", "#45a488", "#247660"),
    "W": ("#f7d9a8", "#eebb66", "#d18f26", "#9a6413"),
}
DARK = 2  # the first shade under white text
LEFT, TOP, ROW, GAP = 64, 44, 26, 4
FONT = "system-ui, sans-serif"
MONOSPACE = ' font-family="ui-monospace, monospace"'
MAX_WIDTH = 1120


class Colours(NamedTuple):
    """Colours of everything but the boxes: words, paper, idle time, quiet words, and lines between boxes."""

    words: str
    paper: str
    idle: str
    quiet: str
    between: str


ON_PAPER = Colours("#222", "#fff", "#f1f1f1", "#666", "#fff")
"""Colours of a picture that stands for itself."""
IN_PAGE = Colours("currentColor", "none", "#8883", "#888", "none")
"""Colours of a picture in a page, light or dark, which takes the page's colour of words."""


def draw_svg(
    title: str,
    events: Sequence[Sequence[Event]],
    caption: Sequence[str],
    ticks: Sequence[float] = (),
    *,
    colours: Colours = ON_PAPER,
) -> str:
    """Draws a row per rank and a box per action, with its microbatch in it and chunks as shades; boxes have tooltips.

    Args:
      title: above the rows.
      events: per rank.
      caption: lines below.
      ticks: times at which all ranks wait for each other, drawn as lines.
      colours: the colours of what is not a box.

    Returns:
      The SVG document.
    """
    everything = [event for here in events for event in here]
    until = max((event.end for event in everything), default=1.0) or 1.0
    shortest = min((event.end - event.start for event in everything if event.end > event.start), default=until)
    digits = max((len(str(event.action.microbatch)) for event in everything), default=1)
    scale = max((9 + 6 * digits) / shortest, min(44 / shortest, MAX_WIDTH / until))
    lines = [line for text in caption for line in text.splitlines() or [""]]
    words = 24 + max(9 * len(title), 7.3 * max(map(len, lines), default=0), _legend_width(events, ticked=bool(ticks)))
    bottom = TOP + len(events) * (ROW + GAP)
    width, height = max(LEFT + until * scale + 16, words), bottom + 62 + 17 * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="{FONT}" font-size="12" fill="{colours.words}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="{colours.paper}"/>',
        f'<text x="12" y="26" font-size="15" font-weight="600">{escape(title)}</text>',
        *_rows(events, until * scale, scale, colours),
        *(_svg_line(LEFT + tick * scale, bottom, colours) for tick in ticks),
        *_axis(until, scale, bottom, colours),
        *_legend(events, bottom + 44, colours, ticked=bool(ticks)),
        *(_text(12, bottom + 70 + 17 * row, line, MONOSPACE) for row, line in enumerate(lines)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _rows(events: Sequence[Sequence[Event]], length: float, scale: float, colours: Colours) -> Iterator[str]:
    num_ranks = len(events)
    for rank, here in enumerate(events):
        y = TOP + rank * (ROW + GAP)
        yield f'<text x="12" y="{y + 17}">rank {rank}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{ROW}" fill="{colours.idle}"/>'
        yield from (_box(event, event.action.stage // num_ranks, y, scale, colours) for event in here)


def _box(event: Event, chunk: int, y: int, scale: float, colours: Colours) -> str:
    stage, work, microbatch = event.action
    x, wide = LEFT + event.start * scale, (event.end - event.start) * scale
    shade = chunk % len(SHADES[work])
    size = min(12.0, wide / (0.62 * len(str(microbatch)) + 0.4))
    colour = "#fff" if shade >= DARK else "#222"
    name = f"{event.action}: {WORDS[work]} of stage {stage}, microbatch {microbatch}, {event.start:g} to {event.end:g}"
    return (
        f'<g><title>{name}</title><rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW}" '
        f'fill="{SHADES[work][shade]}" stroke="{colours.between}"/><text x="{x + wide / 2:.1f}" y="{y + 17}" '
        f'text-anchor="middle" font-size="{size:.1f}" fill="{colour}">{microbatch}</text></g>'
    )


def _svg_line(x: float, bottom: int, colours: Colours) -> str:
    return f'<path d="M{x:.1f} {TOP - 4}V{bottom}" stroke="{colours.words}" stroke-width="0.6" stroke-dasharray="2 3"/>'


def _axis(until: float, scale: float, y: int, colours: Colours) -> Iterator[str]:
    """Draws times below the rows, a round number apart."""
    step = next(step for power in range(-6, 12) for step in _steps(power) if step * scale >= 40)
    for k in range(int(until / step) + 1):
        yield _text(LEFT + k * step * scale, y + 14, f"{k * step:g}", f' text-anchor="middle" fill="{colours.quiet}"')
    yield _text(12, y + 14, "time", f' fill="{colours.quiet}"')


def _steps(power: int) -> tuple[float, ...]:
    return tuple(digit * 10.0**power for digit in (1, 2, 5))


def _legend(events: Sequence[Sequence[Event]], y: int, colours: Colours, *, ticked: bool) -> Iterator[str]:
    x = 12.0
    for work, words, chunks in _legend_words(events):
        for chunk in range(chunks):
            fill = SHADES[work][chunk % len(SHADES[work])]
            yield f'<rect x="{x:.0f}" y="{y - 11}" width="14" height="14" fill="{fill}"/>'
            x += 17
        yield _text(x + 3, y, words)
        x += 22 + 6.6 * len(words)
    yield f'<rect x="{x:.0f}" y="{y - 11}" width="14" height="14" fill="{colours.idle}"/>'
    yield _text(x + 20, y, IDLE + WAITING * ticked)


def _legend_words(events: Sequence[Sequence[Event]]) -> list[tuple[str, str, int]]:
    """The (kind of work, its words, number of shades) of every kind that is drawn."""
    chunks = 1 + max((event.action.stage // len(events) for here in events for event in here), default=0)
    used = {event.action.work for here in events for event in here}
    more = f" (chunks 0 to {chunks - 1})" if chunks > 1 else ""
    return [(work, words + more, chunks) for work, words in WORDS.items() if work in used]


def _legend_width(events: Sequence[Sequence[Event]], *, ticked: bool) -> float:
    each = (17 * chunks + 22 + 6.6 * len(words) for _, words, chunks in _legend_words(events))
    return sum(each) + 20 + 6.6 * len(IDLE + WAITING * ticked)


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}"{style} xml:space="preserve">{escape(words)}</text>'


# --------------------------------------------------------------------------------------------------
# The timetable that is executed: at which tick every action happens, and in which slot each value lives meanwhile.
# --------------------------------------------------------------------------------------------------

Grid = tuple[tuple[int, ...], ...]

MOST_DRAWN = 4000
"""Actions in a notebook's picture; more would be megabytes, and too small to see."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """The slots in which the values of one kind live.

    Attributes:
      shape: [stage, microbatch] of the timetable.
      stages: those that have such values.
      first, last: ticks between which each is held, [stage, microbatch] of these stages; None: nothing is kept.
      num_ranks: S.
    """

    shape: tuple[int, ...]
    stages: slice
    first: np.ndarray | None
    last: np.ndarray | None
    num_ranks: int

    @cached_property
    def slots(self) -> np.ndarray:
        """The slot of every value, [stage, microbatch]; -1 for stages that have none, 0 (trash) where nothing is kept."""
        if self.first is None or self.last is None:
            return np.zeros(self.shape, np.int32)
        slots = np.full(self.shape, -1, np.int32)
        slots[self.stages], counts = colour_by_rank(self.first, self.last, self._rank, self.num_ranks)
        assert counts == self.counts
        return slots

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Slots that each rank needs; a program that is the same on every rank allocates the maximum."""
        if self.first is None or self.last is None:
            return (0,) * self.num_ranks
        return held_by_rank(self.first, self.last, self._rank, self.num_ranks)

    @property
    def size(self) -> int:
        """Slots to allocate on every rank, without the trash slot behind them."""
        return max(self.counts)

    @property
    def _rank(self) -> np.ndarray:
        return np.arange(self.shape[0])[self.stages] % self.num_ranks


@dataclass(frozen=True)
class Timetable:
    """The tick of every action. Stage p lives on rank p mod S; slots and arrivals follow from the ticks.

    Attributes:
      num_ranks: S.
      forward: tick of F, by stage and then by microbatch.
      backward: tick of B, or of I where `weight` is given; None: forwards only.
      weight: tick of W; None: backwards are whole.

    Raises:
      ValueError: for ticks that no executor can keep, naming the actions.
    """

    num_ranks: int
    forward: Grid
    backward: Grid | None = None
    weight: Grid | None = None

    def __post_init__(self):
        found = violations(self.num_ranks, self.ticks)
        if found:
            shown = found[:8] + [f"and {len(found) - 8} more"] * (len(found) > 8)
            raise ValueError("no timetable: " + "; ".join(shown))

    @classmethod
    def of(cls, num_ranks: int, ticks: Ticks) -> "Timetable":
        """Builds the timetable with these ticks."""
        return cls(num_ranks, _frozen(ticks.forward), *(None if t is None else _frozen(t) for t in ticks[1:]))

    @cached_property
    def ticks(self) -> Ticks:
        """The ticks as arrays [stage, microbatch]."""
        later = (None if grid is None else np.asarray(grid) for grid in (self.backward, self.weight))
        return Ticks(np.asarray(self.forward), *later)

    @property
    def kinds(self) -> dict[Work, np.ndarray]:
        """The ticks of every kind of work: of F, and of B or of I and W."""
        names: tuple[Work, ...] = ("F", "B" if self.weight is None else "I", "W")
        return {work: grid for work, grid in zip(names, self.ticks, strict=True) if grid is not None}

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.forward)

    @property
    def num_microbatches(self) -> int:
        """M, the microbatches."""
        return len(self.forward[0])

    @property
    def num_ticks(self) -> int:
        """Length of the loop."""
        return max(int(grid.max()) for grid in self.ticks if grid is not None) + 1

    @cached_property
    def residuals(self) -> Buffer:
        """The residuals that forwards keep, held from F to the last of B, I and W, both ticks included."""
        last = self._last_use
        return self._buffer(slice(None), None if last is None else self.ticks.forward, last)

    @cached_property
    def activations(self) -> Buffer:
        """The inputs of forwards: they arrive at the end of the previous stage's tick and are held until their own."""
        forward = self.ticks.forward
        return self._buffer(slice(1, None), forward[:-1] + 1, forward[1:])

    @cached_property
    def cotangents(self) -> Buffer:
        """The gradients of stages' outputs: they arrive at the end of the next stage's tick and are held until used."""
        backward, last = self.ticks.backward, self._last_use
        if backward is None or last is None:
            return self._buffer(slice(None), None, None)
        return self._buffer(slice(None, -1), backward[1:] + 1, last[:-1])

    @property
    def forward_only(self) -> "Timetable":
        """The same forwards without backwards, for evaluation and inference."""
        return Timetable(self.num_ranks, self.forward)

    def __str__(self):
        return self.draw()

    def _repr_html_(self, title: str = "") -> str:
        title = title or f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches"
        if (size := sum(grid.size for grid in self.kinds.values())) > MOST_DRAWN:
            return section(
                title, lines(f"{size:,} actions in {self.num_ticks:,} ticks; pictures end at {MOST_DRAWN:,}")
            )
        costs = StageCosts()
        _, ends = tick_times(self, costs)
        caption = [f"{self.num_ticks} ticks, drawn for stages of equal cost"]
        return section("", draw_svg(title, trace_ticks(self, costs), caption, ends.tolist(), colours=IN_PAGE))

    def draw(self, width: int = 120) -> str:
        """Draws ranks down and ticks to the right: a line for forwards, one for backwards, one for weight gradients.

        Args:
          width: the longest line; more ticks go into another block below.
        """
        rows = {(rank, work): [""] * self.num_ticks for rank in range(self.num_ranks) for work in self.kinds}
        for work, grid in self.kinds.items():
            for (stage, microbatch), tick in np.ndenumerate(grid):
                rows[stage % self.num_ranks, work][tick] = str(Action(stage, work, microbatch))
        return draw_grid({f"rank {rank} {work}": row for (rank, work), row in rows.items()}, width=width)

    @property
    def _last_use(self) -> np.ndarray | None:
        return self.ticks.backward if self.ticks.weight is None else self.ticks.weight

    def _buffer(self, stages: slice, first: np.ndarray | None, last: np.ndarray | None) -> Buffer:
        return Buffer(self.ticks.forward.shape, stages, first, last, self.num_ranks)


def _frozen(grid: np.ndarray) -> Grid:
    return tuple(tuple(row) for row in grid.tolist())
