"""A first price of every way to run, many meshes at once: flows and memory are the ledger's own lists, with arrays in them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from axonml_jax.cost.amounts import Many, divided
from axonml_jax.cost.decoder.cuts import stages_of
from axonml_jax.cost.decoder.split_attention import SplitAttention
from axonml_jax.cost.decoder.work import expert_flops, recomputed_flops, stage_costs
from axonml_jax.cost.flow import Flow, joined
from axonml_jax.cost.held import Memory
from axonml_jax.cost.passing import TickCounts
from axonml_jax.cost.rounds import Run, ShardCounts, splitting
from axonml_jax.cost.step_cost import Step, attention_work, flows, held
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.pipeline.policy import Pipelined
from axonml_jax.parallel.pipeline.schedules.schedule import PipelineSchedule
from axonml_jax.parallel.plan import Plan
from axonml_jax.planner.candidate import Question
from axonml_jax.planner.legal import Way, candidate
from axonml_jax.planner.price import price
from axonml_jax.planner.resting import Placing, Resting, spread, weights_together

Meshes = Sequence[tuple[dict[str, int], tuple[Way, ...]]]
"""Degrees, and the ways to run on them."""

AT_ONCE = 2**15
"""Candidates that are priced together: their arrays stay in a core's cache."""


def quick(
    meshes: Meshes, asked: Question, offload: CPUOffload = CPUOffload.NONE
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(seconds, bytes) of the ways on every mesh.

    Ways of one discrete choice, on all meshes over which weights rest alike, have one list of flows and one of what is held,
    whose sizes and counts are arrays. Bytes are the ledger's (see `TickCounts.foreseen` for pipelines), and seconds those of
    the ledger's price but for a pipeline's bubble.
    """
    found = [(np.zeros(len(ways)), np.zeros(len(ways))) for _, ways in meshes]
    for together in alike(meshes, asked):
        many = candidates_of(together, asked, offload)
        total = sum(len(each.columns.at) for each in together)
        seconds = np.broadcast_to(price(many, asked.hardware, asked.assumptions).time, total)
        memory, start = np.broadcast_to(many.memory.total, total), 0
        for each in together:
            end = start + len(each.columns.at)
            for own, of_all in zip(found[each.number], (seconds, memory), strict=True):
                own[each.columns.at] = of_all[start:end]
            start = end
    return found


class WayColumns:
    """Ways that are one discrete choice: alike in ZeRO's stage and its axes, sequence parallelism and how tokens travel.

    Attributes:
      way: the first.
      at: where they are among all ways of their mesh.
      choice: what they have in common.
      microbatches: per update and rank.
      full, selective: 1 where that is recomputed.
      chunks, gpipe: of a pipeline.
      cuts: kinds of (chunks, recomputation).
      cut: of which kind each is.
    """

    def __init__(self, ways: tuple[Way, ...], at: list[int]):
        own = [ways[i] for i in at]
        column = lambda values: np.array(list(values), float)
        self.way, self.at = own[0], np.array(at)
        self.choice = choice_of(self.way)
        self.microbatches, self.chunks = column(way.microbatches for way in own), column(way.chunks for way in own)
        self.full = column(way.remat == "full" for way in own)
        self.selective = column(way.remat == "selective" for way in own)
        self.gpipe = column(way.schedule is PipelineSchedule.GPIPE for way in own)
        self.cuts = sorted({(way.chunks, way.remat or "") for way in own})
        self.cut = np.array([self.cuts.index((way.chunks, way.remat or "")) for way in own])


def choice_of(way: Way) -> tuple:
    """What decides on the list of a way's flows, but for the mesh."""
    return way.stage, way.shared, way.sequence_parallel, way.method, way.dispatch


def choices(ways: tuple[Way, ...]) -> tuple[WayColumns, ...]:
    """The ways of a mesh by discrete choice."""
    found: dict[tuple, list[int]] = {}
    for i, way in enumerate(ways):
        found.setdefault(choice_of(way), []).append(i)
    return tuple(WayColumns(ways, at) for at in found.values())


def _cut_columns(model: TransformerConfig, pipe: int, columns: WayColumns, length: int) -> np.ndarray:
    """What `_cut` says of every way; [values, ways]."""
    return np.array([_cut(model, pipe, *key, length) for key in columns.cuts]).T[:, columns.cut]


@lru_cache(maxsize=4096)
def _cut(model: TransformerConfig, pipe: int, chunks: int, remat: str, length: int) -> tuple[float, ...]:
    """Of a cut into pipe x chunks stages: the slowest stages' part of all work, the longest stage's blocks, routers passed.

    Then the blocks of the first rank, of the fullest between, and of the last, and those of them that have experts.
    """
    decoder: Any = model
    policy = Pipelined(schedule=PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, num_microbatches=pipe, chunks=chunks)
    if chunks == 1:
        policy = Pipelined(num_microbatches=pipe)
    stages = stages_of(decoder, Plan(pipe=policy), {"pipe": pipe})
    run = Run(roles={}, microbatches=1, full=int(remat == "full"), selective=int(remat == "selective"))
    costs = stage_costs(decoder, stages.blocks, stages.experts, run, length).tables(len(stages.blocks))
    work = np.add(costs["F"], costs["B"]).reshape(chunks, pipe)
    first, *between, last = ((parts.blocks, parts.experts) for parts in stages.ranks)
    blocks, experts = zip(first, (between or [(0, 0)])[0], last, strict=True)
    slowest = float(work.max(axis=1).sum() / work.sum())
    return slowest, max(stages.blocks), stages.routers_passed, *blocks, *experts


@dataclass(frozen=True, slots=True)
class DiscreteChoice:
    """The ways of one discrete choice on one mesh.

    Attributes:
      number: of the mesh.
      degrees: of the mesh, `data` among them.
      columns: the ways.
      placing: the weights.
      cuts: how a pipeline cuts the model (see `_cut_columns`); None without one.
    """

    number: int
    degrees: dict[str, int]
    columns: WayColumns
    placing: Placing
    cuts: np.ndarray | None


def alike(meshes: Meshes, asked: Question) -> Iterator[list[DiscreteChoice]]:
    """Choices that make one list, at most so many candidates together."""
    resting, lists, cuts = Resting(asked), {}, {}
    same = {id(ways): choices(ways) for ways in {id(ways): ways for _, ways in meshes}.values()}
    for number, (given, ways) in enumerate(meshes):
        for columns in same[id(ways)]:
            degrees = candidate(given, columns.way).mesh
            placing = resting.placing(given, columns.way)
            kind = (*columns.choice, tuple(degrees), placing.form, placing.strategies)
            if (pipe := given.get("pipe")) and (pipe, columns) not in cuts:
                cuts[pipe, columns] = _cut_columns(asked.model, pipe, columns, asked.length)
            lists.setdefault(kind, []).append(
                DiscreteChoice(number, degrees, columns, placing, cuts.get((pipe, columns)))
            )
    for together in lists.values():
        starts = np.cumsum([len(each.columns.at) for each in together]) // AT_ONCE
        for batch in np.unique(starts):
            yield [together[i] for i in np.flatnonzero(starts == batch)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What a price is made of (see `Predicted`), for many ways to run at once."""

    degrees: Mapping[str, Many]
    pipelined: bool
    microbatches: Many
    tokens: int
    layers: int
    flops_per_token: int
    recomputed_flops_per_token: Many
    masked_flops_per_token: Many
    attention_again: Many
    blockwise_flops_per_token: Many
    expert_flops_per_token: Many
    expert_padding: Many
    causal_balance: Many
    traffic: Sequence[Flow]
    memory: Memory
    bubble: Many


def candidates_of(
    together: Sequence[DiscreteChoice], asked: Question, offload: CPUOffload = CPUOffload.NONE
) -> Candidates:
    """The candidates of choices that make one list: the one after the other."""
    step, slowest = _step(together, asked)
    run, tokens = step.run, asked.global_batch * asked.length
    masked, blockwise = attention_work(step)
    return Candidates(
        degrees=step.degrees,
        pipelined=run.pipelined,
        microbatches=run.microbatches,
        tokens=tokens,
        layers=asked.model.num_layers,
        flops_per_token=asked.model.flops_per_token(asked.length),
        recomputed_flops_per_token=recomputed_flops(step.model, run, asked.length),
        masked_flops_per_token=masked,
        attention_again=run.recomputes,
        blockwise_flops_per_token=blockwise,
        expert_flops_per_token=expert_flops(step.model, run),
        expert_padding=0.0 if step.experts is None else step.experts.padded,
        causal_balance=1.0 if step.attention is None else step.attention.balance,
        traffic=joined(flows(step)),
        memory=held(step, moments=asked.moments, offload=offload, in_ticks=False),
        bubble=_bubble(step, slowest) if run.pipelined else 0.0,
    )


def _step(together: Sequence[DiscreteChoice], asked: Question) -> tuple[Step, Many]:
    """The step of all these candidates, and the slowest stages' part of all work."""
    repeats, placings = np.array([len(each.columns.at) for each in together]), [each.placing for each in together]
    column = lambda name: np.concatenate([getattr(each.columns, name) for each in together])
    meshes = [each.degrees for each in together]
    degrees = {axis: spread([mesh[axis] for mesh in meshes], repeats) for axis in meshes[0]}
    weights, plan = weights_together(placings, meshes, repeats), placings[0].plan
    roles = {axis: strategy.role for axis, strategy in plan.on(degrees).items()}
    often = {name: column(name) for name in ("microbatches", "full", "selective")}
    run = Run(roles=roles, pipelined="pipe" in degrees, **often)
    shards = math.prod(degrees[axis] for axis in splitting(roles, "rows"))
    layers, chunks = asked.model.num_layers, column("chunks")
    slowest, longest, passed, ticks = 1.0, layers, 0, None
    ranks = [ShardCounts(layers, 1, 1, layers, sum(map(asked.model.has_experts, range(layers))))]
    if run.pipelined:
        slowest, longest, passed, *cuts = np.concatenate(
            [each.cuts for each in together if each.cuts is not None], axis=1
        )
        passed = passed if asked.model.experts is not None else 0
        each = zip(cuts[:3], ((1, 0), (0, 0), (0, 1)), cuts[3:], strict=True)
        ranks = [ShardCounts(own, *ends, layers, experts) for own, ends, experts in each]
        ticks = TickCounts.foreseen(column("gpipe") > 0, degrees["pipe"], run.microbatches, chunks)
    step = Step(
        model=placings[0].model, degrees=degrees, run=run, weights=weights, ranks=ranks,
        rows=divided(asked.global_batch, shards), length=asked.length, compute=asked.dtype, ticks=ticks,
        stage_blocks=longest, chunks=chunks, attention=SplitAttention.of(plan, placings[0].model, degrees, asked.length),
        platform=asked.hardware.platform, routers_passed=passed, documents=asked.documents,
    )  # fmt: skip
    return step, slowest


def _bubble(step: Step, slowest: Many) -> Many:
    """Idle time over useful time, had all ticks of a chunk its slowest stage's length.

    The first and the last ticks fill and drain; where microbatches do not come in groups of the ranks, a chunk waits for the
    rest of a group.
    """
    ranks, count, chunks = step.degrees["pipe"], step.run.microbatches, step.chunks
    missing = ranks * (1 + divided(count - 1, ranks)) - count
    idle = (ranks - 1 + (chunks - 1) * missing) / (ranks * chunks)
    return (count * slowest + idle) * ranks / count - 1
