"""`Flow`: collectives of a step that a prediction knows of, alike in kind, axes, dtype and place."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from axonml_jax.cost.wire import Amount, exact, wire_elements

GRADIENTS = "gradients"
PARAMETERS = "parameters"

ONCE = "once"
EACH_MICROBATCH = "each microbatch"
EACH_TICK = "each tick"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Collectives of one label, kind, axes, dtype and place.

    Attributes:
      label: what they move, in the words of the counted ledger: parameters, gradients, activations, ...
      kind: one of `wire.KINDS`.
      axes: mesh axes.
      group_size: ranks that take part.
      dtype: element type on the wire.
      itemsize: its bytes.
      elements: of the full arrays, in one execution.
      padding: how many of them are padding.
      launches: arrays that travel, in one execution.
      times: executions in one step.
      where: once, each microbatch, or each tick of a pipeline.
      work: what it may hide behind: "forward", "backward", or nothing ("").
    """

    label: str
    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    itemsize: int
    elements: int
    padding: int = 0
    launches: int = 1
    times: int = 1
    where: str = ONCE
    work: str = ""

    @property
    def wire_bytes(self) -> Amount:
        """Bytes that one rank sends in one step, padding included."""
        return exact(self.times * self.itemsize * wire_elements(self.kind, self.elements, self.group_size))

    @property
    def padding_bytes(self) -> Amount:
        """The part of them that is padding."""
        return exact(self.times * self.itemsize * wire_elements(self.kind, self.padding, self.group_size))

    @property
    def count(self) -> int:
        """Launches in one step."""
        return self.launches * self.times


def merged(flows: Iterable[Flow]) -> tuple[Flow, ...]:
    """Flows that are alike joined, those that send nothing dropped; the heaviest first."""
    joined: dict[tuple, Flow] = {}
    for flow in flows:
        if flow.group_size == 1 or not flow.times or not flow.elements:
            continue
        key = (flow.label, flow.kind, flow.axes, flow.group_size, flow.dtype, flow.where, flow.work, flow.times)
        old = joined.get(key)
        joined[key] = flow if old is None else _joined(old, flow)
    return tuple(sorted(joined.values(), key=lambda flow: -flow.wire_bytes))


def _joined(a: Flow, b: Flow) -> Flow:
    return replace(a, elements=a.elements + b.elements, padding=a.padding + b.padding, launches=a.launches + b.launches)
