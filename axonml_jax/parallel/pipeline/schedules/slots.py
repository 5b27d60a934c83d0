"""Interval colouring: the fewest slots in which values live without one overwriting another."""

import heapq
from collections.abc import Sequence

import numpy as np


def colour(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """A slot for every interval such that intervals in one slot do not overlap.

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
    """Colours the values of every rank apart.

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
