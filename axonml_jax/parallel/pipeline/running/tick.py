"""What a rank does in one tick: one of the stages' forwards, one of their backwards, or nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
from jax.typing import ArrayLike

from axonml_jax.collectives.varying import vary_like
from axonml_jax.parallel.pipeline.cutting.traced_stage import Inputs
from axonml_jax.parallel.pipeline.resting.packing import Buffers
from axonml_jax.parallel.pipeline.running.one_of import one_of
from axonml_jax.parallel.pipeline.running.rings import nothing
from axonml_jax.parallel.pipeline.running.traced_line import Held, Member, TracedLine
from axonml_jax.parallel.pipeline.schedules.tick_table import Work

Read = Callable[[Member], Sequence[jax.Array]]
"""The weights that a stage reads, in its own branch."""

Accumulate = Callable[[Member, Buffers, Sequence[Any]], Buffers]
"""`accumulate(member, grads, gradients of what it read) -> grads`, in its own branch."""

Part = Literal["both", "input", "weight"]
"""Of a backward: both gradients, that of the input alone, or that of the weights alone."""


class Made(NamedTuple):
    """What a forward leaves.

    Attributes:
      y: for the next stage.
      output: what the last stage returns.
      residuals: the slots for backwards, with this forward's stored.
      states: the rank's states.
      loss, aux: of this microbatch.
    """

    y: Buffers
    output: Buffers
    residuals: Buffers
    states: Buffers
    loss: jax.Array
    aux: Sequence[jax.Array]


def forward(
    line: TracedLine,
    held: Held,
    activations: Buffers,
    residuals: Buffers,
    slot: ArrayLike,
    states: Buffers,
    work: Work,
    read: Read,
) -> Made:
    """One forward, of the stage that `work` names.

    Args:
      line: the stages.
      held: this rank's weights and batch.
      activations: received, by slot.
      residuals: what forwards keep for backwards, by slot. A stage writes there itself: nothing is packed and copied.
      slot: where it writes.
      states: the rank's.
      work: what to do, a number in each field.
      read: gives its weights.
    """

    def idle() -> Made:
        sent, output = nothing(line.activations), nothing(line.outputs)
        return Made(sent, output, residuals, states, line.loss_like, line.aux_like)

    def run(member: Member) -> Made:
        inputs = Inputs(
            list(read(member)),
            held.microbatch(work.microbatch),
            member.x.unpack(activations, work.source),
            member.state.unpack(states),
        )
        if member.forward is None or member.residuals is None:
            result, kept = member.traced.apply(inputs), residuals
        else:
            result, values = member.forward.apply(inputs)
            kept = member.residuals.store(residuals, values, slot)
        last = member is line.members[-1]
        aux = line.aux_like
        if last:
            aux = [vary_like(x.astype(like.dtype), like) for x, like in zip(result.aux, aux, strict=True)]
        return Made(
            nothing(line.activations) if last else member.y.pack(result.y, line.activations),
            member.y.pack(result.y, line.outputs) if last else nothing(line.outputs),
            kept,
            member.state.write(states, result.state),
            vary_like(result.loss.astype(line.loss_like.dtype), line.loss_like),
            tuple(aux),
        )

    return _switch(line, work, run, idle)


def backward(
    line: TracedLine,
    held: Held,
    residuals: Buffers,
    cotangents: Buffers,
    grads: Buffers,
    work: Work,
    seed: Any,
    part: Part,
    read: Read,
    accumulate: Accumulate,
) -> tuple[Buffers, Buffers]:
    """One backward, of the stage that `work` names.

    Args:
      line: the stages.
      held: this rank's weights and batch.
      residuals: what forwards kept, by slot.
      cotangents: received, by slot.
      grads: gradients so far.
      work: what to do, a number in each field.
      seed: the gradient of every microbatch's loss.
      part: which gradients.
      read: gives its weights.
      accumulate: adds their gradients.

    Returns:
      The gradient of the stage's input for the stage before, and the gradients so far with this one's added.
    """

    def idle() -> tuple[Buffers, Buffers]:
        return nothing(line.cotangents), grads

    def run(member: Member) -> tuple[Buffers, Buffers]:
        assert member.residuals is not None and member.forward is not None
        inputs = Inputs(list(read(member)), held.microbatch(work.microbatch), (), ())
        saved = replace(member.forward.saved, residuals=member.residuals.unpack(residuals, work.slot))
        last = member is line.members[-1]
        dy = [_zero(member, i) for i in member.traced.varied_y] if last else member.dy.unpack(cotangents, work.source)
        dx, of_weights = member.traced.backward(saved, inputs, dy, seed)
        sent = nothing(line.cotangents) if part == "weight" else member.dx.pack(dx, line.cotangents)
        return sent, grads if part == "input" else accumulate(member, grads, of_weights)

    return _switch(line, work, run, idle)


def _zero(member: Member, place: int) -> jax.Array:
    """The gradient of what the last stage returns: nobody differentiates it."""
    return member.traced.body.cotangent(member.traced.places.y[place])  # pyright: ignore[reportArgumentType]


def _switch(line: TracedLine, work: Work, run: Callable[[Member], Any], idle: Callable[[], Any]) -> Any:
    last = line.members[-1]  # it alone returns what it makes
    kinds = [(member is last, member.runs) for member in line.members]
    branches = {kind: lambda member=member: run(member) for kind, member in zip(kinds, line.members, strict=True)}
    functions = [branches[kind] for kind in kinds]
    return one_of(work.stage, [*functions, idle], [*(member.looks for member in line.members), None])
