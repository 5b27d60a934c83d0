"""The price of a plan: the phases of a step on a timeline."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from axonml_jax.base import aligned
from axonml_jax.cost.base import ATTENTION, GRADIENTS, LATER, ONCE, PARAMETERS, Flow
from axonml_jax.cost.decoder import Many, divided, either, least, varies
from axonml_jax.cost.memory import Memory
from axonml_jax.layers.kernels import kernel_of
from axonml_jax.ledger.predict import Prediction
from axonml_jax.mesh.axes import AXES, LAYER_AXES
from axonml_jax.pipeline.schedules import AXIS as PIPE
from axonml_jax.pipeline.timetable import Timetable, tick_times, trace_ticks
from axonml_jax.planner.hardware import Assumptions, Hardware

# --------------------------------------------------------------------------------------------------
# A step as phases: its compute, what is sent meanwhile, and how much of the communication compute does not hide.
# --------------------------------------------------------------------------------------------------

JOINED_BYTES = 32 * 2**20
"""Bytes of parameters or gradients that one launch carries at most in the cost model; on CPUs every array is a launch."""

RAGGED = "ragged_all_to_all"
"""The kind of collective whose wire bytes are an upper bound."""

START, FORWARD, BACKWARD, TICKS, END = "start", "forward", "backward", "ticks", "end"
"""Phases: a pipeline's start; each microbatch's forward and backward, or a pipeline's ticks; and the end of the step."""


class Predicted(Protocol):
    """Protocol of a step to price: a `Prediction`, or many candidates as arrays (`Candidates` of `planner/search.py`)."""

    @property
    def degrees(self) -> Mapping[str, Many]:
        """The mesh's degrees."""
        ...

    @property
    def pipelined(self) -> bool:
        """Whether the step is a pipeline of stages."""
        ...

    @property
    def microbatches(self) -> Many:
        """The number of microbatches in one update."""
        ...

    @property
    def tokens(self) -> int:
        """The number of tokens in one update."""
        ...

    @property
    def flops_per_token(self) -> int:
        """FLOPs per token, forward and backward."""
        ...

    @property
    def layers(self) -> int:
        """The number of blocks of the model."""
        ...

    @property
    def recomputed_flops_per_token(self) -> Many:
        """FLOPs per token that recomputation adds."""
        ...

    @property
    def masked_flops_per_token(self) -> Many:
        """FLOPs per token, forward and backward, that masked attention skips."""
        ...

    @property
    def attention_again(self) -> Many:
        """How often attention's forward is recomputed, from 0 to 1."""
        ...

    @property
    def blockwise_flops_per_token(self) -> Many:
        """FLOPs per token, forward and backward, of attention in blocks that XLA computes."""
        ...

    @property
    def pairs_per_token(self) -> Many:
        """Pairs of positions that an attention kernel, or blocks, compute (see `cost.memory.attention_work`)."""
        ...

    @property
    def passes(self) -> Many:
        """Bytes that a device reads and writes between products (see `cost.memory.passes`)."""
        ...

    @property
    def expert_flops_per_token(self) -> Many:
        """FLOPs per token of experts, included in the others."""
        ...

    @property
    def expert_padding(self) -> Many:
        """Rows that experts multiply on a rank over its share of pairs; 0: as many as others send."""
        ...

    @property
    def causal_balance(self) -> Many:
        """The causal attention work of the busiest rank over the mean."""
        ...

    @property
    def traffic(self) -> Sequence[Flow]:
        """The flows that a rank sends."""
        ...

    @property
    def memory(self) -> Memory:
        """The memory of the fullest rank."""
        ...

    @property
    def bubble(self) -> Many:
        """Idle time over useful time."""
        ...


@dataclass(frozen=True, slots=True)
class Sending:
    """One flow in one run of a phase.

    Attributes:
      axes: mesh axes, joined by commas.
      name: what it moves: parameters, gradients, layers, ...
      kind: "weights" hides behind `overlap` of the phase's compute, "layers" behind `layer_overlap`, "passing" (permutes that
        end a pipeline's tick or lie between a ring's products) behind nothing.
      seconds: for which it keeps the network busy.
    """

    axes: str
    name: str
    kind: str
    seconds: Many


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a step that runs once or several times.

    Attributes:
      name: forward, backward or end; of a pipeline start, ticks (all of them) or end.
      times: how often it runs in a step.
      compute: seconds of one run's products and of passes between them.
      every: what each run sends.
      once: what one of the runs sends besides: the first forward, or the last backward.
      assumptions: which shares of communication compute hides.
    """

    name: str
    times: Many
    compute: Many
    every: tuple[Sending, ...]
    once: tuple[Sending, ...]
    assumptions: Assumptions

    @property
    def exposed(self) -> Many:
        """Seconds of communication in all runs that compute does not hide."""
        return (self.times - 1) * self.waits(self.every) + self.waits((*self.every, *self.once))

    def waits(self, sent: tuple[Sending, ...]) -> Many:
        """Seconds by which communication lengthens one run."""
        given = self.assumptions
        weights, layers, passing = (
            sum(each.seconds for each in sent if each.kind == kind) for kind in ("weights", "layers", "passing")
        )
        hidden = least(weights, given.overlap * self.compute) + least(layers, given.layer_overlap * self.compute)
        return weights + layers + passing - hidden


def phases(found: Predicted, hardware: Hardware, given: Assumptions) -> tuple[Phase, ...]:
    """The phases of a predicted step, in order.

    Without a pipeline every microbatch has a forward with a third of the products, and a backward with two thirds and the
    recomputation; passes over memory are divided as the products are. A measured block's fixed time comes with every
    microbatch.
    What a step sends once hides behind one microbatch alone: gathers behind the first forward, reductions behind the last
    backward. A pipeline's ticks are one phase; what its rank sends once goes before and after it and hides behind nothing.
    """
    devices = math.prod(found.degrees.values())
    seconds = lambda flops: found.tokens * flops / devices / (hardware.flops * given.efficiency)
    slower = found.causal_balance / (given.blocks if kernel_of(hardware.platform) else 1)
    attention = (slower - 1) * found.blockwise_flops_per_token - found.masked_flops_per_token
    fuller = either(found.expert_padding > 0, found.expert_padding, given.imbalance)
    products = seconds(found.flops_per_token + attention + (fuller - 1) * found.expert_flops_per_token)
    again = seconds(found.recomputed_flops_per_token + found.attention_again * attention / 3)
    pairs = found.tokens * found.pairs_per_token / devices * given.score_seconds
    pairs = pairs * either(found.blockwise_flops_per_token > 0, slower, 1.0)
    products, again = products + pairs, again + found.attention_again * pairs / 3
    if given.passes:
        whole = found.passes / hardware.memory_bandwidth / given.passes
        products, again = products + whole * products / (products + again), again + whole * again / (products + again)
    fixed = hardware.block_seconds * found.layers / found.degrees.get(PIPE, 1) * found.microbatches
    products, again = products + fixed, again + fixed * found.recomputed_flops_per_token / found.flops_per_token
    if found.pipelined:
        runs = {START: (1, 0.0), TICKS: (1, products + again), END: (1, 0.0)}
    else:
        times = found.microbatches
        runs = {
            FORWARD: (times, products / 3 / times),
            BACKWARD: (times, (products * 2 / 3 + again) / times),
            END: (1, 0.0),
        }
    every: dict[str, list[Sending]] = {name: [] for name in runs}
    once: dict[str, list[Sending]] = {name: [] for name in runs}
    for flow in sorted((flow for flow in found.traffic if flow.where != LATER), key=_place):
        name = _phase_of(flow, runs)
        times = runs[name][0]
        sent = flow_seconds(flow, found.degrees, hardware)
        single = flow.where == ONCE and (varies(times) or times > 1)
        own = Sending(",".join(flow.axes), flow.label or "layers", _kind(flow), sent if single else sent / times)
        (once if single else every)[name].append(own)
    return tuple(
        Phase(
            name=name, times=times, compute=compute, every=tuple(every[name]), once=tuple(once[name]), assumptions=given
        )
        for name, (times, compute) in runs.items()
    )


def _place(flow: Flow) -> int:
    """Sort key of a flow within a phase: parameters first, gradients last."""
    return {PARAMETERS: 0, GRADIENTS: 2}.get(flow.label, 1)


def _phase_of(flow: Flow, runs: Mapping[str, object]) -> str:
    if flow.work in runs:
        return flow.work
    if flow.where == ONCE:
        return START if flow.work == FORWARD else END
    return TICKS


def _kind(flow: Flow) -> str:
    if flow.label in (GRADIENTS, PARAMETERS) and not set(flow.axes) & set(LAYER_AXES):  # else a layer waits for its own
        return "weights"
    return "passing" if flow.kind == "permute" and flow.label != ATTENTION else "layers"


def network_by_axes(run: tuple[Phase, ...]) -> dict[str, Many]:
    """Seconds of network time by mesh axes, hidden or not."""
    found: dict[str, Many] = {}
    for times, each in _sendings(run):
        found[each.axes] = found.get(each.axes, 0.0) + times * each.seconds
    return found


def _sendings(run: tuple[Phase, ...]) -> Iterator[tuple[Many, Sending]]:
    for phase in run:
        yield from ((phase.times, each) for each in phase.every)
        yield from ((1, each) for each in phase.once)


def flow_seconds(flow: Flow, degrees: Mapping[str, Many], hardware: Hardware) -> Many:
    """Seconds in a step for which a flow keeps its slowest axis's network busy."""
    inner = inner_product(degrees, flow.axes) * flow.apart
    arrays = flow.launches
    if flow.label in (GRADIENTS, PARAMETERS) and hardware.platform != "cpu":  # XLA joins neighbours, but not on CPUs
        arrays = -divided(-flow.elements * flow.itemsize, JOINED_BYTES)
    delays = flow.times * hardware.delay(flow.group_size, inner) * arrays / flow.every
    sent = flow.wire_bytes
    if flow.kind == RAGGED:  # filled slots alone travel, those that stay here not
        filled = flow.itemsize * (flow.elements - flow.padding)
        sent = flow.times * filled * (flow.group_size - 1) / flow.group_size
    sent = sent if varies(sent) else float(sent)
    speed = hardware.bandwidth(flow.group_size, inner, layers=_kind(flow) != "weights")
    seconds = sent / speed + delays
    return either(flow.group_size > 1, seconds, 0.0)


def inner_product(degrees: Mapping[str, Many], axes: Sequence[str]) -> Many:
    """The product of the degrees of the other axes inside the outermost of `axes`: the stride of a group's neighbours.

    >>> inner_product({"data": 2, "fsdp": 4, "context": 8, "tensor": 2}, ("fsdp", "context"))
    2
    """
    outermost = axes[0]
    if outermost not in AXES:  # one of the user's own, whose place in the mesh is not known
        return 1
    inside = AXES[AXES.index(outermost) + 1 :]
    return math.prod(degrees.get(name, 1) for name in inside if name not in axes)


# --------------------------------------------------------------------------------------------------
# The time of a step, from a prediction and a kind of hardware: compute, what the network adds, bubble and update.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Price:
    """Seconds of one step on one device; arrays for many candidates.

    Attributes:
      compute: products, recomputation included, at the assumed efficiency, and passes over memory between them.
      bubble: of the pipeline.
      update: the optimizer's reading and writing of memory, and what else a measured step takes however few tokens it has.
      host: to and from host memory.
      network: seconds on the network by mesh axes, hidden or not.
      exposed: seconds on the network that compute does not hide.
      memory: peak bytes of a device.
      tokens: of one step, over all devices.
      ideal: seconds of the step's model FLOPs at peak: without recomputation, but with scores that a mask hides, as published.
    """

    compute: Many
    bubble: Many
    update: Many
    host: Many
    network: Mapping[str, Many] = field(hash=False)
    exposed: Many
    memory: Many
    tokens: int
    ideal: float

    @property
    def time(self) -> Many:
        """Total seconds of a step."""
        return self.compute + self.bubble + self.update + self.host + self.exposed

    @property
    def mfu(self) -> Many:
        """Model FLOPs utilization as published: ideal time over this time; masks over long sequences may lift it above 1."""
        return self.ideal / self.time

    @property
    def tokens_per_second(self) -> Many:
        """Tokens per second over all devices."""
        return self.tokens / self.time


def price(found: Predicted, hardware: Hardware, assumptions: Assumptions | None = None) -> Price:
    """Price a predicted step, or many candidates at once.

    A flow of b bytes over an axis takes b / bandwidth, and each of its executions a delay. In every phase (see `phases`)
    collectives of parameters and gradients hide behind `overlap` of its compute time, those of layers behind `layer_overlap`,
    and permutes of a pipeline behind nothing.

    Args:
      found: what the plan holds, sends and computes.
      hardware: the kind of devices.
      assumptions: of the cost model; None: those for the hardware.
    """
    given = assumptions or Assumptions.on(hardware)
    run = phases(found, hardware, given)
    compute = sum(phase.times * phase.compute for phase in run)
    memory = found.memory
    states = memory.parameters + memory.optimizer + memory.padding
    return Price(
        compute=compute,
        bubble=hardware.idle(found.bubble) * compute,
        update=(2 * states + memory.gradients) / hardware.memory_bandwidth + hardware.step_seconds,
        host=2 * memory.host / given.host_bandwidth,
        network=network_by_axes(run),
        exposed=sum(phase.exposed for phase in run),
        memory=memory.total,
        tokens=found.tokens,
        ideal=found.tokens * found.flops_per_token / math.prod(found.degrees.values()) / hardware.flops,
    )


# --------------------------------------------------------------------------------------------------
# A predicted step on a timeline: what every device computes, what it sends meanwhile, and where it waits.
# --------------------------------------------------------------------------------------------------

COLUMNS = 64
"""Characters of a printed lane."""

HARDLY = 0.02
"""A printed character whose part of the step is busy for a smaller share than this is shown as idle."""

WORDS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
"""The names of a pipeline's actions on a timeline, by their letters in `pipeline/schedules.py`."""


class Span(NamedTuple):
    """A named interval of time, in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Lane:
    """One line of a timeline: a device's work ("compute", or a pipeline's "rank 0", ...), or the network of mesh axes.

    Attributes:
      name: of the lane.
      spans: in order of time, none over another. Work is forward, backward, update or host; what is sent has the names of the
        ledger's labels.
    """

    name: str
    spans: tuple[Span, ...]

    @property
    def busy(self) -> float:
        """Seconds that the spans take in total."""
        return sum(span.end - span.start for span in self.spans)


@dataclass(frozen=True)
class Timeline:
    """The lanes of a step in the cost model; it ends at the step's price.

    The network carries one flow at a time, each as soon as its phase begins; exposed communication lengthens every run of the
    phase alike. Within a phase the order is not modelled.

    Attributes:
      lanes: work first, then the network.
      seconds: of the step.
    """

    lanes: tuple[Lane, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The lanes by name, with their spans as [name, start, end] in seconds."""
        return {lane.name: [list(span) for span in lane.spans] for lane in self.lanes}

    def __str__(self) -> str:
        rows = [
            [lane.name, f"{1e3 * lane.busy:,.2f}", f"{lane.busy / self.seconds:.0%}", self._strip(lane)]
            for lane in self.lanes
        ]
        shown = sorted({span.name for lane in self.lanes for span in lane.spans})
        legend = ", ".join(f"{name[0].upper()} {name}" for name in shown)
        header = ["lane", "busy ms", "of the step", f"{1e3 * self.seconds:,.2f} ms".ljust(COLUMNS)]
        return f"{aligned(header, rows, left=1)}\n{legend}; small letters: less than half of the time"

    def _strip(self, lane: Lane) -> str:
        """One character per part of the step, for what takes most of it."""
        parts: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
        wide = self.seconds / COLUMNS
        for name, start, end in lane.spans:
            for i in range(int(start / wide), min(COLUMNS, math.ceil(end / wide))):
                part = min(end, (i + 1) * wide) - max(start, i * wide)
                parts[i][name] = parts[i].get(name, 0.0) + part
        return "".join(self._letter(part, wide) for part in parts)

    def _letter(self, part: dict[str, float], wide: float) -> str:
        taken = sum(part.values()) / wide
        if taken < HARDLY:
            return "."
        first = max(part, key=part.__getitem__)[0]
        return first.upper() if taken >= 0.5 else first


def timeline(found: Prediction, hardware: Hardware, assumptions: Assumptions | None = None) -> Timeline:
    """The timeline of a predicted step.

    Args:
      found: what the plan holds, sends and computes.
      hardware: the kind of devices.
      assumptions: of the cost model; None: those for the hardware.

    Returns:
      A `Timeline`; `print` it, or draw it with `Answer.save_picture`.
    """
    given = assumptions or Assumptions.on(hardware)
    cost, run = price(found, hardware, given), phases(found, hardware, given)
    work = {f"rank {rank}": [] for rank in range(found.timetable.num_ranks)} if found.timetable else {"compute": []}
    drawing = _Drawing(work, {}, 0.0, 0.0)
    if found.timetable is None:
        drawing.microbatches(run[:-1])
    else:
        drawing.alone(run[0])
        drawing.ticks(run[1], found, found.timetable, hardware.idle(found.bubble))
    drawing.alone(run[-1])
    drawing.both("host", cost.host)
    drawing.both("update", cost.update)
    lanes = {name: spans for name, spans in (drawing.work | drawing.network).items() if spans}
    return Timeline(tuple(Lane(name, tuple(spans)) for name, spans in lanes.items()), cost.time)


@dataclass
class _Drawing:
    """Lanes being drawn, with the times until which work (`clock`) and network (`sent`) are busy."""

    work: dict[str, list[Span]]
    network: dict[str, list[Span]]
    clock: float
    sent: float

    def send(self, sendings: tuple[Sending, ...], share: float = 1.0) -> None:
        """Put a share of flows on the network, from now or when it is free."""
        self.sent = max(self.sent, self.clock)
        for each in sendings:
            end = self.sent + share * each.seconds
            self.network.setdefault(each.axes, []).append(Span(each.name, self.sent, end))
            self.sent = end

    def alone(self, phase: Phase) -> None:
        """Draw a phase without compute."""
        self.send(phase.every)
        self.clock += phase.exposed

    def both(self, name: str, seconds: float) -> None:
        """Draw work that all devices do at the same time."""
        if seconds:
            for spans in self.work.values():
                spans.append(Span(name, self.clock, self.clock + seconds))
        self.clock += seconds

    def microbatches(self, run: tuple[Phase, ...]) -> None:
        """Draw the forward and backward of every microbatch; flows sent once go with the first or last."""
        times = run[0].times
        for i in range(times):
            for phase in run:
                special = i == (0 if phase is run[0] else times - 1)
                sendings = (*phase.every, *phase.once) if special else phase.every
                self.send(sendings)
                self.both(phase.name, phase.compute)
                self.clock += phase.waits(sendings)

    def ticks(self, phase: Phase, found: Prediction, timetable: Timetable, bubble: float) -> None:
        """Draw the ticks of a pipeline, each lengthened by its part of the exposed communication."""
        assert found.stage_costs is not None
        _, ends = tick_times(timetable, found.stage_costs)
        useful = phase.compute * (1 + bubble) / float(ends[-1])  # seconds of one unit of the stages' costs
        wait = phase.exposed / len(ends)
        begins = np.concatenate([[0.0], ends[:-1]])
        for rank, events in enumerate(trace_ticks(timetable, found.stage_costs)):
            for event in events:
                tick = int(np.searchsorted(begins, (event.start + event.end) / 2, side="right")) - 1
                shift = self.clock + tick * wait
                span = Span(WORDS[event.action.work], shift + useful * event.start, shift + useful * event.end)
                self.work[f"rank {rank}"].append(span)
        start = self.clock
        for tick, begin in enumerate(begins):
            self.clock = start + useful * float(begin) + tick * wait
            self.send(phase.every, 1 / len(ends))
        self.clock = start + useful * float(ends[-1]) + phase.exposed
