"""How a decoder's blocks lie on the stages of a pipeline, and what its timetable means for time and memory."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from axonml_jax.cost.decoder.configuration import DecoderLike, expert_blocks
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
      experts: those of them that have experts.
    """

    num_ranks: int
    blocks: tuple[int, ...]
    experts: tuple[int, ...]

    def on_rank(self, rank: int) -> tuple[int, int]:
        """Blocks of one rank with experts, and all."""
        return sum(self.experts[rank :: self.num_ranks]), sum(self.blocks[rank :: self.num_ranks])

    @property
    def routers_passed(self) -> int:
        """Routers whose values reach the last stage from others."""
        return sum(self.experts[:-1])

    @property
    def ranks(self) -> tuple[ShardCounts, ...]:
        """What the ranks have that may have most of something: the first, the fullest of those between, and the last."""
        last, total = self.num_ranks - 1, sum(self.blocks)
        between = max(range(1, last), key=self.on_rank, default=None)
        chosen = (0, last) if between is None else (0, between, last)
        here = ((rank, *self.on_rank(rank)) for rank in dict.fromkeys(chosen))
        return tuple(ShardCounts(blocks, int(r == 0), int(r == last), total, experts) for r, experts, blocks in here)


@lru_cache(maxsize=4096)
def _cut(costs: tuple[float, ...], loose: frozenset[int], head: float, num_stages: int) -> tuple[int, ...]:
    """Blocks of every stage; a loose one, of which there is no second, begins no stage."""
    begins = [i for i in range(len(costs)) if i not in loose]
    own = [costs[i] for i in begins]
    own[0] += sum(costs[: begins[0]])
    own[-1] += sum(costs[begins[-1] + 1 :]) + head
    ends = [0, *(begins[i] for i in balanced(own, num_stages)), len(costs)]
    return tuple(b - a for a, b in pairwise(ends))


def stages_of(config: DecoderLike, plan: Plan, degrees: dict[str, int]) -> Stages:
    """How a plan's pipeline cuts a model: between blocks, by balanced numbers of multiplications.

    Raises:
      ValueError: when there are fewer blocks than stages.
    """
    ranks, experts = degrees.get(AXIS, 1), expert_blocks(config)
    if plan.pipe is None or ranks == 1:
        return Stages(1, (config.num_layers,), (sum(experts),))
    count, loose = plan.pipe.num_stages(ranks), frozenset(i for i, own in enumerate(experts) if experts.count(own) == 1)
    loose = loose if any(experts) else frozenset()
    if config.num_layers - len(loose) < count:
        alike = f" ({len(loose)} of another kind alone)" if loose else ""
        raise ValueError(f"{config.num_layers} blocks{alike} cannot be cut into {count} stages (pipe={ranks})")
    costs = {own: block_products(config, experts=own, resting=True) for own in set(experts)}
    head = 0.0 if config.tie_embeddings else head_products(config)
    blocks = _cut(tuple(costs[own] for own in experts), loose, head, count)
    starts = [0, *accumulate(blocks)]
    return Stages(ranks, blocks, tuple(sum(experts[a:b]) for a, b in pairwise(starts)))


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
