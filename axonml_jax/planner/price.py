"""The time of a step, from a prediction and a kind of hardware: compute, what the network adds, bubble and update."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from axonml_jax.cost.amounts import Many
from axonml_jax.planner.assumptions import Assumptions
from axonml_jax.planner.hardware import Hardware
from axonml_jax.planner.phases import Predicted, network_by_axes, phases


@dataclass(frozen=True, kw_only=True)
class Price:
    """Seconds of one step on one device; of many candidates arrays of them.

    Attributes:
      compute: products, recomputation included, at the assumed efficiency.
      bubble: of the pipeline.
      update: the optimizer's reading and writing of memory, and what else a measured step takes however few tokens it has.
      host: to and from host memory.
      network: seconds on the network by mesh axes, hidden or not.
      exposed: the part of them that nothing hides.
      memory: bytes of a device at the fullest moment.
      tokens: of one step, over all devices.
      ideal: what the FLOPs that are published count take at the peak: without recomputation, with scores that a mask hides.
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
        """Seconds of a step."""
        return self.compute + self.bubble + self.update + self.host + self.exposed

    @property
    def mfu(self) -> Many:
        """Model FLOPs utilization as published, the ideal time over this one; masks over long sequences may lift it above 1."""
        return self.ideal / self.time

    @property
    def tokens_per_second(self) -> Many:
        """Over all devices."""
        return self.tokens / self.time


def price(found: Predicted, hardware: Hardware, assumptions: Assumptions | None = None) -> Price:
    """Price a predicted step, or many candidates at once.

    A flow of b bytes over an axis takes b / bandwidth, and each of its executions a delay. In every phase (see `phases`) what
    parameters and gradients send hides behind `overlap` of its compute time, what layers send behind `layer_overlap`;
    permutes of a pipeline end a tick and hide behind nothing.

    Args:
      found: what the plan holds, sends and computes.
      hardware: on what.
      assumptions: how well; None: the defaults.
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
