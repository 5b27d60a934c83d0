"""How a decoder's blocks lie on the stages of a pipeline, and what its timetable means for time and memory."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from axonml_jax.cost.decoder.configuration import DecoderLike
from axonml_jax.cost.decoder.work import block_products, head_products
from axonml_jax.cost.rounds import ShardCounts
from axonml_jax.parallel.pipeline.cutting.assign import balanced
from axonml_jax.parallel.pipeline.estimates.costs import StageCosts
from axonml_jax.parallel.pipeline.estimates.simulate import simulate
from axonml_jax.parallel.pipeline.policy import AXIS, Pipelined
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable
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

    @property
    def ranks(self) -> tuple[ShardCounts, ...]:
        """What the ranks have that may have most of something: the first, the fullest of those between, and the last."""
        last, total = self.num_ranks - 1, sum(self.blocks)
        between = max(range(1, last), key=self.on_rank, default=None)
        chosen = (0, last) if between is None else (0, between, last)
        return tuple(ShardCounts(self.on_rank(r), int(r == 0), int(r == last), total) for r in dict.fromkeys(chosen))


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
    head = 0.0 if config.tie_embeddings else head_products(config)
    return Stages(ranks, _cut(config.num_layers, block_products(config), head, count))


@lru_cache(maxsize=1024)
def _timetable(pipe: Pipelined, ranks: int, microbatches: int) -> Timetable:
    return pipe.timetable(ranks, microbatches)


def timetable_of(plan: Plan, degrees: dict[str, int]) -> Timetable | None:
    """What a plan's pipeline executes; None without one.

    Raises:
      ValueError: for sizes that the schedule refuses.
    """
    ranks = degrees.get(AXIS, 1)
    if plan.pipe is None or ranks == 1:
        return None
    return _timetable(plan.pipe, ranks, plan.microbatches)


def bubble(timetable: Timetable | None, costs: StageCosts | None = None) -> float:
    """Idle time over useful time; 0 without a pipeline."""
    return 0.0 if timetable is None else simulate(timetable, costs).bubble_fraction
