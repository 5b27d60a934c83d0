"""The timetable as integers [tick, rank]: all that an executor which scans over ticks needs to know."""

from typing import NamedTuple

import numpy as np

from axonml_jax.parallel.pipeline.schedules.timetable import Buffer, Timetable


class Work(NamedTuple):
    """One kind of work, each field int32 [tick, rank].

    Attributes:
      stage: which stage; `num_stages` when the rank is idle.
      microbatch: which microbatch; 0 when idle.
      source: received slot that is read: an activation by forwards (trash in stage 0, which reads the batch), a cotangent by
        backwards (trash in the last stage, which starts from the loss).
      slot: residual slot, written by forwards and read by backwards; trash when idle.
    """

    stage: np.ndarray
    microbatch: np.ndarray
    source: np.ndarray
    slot: np.ndarray


class Turns(NamedTuple):
    """Where ranks turn to another of their stages, each field int32 [tick, rank]; `num_stages` where they do not.

    Attributes:
      forward, backward: the stage that forwards, or backwards, begin; None: forwards only.
      left: the stage that backwards leave.
    """

    forward: np.ndarray
    backward: np.ndarray | None
    left: np.ndarray | None


class Table(NamedTuple):
    """What every rank does at every tick. A buffer's trash slot is the one behind its last, index `Buffer.size`.

    One tick on every rank: (1) `forward`; (2) `backward`, which may read what (1) wrote; (3) `weight`; (4) shift the
    forward's output to the next rank of the ring and the backward's cotangent to the previous one; (5) store what comes
    in by `activation_arrival` and `cotangent_arrival`. A tick reads only slots that earlier ticks stored.

    Attributes:
      forward: forwards.
      backward: whole backwards, or gradients of inputs alone where `weight` is there; None: forwards only.
      weight: gradients of weights; None where backwards are whole.
      activation_arrival: slot for what comes from the previous rank, int32 [tick, rank]; trash for what nobody awaits.
      cotangent_arrival: slot for what comes from the next rank; None: forwards only.
      turns: where ranks change stages; None where nobody asks.
    """

    forward: Work
    backward: Work | None
    weight: Work | None
    activation_arrival: np.ndarray
    cotangent_arrival: np.ndarray | None
    turns: Turns | None = None


def make_table(timetable: Timetable, with_turns: bool = False) -> Table:
    """The table of a timetable.

    Args:
      timetable: the timetable.
      with_turns: also where ranks turn to another stage.
    """
    ticks, activations, cotangents = timetable.ticks, timetable.activations, timetable.cotangents
    forward = _work(timetable, ticks.forward, activations)
    backward = None if ticks.backward is None else _work(timetable, ticks.backward, cotangents)
    there = (None, None) if backward is None else turns(backward.stage, timetable.num_stages)
    return Table(
        forward,
        backward,
        None if ticks.weight is None else _work(timetable, ticks.weight, cotangents),
        _arrivals(timetable, ticks.forward, activations, step=1),
        None if ticks.backward is None else _arrivals(timetable, ticks.backward, cotangents, step=-1),
        Turns(turns(forward.stage, timetable.num_stages)[0], *there) if with_turns else None,
    )


def turns(stage: np.ndarray, num_stages: int) -> tuple[np.ndarray, np.ndarray]:
    """Where every rank turns to another of its stages, and where it leaves one.

    Args:
      stage: `Work.stage`.
      num_stages: what stands for idle there, and in the results for neither.

    Returns:
      The stage that a rank begins in a tick, and the one it has done for the last time before another, [tick, rank].

    >>> begins, ends = turns(np.array([[0], [0], [4], [0], [2], [2]]), 4)
    >>> begins[:, 0].tolist(), ends[:, 0].tolist()
    ([0, 4, 4, 4, 2, 4], [4, 4, 4, 0, 4, 2])
    """

    def begins(grid: np.ndarray) -> np.ndarray:
        found, before = np.full_like(grid, num_stages), np.full(grid.shape[1], num_stages)
        for tick, row in enumerate(grid):
            new = (row != num_stages) & (row != before)
            found[tick, new] = row[new]
            before = np.where(row != num_stages, row, before)
        return found

    return begins(stage), begins(stage[::-1])[::-1]


def _work(timetable: Timetable, tick: np.ndarray, received: Buffer) -> Work:
    stage, microbatch = np.arange(tick.shape[0])[:, None], np.arange(tick.shape[1])
    where = (tick, stage % timetable.num_ranks)
    residuals = timetable.residuals
    return Work(
        _spread(timetable, where, stage, idle=timetable.num_stages),
        _spread(timetable, where, microbatch, idle=0),
        _spread(timetable, where, np.where(received.slots < 0, received.size, received.slots), idle=received.size),
        _spread(timetable, where, residuals.slots, idle=residuals.size),
    )


def _arrivals(timetable: Timetable, sent: np.ndarray, received: Buffer, *, step: int) -> np.ndarray:
    """What stage p sends arrives at the end of the same tick on the rank of stage p + step, in that stage's slot."""
    stage = np.arange(timetable.num_stages)[:, None]
    senders = slice(None, -1) if step == 1 else slice(1, None)
    receivers = slice(1, None) if step == 1 else slice(None, -1)
    where = (sent[senders], stage[receivers] % timetable.num_ranks)
    return _spread(timetable, where, received.slots[receivers], idle=received.size)


def _spread(timetable: Timetable, where: tuple[np.ndarray, np.ndarray], values: np.ndarray, *, idle: int) -> np.ndarray:
    grid = np.full((timetable.num_ticks, timetable.num_ranks), idle, np.int32)
    grid[where] = values
    return grid
