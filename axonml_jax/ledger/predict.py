"""What a plan will hold and send, from the shapes of a model alone."""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

import jax.numpy as jnp

from axonml_jax.base import bytes_meant, lines, section, size_in_words
from axonml_jax.cost.base import LATER, Flow, Run, ShardCounts, TickCounts, merged, splitting
from axonml_jax.cost.decoder import Amount, DecoderLike, exact, layer_degrees, problems
from axonml_jax.cost.flows import (
    SplitAttention,
    Stages,
    bubble,
    expert_flops,
    recomputed_flops,
    stage_costs,
    stages_of,
    timetable_of,
)
from axonml_jax.cost.memory import (
    Memory,
    Step,
    attention_problems,
    attention_work,
    compute_dtype,
    flows,
    held,
    passes,
    resting,
    weights_of,
)
from axonml_jax.cost.published import experts_traffic, pipeline_traffic, tensor_traffic, weight_traffic
from axonml_jax.ledger.count import PADDING, SCALARS, Collective, PrintedTable, axes_table, number
from axonml_jax.mesh.axes import AXES, LAYER_AXES, as_axes, flat_axes
from axonml_jax.parallel.plan import Plan
from axonml_jax.pipeline.schedules import AXIS
from axonml_jax.pipeline.timetable import StageCosts, Timetable
from axonml_jax.strategies.strategy import Fabric, LocalRounds

if TYPE_CHECKING:
    from axonml_jax.ledger.pictures import Kept

# --------------------------------------------------------------------------------------------------
# `Prediction`: what a plan will hold, send and compute, as a value that prints as tables, compares and goes to JSON.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The ledger of a plan from shapes alone.

    Attributes:
      degrees: of the mesh.
      plan: how the step runs, in words.
      memory: bytes per device.
      traffic: collectives by what they move, the heaviest first. One of a dispatch's later rounds, which even loads do not
        need, is among them, as in a traced step; sums leave it out.
      minimum: bytes per rank and step of the published algorithm, by label: gradients+parameters (ZeRO), activations+cotangents
        (pipeline), layers (Megatron, Korthikanti et al., AxoNN), experts (every token to its k experts and back).
      bubble: idle time of a pipeline's ranks over useful time.
      ticks: rows of the pipeline's timetable; 0 without one.
      microbatches: of one update, on one batch shard.
      params: parameters of the whole model.
      tokens: of one update, over all devices.
      layers: blocks of the model.
      flops_per_token: of forward and backward, recomputation left out.
      recomputed_flops_per_token: what recomputation adds.
      causal_balance: causal attention work of the busiest rank over the mean.
      masked_flops_per_token: the part of flops_per_token that attention skips, as masks hide whole tiles.
      attention_again: how often attention's forward is recomputed, from 0 to 1.
      blockwise_flops_per_token: the part of flops_per_token in attention that is computed in blocks without a kernel.
      pairs_per_token: pairs of positions per token that attention kernels, or blocks, compute, over all heads and layers.
      passes: bytes that a device reads and writes between products in a step (see `cost.memory.passes`).
      expert_flops_per_token: FLOPs per token of the experts that it is sent to, recomputation included.
      expert_padding: rows that a rank's experts multiply over its share of pairs; 0: as many as others send.
      notes: what the numbers leave out, in words.
      timetable: the pipeline's schedule; None without a pipeline.
      stage_costs: multiplications per token of the timetable's stages.
      ways: predictions of the plan by what its blocks keep, for `curve`; None: `curve` is empty.
    """

    degrees: Mapping[str, int]
    plan: str
    memory: Memory
    traffic: tuple[Flow, ...]
    minimum: Mapping[str, Amount]
    bubble: float
    ticks: int
    microbatches: int
    params: int
    tokens: int
    layers: int
    flops_per_token: int
    recomputed_flops_per_token: int
    causal_balance: float = 1.0
    masked_flops_per_token: float = 0.0
    attention_again: float = 0
    blockwise_flops_per_token: float = 0.0
    pairs_per_token: float = 0.0
    passes: float = 0.0
    expert_flops_per_token: float = 0.0
    expert_padding: float = 0.0
    notes: tuple[str, ...] = ()
    timetable: Timetable | None = field(default=None, repr=False)
    stage_costs: StageCosts | None = field(default=None, repr=False)
    ways: "Ways | None" = field(default=None, repr=False, compare=False)

    @property
    def pipelined(self) -> bool:
        """Whether stages lie along a pipeline."""
        return self.timetable is not None

    @property
    def total_bytes(self) -> Amount:
        """Bytes that one rank sends in one step, with equal loads of experts."""
        return exact(sum(flow.wire_bytes for flow in self._even))

    @property
    def _even(self) -> list[Flow]:
        return [flow for flow in self.traffic if flow.where != LATER]

    @property
    def bytes_by_axes(self) -> dict[tuple[str, ...], Amount]:
        """`total_bytes` by mesh axes."""
        totals: dict[tuple[str, ...], Amount] = {}
        for flow in self._even:
            totals[flow.axes] = exact(totals.get(flow.axes, 0) + flow.wire_bytes)
        return totals

    @property
    def ratios(self) -> dict[str, tuple[Amount, Amount, float | None]]:
        """(sent, published, their ratio) of every label for which an algorithm is published."""
        found = {}
        for name, least in self.minimum.items():
            labels = {"layers": ("layers",)}.get(name, name.split("+"))
            sent = exact(sum(flow.wire_bytes for flow in self._even if (flow.label or "layers") in labels))
            found[name] = (sent, least, float(sent / least) if least else None)
        return found

    @property
    def again(self) -> float:
        """Recomputed FLOPs over those of forward and backward."""
        return self.recomputed_flops_per_token / self.flops_per_token

    @property
    def curve(self) -> "tuple[Kept, ...]":
        """Memory of a device against recomputed FLOPs, for choices of what blocks keep; the most memory first."""
        return () if self.ways is None else self.ways.curve()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "mesh": dict(self.degrees),
            "plan": self.plan,
            "memory": {
                **self.memory.by_kind(),
                "arguments": self.memory.arguments,
                "temporaries": self.memory.temporaries,
                "total": self.memory.total,
            },
            "traffic": [
                {**asdict(flow), "axes": list(flow.axes), "wire_bytes": float(flow.wire_bytes)} for flow in self.traffic
            ],
            "total_bytes": float(self.total_bytes),
            "against_theory": {
                name: {"sent": float(sent), "minimum": float(least), "ratio": ratio}
                for name, (sent, least, ratio) in self.ratios.items()
            },
            **{name: getattr(self, name) for name in _NUMBERS},
            "masked_flops_per_token": float(self.masked_flops_per_token),
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def save_picture(self, path: Any, *, model: str = "", budget: float | None = None) -> None:
        """Draws memory by kind, traffic by axis, and memory against recomputation; needs the `plots` extra.

        Args:
          path: of the file; its suffix chooses the format.
          model: its name, for the title.
          budget: bytes that a device may use, drawn as a line.
        """
        from axonml_jax.ledger.pictures import draw

        draw(self, path, model=model, budget=budget)

    @property
    def headline(self) -> str:
        """The size of the model, the mesh and the plan in words."""
        mesh = " x ".join(f"{axis} {ranks}" for axis, ranks in self.degrees.items()) or "one device"
        return f"{self.params:,} parameters on {mesh}; {self.plan}"

    def __str__(self) -> str:
        return "\n\n".join([self.headline, *map(str, self._tables), *self._said])

    def _repr_html_(self) -> str:
        pictures = [] if self.timetable is None else [self.timetable._repr_html_()]
        tables = [table._repr_html_() for table in self._tables]
        return section(self.headline, *tables, *map(lines, self._said), *pictures)

    @property
    def _tables(self) -> list[PrintedTable]:
        sent = [self._traffic_table(), self._axes_table()] if self.traffic else []
        known = [self._theory_table()] if any(self.minimum.values()) else []
        return [self._memory_table(), *sent, *known]

    @property
    def _said(self) -> list[str]:
        return [self._work(), *(f"note: {note}" for note in self.notes)]

    def _memory_table(self) -> PrintedTable:
        kinds, total = self.memory.by_kind(), self.memory.total
        rows = [[name, f"{size / 2**20:,.1f}"] for name, size in kinds.items()]
        rows += [["at the fullest moment", f"{total / 2**20:,.1f}"]]
        shares = [size / max(total, *kinds.values(), 1) for size in (*kinds.values(), total)]
        return PrintedTable(["memory per device", "MiB"], rows, left=1, shares=shares)

    def _traffic_table(self) -> PrintedTable:
        header = ["label", "collective", "axes", "dtype", "where", "launches", "elements", "bytes/rank"]
        rows = [row for flow in self.traffic for row in _flow_rows(flow)]
        return PrintedTable(header, rows, left=5)

    def _axes_table(self) -> PrintedTable:
        return axes_table({",".join(axes): sent for axes, sent in self.bytes_by_axes.items()}, self.total_bytes)

    def _theory_table(self) -> PrintedTable:
        rows = [
            [name, number(sent), number(least), "-" if ratio is None else f"{ratio:.4f}"]
            for name, (sent, least, ratio) in self.ratios.items()
            if least
        ]
        return PrintedTable(["against published", "bytes/rank", "published", "ratio"], rows, left=1)

    def _work(self) -> str:
        more = [f"and {self.recomputed_flops_per_token:,} again"] if self.recomputed_flops_per_token else []
        more += [f"but {self.masked_flops_per_token:,.0f} that masks hide"] if self.masked_flops_per_token else []
        again = f" ({', '.join(more)})" if more else ""
        lines = [f"{self.tokens:,} tokens per update, {self.flops_per_token:,} FLOPs per token{again}"]
        if self.causal_balance > 1:
            lines.append(f"causal attention: the busiest rank computes {self.causal_balance:.2f} times the mean")
        if self.ticks:
            lines.append(f"pipeline: {self.ticks} ticks, bubble {self.bubble:.1%} of the useful time")
        return "\n".join(lines)


_NUMBERS = (
    *("bubble", "ticks", "microbatches", "params", "tokens", "layers", "flops_per_token", "recomputed_flops_per_token"),
    *("causal_balance", "expert_flops_per_token"),
)
"""Attributes of a prediction that `to_dict` takes as they are."""


def _flow_rows(flow: Flow) -> Iterator[list[str]]:
    """The rows of a flow in a table: one, and one of its padding, which has no launches."""
    place = flow.where if flow.times == 1 else f"{flow.where} ({flow.times})"
    ranks = f"{','.join(flow.axes)} ({flow.group_size})"
    parts = [(flow.label or "layers", flow.count, flow.elements - flow.padding, flow.wire_bytes - flow.padding_bytes)]
    parts += [(PADDING, 0, flow.padding, flow.padding_bytes)] if flow.padding else []
    for label, count, elements, sent in parts:
        counts = (number(count), number(elements * flow.times), number(exact(sent)))
        yield [label, flow.kind, ranks, flow.dtype, place, *counts]


# --------------------------------------------------------------------------------------------------
# Compares a prediction with the program it predicts: traffic by what is moved, memory as the compiler planned it.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Disagreement:
    """Collectives of one kind that prediction and program count differently.

    Attributes:
      label, kind, axes, dtype: of the collectives.
      predicted: (launches, elements, bytes per rank) of one step.
      found: the same numbers in the program.
    """

    label: str
    kind: str
    axes: tuple[str, ...]
    dtype: str
    predicted: tuple[int, int, Amount]
    found: tuple[int, int, Amount]

    def __str__(self) -> str:
        what = f"{self.label or 'layers'}: {self.kind} of {self.dtype} over {','.join(self.axes)}"
        show = lambda counts: f"{counts[0]:,} launches, {counts[1]:,} elements, {float(counts[2]):,.0f} bytes"
        return f"{what}: predicted {show(self.predicted)}; found {show(self.found)}"


def difference(prediction: Prediction, collectives: Iterable[Collective]) -> list[Disagreement]:
    """Lists the differences between predicted and traced traffic; empty when they agree.

    Args:
      prediction: of the plan.
      collectives: of the step, traced (`collectives_in`, or a report's). Over one rank nothing is sent and nothing compared.

    Returns:
      A sorted list of `Disagreement`.
    """
    ours: dict[tuple, tuple] = {}
    for flow in prediction.traffic:
        key = (flow.label, flow.kind, tuple(sorted(flow.axes)), flow.dtype)
        ours[key] = _add(ours.get(key), (flow.count, flow.elements * flow.times, flow.wire_bytes))
    theirs: dict[tuple, tuple] = {}
    for entry in collectives:
        if entry.counted and entry.group_size != 1:
            label = "" if entry.label == SCALARS else entry.label
            key = (label, entry.kind, tuple(sorted(entry.axes)), entry.dtype)
            more = (entry.executions * entry.leaves, entry.executions * entry.elements, entry.step_wire_bytes)
            theirs[key] = _add(theirs.get(key), more)
    nothing = (0, 0, 0)
    return sorted(
        Disagreement(*key, predicted=ours.get(key, nothing), found=theirs.get(key, nothing))
        for key in ours.keys() | theirs.keys()
        if ours.get(key, nothing) != theirs.get(key, nothing)
    )


def _add(a: tuple | None, b: tuple) -> tuple:
    return b if a is None else (a[0] + b[0], a[1] + b[1], exact(Fraction(a[2]) + b[2]))


@dataclass(frozen=True, slots=True)
class MemoryDifference:
    """Predicted and planned bytes of one device.

    Attributes:
      arguments: (predicted, planned) bytes that rest.
      temporaries: (predicted, planned) bytes that the step needs more.
    """

    arguments: tuple[int, int]
    temporaries: tuple[int, int]

    @property
    def ratios(self) -> tuple[float, float]:
        """Planned over predicted, of arguments and of temporaries."""
        return tuple(found / told if told else float("inf") for told, found in (self.arguments, self.temporaries))  # pyright: ignore[reportReturnType]

    def __str__(self) -> str:
        rows = zip(("arguments", "temporaries"), (self.arguments, self.temporaries), self.ratios, strict=True)
        return "\n".join(
            f"{name:<12} predicted {told / 2**20:,.1f} MiB, planned {found / 2**20:,.1f} MiB, ratio {ratio:.3f}"
            for name, (told, found), ratio in rows
        )


def memory_difference(prediction: Prediction, compiled: Any) -> MemoryDifference:
    """Predicted memory beside what a compiled step plans.

    Args:
      prediction: of the plan.
      compiled: anything with `memory_analysis()`, such as `step.lower(state, batch).compile()`.
    """
    planned, memory = compiled.memory_analysis(), prediction.memory
    resting = planned.argument_size_in_bytes + getattr(planned, "host_argument_size_in_bytes", 0)
    return MemoryDifference((memory.arguments, resting), (memory.temporaries, planned.temp_size_in_bytes))


# --------------------------------------------------------------------------------------------------
# From a plan and a decoder's configuration to its prediction.
# --------------------------------------------------------------------------------------------------


T = TypeVar("T")

REMATS: tuple[str | None, ...] = (None, "selective", "full")
"""Words of recomputation, from the most memory to the least."""


@dataclass(frozen=True)
class Ways:
    """Predictions of a plan by what its blocks keep for the backward.

    Some blocks recompute by one word of `REMATS`, the others by the word before it. Blocks in one loop all keep the same, which
    is counted in thirds of a block. All stages of a pipeline are taken to have as many blocks of each word as the fullest one.

    Attributes:
      plan: without recomputation.
      model: the transformer's configuration.
      degrees: of the mesh.
      given: the other arguments of `predict`.
    """

    plan: Plan
    model: DecoderLike
    degrees: Mapping[str, int]
    given: Mapping[str, Any]

    @property
    def loops(self) -> bool:
        """Whether all blocks are one loop."""
        return self.model.scan_layers and self.degrees.get(AXIS, 1) == 1

    @property
    def total(self) -> int:
        """The number of units that choose: the blocks of the longest stage, or three parts of a loop's block."""
        return 3 if self.loops else max(stages_of(self.model, self.plan, dict(self.degrees)).blocks)

    def of(self, word: int, blocks: int | None = None, sends: float = 0) -> Prediction:
        """The prediction with this many blocks that recompute by a word, the rest by the word before.

        Args:
          word: index in `REMATS`.
          blocks: how many of `total`; None: all.
          sends: most bytes of activations that a loop may keep in the host's memory.
        """
        blocks, total = self.total if blocks is None else blocks, self.total
        parts = (Fraction(blocks, total), Fraction(total - blocks, total))
        again = dict(zip((REMATS[word], REMATS[word - 1]), parts, strict=True)) if word else {}
        return _predict(self.plan, self.model, self.degrees, again=again, sends=sends, **self.given)

    def in_words(self, word: int, blocks: int) -> str:
        """Says in words by what so many blocks recompute, and by what the others do."""
        if blocks == self.total:
            return f"remat={REMATS[word]!r}"
        what = "thirds of the loop's block" if self.loops else "blocks"
        others = f", {REMATS[word - 1]!r} in the others" if word > 1 else ""
        return f"remat={REMATS[word]!r} in {blocks} of {self.total} {what}{others}"

    def curve(self, steps: int = 6) -> "tuple[Kept, ...]":
        """Points from everything kept to everything recomputed, `steps` per word, without those that another dominates."""
        from axonml_jax.ledger.pictures import Kept

        shares = sorted({-(-self.total * i // steps) for i in range(1, steps + 1)})
        ways = [(0, self.total), *((word, blocks) for word in range(1, len(REMATS)) for blocks in shares)]
        named = lambda word, blocks: f"{REMATS[word]}" if blocks == self.total else ""
        points = [Kept(each.memory.total, each.again, named(*way)) for way in ways for each in [self.of(*way)]]
        points.sort(key=lambda point: (point.again, point.memory))
        return tuple(p for i, p in enumerate(points) if all(p.memory < before.memory for before in points[:i]))


def _within(ways: Ways, memory: Any) -> Prediction:
    """The prediction of a plan with `memory=`: the fewest blocks recompute with which it fits.

    When a step is traced the choice is made anew. A budget that is a share of a device has no number of bytes here, and nothing
    is recomputed. Where no word fits, blocks in a loop send activations to the host, as many as the link takes and the budget
    allows.
    """
    size = bytes_meant(memory) if isinstance(memory, str) else memory
    budget, total = math.inf if size is None or size <= 1 else size, ways.total
    fits = lambda found: found.memory.total <= budget
    loops = ways.loops and math.isfinite(budget)
    there = (0, budget) if loops and ways.of(len(REMATS) - 1, sends=budget).memory.kept_on_host else (0,)
    all_alike = [(word, sends) for sends in there for word in range(len(REMATS))]
    word, sends = next((way for way in all_alike if fits(ways.of(way[0], sends=way[1]))), all_alike[-1])
    blocks = total if not word or sends else bisect_left(range(total), True, key=lambda n: fits(ways.of(word, n)))
    found, how = ways.of(word, blocks, sends), f"this is of {ways.in_words(word, blocks)}"
    how += f", and {size_in_words(found.memory.kept_on_host)} of what is kept in the host's memory" if sends else ""
    said = f"what is recomputed within memory={memory!r} is chosen when a step is traced: {how}"
    said += "" if fits(found) else ", which is predicted not to fit"
    return replace(found, notes=(*found.notes, said))


def predict(
    plan: Plan,
    model: DecoderLike,
    degrees: Mapping[str, int],
    *,
    global_batch: int,
    length: int | None = None,
    moments: int = 2,
    platform: str | None = None,
    torus: int = 0,
    documents: bool = False,
) -> Prediction:
    """Predicts memory, traffic, bubble and FLOPs of a training step from shapes alone.

    Args:
      plan: how the step runs.
      model: the transformer's configuration; it says how its layers split too.
      degrees: of the mesh.
      global_batch: sequences per update.
      length: of a sequence; None: the longest the model takes.
      moments: values that the optimizer keeps per parameter (Adam 2, Lion 1, SGD 0).
      platform: what it will be compiled for, "tpu" or "cuda", whose attention kernels hold no scores; others: no kernels.
      torus: dims of the torus that the devices form, which decides on the hops of FSDP's collectives; 0: none.
      documents: whether rows hold several documents (`segment_ids` and `positions` beside tokens and targets).

    Raises:
      ValueError: listing every reason why the plan cannot run.
    """
    given = {"global_batch": global_batch, "length": length, "moments": moments}
    least = {"global_batch": 1, "length": 1, "moments": 0}
    if wrong := [
        f"{name}={size} is less than {least[name]}"
        for name, size in given.items()
        if size is not None and size < least[name]
    ]:
        raise ValueError(f"this plan cannot run: {'; '.join(wrong)}")
    given |= {"platform": platform, "torus": torus, "documents": documents}
    ways = Ways(replace(plan, memory=None, remat=None), model, degrees, given)
    found = _predict(plan, model, degrees, **given) if plan.memory is None else _within(ways, plan.memory)
    return replace(found, ways=ways)


def _predict(
    plan: Plan,
    model: DecoderLike,
    degrees: Mapping[str, int],
    *,
    global_batch: int,
    length: int | None,
    moments: int,
    platform: str | None,
    torus: int,
    documents: bool,
    again: Mapping[str | None, Fraction] | None = None,
    sends: float = 0,
) -> Prediction:
    """See `predict`.

    Args:
      again: word of `REMATS` -> the share of the blocks that recompute by it; None: all by the plan's.
      sends: most bytes of activations that blocks in a loop may keep in the host's memory.
    """
    degrees = {axis: degrees[axis] for axis in (*AXES, *flat_axes(plan.axes)) if axis in degrees}
    plan = plan.decided(Fabric(devices=math.prod(degrees.values()), torus=torus), degrees)
    length = model.max_length if length is None else length
    rows = _sequences(plan, model, degrees, global_batch, length)
    stages, timetable = stages_of(model, plan, degrees), timetable_of(plan, degrees)
    step = _step(plan, model, degrees, stages, timetable, rows, length)
    step = replace(step, platform=platform, documents=documents, run=replace(step.run.recomputing(again), sends=sends))
    model = step.model
    if wrong := [*attention_problems(step), *_rounding_problems(plan, model, degrees)]:
        raise ValueError(f"this plan cannot run: {'; '.join(wrong)}")
    masked, blockwise, pairs = attention_work(step)
    memory = held(step, moments=moments, offload=plan.offload, in_ticks=plan.pipe is not None and plan.pipe.in_ticks)
    flops, costs = model.flops_per_token(length), stage_costs(model, stages.blocks, stages.experts, step.run, length)
    return Prediction(
        degrees={axis: ranks for axis, ranks in degrees.items() if ranks > 1},
        plan=in_words(plan, degrees, model),
        memory=_counted(memory),
        traffic=tuple(map(_counted, merged(flows(step)))),
        minimum=_minimum(plan, step),
        bubble=bubble(timetable, costs),
        ticks=0 if timetable is None else timetable.num_ticks,
        microbatches=plan.microbatches,
        params=model.num_params,
        tokens=global_batch * length,
        layers=model.num_layers,
        flops_per_token=flops,
        recomputed_flops_per_token=int(recomputed_flops(model, step.run, length)),
        causal_balance=1.0 if step.attention is None else step.attention.balance,
        masked_flops_per_token=masked,
        attention_again=float(step.run.recomputes),
        blockwise_flops_per_token=blockwise,
        pairs_per_token=pairs,
        passes=float(passes(step)),
        expert_flops_per_token=float(expert_flops(model, step.run)),
        expert_padding=0.0 if step.experts is None else step.experts.padded,
        notes=_notes(plan, degrees, timetable, memory, step),
        timetable=timetable,
        stage_costs=None if timetable is None else costs,
    )


def _counted(one: T) -> T:
    """Rounds a dataclass's fractions of bytes and launches, as shares of blocks make them, up to whole numbers."""
    parts = {each.name: getattr(one, each.name) for each in fields(one)}  # pyright: ignore[reportArgumentType]
    return replace(one, **{name: math.ceil(value) for name, value in parts.items() if isinstance(value, Fraction)})  # pyright: ignore


def _step(
    plan: Plan,
    model: DecoderLike,
    degrees: dict[str, int],
    stages: Stages,
    timetable: Timetable | None,
    rows: int,
    length: int,
) -> Step:
    """The step of a plan, with `rows` sequences on every rank; stages of a pipeline run a loop's trips one by one."""
    stacked = timetable is not None and model.scan_layers
    model = replace(model, scan_layers=False) if stacked else model  # pyright: ignore[reportArgumentType]
    return Step(
        model=model,
        degrees=degrees,
        run=replace(Run.of(plan, degrees), rows=stacked),
        weights=weights_of(model, plan, degrees),
        ranks=stages.ranks,
        rows=rows,
        length=length,
        compute=compute_dtype(model, plan.precision.compute),
        ticks=None if timetable is None else TickCounts.of(timetable),
        stage_blocks=max(stages.blocks),
        chunks=1 if plan.pipe is None else plan.pipe.chunks,
        attention=SplitAttention.of(plan, model, degrees, length),
        routers_passed=stages.routers_passed,
    )


def _sequences(plan: Plan, model: DecoderLike, degrees: Mapping[str, int], global_batch: int, length: int) -> int:
    """Sequences per rank and update.

    Raises:
      ValueError: listing everything that does not divide or go together.
    """
    roles = {axis: strategy.role for axis, strategy in plan.on(degrees).items()}
    shards, positions = (math.prod(degrees[axis] for axis in splitting(roles, what)) for what in ("rows", "positions"))
    parts, cuts = shards * plan.microbatches, plan.batch_layout(degrees).position_parts
    found = problems(model, degrees, length // positions)
    if global_batch % parts:
        found.append(f"{global_batch} sequences do not divide into {shards} shards of {plan.microbatches} microbatches")
    if length % cuts:
        found.append(f"{length} positions do not divide into {cuts} parts over {positions} ranks")
    if length > model.max_length:
        found.append(f"sequences of {length} are longer than the model's {model.max_length}")
    if degrees.get(AXIS, 1) > 1 and plan.pipe is None:
        found.append(f"pipe={degrees[AXIS]} without a pipeline in the plan: give it pipe=ax.Pipelined(...)")
    if found:
        raise ValueError(f"this plan cannot run: {'; '.join(found)}")
    return global_batch // shards


def _rounding_problems(plan: Plan, model: DecoderLike, degrees: Mapping[str, int]) -> list[str]:
    """Why products cannot be rounded to 8 bits as on one device; for traced programs `layers/float8.py` finds it."""
    own, precision = layer_degrees(model, degrees), plan.precision
    inside = {
        "sequence_parallel": model.sequence_parallel and own.get("tensor", 1) > 1,
        "depth": own.get("depth", 1) > 1,
    }
    if precision.products is None or precision.products_kept or not any(inside.values()):
        return []
    named = ", ".join(name for name, holds in inside.items() if holds)
    return [
        f"products={precision.products!r} reaches no products under {named}: leave these out, or use precision='bf16'"
    ]


def _minimum(plan: Plan, step: Step) -> dict[str, Amount]:
    """Bytes per rank and step that the published algorithms send, by label."""
    degrees, model, run = step.degrees, step.model, step.run
    weights = max(_minimum_of_weights(plan, step, parts) for parts in step.ranks)
    found: dict[str, Amount] = {"gradients+parameters": exact(weights)}
    whole, item = step.tokens * model.hidden_size, jnp.dtype(step.compute).itemsize
    if (tensor := layer_degrees(model, degrees).get("tensor", 1)) > 1:
        found["layers"] = exact(tensor_traffic(step.fullest.blocks, run.microbatches, whole, item, tensor))
    if step.experts is not None and step.experts.ranks > 1:
        layers = step.fullest.experts * run.microbatches
        found["experts"] = exact(layers * experts_traffic(whole, step.experts.top_k, item, step.experts.ranks))
    if step.ticks is not None:
        passed = whole // (tensor if model.sequence_parallel else 1)
        found["activations+cotangents"] = pipeline_traffic(step.chunks, run.microbatches, passed, item)
    return found


def _minimum_of_weights(plan: Plan, step: Step, parts: ShardCounts) -> Fraction:
    """ZeRO's bytes for the weights that rest on a pipeline rank."""
    total = Fraction(0)
    for group in step.weights.groups:
        number = resting(group, parts)
        if number:
            whole = group.read * math.prod(step.degrees[axis] for axis in group.axes if axis in LAYER_AXES)
            total += number * weight_traffic(plan, step.degrees, whole, group.axes, group.rest_dtype, group.trained)
    return total


def in_words(plan: Plan, degrees: Mapping[str, int], model: DecoderLike) -> str:
    """A plan in a few words."""
    words = []
    for axis, strategy in plan.on(degrees).items():
        usual = axis == "data" and strategy.role.parameters == "whole" and not strategy.having(LocalRounds)
        if strategy.role.parameters != "layers" and not usual and any(degrees[name] > 1 for name in as_axes(axis)):
            words.append(strategy.in_words(axis))
    if plan.pipe is not None and degrees.get(AXIS, 1) > 1:
        words.append(plan.pipe.in_words)
    words.append(f"{plan.microbatches} microbatches" if plan.microbatches > 1 else "1 microbatch")
    if model.sequence_parallel and degrees.get("tensor", 1) > 1:
        words.append("sequence parallel")
    words += [f"{plan.remat if isinstance(plan.remat, str) else 'chosen'} recomputation"] if plan.remat else []
    words += [f"recomputation within {plan.memory}"] if plan.memory is not None else []
    words += [f"offload {plan.offload.value}"] if plan.offload.value != "none" else []
    words += [f"computing in {plan.precision.compute}"] if plan.precision.compute else []
    words += [f"products of {plan.precision.products}"] if plan.precision.products else []
    return ", ".join(words)


def _notes(
    plan: Plan, degrees: Mapping[str, int], timetable: Timetable | None, held: Memory, step: Step
) -> tuple[str, ...]:
    found = {
        "what attention sends of other ranks' keys and values is not counted": (
            step.attention is None and any(degrees[axis] > 1 for axis, _ in plan.batch_layout(degrees).positions)
        ),
        "nothing is sent along an axis under NO_SYNC: its ranks train models of their own": plan.independent,
        **{
            f"rows of every {each.every} steps happen in the last of these, and their bytes are the mean over them": each.every
            > 1
            for each in plan.rounds.values()
        },
        "what layers send is counted for the microbatches that a stage works on; a trace counts every tick's dearest branch": (
            timetable is not None and any(degrees.get(axis, 1) > 1 for axis in LAYER_AXES)
        ),
        "experts get equal loads: of the rounds that other loads need one is listed, as a trace counts it, and is in no sum": (
            step.experts is not None
            and step.experts.capacity is None
            and step.experts.ranks > 1
            and not step.experts.gathers
        ),
        "the bubble is that of the stages' matrix products, the head's on the last": timetable is not None,
        "products of fp8 are as long as those of bfloat16 here: where devices have units for them, they take less time": (
            plan.precision.products is not None
        ),
        f"{held.host:,} bytes rest in host memory; the update brings them to the device "
        + ("in pieces" if timetable is None else "at once"): bool(held.host),
    }
    return tuple(note for note, holds in found.items() if holds)
