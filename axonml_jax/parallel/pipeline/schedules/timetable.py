"""The timetable that is executed: at which tick every action happens, and in which slot each value lives meanwhile."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from axonml_jax.markup import lines, section
from axonml_jax.parallel.pipeline.estimates.costs import StageCosts
from axonml_jax.parallel.pipeline.estimates.events import tick_times, trace_ticks
from axonml_jax.parallel.pipeline.estimates.schedule_svg import IN_PAGE, draw_svg
from axonml_jax.parallel.pipeline.schedules.action import Action, Work
from axonml_jax.parallel.pipeline.schedules.check import violations
from axonml_jax.parallel.pipeline.schedules.draw import draw_grid
from axonml_jax.parallel.pipeline.schedules.slots import colour_by_rank, held_by_rank
from axonml_jax.parallel.pipeline.schedules.ticks import Ticks

Grid = tuple[tuple[int, ...], ...]

MOST_DRAWN = 4000
"""Actions in a notebook's picture; more would be megabytes, and too small to see."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """Where the values of one kind live.

    Attributes:
      shape: [stage, microbatch] of the timetable.
      stages: those that have such values.
      first, last: ticks between which each is held, [stage, microbatch] of these stages; None: nothing is kept.
      num_ranks: S.
    """

    shape: tuple[int, ...]
    stages: slice
    first: np.ndarray | None
    last: np.ndarray | None
    num_ranks: int

    @cached_property
    def slots(self) -> np.ndarray:
        """The slot of every value, [stage, microbatch]; -1 for stages that have none, 0 (trash) where nothing is kept."""
        if self.first is None or self.last is None:
            return np.zeros(self.shape, np.int32)
        slots = np.full(self.shape, -1, np.int32)
        slots[self.stages], counts = colour_by_rank(self.first, self.last, self._rank, self.num_ranks)
        assert counts == self.counts
        return slots

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Slots that each rank needs; a program that is the same on every rank allocates the maximum."""
        if self.first is None or self.last is None:
            return (0,) * self.num_ranks
        return held_by_rank(self.first, self.last, self._rank, self.num_ranks)

    @property
    def size(self) -> int:
        """Slots to allocate on every rank, without the trash slot behind them."""
        return max(self.counts)

    @property
    def _rank(self) -> np.ndarray:
        return np.arange(self.shape[0])[self.stages] % self.num_ranks


@dataclass(frozen=True)
class Timetable:
    """When every action happens. Stage p lives on rank p mod S; slots and arrivals follow from the ticks.

    Attributes:
      num_ranks: S.
      forward: tick of F, by stage and then by microbatch.
      backward: tick of B, or of I where `weight` is given; None: forwards only.
      weight: tick of W; None: backwards are whole.

    Raises:
      ValueError: for ticks that no executor can keep, naming the actions.
    """

    num_ranks: int
    forward: Grid
    backward: Grid | None = None
    weight: Grid | None = None

    def __post_init__(self):
        found = violations(self.num_ranks, self.ticks)
        if found:
            shown = found[:8] + [f"and {len(found) - 8} more"] * (len(found) > 8)
            raise ValueError("no timetable: " + "; ".join(shown))

    @classmethod
    def of(cls, num_ranks: int, ticks: Ticks) -> "Timetable":
        """The timetable with these ticks."""
        return cls(num_ranks, _frozen(ticks.forward), *(None if t is None else _frozen(t) for t in ticks[1:]))

    @cached_property
    def ticks(self) -> Ticks:
        """The ticks as arrays [stage, microbatch]."""
        later = (None if grid is None else np.asarray(grid) for grid in (self.backward, self.weight))
        return Ticks(np.asarray(self.forward), *later)

    @property
    def kinds(self) -> dict[Work, np.ndarray]:
        """The ticks of every kind of work that there is: of F, of B or of I and W."""
        names: tuple[Work, ...] = ("F", "B" if self.weight is None else "I", "W")
        return {work: grid for work, grid in zip(names, self.ticks, strict=True) if grid is not None}

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.forward)

    @property
    def num_microbatches(self) -> int:
        """M."""
        return len(self.forward[0])

    @property
    def num_ticks(self) -> int:
        """Length of the loop."""
        return max(int(grid.max()) for grid in self.ticks if grid is not None) + 1

    @cached_property
    def residuals(self) -> Buffer:
        """What a forward keeps for its backward, held from F to the last of B, I and W, both ticks included."""
        last = self._last_use
        return self._buffer(slice(None), None if last is None else self.ticks.forward, last)

    @cached_property
    def activations(self) -> Buffer:
        """Inputs of forwards: they arrive at the end of the previous stage's tick and are held until their own."""
        forward = self.ticks.forward
        return self._buffer(slice(1, None), forward[:-1] + 1, forward[1:])

    @cached_property
    def cotangents(self) -> Buffer:
        """Gradients of a stage's output: they arrive at the end of the next stage's tick and are held until used."""
        backward, last = self.ticks.backward, self._last_use
        if backward is None or last is None:
            return self._buffer(slice(None), None, None)
        return self._buffer(slice(None, -1), backward[1:] + 1, last[:-1])

    @property
    def forward_only(self) -> "Timetable":
        """The same forwards without backwards, for evaluation and inference."""
        return Timetable(self.num_ranks, self.forward)

    def __str__(self):
        return self.draw()

    def _repr_html_(self, title: str = "") -> str:
        title = title or f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches"
        if (size := sum(grid.size for grid in self.kinds.values())) > MOST_DRAWN:
            return section(
                title, lines(f"{size:,} actions in {self.num_ticks:,} ticks; pictures end at {MOST_DRAWN:,}")
            )
        costs = StageCosts()
        _, ends = tick_times(self, costs)
        caption = [f"{self.num_ticks} ticks, drawn for stages of equal cost"]
        return section("", draw_svg(title, trace_ticks(self, costs), caption, ends.tolist(), colours=IN_PAGE))

    def draw(self, width: int = 120) -> str:
        """Ranks down, ticks to the right; a line for forwards, one for backwards, one for weight gradients.

        Args:
          width: the longest line; more ticks go into another block below.
        """
        rows = {(rank, work): [""] * self.num_ticks for rank in range(self.num_ranks) for work in self.kinds}
        for work, grid in self.kinds.items():
            for (stage, microbatch), tick in np.ndenumerate(grid):
                rows[stage % self.num_ranks, work][tick] = str(Action(stage, work, microbatch))
        return draw_grid({f"rank {rank} {work}": row for (rank, work), row in rows.items()}, width=width)

    @property
    def _last_use(self) -> np.ndarray | None:
        return self.ticks.backward if self.ticks.weight is None else self.ticks.weight

    def _buffer(self, stages: slice, first: np.ndarray | None, last: np.ndarray | None) -> Buffer:
        return Buffer(self.ticks.forward.shape, stages, first, last, self.num_ranks)


def _frozen(grid: np.ndarray) -> Grid:
    return tuple(tuple(row) for row in grid.tolist())
