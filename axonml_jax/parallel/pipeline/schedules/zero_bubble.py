"""Zero-bubble: weight gradients are work that nobody waits for, so they fill the time in which a rank would be idle."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from axonml_jax.parallel.pipeline.schedules.action import Action
from axonml_jax.parallel.pipeline.schedules.schedule import AbstractSchedule, PipelineSchedule, one_chunk
from axonml_jax.parallel.pipeline.schedules.ticks import Ticks


@dataclass(frozen=True)
class ZeroBubble(AbstractSchedule):
    """ZB-H1 and ZB-H2 (Qi et al. 2024), by their handcrafted orders. B is split into I, which others wait for, and W.

    Bubble: (S-1)(F+I-W) for H1 and (S-1)(F+I-2W) for H2. Activations in flight: min(M, S) and min(M, 2S-1) on every rank.
    In H2's order ranks end one after another: its time is that of each rank, and a step gains it only if the next
    step may start before the last rank has ended.

    Attributes:
      num_ranks: S.
      num_microbatches: M.
      num_chunks: 1.
      variant: "H1" keeps 1F1B's memory, "H2" takes about twice as much and has the smaller bubble.
    """

    variant: Literal["H1", "H2"] = "H1"

    name: ClassVar = PipelineSchedule.ZERO_BUBBLE

    def problems(self) -> list[str]:
        """One chunk per rank, and a known variant."""
        known = [] if self.variant in ("H1", "H2") else [f"variant={self.variant!r} must be 'H1' or 'H2'"]
        return one_chunk(self) + known

    def order(self, rank: int) -> tuple[Action, ...]:
        """Warm up, then I, W and F in turn, where W comes `lag` microbatches after its I; then the remaining W."""
        late = 1 if self.variant == "H1" else 2
        warmup = min(self.num_microbatches, late * (self.num_ranks - rank - 1) + 1)
        lag = late * rank
        actions = [Action(rank, "F", m) for m in range(warmup)]
        for done in range(self.num_microbatches):
            actions.append(Action(rank, "I", done))
            if done >= lag:
                actions.append(Action(rank, "W", done - lag))
            if done + warmup < self.num_microbatches:
                actions.append(Action(rank, "F", done + warmup))
        rest = range(max(0, self.num_microbatches - lag), self.num_microbatches)
        return (*actions, *(Action(rank, "W", m) for m in rest))

    def ticks(self) -> Ticks:
        """F and I as in 1F1B; W of m at 2(S-1) + m on every rank, the latest that the first rank's I allows.

        All ranks do W in the same ticks, so that the ticks before have none: (S-1)(F+I) of bubble instead of (S-1)(F+I+W),
        with the 2S-1 residuals of fused 1F1B.
        """
        rank, microbatch = np.arange(self.num_ranks)[:, None], np.arange(self.num_microbatches)[None, :]
        latest = 2 * (self.num_ranks - 1)
        return Ticks(rank + microbatch, latest - rank + microbatch, latest + 0 * rank + microbatch)

    def ideal_makespan(self, forward: float, input_gradient: float, weight_gradient: float) -> float | None:
        """M(F+I+W) and the bubble; None unless M fills the warm-up and W is no longer than F and I, which hide it."""
        late = 1 if self.variant == "H1" else 2
        if self.num_microbatches <= late * (self.num_ranks - 1) or weight_gradient > min(forward, input_gradient):
            return None
        bubble = (self.num_ranks - 1) * (forward + input_gradient - late * weight_gradient)
        return self.num_microbatches * (forward + input_gradient + weight_gradient) + bubble
