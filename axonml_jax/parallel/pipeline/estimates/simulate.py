"""What a step of a pipeline costs on paper: time, bubble and memory of classic orders and of timetables."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from axonml_jax.parallel.pipeline.estimates.costs import StageCosts
from axonml_jax.parallel.pipeline.estimates.events import order_spans, tick_times
from axonml_jax.parallel.pipeline.schedules.action import Action
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable

# What an action changes in the number of activations that a rank keeps: a backward drops them, where split its W.
KEPT = {"F": 1, "B": -1, "I": 0, "W": -1}


@dataclass(frozen=True)
class Simulation:
    """What a step costs on paper, in the unit of the costs.

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
    """Simulate a timetable, or the classic order of every rank.

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
