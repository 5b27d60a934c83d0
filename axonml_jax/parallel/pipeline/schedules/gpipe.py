"""GPipe: all forwards, then all backwards; the simplest order, whose memory grows with the microbatches."""

from typing import ClassVar

import numpy as np

from axonml_jax.parallel.pipeline.schedules.action import Action
from axonml_jax.parallel.pipeline.schedules.schedule import AbstractSchedule, PipelineSchedule
from axonml_jax.parallel.pipeline.schedules.ticks import Ticks


class GPipe(AbstractSchedule):
    """GPipe (Huang et al. 2019). With V chunks each chunk takes all microbatches before the next: PyTorch's looped BFS.

    Bubble: (S-1)/(VM) of the useful time. Activations in flight: VM.
    """

    name: ClassVar = PipelineSchedule.GPIPE

    def problems(self) -> list[str]:
        """None: every size works."""
        return []

    def order(self, rank: int) -> tuple[Action, ...]:
        """Forwards chunk by chunk, then backwards from the last chunk to the first."""
        stages, microbatches = self.stages(rank), range(self.num_microbatches)
        forwards = [Action(stage, "F", m) for stage in stages for m in microbatches]
        return (*forwards, *(Action(stage, "B", m) for stage in reversed(stages) for m in microbatches))

    def ticks(self) -> Ticks:
        """Chunk v's forward of m on rank r at r + v*max(M, S) + m; backwards mirror it from the last forward's tick."""
        stride = max(self.num_microbatches, self.num_ranks)  # a chunk's first microbatch must have come round the ring
        chunk, rank = np.divmod(np.arange(self.num_stages)[:, None], self.num_ranks)
        microbatch = np.arange(self.num_microbatches)[None, :]
        forward = rank + chunk * stride + microbatch
        last = forward.max()
        back = (self.num_ranks - 1 - rank) + (self.num_chunks - 1 - chunk) * stride + microbatch
        return Ticks(forward, last + back)

    def ideal_makespan(self, forward: float, input_gradient: float, weight_gradient: float) -> float | None:
        """(VM + S-1)(F+B), for M >= S where there are several chunks."""
        if self.num_chunks > 1 and self.num_microbatches < self.num_ranks:
            return None
        steps = self.num_chunks * self.num_microbatches + self.num_ranks - 1
        return steps * (forward + input_gradient + weight_gradient)
