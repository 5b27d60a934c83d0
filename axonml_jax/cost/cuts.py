"""How a decoder's blocks lie on the stages of a pipeline, and what its timetable means for time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from axonml_jax.cost.decoder import DecoderLike
from axonml_jax.parallel.pipeline.assign import balanced
from axonml_jax.parallel.pipeline.costs import StageCosts
from axonml_jax.parallel.pipeline.policy import AXIS, Pipelined
from axonml_jax.parallel.pipeline.schedule import PipelineSchedule
from axonml_jax.parallel.pipeline.simulate import simulate
from axonml_jax.parallel.pipeline.timetable import Timetable
from axonml_jax.parallel.plan import Plan


@dataclass(frozen=True)
class Stages:
    """Blocks by stage.

    Attributes:
      num_ranks: S; 1 without a pipeline.
      blocks: of every stage, S*V of them; stage p lies on rank p mod S.
    """

    num_ranks: int
    blocks: tuple[int, ...]

    def on_rank(self, rank: int) -> int:
        """Blocks of one rank."""
        return sum(self.blocks[rank :: self.num_ranks])

    def first(self, rank: int) -> bool:
        """Whether a rank has the embedding."""
        return rank == 0

    def last(self, rank: int) -> bool:
        """Whether a rank has the head."""
        return rank == self.num_ranks - 1


@lru_cache(maxsize=4096)
def _cut(num_layers: int, block: float, head: float, num_stages: int) -> tuple[int, ...]:
    costs = [block] * num_layers
    costs[-1] += head
    ends = [0, *balanced(costs, num_stages), num_layers]
    return tuple(b - a for a, b in pairwise(ends))


def stages_of(config: DecoderLike, plan: Plan, degrees: dict[str, int]) -> Stages:
    """How a plan's pipeline cuts a model: between blocks, by balanced numbers of multiplications.

    Raises:
      ValueError: when there are fewer blocks than stages.
    """
    ranks = degrees.get(AXIS, 1)
    if plan.pipe is None or ranks == 1:
        return Stages(1, (config.num_layers,))
    count = plan.pipe.num_stages(ranks)
    if config.num_layers < count:
        raise ValueError(f"{config.num_layers} blocks cannot be cut into {count} stages (pipe={ranks})")
    head = 0.0 if config.tie_embeddings else _head(config)
    return Stages(ranks, _cut(config.num_layers, _block(config), head, count))


def stage_costs(config: DecoderLike, plan: Plan, stages: Stages, length: int) -> StageCosts:
    """What the stages' work costs, in multiplications per token: of their blocks, and of the head on the last one.

    The embedding is looked up and costs nothing; a tied one multiplies as the head, though it lives on the first stage.

    Args:
      config: the model.
      plan: says what the backward recomputes.
      stages: blocks by stage.
      length: of a sequence.
    """
    attention = 2.0 * config.num_heads * config.head_size * length
    forward = [count * (_block(config) + attention) for count in stages.blocks]
    again = [0.0] * len(forward)
    if plan.remat is not None:
        again = [count * attention for count in stages.blocks] if plan.remat == "selective" else list(forward)
    forward[-1] += _head(config)
    again[-1] += _head(config) * (plan.remat == "full")
    back = tuple(own + more for own, more in zip(forward, again, strict=True))
    return StageCosts(tuple(forward), back, tuple(forward))


def _block(config: DecoderLike) -> float:
    """Multiplications of a block's matrices per token."""
    size, kv = config.hidden_size, config.kv_heads * config.head_size
    inward = 2 if config.activation == "swiglu" else 1
    return 2.0 * size * (size + kv) + (inward + 1.0) * size * config.mlp_size


def _head(config: DecoderLike) -> float:
    return float(config.hidden_size * config.vocab_size)


@lru_cache(maxsize=1024)
def _timetable(schedule: PipelineSchedule, ranks: int, microbatches: int, chunks: int) -> Timetable:
    return Pipelined(schedule=schedule, num_microbatches=microbatches, chunks=chunks).timetable(ranks, microbatches)


def timetable_of(plan: Plan, degrees: dict[str, int]) -> Timetable | None:
    """What a plan's pipeline executes; None without one.

    Raises:
      ValueError: for sizes that the schedule refuses.
    """
    ranks = degrees.get(AXIS, 1)
    if plan.pipe is None or ranks == 1:
        return None
    return _timetable(plan.pipe.schedule, ranks, plan.microbatches, plan.pipe.chunks)


def bubble(timetable: Timetable | None, costs: StageCosts | None = None) -> float:
    """Idle time over useful time; 0 without a pipeline."""
    return 0.0 if timetable is None else simulate(timetable, costs).bubble_fraction


def ranks_of(stages: Stages) -> Sequence[int]:
    """Every rank of the pipe axis."""
    return range(stages.num_ranks)
