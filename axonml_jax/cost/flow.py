"""`Flow`: collectives of a step that a prediction knows of, alike in kind, axes, dtype and place."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jax.numpy as jnp

from axonml_jax.cost.amounts import Many, nothing, varies
from axonml_jax.cost.wire import exact, wire_elements

GRADIENTS = "gradients"
PARAMETERS = "parameters"
ATTENTION = "attention"
"""What attention sends of sequences whose positions are split over ranks."""
EXPERTS = "experts"
"""What travels between tokens and experts on other ranks."""

ONCE = "once"
EACH_MICROBATCH = "each microbatch"
EACH_TICK = "each tick"
LATER = "a later round"
"""One round of a dispatch after the first, of which an even load needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Collectives of one label, kind, axes, dtype and place.

    Sizes and counts are numbers for one plan, or arrays for many candidates at once.

    Attributes:
      label: what they move, in the words of the counted ledger: parameters, gradients, activations, ...
      kind: one of `wire.KINDS`.
      axes: mesh axes.
      group_size: ranks that take part.
      apart: of the axis's ranks the next that takes part: 1 for all of them, U where neighbours by U do something else.
      dtype: element type on the wire.
      itemsize: its bytes.
      elements: of the full arrays, in one execution.
      padding: how many of them are padding.
      launches: arrays that travel, in one execution.
      times: executions in one step.
      every: they happen in one of so many steps; bytes are the mean over these.
      where: once, each microbatch, each tick of a pipeline, or in a round that even loads do not need.
      work: what it may hide behind: "forward", "backward", or nothing ("").
    """

    label: str
    kind: str
    axes: tuple[str, ...]
    group_size: Many
    dtype: str
    itemsize: int
    elements: Many
    padding: Many = 0
    apart: Many = 1
    launches: Many = 1
    times: Many = 1
    every: int = 1
    where: str = ONCE
    work: str = ""

    @property
    def wire_bytes(self) -> Many:
        """Bytes that one rank sends in one step, padding included."""
        return self._mean(self.times * self.itemsize * wire_elements(self.kind, self.elements, self.group_size))

    @property
    def padding_bytes(self) -> Many:
        """The part of them that is padding."""
        return self._mean(self.times * self.itemsize * wire_elements(self.kind, self.padding, self.group_size))

    def _mean(self, amount: Many) -> Many:
        return exact(amount if self.every == 1 else amount / Fraction(self.every))

    @property
    def count(self) -> Many:
        """Launches in one step."""
        return self.launches * self.times

    @property
    def sends(self) -> bool:
        """Whether anything travels; of arrays it may."""
        alone = not varies(self.group_size) and self.group_size == 1
        return not (alone or nothing(self.times) or nothing(self.elements))


@lru_cache(maxsize=256)
def named(dtype: Any) -> tuple[str, int]:
    """Name and bytes of a dtype.

    >>> named("bfloat16")
    ('bfloat16', 2)
    """
    found = jnp.dtype(dtype)
    return found.name, found.itemsize


def every(steps: int) -> str:
    """The place of what runs in one of so many steps.

    >>> every(10)
    'every 10 steps'
    """
    return f"every {steps} steps" if steps > 1 else ONCE


def where_of(times: Many) -> str:
    """The place of what runs so many times for a step's microbatches."""
    return EACH_MICROBATCH if varies(times) or times > 1 else ONCE


def joined(flows: Iterable[Flow]) -> list[Flow]:
    """Flows that are alike joined, those that send nothing dropped."""
    found: dict[tuple, list[Flow]] = {}
    for flow in flows:
        if flow.sends:
            # Arrays of one axis, or of one place, are one and the same.
            sizes = ("many" if varies(size) else size for size in (flow.group_size, flow.times))
            key = (flow.label, flow.kind, flow.axes, flow.dtype, flow.where, flow.work, flow.every, *sizes)
            found.setdefault(key, []).append(flow)
    return [alike[0] if len(alike) == 1 else _joined(alike) for alike in found.values()]


def merged(flows: Iterable[Flow]) -> tuple[Flow, ...]:
    """Flows of one plan that are alike joined, those that send nothing dropped; the heaviest first."""
    return tuple(sorted(joined(flows), key=lambda flow: -flow.wire_bytes))


def _joined(alike: list[Flow]) -> Flow:
    first = alike[0]
    elements, padding, launches = first.elements, first.padding, first.launches
    for flow in alike[1:]:
        elements, padding, launches = elements + flow.elements, padding + flow.padding, launches + flow.launches
    return replace(first, elements=elements, padding=padding, launches=launches)
