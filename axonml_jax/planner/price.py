"""The time of a step, from a prediction and a kind of hardware: compute, what the network adds, bubble and update."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from axonml_jax.ledger.label import GRADIENTS, PARAMETERS
from axonml_jax.ledger.predict.flow import Flow
from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.mesh.axes import AXES
from axonml_jax.planner.assumptions import Assumptions
from axonml_jax.planner.hardware import Hardware

JOINED_BYTES = 32 * 2**20
"""What one launch of parameters or gradients carries at most, in the cost model."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """Seconds of one step on one device.

    Attributes:
      compute: products, recomputation included, at the assumed efficiency.
      bubble: of the pipeline.
      update: the optimizer's reading and writing of memory.
      host: to and from host memory.
      network: seconds on the network by mesh axes, hidden or not.
      exposed: the part of them that nothing hides.
      memory: bytes of a device at the fullest moment.
      tokens: of one step, over all devices.
      ideal: what an ideal device takes at its peak, without recomputation.
    """

    compute: float
    bubble: float
    update: float
    host: float
    network: Mapping[str, float] = field(hash=False)
    exposed: float
    memory: int
    tokens: int
    ideal: float

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return self.compute + self.bubble + self.update + self.host + self.exposed

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the ideal time over this one."""
        return self.ideal / self.time

    @property
    def tokens_per_second(self) -> float:
        """Over all devices."""
        return self.tokens / self.time


def price(found: Prediction, hardware: Hardware, assumptions: Assumptions | None = None) -> Price:
    """Price a predicted step.

    A flow of b bytes over an axis takes b / bandwidth, and each of its executions a delay. What parameters and gradients
    send hides behind `overlap` of the compute time; what layers send behind `layer_overlap`; permutes of a pipeline end a
    tick and hide behind nothing.

    Args:
      found: what the plan holds, sends and computes.
      hardware: on what.
      assumptions: how well; None: the defaults.
    """
    given = assumptions or Assumptions()
    devices = math.prod(found.degrees.values())
    flops = found.tokens * (found.flops_per_token + found.recomputed_flops_per_token) / devices
    compute = flops / (hardware.flops * given.efficiency)
    weights, layers, passing, network = 0.0, 0.0, 0.0, {}
    for flow in found.traffic:
        seconds = flow_seconds(flow, found.degrees, hardware)
        network[",".join(flow.axes)] = network.get(",".join(flow.axes), 0.0) + seconds
        if flow.label in (GRADIENTS, PARAMETERS) and "depth" not in flow.axes:
            weights += seconds
        elif flow.kind == "permute":
            passing += seconds
        else:
            layers += seconds
    hidden = min(weights, given.overlap * compute) + min(layers, given.layer_overlap * compute)
    memory = found.memory
    states = memory.parameters + memory.optimizer + memory.padding
    return Price(
        compute=compute,
        bubble=found.bubble * compute,
        update=(2 * states + memory.gradients) / hardware.memory_bandwidth,
        host=2 * memory.host / given.host_bandwidth,
        network=network,
        exposed=weights + layers + passing - hidden,
        memory=memory.total,
        tokens=found.tokens,
        ideal=found.tokens * found.flops_per_token / devices / hardware.flops,
    )


def flow_seconds(flow: Flow, degrees: Mapping[str, int], hardware: Hardware) -> float:
    """Seconds that a flow keeps the network busy, on its slowest axis."""
    seconds = 0.0
    for axis in flow.axes[:1]:  # a collective over several axes is limited by the outermost
        inner = inner_product(degrees, axis)
        joined = flow.launches
        if flow.label in (GRADIENTS, PARAMETERS):  # XLA joins neighbours into launches of some tens of MB
            joined = -(-flow.elements * flow.itemsize // JOINED_BYTES)
        delays = flow.times * hardware.delay(flow.group_size, inner) * joined
        seconds += float(flow.wire_bytes) / hardware.bandwidth(flow.group_size, inner) + delays
    return seconds


def inner_product(degrees: Mapping[str, int], axis: str) -> int:
    """Product of the degrees of the axes inside one: how far apart its neighbours are."""
    return math.prod(degrees.get(name, 1) for name in AXES[AXES.index(axis) + 1 :])
