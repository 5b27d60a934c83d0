"""1F1B: a rank alternates forward and backward, so that memory does not grow with the microbatches."""

from typing import ClassVar

import numpy as np

from axonml_jax.parallel.pipeline.schedules.action import Action
from axonml_jax.parallel.pipeline.schedules.schedule import AbstractSchedule, PipelineSchedule, one_chunk
from axonml_jax.parallel.pipeline.schedules.ticks import Ticks


class OneFOneB(AbstractSchedule):
    """PipeDream-Flush, the default of PyTorch and Megatron (Narayanan et al. 2021).

    Bubble: (S-1)/M of the useful time. Activations in flight on rank r: min(M, S-r), with fused rows min(M, 2(S-r)-1).
    """

    name: ClassVar = PipelineSchedule.ONE_F_ONE_B

    def problems(self) -> list[str]:
        """One chunk per rank."""
        return one_chunk(self)

    def order(self, rank: int) -> tuple[Action, ...]:
        """min(M, S-r) forwards to warm up, then backward and forward in turn, then the remaining backwards."""
        warmup = min(self.num_microbatches, self.num_ranks - rank)
        actions = [Action(rank, "F", m) for m in range(warmup)]
        for done in range(self.num_microbatches):
            actions.append(Action(rank, "B", done))
            if done + warmup < self.num_microbatches:
                actions.append(Action(rank, "F", done + warmup))
        return tuple(actions)

    def ticks(self) -> Ticks:
        """Forward of m on rank r at r + m, backward at 2(S-1) - r + m."""
        rank, microbatch = np.arange(self.num_ranks)[:, None], np.arange(self.num_microbatches)[None, :]
        return Ticks(rank + microbatch, 2 * (self.num_ranks - 1) - rank + microbatch)

    def ideal_makespan(self, forward: float, input_gradient: float, weight_gradient: float) -> float:
        """(M + S-1)(F+B)."""
        return (self.num_microbatches + self.num_ranks - 1) * (forward + input_gradient + weight_gradient)
