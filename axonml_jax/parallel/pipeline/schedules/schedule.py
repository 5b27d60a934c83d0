"""The names of the pipeline schedules, and what every schedule can say about itself."""

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

from axonml_jax.parallel.pipeline.schedules.action import Action
from axonml_jax.parallel.pipeline.schedules.ticks import Ticks
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable
from axonml_jax.synonyms import is_choice, member


class PipelineSchedule(enum.Enum):
    """In which order microbatches pass through a pipeline. A schedule changes time and memory, never what is computed.

    Attributes:
      GPIPE: all forwards, then all backwards (Huang et al. 2019); with several chunks, PyTorch's looped BFS.
      ONE_F_ONE_B: forwards and backwards alternate; memory does not grow with the microbatches (PipeDream-Flush, 2021).
      INTERLEAVED_ONE_F_ONE_B: 1F1B with several chunks of layers per rank and a smaller bubble (Narayanan et al. 2021).
      ZERO_BUBBLE: 1F1B whose weight gradients wait until a rank would be idle (Qi et al. 2024).
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_ONE_F_ONE_B = "interleaved"
    ZERO_BUBBLE = "zero-bubble"

    @classmethod
    def of(cls, schedule: "PipelineSchedule | str") -> "PipelineSchedule":
        """A schedule from itself, its value or its name.

        >>> PipelineSchedule.of("1f1b") is PipelineSchedule.of("one_f_one_b") is PipelineSchedule.ONE_F_ONE_B
        True

        Raises:
          ValueError: for anything else.
        """
        if is_choice(cls, schedule):
            return cls(schedule)
        names = ", ".join(f"{known} ({known.value!r})" for known in cls)
        raise ValueError(f"schedule={schedule!r} is none of {names}")

    @classmethod
    def _missing_(cls, value: object) -> "PipelineSchedule | None":
        return member(cls, "schedule", value)

    def __str__(self):
        return self.name


@dataclass(frozen=True)
class AbstractSchedule(abc.ABC):
    """One schedule for one size of pipeline. Stage p of the S*V stages lives on rank p mod S.

    Attributes:
      num_ranks: S, ranks of the pipeline axis.
      num_microbatches: M.
      num_chunks: V, stages per rank.
    """

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1

    name: ClassVar[PipelineSchedule]

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("num_ranks", "num_microbatches", "num_chunks")}
        problems = [
            f"{name}={value!r} must be a positive whole number"
            for name, value in sizes.items()
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1
        ]
        problems = problems or list(self.problems())
        if problems:
            raise ValueError(f"{self.name}: {'; '.join(problems)}")

    @property
    def num_stages(self) -> int:
        """S*V, stages of the whole model."""
        return self.num_ranks * self.num_chunks

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The classic order of every rank."""
        return tuple(self.order(rank) for rank in range(self.num_ranks))

    def stages(self, rank: int) -> range:
        """The stages that live on a rank."""
        return range(rank, self.num_stages, self.num_ranks)

    def order_problems(self) -> Sequence[str]:
        """Why this size has no classic order, though fused rows execute it; empty when it has one."""
        return []

    def require_order(self) -> None:
        """Refuse a size that has no classic order.

        Raises:
          ValueError: with the rule and the remedy.
        """
        if problems := self.order_problems():
            raise ValueError(f"{self.name}: {'; '.join(problems)}")

    @abc.abstractmethod
    def problems(self) -> Sequence[str]:
        """Why this size is refused, each with its remedy; empty when it is accepted."""

    @abc.abstractmethod
    def order(self, rank: int) -> tuple[Action, ...]:
        """The classic order: what papers and PyTorch print, each rank starting an action as soon as it can.

        Raises:
          ValueError: for a size that `order_problems` refuses.
        """

    @abc.abstractmethod
    def ticks(self) -> Ticks:
        """The fused rows that are executed: at most one forward and one backward per rank and tick."""

    def _repr_html_(self) -> str:
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        title = f"{self.name}: {self.num_ranks} ranks{chunks}, {self.num_microbatches} microbatches"
        return Timetable.of(self.num_ranks, self.ticks())._repr_html_(title)

    @abc.abstractmethod
    def ideal_makespan(self, forward: float, input_gradient: float, weight_gradient: float) -> float | None:
        """Published time of the classic order when every stage costs the same and sending is free.

        Args:
          forward: time of F of one stage.
          input_gradient: time of I.
          weight_gradient: time of W.

        Returns:
          The time, or None where the published formula does not hold.
        """


def one_chunk(schedule: AbstractSchedule) -> list[str]:
    """The problem of a schedule that knows one stage per rank, if there is one."""
    if schedule.num_chunks == 1:
        return []
    return [
        f"num_chunks={schedule.num_chunks} must be 1, one stage per rank; take "
        f"{PipelineSchedule.INTERLEAVED_ONE_F_ONE_B} for several"
    ]
