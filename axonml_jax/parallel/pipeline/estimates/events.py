"""When every action starts and ends, on paper: ranks in a classic order, or ticks of a timetable."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from axonml_jax.parallel.pipeline.estimates.costs import StageCosts
from axonml_jax.parallel.pipeline.schedules.action import Action, Work

Done = dict[Action, tuple[float, int]]


class DeadlockError(ValueError):
    """The actions of an order wait for each other, or for one that nobody does."""


class Event(NamedTuple):
    """One action of one rank, from `start` to `end`."""

    action: Action
    rank: int
    start: float
    end: float


class Ticking(Protocol):
    """What is asked of a timetable, which draws itself with what stands here."""

    @property
    def num_ranks(self) -> int:
        """S."""
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
    """The events of every rank that starts its actions in order, as soon as it is free and their inputs have arrived.

    Raises:
      DeadlockError: when that never comes, naming who waits where for what.
      ValueError: for an order that holds something twice, or costs for another number of stages.
    """
    return [
        [Event(action, rank, *span) for action, span in zip(order, spans, strict=True)]
        for rank, (order, spans) in enumerate(zip(orders, order_spans(orders, costs), strict=True))
    ]


def order_spans(orders: Sequence[Sequence[Action]], costs: StageCosts) -> list[list[tuple[float, float]]]:
    """(start, end) of every action of every rank, as `trace_orders`."""
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
    """The events of every rank when all ranks start a tick together and do F, B, W in this order."""
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
    """How long every rank works in every tick, and when the ticks end.

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
    """When a rank that is free from `free` on has all that an action needs; None while some of it is not done."""
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
