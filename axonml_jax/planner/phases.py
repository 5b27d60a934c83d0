"""A step as phases: what runs, what is sent meanwhile, and how much of the sending nothing hides."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from axonml_jax.cost.amounts import Many, divided, either, least, varies
from axonml_jax.cost.flow import ATTENTION, GRADIENTS, LATER, ONCE, PARAMETERS, Flow
from axonml_jax.cost.held import Memory
from axonml_jax.mesh.axes import AXES, LAYER_AXES
from axonml_jax.parallel.pipeline.policy import AXIS as PIPE
from axonml_jax.parallel.tensor.megatron.fused_attention import kernel_of
from axonml_jax.planner.assumptions import Assumptions
from axonml_jax.planner.hardware import Hardware

JOINED_BYTES = 32 * 2**20
"""What one launch of parameters or gradients carries at most, in the cost model, but for CPUs."""

RAGGED = "ragged_all_to_all"
"""The collective whose wire bytes are an upper bound."""

START, FORWARD, BACKWARD, TICKS, END = "start", "forward", "backward", "ticks", "end"
"""A step's parts: what comes before the first microbatch, its passes or a pipeline's ticks, and what comes after the last."""


class Predicted(Protocol):
    """What is asked of a step that is priced: a `Prediction`, or arrays of many candidates (see `quick.py`)."""

    @property
    def degrees(self) -> Mapping[str, Many]:
        """Of the mesh."""
        ...

    @property
    def pipelined(self) -> bool:
        """Whether stages lie along a pipeline."""
        ...

    @property
    def microbatches(self) -> Many:
        """Of one update."""
        ...

    @property
    def tokens(self) -> int:
        """Of one update."""
        ...

    @property
    def flops_per_token(self) -> int:
        """Of forward and backward."""
        ...

    @property
    def layers(self) -> int:
        """Blocks of the model."""
        ...

    @property
    def recomputed_flops_per_token(self) -> Many:
        """What recomputation adds."""
        ...

    @property
    def masked_flops_per_token(self) -> Many:
        """Of forward and backward, what attention leaves out, as masks hide it."""
        ...

    @property
    def attention_again(self) -> Many:
        """How often attention's forward is computed again."""
        ...

    @property
    def blockwise_flops_per_token(self) -> Many:
        """Of forward and backward, those of attention in blocks that XLA computes."""
        ...

    @property
    def expert_flops_per_token(self) -> Many:
        """Of all those, of experts."""
        ...

    @property
    def expert_padding(self) -> Many:
        """Rows that these multiply on a rank, over those of its share of tokens; 0: as many as others send."""
        ...

    @property
    def causal_balance(self) -> Many:
        """What the busiest rank computes of it, over the mean."""
        ...

    @property
    def traffic(self) -> Sequence[Flow]:
        """What is sent."""
        ...

    @property
    def memory(self) -> Memory:
        """What is held."""
        ...

    @property
    def bubble(self) -> Many:
        """Idle time over useful time."""
        ...


@dataclass(frozen=True, slots=True)
class Sending:
    """One flow while a phase runs once.

    Attributes:
      axes: mesh axes, joined by commas.
      name: what it moves: parameters, gradients, layers, ...
      kind: "weights" hides behind `overlap` of the phase's compute, "layers" behind `layer_overlap`, "passing" (permutes: a
        pipeline's end a tick, a ring's lie between products) behind nothing.
      seconds: on the network.
    """

    axes: str
    name: str
    kind: str
    seconds: Many


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of a step.

    Attributes:
      name: forward, backward or end; of a pipeline start, ticks (all of them) or end.
      times: how often it runs in a step.
      compute: seconds of products of one run.
      every: what each run sends.
      once: what only one of the runs sends besides: a forward the first, a backward the last.
      assumptions: say what hides.
    """

    name: str
    times: Many
    compute: Many
    every: tuple[Sending, ...]
    once: tuple[Sending, ...]
    assumptions: Assumptions

    @property
    def exposed(self) -> Many:
        """Seconds of all runs that nothing hides."""
        return (self.times - 1) * self.waits(self.every) + self.waits((*self.every, *self.once))

    def waits(self, sent: tuple[Sending, ...]) -> Many:
        """Seconds that one run takes longer for sending this."""
        given = self.assumptions
        weights, layers, passing = (
            sum(each.seconds for each in sent if each.kind == kind) for kind in ("weights", "layers", "passing")
        )
        hidden = least(weights, given.overlap * self.compute) + least(layers, given.layer_overlap * self.compute)
        return weights + layers + passing - hidden


def phases(found: Predicted, hardware: Hardware, given: Assumptions) -> tuple[Phase, ...]:
    """The phases of a predicted step, in order.

    Without a pipeline every microbatch has a forward and a backward, which take one and two thirds of the products and the
    backward what is recomputed; what a measured block takes besides comes with every microbatch. What a step sends once
    hides behind one microbatch alone: gathers behind the first forward, reductions behind the last backward. A pipeline's
    ticks are one phase, before and after which its rank sends what it sends once, behind nothing.
    """
    devices = math.prod(found.degrees.values())
    seconds = lambda flops: found.tokens * flops / devices / (hardware.flops * given.efficiency)
    slower = found.causal_balance / (given.blocks if kernel_of(hardware.platform) else 1)
    attention = (slower - 1) * found.blockwise_flops_per_token - found.masked_flops_per_token
    fuller = either(found.expert_padding > 0, found.expert_padding, given.imbalance)
    products = seconds(found.flops_per_token + attention + (fuller - 1) * found.expert_flops_per_token)
    again = seconds(found.recomputed_flops_per_token + found.attention_again * attention / 3)
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
    """Parameters are sent before what is computed with them, gradients after it."""
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
    """Seconds on the network by mesh axes, hidden or not."""
    found: dict[str, Many] = {}
    for times, each in _sendings(run):
        found[each.axes] = found.get(each.axes, 0.0) + times * each.seconds
    return found


def _sendings(run: tuple[Phase, ...]) -> Iterator[tuple[Many, Sending]]:
    for phase in run:
        yield from ((phase.times, each) for each in phase.every)
        yield from ((1, each) for each in phase.once)


def flow_seconds(flow: Flow, degrees: Mapping[str, Many], hardware: Hardware) -> Many:
    """Seconds that a flow keeps the network busy in a step, on its slowest axis."""
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
    """Product of the degrees of the other axes inside the outermost of some: how far apart a group of ranks over these lies.

    >>> inner_product({"data": 2, "fsdp": 4, "context": 8, "tensor": 2}, ("fsdp", "context"))
    2
    """
    outermost = axes[0]
    if outermost not in AXES:  # one of the user's own: nobody says what lies inside it
        return 1
    inside = AXES[AXES.index(outermost) + 1 :]
    return math.prod(degrees.get(name, 1) for name in inside if name not in axes)
