"""Every legal plan for a number of devices, priced, and the answer."""

import heapq
import itertools
import json
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from axonml_jax.base import aligned, bytes_meant, is_one_of, size_in_words
from axonml_jax.cost.base import (
    Flow,
    Placed,
    Run,
    Setting,
    ShardCounts,
    TickCounts,
    Weights,
    grouped,
    merged_flows,
    split_by_layers,
    splitting,
)
from axonml_jax.cost.decoder import Many, decoder_weights, divided, problems, varies
from axonml_jax.cost.flows import SplitAttention, expert_flops, recomputed_flops, stage_costs, stages_of
from axonml_jax.cost.memory import SENDS, Memory, Step, attention_work, compute_dtype, flows, held, passes
from axonml_jax.ledger.pictures import height, new_figure, panels, put_title, save
from axonml_jax.ledger.predict import REMATS, Prediction, predict
from axonml_jax.mesh.axes import AXES, LAYER_AXES, batch_axes
from axonml_jax.mesh.shape import MeshShape
from axonml_jax.model.loss import Precision
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.context import Context
from axonml_jax.parallel.plan import CPUOffload, Plan
from axonml_jax.pipeline.schedules import Pipelined, PipelineSchedule
from axonml_jax.planner.hardware import (
    FAMILIES,
    SEARCHED,
    SHORTEST,
    Assumptions,
    Hardware,
    SaveAdvice,
    SaveAssumptions,
    advise,
    hardware,
)
from axonml_jax.planner.price import Price, Timeline, price, timeline
from axonml_jax.sharding.layout import Layout, order_parts
from axonml_jax.strategies.replicate import Replicate
from axonml_jax.strategies.shard import Shard
from axonml_jax.strategies.strategy import AbstractStrategy, Fabric, Method, unsplittable

# --------------------------------------------------------------------------------------------------
# A priced plan as a picture: its memory and traffic, and its step on a timeline.
# --------------------------------------------------------------------------------------------------

COLOURS: dict[str, str] = {
    "forward": "#7fb0e3",
    "backward": "#2f6fb2",
    "update": "#6b6b6b",
    "host": "#a0a0a0",
    "parameters": "#eebb66",
    "gradients": "#c0632d",
    "layers": "#85c788",
    "activations": "#86cdb6",
    "cotangents": "#247660",
}
"""Colours of a lane's spans, by name: compute in blues, what is sent in warm and green colours."""

OTHER = "#c9a9d6"
"""The colour of a span with any other name."""


def draw(
    prediction: Prediction, timeline: Timeline, path: str | Path, *, model: str = "", budget: float | None = None
) -> None:
    """Draw memory and traffic, and below them a lane for every line of the timeline.

    Args:
      prediction: what the plan holds and sends.
      timeline: its step.
      path: where; the suffix chooses the format (.svg, .png, .pdf).
      model: its name, for the title.
      budget: bytes that a device may use, drawn as a line.

    Raises:
      ModuleNotFoundError: without matplotlib, which the `plots` extra installs.
    """
    lanes = 1.1 + 0.28 * len(timeline.lanes)
    figure = new_figure(9, height(prediction) + lanes)
    put_title(figure, prediction, model)
    above, below = figure.subfigures(2, 1, height_ratios=(height(prediction), lanes))
    panels(above, prediction, budget)
    _lanes(below.subplots(), timeline)
    save(figure, path)


def _lanes(axes: Any, timeline: Timeline) -> None:
    seen, shortest = set(), timeline.seconds / 700  # about a pixel: what is shorter stays visible
    for row, lane in enumerate(timeline.lanes):
        for name in dict.fromkeys(span.name for span in lane.spans):
            mine = [span for span in lane.spans if span.name == name]
            spans = [(1e3 * span.start, 1e3 * max(span.end - span.start, shortest)) for span in mine]
            label = None if name in seen else name
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=COLOURS.get(name, OTHER), linewidth=0, label=label)
            seen.add(name)
    axes.set(
        title="one step, as the cost model has it", xlabel="ms", xlim=(0, 1e3 * timeline.seconds),
        yticks=range(len(timeline.lanes)), yticklabels=[lane.name for lane in timeline.lanes],
    )  # fmt: skip
    axes.invert_yaxis()
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


# --------------------------------------------------------------------------------------------------
# `Candidate`: one way to run a model on a number of devices; `Question`: the planner's arguments.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a model: everything that the planner decides.

    Attributes:
      degrees: (axis, ranks) of every mesh axis with more than one rank.
      stage: of ZeRO along `fsdp`; 0 without it. For another strategy the stage whose reads and reductions come at the same
        time.
      strategy: another one along `fsdp`; None: `ax.Shard` of the stage.
      method: how attention reads positions of other ranks; None without `context`.
      shared: whether parameters rest sharded over `context` too.
      dispatch: how tokens reach experts on other ranks; None: as the model says.
      microbatches: per update and rank.
      remat: what the backward recomputes.
      memory: bytes within which recomputation is chosen when a step is traced, in place of `remat`; None: `remat` decides.
      sequence_parallel: with `tensor`.
      schedule: of the pipeline; None without `pipe`.
      chunks: stages per rank.
      offload: what rests in host memory.
    """

    degrees: tuple[tuple[str, int], ...]
    stage: int = 0
    microbatches: int = 1
    remat: str | None = None
    memory: int | None = None
    sequence_parallel: bool = False
    schedule: PipelineSchedule | None = None
    chunks: int = 1
    offload: CPUOffload = CPUOffload.NONE
    strategy: AbstractStrategy | None = None
    method: Method | None = None
    shared: bool = False
    dispatch: str | None = None

    def degree(self, axis: str) -> int:
        """Ranks of a mesh axis."""
        return dict(self.degrees).get(axis, 1)

    @property
    def mesh(self) -> dict[str, int]:
        """The degrees in the order of `AXES`, with `data` always, and `fsdp` if parameters rest over both it and `context`."""
        there = {"data": 1, **({"fsdp": 1} if self.shared else {}), **dict(self.degrees)}
        return {axis: there[axis] for axis in AXES if axis in there}

    def plan(self, precision: Any = None) -> Plan:
        """The plan to hand to `ax.parallelize`."""
        pipe = None
        if self.schedule is not None:
            pipe = Pipelined(schedule=self.schedule, num_microbatches=self.microbatches, chunks=self.chunks)
        return Plan(
            mesh=MeshShape(**self.mesh),
            fsdp=self.strategy or (Shard(stage=self.stage) if self.stage else Replicate()),
            context=Context() if self.method is None else Context(method=self.method, shard=self.shared),
            pipe=pipe,
            precision=precision,
            accumulate=1 if pipe else self.microbatches,
            remat=self.remat,  # pyright: ignore[reportArgumentType]
            memory=self.memory,
            offload=self.offload,
        )

    def model(self, config: TransformerConfig) -> TransformerConfig:
        """The model with its layers split as this candidate needs."""
        grid = any(axis in ("row", "col", "depth") for axis, _ in self.degrees)
        chosen: dict[str, Any] = {"split": "grid" if grid else "tensor", "sequence_parallel": self.sequence_parallel}
        if self.dispatch is not None and config.experts is not None:
            dispatch: Any = self.dispatch
            chosen["experts"] = replace(config.experts, dispatch=dispatch)
        # A pipeline runs the trips of a loop one by one; blocks of their own it divides by their cost, not by their number.
        return replace(config, scan_layers=config.scan_layers and self.schedule is None, **chosen)

    def __str__(self) -> str:
        words = [" x ".join(f"{axis} {ranks}" for axis, ranks in self.degrees) or "one device"]
        if self.stage:
            over = " over fsdp*context" if self.shared else ""
            words.append((self.strategy or Shard(stage=self.stage)).in_words("fsdp") + over)
        if self.method is not None:
            own = self.method if isinstance(self.method, str) else f"ulysses of {self.method[0]} x {self.method[1]}"
            words.append(f"attention by {own}")
        words += [f"tokens by {self.dispatch}"] if self.dispatch else []
        if self.schedule is not None:
            words.append(f"{self.schedule.value}{f' x {self.chunks} chunks' if self.chunks > 1 else ''}")
        words.append(f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}")
        words += ["sequence parallel"] if self.sequence_parallel else []
        words += [f"{self.remat} recomputation"] if self.remat else []
        words += [f"recomputation within {size_in_words(self.memory)}"] if self.memory else []
        words += [f"offload {self.offload.value}"] if self.offload.value != "none" else []
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question that a search answers.

    Attributes:
      model: the transformer.
      num_devices: of the job, all of which are used.
      hardware: the kind of devices.
      global_batch: sequences per update.
      length: of a sequence.
      moments: optimizer values per parameter.
      precision: the policy's name, or a `Precision`.
      compute: the dtype of activations; None: as the model's.
      assumptions: of the cost model.
      memory: bytes that a plan may fill on a device.
      strategy: one of the user's own along `fsdp`; None: the stages of ZeRO.
      saves: assumptions about failures, restarts and checkpoints.
      documents: whether rows hold several documents.
      sends: most bytes of activations that blocks in a loop may keep in the host's memory; the link may take fewer.
    """

    model: TransformerConfig
    num_devices: int
    hardware: Hardware
    global_batch: int
    length: int
    moments: int
    precision: Any
    compute: str | None
    assumptions: Assumptions
    memory: float
    strategy: AbstractStrategy | None = None
    saves: SaveAssumptions = SaveAssumptions()
    documents: bool = False
    sends: float = 0

    @property
    def dtype(self) -> str:
        """The name of the dtype of activations."""
        model: Any = self.model
        return compute_dtype(model, self.compute)


# --------------------------------------------------------------------------------------------------
# `Answer`: the plan that was chosen, those that come next, and why the others were dropped.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Priced:
    """A candidate with its prediction and its price."""

    candidate: Candidate
    prediction: Prediction
    price: Price


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the planner found.

    Attributes:
      asked: the question.
      best: the fastest that fits.
      runners_up: the next ones, fastest first.
      illegal: number of meshes that were refused, by reason.
      dropped: number of ways that were dropped, by reason.
      sensitivity: by changed assumption, (the best plan's step time over its price, the plan that would then be best).
    """

    asked: Question
    best: Priced
    runners_up: tuple[Priced, ...]
    illegal: Mapping[str, int]
    dropped: Mapping[str, int]
    sensitivity: Mapping[str, tuple[float, str]]

    @property
    def plan(self) -> Plan:
        """The best plan; it has its mesh's degrees."""
        return self.best.candidate.plan(self.asked.precision)

    @property
    def model(self) -> TransformerConfig:
        """The model with its layers split as the best plan needs."""
        return self.best.candidate.model(self.asked.model)

    @property
    def prediction(self) -> Prediction:
        """The prediction of the best plan: what it holds, sends and computes."""
        return self.best.prediction

    @property
    def timeline(self) -> Timeline:
        """The timeline of the best plan's step."""
        return timeline(self.prediction, self.asked.hardware, self.asked.assumptions)

    @property
    def saving(self) -> SaveAdvice:
        """How often the best plan's job should save, and its expected goodput."""
        asked = self.asked
        return saving_of(self.prediction, self.best.price, asked.num_devices, asked.assumptions, asked.saves)

    def save_picture(self, path: Any, *, model: str = "") -> None:
        """Draw the best plan's memory, traffic and timeline; needs the `plots` extra.

        Args:
          path: of the file; its suffix chooses the format (.svg, .png, .pdf).
          model: its name, for the title.

        Raises:
          ModuleNotFoundError: without matplotlib.
        """
        draw(self.prediction, self.timeline, path, model=model, budget=self.asked.memory)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "devices": self.asked.num_devices,
            "hardware": self.asked.hardware.name,
            "best": _plain(self.best) | {"timeline": self.timeline.to_dict(), "saving": self.saving.to_dict()},
            "runners_up": [_plain(one) for one in self.runners_up],
            "illegal": dict(self.illegal),
            "dropped": dict(self.dropped),
            "sensitivity": {name: {"time": ratio, "best": best} for name, (ratio, best) in self.sensitivity.items()},
        }

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    @property
    def _assumed(self) -> str:
        """The assumptions behind the times, with the flags that change them."""
        given, kind = self.asked.assumptions, self.asked.hardware
        known = kind.sources.get("reached", "measured") if given.efficiency == kind.reached else "not measured"
        return (
            f"  assumed: products reach {given.efficiency:.0%} of {kind.name}'s peak ({known}), and {given.overlap:.0%} of "
            "their time hides parameters and gradients on their way (--efficiency, --overlap)"
        )

    def __str__(self) -> str:
        asked, best = self.asked, self.best.price
        slices = -(-asked.num_devices // asked.hardware.island) if asked.hardware.torus else 1
        islands = f" in {slices} slices" if slices > 1 else ""
        head = (
            f"{asked.model.num_params:,} parameters in {asked.dtype}, {asked.global_batch:,} sequences of {asked.length:,} "
            f"on {asked.num_devices:,} x {asked.hardware.name}{islands} ({asked.memory / 2**30:.1f} GiB each may be filled)"
        )
        rows = [_row(one) for one in (self.best, *self.runners_up)]
        names = ["plan", "ms/step", "MFU", "GiB", "exposed ms", "bubble ms"]
        table = aligned(names, rows, left=1, spare=names[:3:-1])
        parts = {"compute": best.compute, "bubble": best.bubble, "network not hidden": best.exposed}
        parts |= {"update": best.update, "host": best.host}
        times = "; ".join(f"{name} {1e3 * seconds:,.1f} ms" for name, seconds in parts.items() if seconds)
        why = [
            f"  {name}: {ratio:.2f} times as long; best then: {then}"
            for name, (ratio, then) in self.sensitivity.items()
        ]
        reasons = [f"  {count:,} x {reason}" for reason, count in {**self.illegal, **self.dropped}.items() if count]
        chosen = (
            f"best: {self.best.candidate}\n{times}; {best.tokens_per_second:,.0f} tokens per second\n{self._assumed}"
        )
        return "\n\n".join(
            [head, chosen, str(self.saving), table]
            + ["if\n" + "\n".join(why)] * bool(why)
            + ["dropped\n" + "\n".join(reasons)] * bool(reasons)
        )


def saving_of(
    found: Prediction, price: Price, num_devices: int, given: Assumptions, saves: SaveAssumptions
) -> SaveAdvice:
    """How often the job of a priced prediction should save its parameters and optimizer state."""
    size: Any = found.memory.parameters + found.memory.optimizer
    seconds: Any = price.time
    return advise(size, seconds, num_devices, given.host_bandwidth, saves)


def _row(one: Priced) -> list[str]:
    price = one.price
    return [
        str(one.candidate),
        f"{1e3 * price.time:,.1f}",
        f"{price.mfu:.1%}",
        f"{price.memory / 2**30:.1f}",
        f"{1e3 * price.exposed:,.1f}",
        f"{1e3 * price.bubble:,.1f}",
    ]


def _plain(one: Priced) -> dict[str, Any]:
    price = one.price
    return {
        "plan": str(one.candidate),
        "mesh": one.candidate.mesh,
        "seconds": price.time,
        "compute": price.compute,
        "bubble": price.bubble,
        "exposed": price.exposed,
        "update": price.update,
        "host": price.host,
        "network": dict(price.network),
        "mfu": price.mfu,
        "memory": price.memory,
    }


# --------------------------------------------------------------------------------------------------
# Every legal way to run a model on a number of devices.
# --------------------------------------------------------------------------------------------------

GRID = ("depth", "row", "col")


@lru_cache(maxsize=64)
def divisors(number: int) -> tuple[int, ...]:
    """Every divisor, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def meshes(num_devices: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Yields every way to give each axis a degree so that the product is the number of devices."""
    if len(axes) == 1:
        yield {axes[0]: num_devices}
        return
    for degree in divisors(num_devices):
        for rest in meshes(num_devices // degree, axes[1:]):
            yield {axes[0]: degree, **rest}


def legal_meshes(
    model: TransformerConfig,
    num_devices: int,
    *,
    global_batch: int,
    length: int,
    axes: tuple[str, ...] = SEARCHED,
    shortest: int = SHORTEST,
    illegal: Counter | None = None,
) -> Iterator[dict[str, int]]:
    """Yields the degrees above one of every mesh on which the model can run.

    Args:
      model: the transformer.
      num_devices: all of them are used.
      global_batch: sequences per update.
      length: of a sequence.
      axes: mesh axes that may have more than one rank.
      shortest: the fewest positions on a rank of `context`.
      illegal: counts the reasons for which meshes are refused; None: they are not counted.
    """
    seen = set()
    for family in FAMILIES:
        if not (allowed := tuple(axis for axis in family if axis in axes and _goes_with(model, axis))):
            continue
        for mesh in meshes(num_devices, allowed):
            degrees = {axis: mesh[axis] for axis in AXES if mesh.get(axis, 1) > 1}
            if (key := tuple(degrees.items())) in seen:
                continue
            seen.add(key)
            if not (reason := _refused(model, degrees, global_batch, length, shortest)):
                yield degrees
            elif illegal is not None:
                illegal[reason] += 1


def candidates(
    model: TransformerConfig,
    num_devices: int,
    *,
    global_batch: int,
    length: int,
    axes: tuple[str, ...] = SEARCHED,
    shortest: int = SHORTEST,
    offload: CPUOffload = CPUOffload.NONE,
) -> Iterator[Candidate]:
    """Yields every legal way to run on every legal mesh (see `legal_meshes` for the arguments)."""
    for degrees in legal_meshes(
        model, num_devices, global_batch=global_batch, length=length, axes=axes, shortest=shortest
    ):
        if offload is CPUOffload.NONE or "pipe" not in degrees:
            for way in ways_on(model, degrees, global_batch, length):
                yield candidate(degrees, way, offload)


class Way(NamedTuple):
    """How to run on a mesh that is given; see `Candidate`."""

    stage: int
    sequence_parallel: bool
    remat: str | None
    schedule: PipelineSchedule | None
    chunks: int
    microbatches: int
    method: Method | None = None
    shared: bool = False
    dispatch: str | None = None


def candidate(
    degrees: Mapping[str, int],
    way: Way,
    offload: CPUOffload = CPUOffload.NONE,
    strategy: AbstractStrategy | None = None,
) -> Candidate:
    """The candidate of a way on a mesh, with a strategy of the user's own along `fsdp` or none."""
    return Candidate(degrees=tuple(degrees.items()), offload=offload, strategy=strategy, **way._asdict())


def stage_of(strategy: AbstractStrategy) -> int:
    """The stage of ZeRO that reads parameters and reduces gradients at the same times as a strategy.

    Raises:
      ValueError: for one that does not shard parameters at rest over an axis that splits rows.
    """
    role = strategy.role
    if role.parameters != "sharded" or role.batch != "rows" or role.reduces not in ("step", "microbatch"):
        raise ValueError(
            f"strategies: {strategy!r} has the {role}; the planner puts strategies along fsdp that shard parameters at rest "
            "and split rows"
        )
    return 3 if role.reads == "use" else 2 if role.reduces == "microbatch" else 1


def ways_on(
    model: TransformerConfig,
    degrees: dict[str, int],
    global_batch: int,
    length: int,
    remats: tuple[str | None, ...] = REMATS,
) -> tuple[Way, ...]:
    """Every way to run on a mesh, with these kinds of recomputation; meshes that allow the same ways share one tuple."""
    rows = global_batch // math.prod(degrees[axis] for axis in batch_axes(degrees))
    tensor, context = degrees.get("tensor", 1), degrees.get("context", 1)
    splits = tensor > 1 and length // context % tensor == 0
    stages = [(stage, context > 1) for stage in (1, 2, 3)] if "fsdp" in degrees or context > 1 else []
    stages += [(0, False)] if "fsdp" not in degrees else []
    carried = tuple(itertools.product(_methods(model, context, tensor), _dispatches(model, degrees.get("expert", 1))))
    return _ways(model.num_layers, tuple(stages), splits, carried, degrees.get("pipe", 1), rows, remats)


def _dispatches(model: TransformerConfig, ranks: int) -> tuple[str | None, ...]:
    """The dispatches to try: the model's, and if it leaves the choice open the one that it would not take."""
    experts = model.experts
    if experts is None or ranks == 1 or experts.dispatch != "auto" or experts.capacity_factor is not None:
        return (None,)
    return None, "rounds" if ranks <= experts.top_k else "gather"


def _goes_with(model: TransformerConfig, axis: str) -> bool:
    """Whether a model can be split over an axis at all."""
    if axis in GRID:
        return model.experts is None and model.latent is None
    if axis == "context":
        return model.attention != "xla"  # which reads a rank's own positions
    return model.experts is not None or axis != "expert"


def _methods(model: TransformerConfig, context: int, tensor: int) -> tuple[Method | None, ...]:
    """The methods by which attention may read positions of other ranks: for every U by which heads can be split."""
    if context == 1:
        return (None,)
    heads = model.num_heads // tensor, max(1, model.attention_shape.kv_heads // tensor)
    able = [count for count in divisors(context)[1:] if not unsplittable(count, *heads)]
    if model.attention == "cudnn":  # a kernel of whole sequences
        return ("ulysses",) if context in able else ()
    whole: list[Method] = ["gather", "ulysses"] if context in able else ["gather"]
    found = whole + [(count, "gather") for count in able if count < context]
    if model.window is None:  # how far a ring goes with a window is not priced
        found += ["ring", *((count, "ring") for count in able if count < context)]
    return tuple(found)


@lru_cache(maxsize=1024)
def _ways(
    num_layers: int, stages: tuple[tuple[int, bool], ...], splits: bool,
    carried: tuple[tuple[Method | None, str | None], ...], pipe: int, rows: int, remats: tuple[str | None, ...],
) -> tuple[Way, ...]:  # fmt: skip
    orders = list(_orders(num_layers, pipe, rows))
    return tuple(
        Way(stage, split, remat, *order, method, shared, dispatch)
        for stage, shared in stages
        for split in ((False, True) if splits else (False,))
        for method, dispatch in carried
        for remat in remats
        for order in orders
    )


def _refused(model: TransformerConfig, degrees: dict[str, int], global_batch: int, length: int, shortest: int) -> str:
    """Why a mesh does not go with a model; empty when it does."""
    grid = any(axis in degrees for axis in GRID)
    if grid and model.loss_chunk:
        return "a loss of chunks of words does not go with the grid"
    split: Any = replace(model, split="grid" if grid else "tensor", sequence_parallel=False)
    if model.experts is not None and model.experts.num_experts % degrees.get("expert", 1):
        return "experts do not divide over their ranks"
    if problems(split, degrees, length):
        return f"layers do not divide over {'the grid' if grid else 'tensor'}"
    if degrees.get("pipe", 1) > model.num_layers:
        return "fewer blocks than pipeline ranks"
    if global_batch % math.prod(degrees[axis] for axis in batch_axes(degrees)):
        return "the batch does not divide over its shards"
    if (context := degrees.get("context", 1)) > 1 and length % order_parts("zigzag", context):
        return "positions do not divide over twice the ranks of context"
    if context > 1 and length // context < shortest:
        return f"fewer than {shortest:,} positions on a rank of context"
    return ""


def _orders(num_layers: int, pipe: int, rows: int) -> Iterator[tuple[PipelineSchedule | None, int, int]]:
    """Yields (schedule, chunks, microbatches)."""
    for count in divisors(rows):
        if pipe == 1:
            yield None, 1, count
        elif count > 1:
            yield PipelineSchedule.GPIPE, 1, count
            yield PipelineSchedule.ONE_F_ONE_B, 1, count
            for chunks in (2, 4):
                if pipe * chunks <= num_layers:
                    yield PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, chunks, count


# --------------------------------------------------------------------------------------------------
# `Resting`: where a decoder's weights rest on many meshes, found once for all that split them alike.
# --------------------------------------------------------------------------------------------------


class Placing(NamedTuple):
    """The weights of a way on a mesh.

    Attributes:
      layouts: of all weights.
      form: a number that placings share whose layouts are split over the same axes, with the same stacks split along dim 0;
        other dims change no size.
      model: its configuration, with its layers split so.
      plan: with every default decided; how often anything runs is not in it.
      strategies: a number that plans with the same strategies share.
    """

    layouts: Sequence[Layout]
    form: int
    model: Any
    plan: Plan
    strategies: int


class Resting:
    """Caches the layouts of a model's weights by the axes that split them, which all of ZeRO's stages share."""

    def __init__(self, asked: Question):
        self.asked, self.fabric = asked, Fabric(devices=asked.num_devices, torus=asked.hardware.torus)
        self._models: dict[Any, Any] = {}
        self._plans: dict[Any, tuple[Plan, int]] = {}
        self._split: dict[Any, list[tuple[Any, Layout]]] = {}
        self._layouts: dict[Any, tuple[list[Layout], int]] = {}
        self._numbers: dict[Any, int] = {}

    def placing(self, degrees: Mapping[str, int], way: Way) -> Placing:
        """Where weights rest on a mesh.

        Args:
          degrees: of the mesh, above 1.
          way: of which the stage, attention's method, sequence parallelism and whether there is a schedule decide.
        """
        model = self._model(degrees, way)
        plan, strategies = self._plan(degrees, way)
        there = candidate(degrees, way).mesh.items()
        own = tuple((axis, ranks) for axis, ranks in there if axis not in ("data", "pipe"))
        if (key := (own, model.scan_layers, way.shared)) not in self._layouts:
            self._layouts[key] = self._placed(model, plan, dict(own))
        return Placing(*self._layouts[key], model, plan, strategies)

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _model(self, degrees: Mapping[str, int], way: Way) -> Any:
        key = (any(axis in degrees for axis in ("row", "col", "depth")), way.sequence_parallel, way.schedule is None)
        key += (way.dispatch,)
        if key not in self._models:
            self._models[key] = Candidate(degrees=tuple(degrees.items()), **way._asdict()).model(self.asked.model)
        return self._models[key]

    def _plan(self, degrees: Mapping[str, int], way: Way) -> tuple[Plan, int]:
        ranks = {axis: degrees.get(axis, 1) for axis in ("fsdp", "context")}
        chosen = {"stage": way.stage, "method": way.method, "shared": way.shared}
        if (key := (*ranks.values(), *chosen.values())) not in self._plans:
            found = Candidate(degrees=tuple(ranks.items()), strategy=self.asked.strategy, **chosen)
            plan = found.plan(self.asked.precision).decided(self.fabric, ranks)
            # A strategy of the user's own may send in as many parts as there are ranks: those are a number for it.
            own = None if self.asked.strategy is None else ranks["fsdp"]
            self._plans[key] = plan, self._number((plan.fsdp, plan.context, own))
        return self._plans[key]

    def _placed(self, model: Any, plan: Plan, own: dict[str, int]) -> tuple[list[Layout], int]:
        """The layouts, and the number of their form."""
        layers = tuple((axis, ranks) for axis, ranks in own.items() if axis in LAYER_AXES)
        if (key := (layers, model.split, model.scan_layers)) not in self._split:
            param, weights = plan.precision.param, decoder_weights(model, own)
            split = [((each.shape, each.splits, each.layers), split_by_layers(each, param, own)) for each in weights]
            self._split[key] = split
        found: dict[Any, Layout] = {}
        setting = Setting.of(plan, own)
        for same, layout in self._split[key]:
            if same not in found:
                for axis, strategy in setting.strategies.items():
                    layout = strategy.spec(layout, axis, setting.ranks(axis))
                found[same] = layout
        forms = {
            same: (*sorted(layout.axes), same[2] > 1 and bool(layout.axes_of(0))) for same, layout in found.items()
        }
        order = [same for same, _ in self._split[key]]
        return [found[same] for same in order], self._number(tuple(forms[same] for same in order))


def weights_together(placings: Sequence[Placing], meshes: Sequence[Mapping[str, int]], repeats: np.ndarray) -> Weights:
    """The weights of placings of one form under the same strategies; sizes are arrays with an entry for every candidate.

    Args:
      placings: one for each mesh.
      meshes: the degrees of each mesh.
      repeats: the number of candidates of each mesh.
    """
    first, once = placings[0], np.ones(len(meshes), int)
    degrees = {axis: spread([mesh[axis] for mesh in meshes], once, int) for axis in meshes[0]}
    setting = Setting.of(first.plan, degrees)
    layouts: dict[int, Layout] = {}  # weights of one shape that are split alike share theirs
    for same in zip(*(each.layouts for each in placings), strict=True):
        if id(same[0]) not in layouts:
            layouts[id(same[0])] = _together(same, once)
    weights = zip(decoder_weights(first.model, meshes[0]), first.layouts, strict=True)
    found = grouped([Placed(weight, layouts[id(layout)], setting) for weight, layout in weights])
    return found.sizes(lambda size: np.repeat(size.astype(float), repeats) if varies(size) else size)


def _together(layouts: Sequence[Layout], once: np.ndarray) -> Layout:
    """Merges layouts of one form into one layout, whose sizes are arrays."""
    own = layouts[0]
    stored, parts = (
        tuple(spread(sizes, once, int) for sizes in zip(*values, strict=True))
        for values in ([each.stored for each in layouts], [each.parts for each in layouts])
    )
    return Layout(own.shape, own.dtype, own.spec, stored, parts, own.stack_dims)


def spread(values: Sequence[Any], repeats: np.ndarray, kind: type = float) -> Any:
    """Repeats one value per mesh to one per candidate; returns the plain number if all are equal."""
    if all(value == values[0] for value in values):
        return values[0]
    return np.repeat(np.array(values, kind), repeats)


# --------------------------------------------------------------------------------------------------
# A first price of every way to run, many meshes at once: the ledger's own flows and memory, with arrays as sizes.
# --------------------------------------------------------------------------------------------------

Meshes = Sequence[tuple[dict[str, int], tuple[Way, ...]]]
"""(degrees, ways to run on them) of each mesh."""

AT_ONCE = 2**15
"""The number of candidates that are priced together, so that their arrays stay in a core's cache."""


def quick(
    meshes: Meshes, asked: Question, offload: CPUOffload = CPUOffload.NONE
) -> list[tuple[np.ndarray, np.ndarray]]:
    """First prices of all ways, as one (seconds, bytes) pair of arrays for each mesh.

    Ways of one discrete choice, on all meshes over which weights rest alike, share one list of flows and one `Memory`, whose
    sizes and counts are arrays. Bytes are the ledger's, but for an upper bound on a pipeline's slots (`TickCounts.foreseen`);
    seconds are the ledger's price, but for a pipeline's bubble.
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
    """Ways of one mesh that are one discrete choice: alike in ZeRO's stage and axes, sequence parallelism, method and dispatch.

    Attributes:
      way: the first of them.
      at: their indices among all ways of their mesh.
      choice: the choice that they share.
      microbatches: per update and rank.
      full, selective: 1 where that is recomputed.
      chunks, gpipe: of a pipeline.
      cuts: the different pairs of (chunks, recomputation).
      cut: the index of each way's pair in `cuts`.
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
    """The settings of a way that decide which flows it has on a given mesh."""
    return way.stage, way.shared, way.sequence_parallel, way.method, way.dispatch


def choices(ways: tuple[Way, ...]) -> tuple[WayColumns, ...]:
    """Groups the ways of a mesh by discrete choice."""
    found: dict[tuple, list[int]] = {}
    for i, way in enumerate(ways):
        found.setdefault(choice_of(way), []).append(i)
    return tuple(WayColumns(ways, at) for at in found.values())


def _cut_columns(model: TransformerConfig, pipe: int, columns: WayColumns, length: int) -> np.ndarray:
    """The values of `_cut` for every way: [values, ways]."""
    return np.array([_cut(model, pipe, *key, length) for key in columns.cuts]).T[:, columns.cut]


@lru_cache(maxsize=4096)
def _cut(model: TransformerConfig, pipe: int, chunks: int, remat: str, length: int) -> tuple[float, ...]:
    """Numbers of a cut into pipe x chunks stages.

    Returns:
      The slowest stages' share of all work, the longest stage's blocks, the routers passed on; then the blocks of the first
      rank, of the fullest between, and of the last; then how many of these have experts.
    """
    decoder: Any = replace(model, scan_layers=False)  # as `Candidate.model` has it, whose blocks are divided by cost
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
    """Yields batches of choices that share one list of flows, of about `AT_ONCE` candidates each."""
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
    """The inputs of a price (see `Predicted`), for many ways to run at once."""

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
    pairs_per_token: Many
    passes: Many
    expert_flops_per_token: Many
    expert_padding: Many
    causal_balance: Many
    traffic: Sequence[Flow]
    memory: Memory
    bubble: Many


def candidates_of(
    together: Sequence[DiscreteChoice], asked: Question, offload: CPUOffload = CPUOffload.NONE
) -> Candidates:
    """The inputs of a price for choices that share one list of flows; candidates of one choice follow those of another."""
    step, slowest = _step(together, asked)
    run, tokens = step.run, asked.global_batch * asked.length
    masked, blockwise, pairs = attention_work(step)
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
        pairs_per_token=pairs,
        passes=passes(step),
        expert_flops_per_token=expert_flops(step.model, run),
        expert_padding=0.0 if step.experts is None else step.experts.padded,
        causal_balance=1.0 if step.attention is None else step.attention.balance,
        traffic=merged_flows(flows(step)),
        memory=held(step, moments=asked.moments, offload=offload, in_ticks=False),
        bubble=_bubble(step, slowest) if run.pipelined else 0.0,
    )


def _step(together: Sequence[DiscreteChoice], asked: Question) -> tuple[Step, Many]:
    """The step of all these candidates, and the slowest stages' share of all work."""
    repeats, placings = np.array([len(each.columns.at) for each in together]), [each.placing for each in together]
    column = lambda name: np.concatenate([getattr(each.columns, name) for each in together])
    meshes = [each.degrees for each in together]
    degrees = {axis: spread([mesh[axis] for mesh in meshes], repeats) for axis in meshes[0]}
    weights, plan = weights_together(placings, meshes, repeats), placings[0].plan
    roles = {axis: strategy.role for axis, strategy in plan.on(degrees).items()}
    often: dict[str, Any] = {name: column(name) for name in ("microbatches", "full", "selective")}
    run = Run(roles=roles, pipelined="pipe" in degrees, sends=asked.sends, **often)
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
    """Idle time over useful time, if all ticks of a chunk took as long as its slowest stage.

    The first and the last ticks fill and drain; where ranks do not divide the microbatches, chunks wait for the last,
    incomplete group.
    """
    ranks, count, chunks = step.degrees["pipe"], step.run.microbatches, step.chunks
    missing = ranks * (1 + divided(count - 1, ranks)) - count
    idle = (ranks - 1 + (chunks - 1) * missing) / (ranks * chunks)
    return (count * slowest + idle) * ranks / count - 1


# --------------------------------------------------------------------------------------------------
# `plan`: the best way to run a model on a number of devices, with the runners-up, the reasons and the sensitivity.
# --------------------------------------------------------------------------------------------------

EXACTLY, DOUBTFUL, LEAN = 48, 24, 8
"""How many ways the ledger prices exactly: the fastest that fit by the first price, the fastest that it finds slightly too
large, and those that need least memory."""

PER_MESH = 3
"""How many of the fastest are of one mesh at most."""

MARGINS = {False: 1.0, True: 1.13}
"""By whether there is a pipeline: what the first price finds too large by up to this factor may still fit."""

_TOO_LARGE = "does not fit in a device's memory"


def plan(
    model: TransformerConfig | Any,
    *,
    num_devices: int,
    hardware: str | Hardware = "v5p",
    global_batch: int,
    length: int | None = None,
    precision: str | Precision | None = "bf16",
    moments: int = 2,
    max_memory: str | float | None = None,
    axes: tuple[str, ...] = SEARCHED,
    remats: Sequence[str | None] = REMATS,
    offload: bool = False,
    strategies: Sequence[AbstractStrategy] = (),
    runners_up: int = 5,
    assumptions: Assumptions | None = None,
    saves: SaveAssumptions | None = None,
    documents: bool = False,
) -> Answer:
    """Find the fastest plan that fits, on paper: no devices, no trace.

    Every legal mesh (data, pipe, fsdp with a ZeRO stage, expert with a dispatch, context with a method of attention, tensor
    with or without sequence parallelism, or AxoNN's depth, row and col), schedule, number of chunks and of microbatches, and
    recomputation gets a first price; the best of them are priced exactly by the ledger.

    Args:
      model: a transformer's configuration, or a model with one as its attribute `config`.
      num_devices: all of them are used.
      hardware: a name of the table, or `ax.Hardware`.
      global_batch: sequences per update.
      length: of a sequence; None: the model's longest.
      precision: dtypes, as of `ax.Plan`.
      moments: values that the optimizer keeps per parameter (Adam 2).
      max_memory: bytes that a device may use, as "16GiB" or a number; None: the hardware's, less a margin.
      axes: mesh axes that may have more than one rank.
      remats: kinds of recomputation to consider.
      offload: whether optimizer states may rest in host memory where nothing fits otherwise.
      strategies: strategies of your own that may take the place of `ax.Shard` along `fsdp`.
      runners_up: how many of the next best to keep.
      assumptions: of the cost model.
      saves: what `answer.saving` assumes of failures, restarts and checkpoints; it does not affect the choice.
      documents: whether rows hold several documents, which some kernels of attention do not keep apart.

    Returns:
      An `Answer`; `print` it.

    Raises:
      ValueError: for sizes, axes, kinds of recomputation or strategies that are wrong; when nothing is legal or nothing fits,
        with the reasons and what would help.
      TypeError: for a model without a `TransformerConfig`.
    """
    asked = _question(model, num_devices, hardware, global_batch, length, precision, moments, max_memory, assumptions)
    asked = replace(asked, saves=saves or SaveAssumptions(), documents=documents)
    illegal, dropped, allowed = Counter(), Counter(), _allowed(axes, remats, runners_up)
    found = _search(asked, *allowed, CPUOffload.NONE, illegal, dropped)
    for each in strategies:
        stage_of(each)
        found += _search(replace(asked, strategy=each), *allowed, CPUOffload.NONE, Counter(), dropped)
    if not found and asked.model.scan_layers and SENDS.get(asked.hardware.platform or ""):
        found = _search(replace(asked, sends=asked.memory), *allowed, CPUOffload.NONE, Counter(), dropped)
    if not found and offload:
        found = _search(asked, *allowed, CPUOffload.OPTIMIZER_STATES, Counter(), dropped)
    found = _in_order(found)
    if not found:
        raise ValueError(_nothing(asked, illegal, dropped))
    best, *rest = found
    return Answer(
        asked=asked, best=best, runners_up=tuple(rest[:runners_up]), illegal=dict(illegal), dropped=dict(dropped),
        sensitivity=_sensitivity(asked, found),
    )  # fmt: skip


def _allowed(axes: Any, remats: Any, runners_up: int) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """The mesh axes and the kinds of recomputation to search, in the order in which they are searched."""
    for name, given, known in (("axes", axes, SEARCHED), ("remats", remats, REMATS)):
        if isinstance(given, str) or not isinstance(given, Iterable) or not (given := list(given)):
            raise ValueError(f"{name}={given!r} must be a sequence of some of {', '.join(map(repr, known))}")
        if others := [repr(each) for each in given if not is_one_of(each, known)]:
            raise ValueError(
                f"{name}={given}: {', '.join(others)} is none of the {name} that are searched, {', '.join(map(repr, known))}; "
                "ax.explain(plan, model=...) prices any plan"
            )
    if not isinstance(runners_up, int) or runners_up < 0:
        raise ValueError(f"runners_up={runners_up!r} must be how many of the next best to keep, 0 or more")
    return tuple(axis for axis in SEARCHED if axis in axes), tuple(each for each in REMATS if each in remats)


def _budget(max_memory: Any) -> float:
    """The bytes that `max_memory` says."""
    problem = ValueError(f"max_memory={max_memory!r} must be bytes of a device, as '16GiB' or 80e9")
    try:
        size = bytes_meant(max_memory) if isinstance(max_memory, str) else max_memory
    except ValueError:
        raise problem from None
    if not isinstance(size, numbers.Real) or isinstance(size, bool) or not 1 < float(size) < math.inf:
        raise problem
    return float(size)


def _question(model, num_devices, kind, global_batch, length, precision, moments, max_memory, assumptions) -> Question:
    config = model if isinstance(model, TransformerConfig) else getattr(model, "config", None)
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"model={type(model).__name__}: give a TransformerConfig, or a model that has one as `config`")
    chosen = hardware(kind)
    given = assumptions or Assumptions.on(chosen)
    sizes = {"num_devices": num_devices, "global_batch": global_batch, "length": 1 if length is None else length}
    if wrong := ", ".join(f"{name}={value}" for name, value in sizes.items() if value < 1):
        raise ValueError(f"{wrong}: each must be at least 1")
    if length is not None and length > config.max_length:
        raise ValueError(f"length={length}: sequences are longer than the model's {config.max_length} (its max_length)")
    if moments < 0:
        raise ValueError(f"moments={moments}: the optimizer keeps 0 or more values per parameter")
    if Precision.of(precision).products is not None:
        raise ValueError(
            f"precision={precision!r}: the search prices products in the compute dtype, and not all plans that it tries may "
            "round them to 8 bits: search with precision='bf16', which sends and holds the same, and train what it finds "
            "with 'fp8'"
        )
    return Question(
        model=config,
        num_devices=num_devices,
        hardware=chosen,
        global_batch=global_batch,
        length=config.max_length if length is None else length,
        moments=moments,
        precision=precision,
        compute=Precision.of(precision).compute or config.dtype,
        assumptions=given,
        memory=chosen.memory * given.memory_margin if max_memory is None else _budget(max_memory),
    )


def _search(
    asked: Question, axes: tuple[str, ...], remats: tuple, offload: CPUOffload, illegal: Counter, dropped: Counter
) -> list[Priced]:
    """The exactly priced ways that fit, fastest first."""
    fitting, doubtful, lean = _Best(EXACTLY), _Best(DOUBTFUL), _Best(LEAN)
    meshes = _meshes(asked, axes, remats, offload, illegal)
    for (degrees, ways), (seconds, sizes) in zip(meshes, quick(meshes, asked, offload), strict=True):
        limit = MARGINS["pipe" in degrees] * asked.memory
        dropped[_TOO_LARGE] += int((sizes > limit).sum())
        make = partial(_candidate, degrees, ways, offload, asked)
        for best, among in ((fitting, sizes <= asked.memory), (doubtful, (sizes > asked.memory) & (sizes <= limit))):
            for i in _fastest(np.flatnonzero(among), seconds, sizes):
                best.keep(float(seconds[i]), partial(make, i))
        between = _between_words(ways, seconds, sizes, asked) if offload is CPUOffload.NONE and not asked.sends else ()
        for i, estimate in between:
            fitting.keep(estimate, partial(_budgeted, partial(make, i), asked))
        leanest = int(sizes.argmin())
        if sizes[leanest] <= limit:
            lean.keep(float(sizes[leanest]), partial(make, leanest))
    return _exactly(asked, list(dict.fromkeys([*fitting.found, *doubtful.found, *lean.found])), dropped)


def _candidate(
    degrees: dict[str, int], ways: tuple[Way, ...], offload: CPUOffload, asked: Question, i: int
) -> Candidate:
    found = candidate(degrees, ways[i], offload, asked.strategy)
    return replace(found, remat=None, memory=int(asked.memory)) if asked.sends else found  # a word alone does not send


def _budgeted(make: Callable[[], Candidate], asked: Question) -> Candidate:
    return replace(make(), remat=None, memory=int(asked.memory))


def _between_words(
    ways: tuple[Way, ...], seconds: np.ndarray, held: np.ndarray, asked: Question
) -> list[tuple[int, float]]:
    """Ways that fit, of which the same way with less recomputation is faster and does not fit.

    Between the two, some blocks recompute by one word and some by the other; memory and time are interpolated linearly.

    Returns:
      Some of the fastest: (the way's index, the interpolated time at which it fills the memory allowed).
    """
    word = np.array([REMATS.index(way.remat) for way in ways])
    step = int(np.argmax(word != word[0]))  # ways with the next word follow in the same order
    if step == 0:
        return []
    more, less = np.arange(len(ways) - step), np.arange(step, len(ways))
    pairs = (word[less] > word[more]) & (held[more] > asked.memory) & (held[less] <= asked.memory)
    more, less = more[pairs & (seconds[more] < seconds[less])], less[pairs & (seconds[more] < seconds[less])]
    part = (held[more] - asked.memory) / (held[more] - held[less])
    times = seconds[more] + part * (seconds[less] - seconds[more])
    return [(int(less[k]), float(times[k])) for k in np.argsort(times, kind="stable")[:PER_MESH]]


def _meshes(asked: Question, axes: tuple[str, ...], remats: tuple, offload: CPUOffload, illegal: Counter) -> list:
    """Lists every legal mesh with the ways to run on it, and counts those without any."""
    found, sizes = [], {"global_batch": asked.global_batch, "length": asked.length}
    for degrees in legal_meshes(asked.model, asked.num_devices, axes=axes, illegal=illegal, **sizes):
        if offload is not CPUOffload.NONE and "pipe" in degrees:
            continue
        ways = ways_on(asked.model, degrees, remats=remats, **sizes)
        if asked.strategy is not None:
            ways = tuple(way for way in ways if way.stage == stage_of(asked.strategy) and not way.shared)
        if ways:
            found.append((degrees, ways))
        elif asked.strategy is None:  # else a mesh without fsdp
            illegal["fewer sequences than a pipeline needs"] += 1
    return found


def _fastest(among: np.ndarray, seconds: np.ndarray, held: np.ndarray) -> list[int]:
    """The `PER_MESH` fastest of these ways; of several with the same time and memory only one."""
    found: dict[tuple[float, float], int] = {}
    for i in among[np.argsort(seconds[among], kind="stable")].tolist():
        found.setdefault((float(f"{seconds[i]:.6g}"), float(f"{held[i]:.6g}")), i)
        if len(found) == PER_MESH:
            break
    return list(found.values())


class _Best:
    """Keeps the `count` candidates with the smallest measure; the larger name wins between equals."""

    def __init__(self, count: int):
        self.count, self._heap = count, []

    def keep(self, measure: float, make: Callable[[], Candidate]) -> None:
        """Adds a candidate if it is among the best so far; others are not even made."""
        if len(self._heap) == self.count and -measure < self._heap[0][0]:
            return
        found = make()
        entry = (-measure, str(found), found)
        if len(self._heap) < self.count:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    @property
    def found(self) -> list[Candidate]:
        """All that are kept."""
        return [found for _, _, found in self._heap]


def _exactly(asked: Question, ways: list[Candidate], dropped: Counter) -> list[Priced]:
    found = []
    for each in ways:
        try:
            one = exactly(asked, each)
        except ValueError as error:
            dropped[str(error)] += 1
            continue
        if one.price.memory > asked.memory:
            dropped[_TOO_LARGE] += 1
        else:
            found.append(one)
    # A budget under which all blocks recompute by one word is the same plan as that word, which is shorter.
    bare = lambda one: (replace(one.candidate, remat=None, memory=None), one.price.time)
    words = {bare(one) for one in found if one.candidate.memory is None}
    return [one for one in found if one.candidate.memory is None or bare(one) not in words]


def _in_order(found: list[Priced]) -> list[Priced]:
    """The fastest first."""
    # Of plans that take the same time the one that sends least comes first: it depends least on overlap.
    digits = lambda one: float(f"{one.price.time:.9g}")
    return sorted(found, key=lambda one: (digits(one), one.prediction.total_bytes, one.price.memory))


def exactly(asked: Question, found: Candidate) -> Priced:
    """A candidate priced by the ledger.

    Raises:
      ValueError: when it turns out illegal (stages that do not balance, sizes that a schedule refuses).
    """
    model: Any = found.model(asked.model)
    own = found.plan(asked.precision)
    prediction = predict(
        own, model, found.mesh, global_batch=asked.global_batch, length=asked.length, moments=asked.moments,
        platform=asked.hardware.platform, torus=asked.hardware.torus, documents=asked.documents,
    )  # fmt: skip
    return Priced(found, prediction, price(prediction, asked.hardware, asked.assumptions))


def _sensitivity(asked: Question, found: list[Priced]) -> dict[str, tuple[float, str]]:
    """By worsened assumption, the best plan's step time over its price, and the plan that would then be best."""
    given, kind = asked.assumptions, asked.hardware
    worse = {
        "links half as fast": (replace(kind, link=kind.link / 2, cross=kind.cross / 2), given),
        "nothing overlaps": (kind, replace(given, overlap=0.0)),
        "efficiency a quarter lower": (kind, replace(given, efficiency=given.efficiency * 0.75)),
        "attention across ranks half as fast": (kind, replace(given, blocks=given.blocks / 2)),
        "experts twice as uneven": (kind, replace(given, imbalance=2 * given.imbalance)),
        "delays ten times longer": (
            replace(kind, latency=10 * kind.latency, cross_latency=10 * kind.cross_latency),
            given,
        ),
    }
    if found[0].prediction.expert_flops_per_token == 0:
        worse.pop("experts twice as uneven")
    result = {}
    for name, (other, assumed) in worse.items():
        times = [price(one.prediction, other, assumed).time for one in found]
        first = min(range(len(found)), key=times.__getitem__)
        result[name] = (times[0] / found[0].price.time, "the same" if first == 0 else str(found[first].candidate))
    return result


def _nothing(asked: Question, illegal: Counter, dropped: Counter) -> str:
    reasons = [f"{count:,} times: {reason}" for reason, count in (illegal + dropped).most_common()]
    return (
        f"no plan of {asked.model.num_params:,} parameters on {asked.num_devices} x {asked.hardware.name} with "
        f"{asked.global_batch} sequences of {asked.length} fits in {asked.memory / 2**30:.1f} GiB per device: "
        f"{'; '.join(reasons) or 'no mesh is legal'}. Use more devices, shorter sequences, another batch (a multiple of the "
        "devices), offload=True, or a model whose sizes divide (heads and inner widths above all)"
    )
