"""The cost of a pipeline on paper: time, bubble and memory, and the choice of the fastest schedule; no JAX here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from numbers import Integral
from typing import Literal

from axonml_jax.pipeline.schedules import AbstractSchedule, PipelineSchedule, Rows, make_schedule, make_timetable
from axonml_jax.pipeline.timetable import Action, StageCosts, Times, Timetable, order_spans, tick_times

# --------------------------------------------------------------------------------------------------
# What a step of a pipeline costs on paper: time, bubble and memory of classic orders and of timetables.
# --------------------------------------------------------------------------------------------------

# What an action changes in the number of activations that a rank keeps: a backward drops them, where split its W.
KEPT = {"F": 1, "B": -1, "I": 0, "W": -1}


@dataclass(frozen=True)
class Simulation:
    """The cost of a step on paper, in the unit of the costs.

    Attributes:
      makespan: the longest that a rank is taken, from its first start to its last end: the pace at which steps can follow.
      finish: from the first start to the last end of all ranks; more than `makespan` only where ranks end one after another.
      busy: time that each rank works.
      peak_activations: the most forwards whose backward is still to come, per rank; one is one microbatch in one stage.
    """

    makespan: float
    finish: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks within the makespan, over useful time."""
        useful = sum(self.busy)
        return (len(self.busy) * self.makespan - useful) / useful if useful else 0.0


def simulate(work: Timetable | Sequence[Sequence[Action]], costs: StageCosts | None = None) -> Simulation:
    """Simulates a timetable, or the classic order of every rank.

    Ranks of a classic order start each action as soon as they are free and its inputs have arrived. Ranks of a timetable
    start each tick together: a tick takes as long as the slowest rank's work, and the shift at its end.

    Args:
      work: what to run.
      costs: times of the actions; None: F = I = W = 1, B = 2, and sending is free.

    Returns:
      Time, bubble and memory.

    Raises:
      DeadlockError: (a ValueError) for an order whose actions wait for each other, or for one that nobody does.
      ValueError: for an order that holds something twice, or costs for another number of stages.
    """
    costs = StageCosts() if costs is None else costs
    if isinstance(work, Timetable):
        spent, ends = tick_times(work, costs)
        busy = tuple(spent.sum(axis=(0, 1)).tolist())
        return Simulation(float(ends[-1]), float(ends[-1]), busy, work.residuals.counts)
    spans = order_spans(work, costs)
    return Simulation(
        makespan=max((here[-1][1] - here[0][0] for here in spans if here), default=0.0),
        finish=max((here[-1][1] for here in spans if here), default=0.0),
        busy=tuple(sum([end - start for start, end in here]) for here in spans),
        peak_activations=tuple(max(accumulate([KEPT[action.work] for action in order], initial=0)) for order in work),
    )


# --------------------------------------------------------------------------------------------------
# Which schedule and rows are really fastest here, by the simulator, and why.
# --------------------------------------------------------------------------------------------------

ROWS: tuple[Rows, ...] = ("fused", "alternating")
# Whether a schedule takes one stage per rank, several, or either.
SEVERAL_CHUNKS: dict[PipelineSchedule, tuple[bool, ...]] = {
    PipelineSchedule.GPIPE: (False, True),
    PipelineSchedule.ONE_F_ONE_B: (False,),
    PipelineSchedule.INTERLEAVED_ONE_F_ONE_B: (True,),
    PipelineSchedule.ZERO_BUBBLE: (False,),
}


@dataclass(frozen=True)
class ScheduleCandidate:
    """One schedule with one kind of rows, and its cost.

    Attributes:
      schedule: its order.
      rows: its rows.
      num_chunks: stages per rank.
      timetable: what would be executed.
      makespan: its time on paper.
      bubble_fraction: time of all ranks that is not spent on F, I and W, over the time that is; the extra work of a
        separate W is no useful time.
      activations: what every rank allocates, in activations of the smallest stages compared.
    """

    schedule: PipelineSchedule
    rows: Rows
    num_chunks: int
    timetable: Timetable
    makespan: float
    bubble_fraction: float
    activations: int

    def __str__(self):
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        return f"{self.schedule}{chunks} in {self.rows} rows"


@dataclass(frozen=True)
class ScheduleChoice:
    """The fastest candidate that was accepted, and the reason.

    Attributes:
      best: what to run.
      reason: a line for the choice and one for everything else.
      candidates: everything that was accepted, fastest first.
    """

    best: ScheduleCandidate
    reason: str
    candidates: tuple[ScheduleCandidate, ...]


def choose(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    costs: StageCosts | None = None,
    schedules: Sequence[PipelineSchedule | str] = tuple(PipelineSchedule),
    max_activations: int | None = None,
    split_overhead: Times | None = None,
) -> ScheduleChoice:
    """Simulate every way to run a step and take the fastest; of equally fast ones the one with fewer activations.

    >>> print(choose(4, 8).best)
    ONE_F_ONE_B in fused rows

    Args:
      num_ranks: S.
      num_microbatches: M.
      num_chunks: V, into how many stages a rank's layers can be cut; schedules that take one stage per rank get V
        neighbouring stages joined.
      costs: times of the S*V stages; None: F = I = W = 1.
      schedules: which may be taken.
      max_activations: most activations (of one of the S*V stages) that a rank may allocate; None: any number.
      split_overhead: time that a separate W costs on top of W, a number or one for each of the S*V stages. None: as much as I,
        because the gradients inside the stage are computed again; 0 for an executor that keeps them for every layer.

    Returns:
      The choice, which says why.

    Raises:
      ValueError: when nothing is accepted, with each reason; for a number of chunks below 1, and for times of another number of
        stages.
    """
    if isinstance(num_chunks, bool) or not isinstance(num_chunks, Integral) or num_chunks < 1:
        raise ValueError(f"num_chunks={num_chunks!r} must be a positive whole number")
    costs = StageCosts() if costs is None else costs
    accepted, refused = [], []
    for schedule in map(PipelineSchedule.of, schedules):
        for chunks in sorted({num_chunks if several else 1 for several in SEVERAL_CHUNKS[schedule]}):
            joined = num_chunks // chunks
            merged, overhead = costs.merged(num_ranks * num_chunks, joined), split_overhead
            if isinstance(overhead, Sequence):
                overhead = StageCosts(weight_gradient=overhead).merged(num_ranks * num_chunks, joined).weight_gradient
            try:
                planned = make_schedule(schedule, num_ranks, num_microbatches, chunks)
            except ValueError as error:
                refused.append(str(error))
                continue
            refused += [f"{planned.name} in alternating rows: {problem}" for problem in planned.order_problems()]
            for found in _candidates(planned, merged, joined, overhead):
                if max_activations is None or found.activations <= max_activations:
                    accepted.append(found)
                else:
                    refused.append(f"{found}: allocates {found.activations} activations, {max_activations} are allowed")
    if not accepted:
        raise ValueError("no schedule is possible: " + "; ".join(refused))
    ranked = sorted(accepted, key=lambda found: (found.makespan, found.activations))
    return ScheduleChoice(ranked[0], _reason(ranked, refused), tuple(ranked))


def _candidates(
    planned: AbstractSchedule, costs: StageCosts, joined: int, split_overhead: Times | None
) -> Iterator[ScheduleCandidate]:
    """The candidates of a schedule in both kinds of rows; its stages are `joined` of those that activations count."""
    for rows in ROWS[:1] if planned.order_problems() else ROWS:
        timetable = make_timetable(planned, rows)
        charged = costs if timetable.weight is None else _split(costs, split_overhead)
        makespan = simulate(timetable, charged).makespan
        useful = sum(simulate(timetable, costs).busy)
        bubble = planned.num_ranks * makespan / useful - 1 if useful else 0.0
        activations = timetable.residuals.size * joined
        yield ScheduleCandidate(planned.name, rows, planned.num_chunks, timetable, makespan, bubble, activations)


def _split(costs: StageCosts, overhead: Times | None) -> StageCosts:
    """The costs with a separate W, which has an overhead."""
    extra = costs.input_gradient if overhead is None else overhead
    weight = costs.weight_gradient
    if isinstance(extra, Sequence) or isinstance(weight, Sequence):
        count = len(weight) if isinstance(weight, Sequence) else len(extra)  # pyright: ignore[reportArgumentType]
        pairs = zip(_each(weight, count), _each(extra, count), strict=True)
        return replace(costs, weight_gradient=tuple(one + other for one, other in pairs))
    return replace(costs, weight_gradient=weight + extra)


def _each(times: Times, count: int) -> Sequence[float]:
    return times if isinstance(times, Sequence) else [times] * count


def _reason(ranked: Sequence[ScheduleCandidate], refused: Sequence[str]) -> str:
    best, *others = ranked
    lines = [f"{best}: fastest, {_figures(best)}"]
    for other in others:
        slower = other.makespan / best.makespan - 1 if best.makespan else 0.0
        same = "as fast, but keeps more" if other.activations > best.activations else "as fast"
        lines.append(f"{other}: {f'{slower:.1%} slower' if slower > 0 else same}, {_figures(other)}")
    return "\n".join([*lines, *refused])


def _figures(found: ScheduleCandidate) -> str:
    return f"time {found.makespan:g}, bubble {found.bubble_fraction:.1%}, {found.activations} activations per rank"


# --------------------------------------------------------------------------------------------------
# How many activations a pipeline keeps: in the classic order, with fused rows, and as allocated by one program.
# --------------------------------------------------------------------------------------------------


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
          rows: the rows of the executed timetable.
          variant: the variant of ZERO_BUBBLE.

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
