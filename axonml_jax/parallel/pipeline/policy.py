"""What a plan says about its pipeline: the schedule, the microbatches, the stages per rank, and when weights are gathered."""

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from axonml_jax._types import is_one_of
from axonml_jax.mesh.axes import STAGES
from axonml_jax.parallel.pipeline.schedules.registry import make_schedule
from axonml_jax.parallel.pipeline.schedules.schedule import PipelineSchedule
from axonml_jax.parallel.pipeline.schedules.tick_rows import make_timetable
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable

AXIS = STAGES
"""The mesh axis along which the stages lie."""


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """The model is cut into stages that lie along the `pipe` axis; microbatches pass through them.

    Communicates: per tick one collective-permute of activations and one of their gradients (per dtype); per step one
    all-reduce over `pipe` of the loss, one per metric and per parameter that several stages read, and one per changed
    buffer of the model.

    Attributes:
      schedule: in which order microbatches pass: an `ax.PipelineSchedule`, its name or its value.
      num_microbatches: into how many parts a rank's rows are cut; with `Plan.accumulate` that many times more pass.
      chunks: stages per rank; stage p lies on rank p mod S.
      split: module paths at which the second and later stages begin, in order; None: between repeated blocks, by balanced
        cost.
      gather: along `fsdp`: "step" gathers a rank's stages once per step (their memory is that of the whole stages), "chunk"
        whenever a rank turns to another of its stages (two are whole, a forward's and a backward's, and one's gradients;
        with one stage per rank the same as "step"), "tick" in every forward and backward.

    Raises:
      ValueError: with everything that is wrong.
    """

    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    num_microbatches: int = 8
    chunks: int = 1
    split: tuple[str, ...] | None = None
    gather: Literal["step", "chunk", "tick"] = "step"

    def __post_init__(self):
        problems = list(self._problems())
        if problems:
            raise ValueError(f"Pipelined: {'; '.join(problems)}")
        object.__setattr__(self, "schedule", PipelineSchedule.of(self.schedule))
        if self.split is not None:
            object.__setattr__(self, "split", tuple(self.split))

    def _problems(self) -> Iterator[str]:
        try:
            PipelineSchedule.of(self.schedule)
        except ValueError as error:
            yield str(error)
        for name in ("num_microbatches", "chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                yield f"{name}={value!r} must be a positive whole number"
        if not is_one_of(self.gather, ("step", "chunk", "tick")):
            yield f"gather={self.gather!r} must be 'step', 'chunk' or 'tick'"
        paths = self.split if isinstance(self.split, (tuple, list)) else () if self.split is None else (None,)
        if not all(isinstance(path, str) for path in paths):
            yield f"split={self.split!r} must be module paths such as ('blocks/2', 'blocks/4')"

    def num_stages(self, num_ranks: int) -> int:
        """Stages of the whole model on so many ranks."""
        return num_ranks * self.chunks

    @property
    def turns(self) -> bool:
        """Whether weights are gathered when a rank turns to another of its stages."""
        return self.gather == "chunk" and self.chunks > 1

    @property
    def in_ticks(self) -> bool:
        """Whether weights are gathered in the loop over ticks, not before it."""
        return self.gather == "tick" or self.turns

    def gathers(self, num_ranks: int, num_microbatches: int) -> int | None:
        """How often a step gathers all stages of a rank for forwards, and again for backwards; None: once for both.

        >>> Pipelined(schedule="interleaved", chunks=2, gather="chunk").gathers(4, 10)
        3
        """
        if self.gather == "tick":
            return num_microbatches
        return -(-num_microbatches // num_ranks) if self.turns else None

    @property
    def in_words(self) -> str:
        """As tables print it."""
        return f"{self.schedule}{f' x {self.chunks} chunks' if self.chunks > 1 else ''}"

    def timetable(self, num_ranks: int, num_microbatches: int) -> Timetable:
        """What is executed, and what the ledger prices; a schedule of your own comes in here (docs/guides/extending.md).

        Raises:
          ValueError: for sizes that the schedule refuses, with the rule and the remedy.
        """
        try:
            schedule = make_schedule(self.schedule, num_ranks, num_microbatches, self.chunks)
        except ValueError as error:
            raise ValueError(f"on a mesh with {AXIS}={num_ranks}: {error}") from error
        return make_timetable(schedule)
