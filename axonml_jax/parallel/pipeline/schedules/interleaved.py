"""Interleaved 1F1B: several chunks of layers per rank, so that the pipeline fills V times faster."""

from typing import ClassVar

import numpy as np

from axonml_jax.parallel.pipeline.schedules.action import Action
from axonml_jax.parallel.pipeline.schedules.schedule import AbstractSchedule, PipelineSchedule
from axonml_jax.parallel.pipeline.schedules.ticks import Ticks


class Interleaved(AbstractSchedule):
    """Megatron's virtual pipeline (Narayanan et al. 2021): rank r holds stages r, S+r, 2S+r and so on.

    Microbatches go in groups of S; a group passes all chunks before the next group starts. Bubble: (S-1)/(VM) of the useful
    time. The classic order and its formulas are of whole groups; the fused rows take any M, and a last group that is not
    whole leaves its missing microbatches' ticks idle.
    """

    name: ClassVar = PipelineSchedule.INTERLEAVED_ONE_F_ONE_B

    def problems(self) -> list[str]:
        """At least two ranks and two chunks."""
        ranks, chunks = self.num_ranks, self.num_chunks
        found = []
        if ranks < 2:
            found.append(f"num_ranks={ranks} must be at least 2; one rank has no bubble to shrink: take GPIPE")
        if chunks < 2:
            found.append(f"num_chunks={chunks} must be at least 2; with one chunk take ONE_F_ONE_B, which is the same")
        return found

    def order_problems(self) -> list[str]:
        """Whole groups of S microbatches."""
        ranks, microbatches = self.num_ranks, self.num_microbatches
        if microbatches % ranks == 0:
            return []
        below, above = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
        near = f"{below} or {above}" if below else f"{above}"
        return [
            f"num_microbatches={microbatches} must be a multiple of num_ranks={ranks} in the classic order, because chunks "
            f"change every {ranks} microbatches; take {near}, or fused rows, which take any number"
        ]

    def warmup(self, rank: int) -> int:
        """Megatron's number of forwards before the first backward: 2(S-r-1) + (V-1)S, or all there are."""
        rounds = 2 * (self.num_ranks - rank - 1) + (self.num_chunks - 1) * self.num_ranks
        return min(rounds, self.num_chunks * self.num_microbatches)

    def order(self, rank: int) -> tuple[Action, ...]:
        """The warm-up's forwards, then forward and backward in turn, then the remaining backwards."""
        self.require_order()
        total, warmup = self.num_chunks * self.num_microbatches, self.warmup(rank)
        actions = [self._forward(rank, k) for k in range(warmup)]
        for k in range(warmup, total):
            actions += [self._forward(rank, k), self._backward(rank, k - warmup)]
        return (*actions, *(self._backward(rank, k) for k in range(total - warmup, total)))

    def ticks(self) -> Ticks:
        """A rank's k-th forward on rank r at r + k, its k-th backward at (V+1)S - 2 - r + k."""
        ranks, chunks = self.num_ranks, self.num_chunks
        chunk, rank = np.divmod(np.arange(self.num_stages)[:, None], ranks)
        group, member = np.divmod(np.arange(self.num_microbatches)[None, :], ranks)
        first = group * ranks * chunks + member
        forward = rank + first + chunk * ranks
        return Ticks(forward, (chunks + 1) * ranks - 2 - rank + first + (chunks - 1 - chunk) * ranks)

    def ideal_makespan(self, forward: float, input_gradient: float, weight_gradient: float) -> float | None:
        """(VM + S-1)(F+B), in times of one chunk, for whole groups of microbatches."""
        if self.order_problems():
            return None
        steps = self.num_chunks * self.num_microbatches + self.num_ranks - 1
        return steps * (forward + input_gradient + weight_gradient)

    def _forward(self, rank: int, k: int) -> Action:
        chunk, microbatch = self._place(k)
        return Action(chunk * self.num_ranks + rank, "F", microbatch)

    def _backward(self, rank: int, k: int) -> Action:
        chunk, microbatch = self._place(k)
        return Action((self.num_chunks - 1 - chunk) * self.num_ranks + rank, "B", microbatch)

    def _place(self, k: int) -> tuple[int, int]:
        """(chunk, microbatch) of a rank's k-th pass: groups outermost, then chunks, then the group's microbatches."""
        group, rest = divmod(k, self.num_ranks * self.num_chunks)
        chunk, member = divmod(rest, self.num_ranks)
        return chunk, group * self.num_ranks + member
