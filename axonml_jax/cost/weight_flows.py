"""What parameters and their gradients send: gathers, reductions, and what stages share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from axonml_jax.cost.amounts import Many, either, most, nothing
from axonml_jax.cost.flow import GRADIENTS, ONCE, PARAMETERS, Flow, every, where_of
from axonml_jax.cost.rounds import Run, ShardCounts
from axonml_jax.cost.weight_groups import Group, Sent, Weights
from axonml_jax.mesh.axes import as_axes
from axonml_jax.parallel.pipeline.policy import AXIS


def weight_flows(weights: Weights, parts: ShardCounts, run: Run, degrees: Mapping[str, Many]) -> Iterator[Flow]:
    """Gathers of parameters and reductions of gradients along the axes of strategies, of what a rank has.

    Args:
      weights: of the model, where they rest.
      parts: those that the rank has.
      run: how often it moves them.
      degrees: of the mesh.
    """
    buffers: dict[tuple[str, ...], Many] = {}
    for group in weights.groups:
        number = parts.number(group.place, group.count)
        if nothing(number):
            continue
        if run.pipelined and group.place == "both ends":
            yield from _sent_along(group, number, degrees[AXIS])
            number = number * parts.first  # elsewhere it is a copy
            if nothing(number):
                continue
        # A pipeline's rank keeps everything that lies over the same axes in one buffer, which is reduced as one array.
        before = buffers.get(group.axes, 0)
        buffers[group.axes] = most(before, either(number > 0, 1, 0))
        moving = _Moving(group, number, buffers[group.axes] - before if run.pipelined else None, run)
        yield from moving.gathers()
        yield from moving.reductions()
        yield from moving.joins()


def _sent_along(group: Group, number: Many, ranks: Many) -> Iterator[Flow]:
    """What several stages read lives on one: it is sent to the others once per step, and its gradient back."""
    for label, dtype, work in ((PARAMETERS, group.read_dtype, "forward"), ("", group.sum_dtype, "backward")):
        yield Flow(
            label=label, kind="all_reduce", axes=(AXIS,), group_size=ranks, dtype=dtype, itemsize=jnp.dtype(dtype).itemsize,
            elements=number * group.read, launches=number * group.arrays, work=work,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Moving:
    """A group while a rank moves it: how many of each it has, and how many buffers it adds (None: no pipeline)."""

    group: Group
    number: Many
    buffers: Many | None
    run: Run

    def gathers(self) -> Iterator[Flow]:
        """Before they are read in forwards, and again in backwards that read them."""
        group, run = self.group, self.run
        again = 1 if group.again or run.pipelined else group.rebuilds * most(run.recomputes, int(group.scanned))
        for sent in group.gathers:
            often = run.rounds(sent.axis)
            yield from self._flows(PARAMETERS, sent, often.at_start, often.at_use, "forward")
            yield from self._flows(PARAMETERS, sent, 0, often.at_use, "backward", group.trained * again)

    def reductions(self) -> Iterator[Flow]:
        """Of their gradients."""
        for sent in self.group.syncs:
            often = self.run.rounds(sent.axis, sent.sharded)
            yield from self._flows(GRADIENTS, sent, often.at_end, often.between, "backward")

    def joins(self) -> Iterator[Flow]:
        """Of what parameters changed by, at the end of a round."""
        for sent in self.group.joins:
            for flow in self._flows(GRADIENTS, sent, 1, 0, ""):
                yield replace(flow, every=sent.every, where=every(sent.every))

    def _flows(
        self, label: str, sent: Sent, once: Many, often: Many, work: str, calls: Many = 1
    ) -> Iterator[Flow]:  # fmt: skip
        """What goes once in a step, and what goes more often: so many times then, or not at all."""
        for times, where in ((once, ONCE), (often, where_of(often))):
            if not nothing(times) and not nothing(calls):
                yield Flow(
                    label=label,
                    kind=sent.kind,
                    axes=as_axes(sent.axis),
                    group_size=sent.ranks,
                    dtype=sent.dtype,
                    itemsize=sent.itemsize,
                    elements=calls * self.number * sent.elements,
                    padding=calls * self.number * sent.padding,
                    launches=calls * self._launches(sent),
                    times=times,
                    where=where,
                    work=work,
                )

    def _launches(self, sent: Sent) -> Many:
        buffered = self.buffers is not None and not sent.sharded and sent.buffered
        if self.run.pipelined:
            return self.buffers if buffered else self.number * sent.launches
        return self.number * either(self.run.microbatches == 1, sent.launches_alone, sent.launches)
