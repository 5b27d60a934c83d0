"""When every action starts and ends, on paper: ranks in a classic order, or ticks of a timetable."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from axonml_jax.parallel.pipeline.action import Action
from axonml_jax.parallel.pipeline.costs import StageCosts
from axonml_jax.parallel.pipeline.timetable import Timetable

Done = dict[Action, tuple[float, int]]


class DeadlockError(ValueError):
    """The actions of an order wait for each other, or for one that nobody does."""


class Event(NamedTuple):
    """One action of one rank, from `start` to `end`."""

    action: Action
    rank: int
    start: float
    end: float


def trace_orders(orders: Sequence[Sequence[Action]], costs: StageCosts) -> list[list[Event]]:
    """The events of every rank that starts its actions in order, as soon as it is free and their inputs have arrived.

    Raises:
      DeadlockError: when that never comes, naming who waits where for what.
      ValueError: for an order that holds something twice, or costs for another number of stages.
    """
    _refuse_twice(orders)
    num_stages = 1 + max((action.stage for order in orders for action in order), default=-1)
    times, done = costs.tables(num_stages), {}
    events: list[list[Event]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, (order, here) in enumerate(zip(orders, events, strict=True)):
            while len(here) < len(order):
                action = order[len(here)]
                ready = _arrival(action.needs(num_stages), rank, done, costs.communication)
                if ready is None:
                    break
                start = max(ready, here[-1].end) if here else ready
                end = start + times[action.work][action.stage]
                here.append(Event(action, rank, start, end))
                done[action.gives()] = end, rank
                moved = True
    if any(len(here) < len(order) for order, here in zip(orders, events, strict=True)):
        raise DeadlockError(_who_waits(orders, events, done, num_stages))
    return events


def trace_ticks(timetable: Timetable, costs: StageCosts) -> list[list[Event]]:
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


def tick_times(timetable: Timetable, costs: StageCosts) -> tuple[np.ndarray, np.ndarray]:
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


def _arrival(needs: tuple[Action, ...], rank: int, done: Done, communication: float) -> float | None:
    """When the last of what an action needs is on its rank; None as long as some of it is not done."""
    ready = 0.0
    for need in needs:
        found = done.get(need)
        if found is None:
            return None
        end, where = found
        ready = max(ready, end if where == rank else end + communication)
    return ready


def _refuse_twice(orders: Sequence[Sequence[Action]]) -> None:
    given = [action.gives() for order in orders for action in order]
    if len(set(given)) < len(given):
        twice = sorted({str(action) for action in given if given.count(action) > 1})
        raise ValueError(f"done twice (I is a part of B): {', '.join(twice)}; orders hold every action once")


def _who_waits(orders: Sequence[Sequence[Action]], events: list[list[Event]], done: Done, num_stages: int) -> str:
    stands = {rank: order[len(events[rank])] for rank, order in enumerate(orders) if len(events[rank]) < len(order)}
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
