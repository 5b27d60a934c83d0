"""From a schedule's name to the schedule: the register of rooms."""

from typing import Literal

from axonml_jax.parallel.pipeline.schedules.gpipe import GPipe
from axonml_jax.parallel.pipeline.schedules.interleaved import Interleaved
from axonml_jax.parallel.pipeline.schedules.one_f_one_b import OneFOneB
from axonml_jax.parallel.pipeline.schedules.schedule import AbstractSchedule, PipelineSchedule
from axonml_jax.parallel.pipeline.schedules.zero_bubble import ZeroBubble

ROOMS: dict[PipelineSchedule, type[AbstractSchedule]] = {
    room.name: room for room in (GPipe, OneFOneB, Interleaved, ZeroBubble)
}


def make_schedule(
    schedule: PipelineSchedule | str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    variant: Literal["H1", "H2"] | None = None,
) -> AbstractSchedule:
    """One schedule for one size of pipeline.

    >>> print(*make_schedule("1f1b", 2, 3).order(0))
    0F0 0F1 0B0 0F2 0B1 0B2

    Args:
      schedule: its name.
      num_ranks: S, ranks of the pipeline axis.
      num_microbatches: M.
      num_chunks: V, stages per rank.
      variant: of ZERO_BUBBLE; None: "H1".

    Raises:
      ValueError: for a size that the schedule refuses, with the rule and the remedy, and for a variant of others.
    """
    room = ROOMS[PipelineSchedule.of(schedule)]
    if variant is None:
        return room(num_ranks, num_microbatches, num_chunks)
    if room is not ZeroBubble:
        raise ValueError(
            f"variant={variant!r} is for {PipelineSchedule.ZERO_BUBBLE}; {room.name} has none: leave it out"
        )
    return ZeroBubble(num_ranks, num_microbatches, num_chunks, variant)
