"""`TickCounts`: what a pipeline's timetable says of memory and traffic, exactly or by formula; what passes between stages."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from axonml_jax.cost.amounts import Many, divided, either, least
from axonml_jax.cost.flow import EACH_TICK, Flow
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable


@dataclass(frozen=True)
class TickCounts:
    """Of a pipeline in fused rows.

    Attributes:
      number: of ticks.
      slots: what forwards keep for their backwards is held in so many on every rank.
      arriving: slots of activations and cotangents on their way.
    """

    number: Many
    slots: Many
    arriving: Many

    @classmethod
    def of(cls, timetable: Timetable) -> "TickCounts":
        """What a timetable says."""
        return cls(
            timetable.num_ticks, timetable.residuals.size, timetable.activations.size + timetable.cotangents.size
        )

    @classmethod
    def foreseen(cls, gpipe: Many, ranks: Many, microbatches: Many, chunks: Many) -> "TickCounts":
        """The same by formula (docs/guides/pipeline-schedules.md), without a timetable.

        Slots are an upper bound with several chunks and more microbatches than ranks that are no multiple of them.

        Args:
          gpipe: whether the schedule is GPipe; else 1F1B, or interleaved with several chunks.
          ranks: S.
          microbatches: M.
          chunks: V, stages per rank.

        >>> TickCounts.foreseen(False, 4, 8, 1), TickCounts.foreseen(True, 4, 8, 1)
        (TickCounts(number=14, slots=7, arriving=2), TickCounts(number=21, slots=8, arriving=2))
        """
        turns = divided(microbatches - 1, ranks)
        rest = microbatches - 1 - turns * ranks
        first = chunks * ranks - 1  # the tick in which the last stage ends its first forward
        number = 2 * first + turns * ranks * chunks + rest + 1
        # In the order of 1F1B as executed, a rank's first stage waits for its last one's backward, there and back.
        slots = least(microbatches * chunks, 2 * (ranks - 1) + (chunks - 1) * ranks + 1)
        return cls(either(gpipe, 2 * microbatches + 2 * ranks - 3, number), either(gpipe, microbatches, slots), 2)


def passing(ticks: TickCounts, boundary: Iterable[Flow]) -> Iterator[Flow]:
    """Activations and cotangents between stages: one permute of each dtype each way in every tick.

    Args:
      ticks: of the timetable.
      boundary: such permutes.
    """
    for label, work in (("activations", "forward"), ("cotangents", "backward")):
        for each in boundary:
            yield replace(each, label=label, times=ticks.number, where=EACH_TICK, work=work)
