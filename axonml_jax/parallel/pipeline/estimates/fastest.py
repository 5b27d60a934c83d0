"""Which schedule and rows are really fastest here, by the simulator, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from axonml_jax.parallel.pipeline.estimates.costs import StageCosts, Times
from axonml_jax.parallel.pipeline.estimates.simulate import simulate
from axonml_jax.parallel.pipeline.schedules.registry import make_schedule
from axonml_jax.parallel.pipeline.schedules.schedule import AbstractSchedule, PipelineSchedule
from axonml_jax.parallel.pipeline.schedules.tick_rows import Rows, make_timetable
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable

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
    """One way to run a step.

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
    """The fastest way that was accepted, and the reason.

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
      split_overhead: time that a separate W costs on top of W. None: as much as I, because the gradients inside the stage
        are computed again; 0 for an executor that keeps them for every layer.

    Returns:
      The choice, which says why.

    Raises:
      ValueError: when nothing is accepted, with each reason.
    """
    costs = StageCosts() if costs is None else costs
    accepted, refused = [], []
    for schedule in map(PipelineSchedule.of, schedules):
        for chunks in sorted({num_chunks if several else 1 for several in SEVERAL_CHUNKS[schedule]}):
            joined = num_chunks // chunks
            merged = costs.merged(num_ranks * num_chunks, joined)
            try:
                planned = make_schedule(schedule, num_ranks, num_microbatches, chunks)
            except ValueError as error:
                refused.append(str(error))
                continue
            refused += [f"{planned.name} in alternating rows: {problem}" for problem in planned.order_problems()]
            for found in _candidates(planned, merged, joined, split_overhead):
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
    """Both kinds of rows of a schedule whose stages are `joined` of those that activations are counted in."""
    for rows in ROWS[:1] if planned.order_problems() else ROWS:
        timetable = make_timetable(planned, rows)
        charged = costs if timetable.weight is None else _split(costs, split_overhead)
        makespan = simulate(timetable, charged).makespan
        useful = sum(simulate(timetable, costs).busy)
        bubble = planned.num_ranks * makespan / useful - 1 if useful else 0.0
        activations = timetable.residuals.size * joined
        yield ScheduleCandidate(planned.name, rows, planned.num_chunks, timetable, makespan, bubble, activations)


def _split(costs: StageCosts, overhead: Times | None) -> StageCosts:
    """Costs where W stands alone."""
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
