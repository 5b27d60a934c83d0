"""How a schedule becomes ticks: fused rows, a forward and a backward in each, or alternating rows, one of them in each."""

from itertools import chain
from typing import Literal

import numpy as np

from axonml_jax.parallel.pipeline.estimates.costs import StageCosts
from axonml_jax.parallel.pipeline.estimates.events import trace_orders
from axonml_jax.parallel.pipeline.schedules.schedule import AbstractSchedule
from axonml_jax.parallel.pipeline.schedules.ticks import Ticks
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable

Rows = Literal["fused", "alternating"]


def make_timetable(schedule: AbstractSchedule, rows: Rows = "fused") -> Timetable:
    """The timetable that executes a schedule.

    Args:
      schedule: which, for which size.
      rows: "fused": a tick holds a forward and a backward, so that neighbours who wait for each other at the end of every
        tick lose nothing in the steady state. "alternating": a tick holds one action, in the classic order and with its
        memory, and costs the longest of them.

    Raises:
      ValueError: for other rows.
    """
    if rows == "fused":
        return Timetable.of(schedule.num_ranks, schedule.ticks())
    if rows != "alternating":
        raise ValueError(f"rows={rows!r} must be 'fused' or 'alternating'")
    return Timetable.of(schedule.num_ranks, _classic_ticks(schedule))


def _classic_ticks(schedule: AbstractSchedule) -> Ticks:
    """The classic order with every action a tick long."""
    split = any(action.work == "W" for action in schedule.order(0))
    each = StageCosts(1, 1, 1) if split else StageCosts(1, 1, 0)
    grids = {work: np.zeros((schedule.num_stages, schedule.num_microbatches), np.int64) for work in "FBIW"}
    for event in chain(*trace_orders(schedule.orders, each)):
        grids[event.action.work][event.action.stage, event.action.microbatch] = event.start
    return Ticks(grids["F"], grids["I" if split else "B"], grids["W"] if split else None)
