"""How many activations a pipeline keeps: in the classic order, with fused rows, and as allocated by one program."""

from dataclasses import dataclass
from typing import Literal

from axonml_jax.parallel.pipeline.estimates.simulate import simulate
from axonml_jax.parallel.pipeline.schedules.registry import make_schedule
from axonml_jax.parallel.pipeline.schedules.schedule import PipelineSchedule
from axonml_jax.parallel.pipeline.schedules.tick_rows import Rows, make_timetable


@dataclass(frozen=True)
class PipelineMemoryStats:
    """Activations that the ranks of a pipeline keep for their backwards, at most.

    One activation is all that one stage keeps of one microbatch. With several chunks per rank a stage is one chunk.

    >>> stats = PipelineMemoryStats.of("1f1b", num_ranks=4, num_microbatches=8, bytes_per_activation=2**20)
    >>> stats.classic, stats.executed, stats.allocated
    ((4, 3, 2, 1), (7, 5, 3, 1), 7)
    >>> stats.allocated_bytes_per_rank == 7 * 2**20 and stats.allocated_bytes == 4 * 7 * 2**20
    True

    Attributes:
      classic: per rank in the classic order, as papers and PyTorch count them; None for a size that has none.
      executed: per rank in the rows of the timetable that is executed.
      allocated: on every rank, in the program that is executed: it is the same on all ranks, so each allocates the maximum.
        One trash slot for idle ticks, which is no activation, is not counted.
      bytes_per_activation: size of one activation, of the largest stage where they differ.
    """

    classic: tuple[int, ...] | None
    executed: tuple[int, ...]
    allocated: int
    bytes_per_activation: int

    @classmethod
    def of(
        cls,
        schedule: PipelineSchedule | str,
        num_ranks: int,
        num_microbatches: int,
        num_chunks: int = 1,
        *,
        bytes_per_activation: int = 1,
        rows: Rows = "fused",
        variant: Literal["H1", "H2"] | None = None,
    ) -> "PipelineMemoryStats":
        """The figures of one schedule.

        Args:
          schedule: which.
          num_ranks: S, ranks of the pipeline axis.
          num_microbatches: M.
          num_chunks: V, stages per rank.
          bytes_per_activation: what one stage keeps of one microbatch; 1 makes totals count activations.
          rows: of the executed timetable.
          variant: of ZERO_BUBBLE.

        Raises:
          ValueError: for a size that the schedule refuses.
        """
        planned = make_schedule(schedule, num_ranks, num_microbatches, num_chunks, variant=variant)
        classic = None if planned.order_problems() else simulate(planned.orders).peak_activations
        residuals = make_timetable(planned, rows).residuals
        return cls(classic, residuals.counts, residuals.size, bytes_per_activation)

    @staticmethod
    def gpipe_peak_activations(num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Activations that each stage keeps under GPipe: all M.

        >>> PipelineMemoryStats.gpipe_peak_activations(4, 8)
        (8, 8, 8, 8)

        Raises:
          ValueError: for sizes below 1.
        """
        return simulate(make_schedule(PipelineSchedule.GPIPE, num_ranks, num_microbatches).orders).peak_activations

    @staticmethod
    def one_f_one_b_peak_activations(num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Activations that each stage keeps under classic 1F1B: min(M, S - stage).

        >>> PipelineMemoryStats.one_f_one_b_peak_activations(4, 8)
        (4, 3, 2, 1)

        Raises:
          ValueError: for sizes below 1.
        """
        return simulate(
            make_schedule(PipelineSchedule.ONE_F_ONE_B, num_ranks, num_microbatches).orders
        ).peak_activations

    @property
    def classic_bytes(self) -> int | None:
        """Bytes over all ranks in the classic order; None for a size that has none."""
        return None if self.classic is None else sum(self.classic) * self.bytes_per_activation

    @property
    def executed_bytes(self) -> int:
        """Bytes over all ranks that the executed rows really hold."""
        return sum(self.executed) * self.bytes_per_activation

    @property
    def allocated_bytes_per_rank(self) -> int:
        """Bytes of one rank's buffer, without its trash slot."""
        return self.allocated * self.bytes_per_activation

    @property
    def allocated_bytes(self) -> int:
        """Bytes over all ranks as allocated."""
        return len(self.executed) * self.allocated_bytes_per_rank
