"""What a rank of a pipeline does in one tick: forwards and backwards of its stages, and how these get their weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from axonml_jax.collectives.primitives import shift, vary, vary_like
from axonml_jax.compat.versions import BRANCHES_WRITE_IN_PLACE
from axonml_jax.executor.cut import Inputs
from axonml_jax.executor.line import Held, Member, TracedLine
from axonml_jax.pipeline.branches import one_of
from axonml_jax.pipeline.pack import Buffers, Packing, Sizes, Slot, largest, nothing
from axonml_jax.pipeline.schedules import Table, Work

# --------------------------------------------------------------------------------------------------
# Buffers with slots that ticks write and read in turn, and the shift of a buffer to the neighbouring rank.
# --------------------------------------------------------------------------------------------------


def slots(sizes: Sizes, count: int) -> Buffers:
    """Empty buffers of `count` slots, [count, n]; where idle ranks write, the last one is for trash."""
    empty = lambda group, size: jnp.zeros((count, *group.shape(size)), group.dtype)
    return {group: vary(empty(group, size), group.axes) for group, size in sizes.items()}


def store(buffers: Buffers, values: Buffers, slot: ArrayLike) -> Buffers:
    """Replaces one slot of the buffers."""
    put = partial(jax.lax.dynamic_update_index_in_dim, axis=0, allow_negative_indices=False)
    return {group: put(buffer, values[group], slot) for group, buffer in buffers.items()}


def lend(buffers: Buffers, slot: ArrayLike) -> tuple[Buffers, ArrayLike]:
    """The buffers and the slot that a branch writes to: the buffers themselves, or one empty slot that is copied back."""
    if BRANCHES_WRITE_IN_PLACE:
        return buffers, slot
    return slots({group: buffer.shape[-1] for group, buffer in buffers.items()}, 1), jnp.zeros_like(slot)


def take_back(buffers: Buffers, written: Buffers, slot: ArrayLike) -> Buffers:
    """The buffers after a branch wrote to those lent to it (`lend`)."""
    return (
        written if BRANCHES_WRITE_IN_PLACE else store(buffers, {group: one[0] for group, one in written.items()}, slot)
    )


def shift_ring(values: Buffers, axis: str, num_ranks: int, step: int, wraps: bool) -> Buffers:
    """Sends buffers to the next rank (`step` 1) or the previous one (-1).

    Args:
      values: this rank's.
      axis: the pipeline's mesh axis.
      num_ranks: its size.
      step: the direction.
      wraps: whether the last rank sends to the first one and back, as it does with several chunks.

    Communicates: one collective-permute per group.
    """
    if num_ranks == 1:
        return values
    ring = [(rank, (rank + step) % num_ranks) for rank in range(num_ranks)]
    pairs = [(a, b) for a, b in ring if wraps or b - a == step]
    with jax.named_scope("axonml.activations" if step == 1 else "axonml.cotangents"):
        return {group: shift(value, axis, pairs) for group, value in values.items()}


# --------------------------------------------------------------------------------------------------
# What a rank does in one tick: one of the stages' forwards, one of their backwards, or nothing.
# --------------------------------------------------------------------------------------------------

Read = Callable[[Member], Sequence[jax.Array]]
"""Gives the weights that a stage reads, in its own branch."""

Accumulate = Callable[[Member, Buffers, Sequence[Any]], Buffers]
"""`accumulate(member, grads, gradients of what it read) -> grads`, in its own branch."""

Part = Literal["both", "input", "weight"]
"""Which gradients a backward computes: both, those of the inputs alone, or those of the weights alone."""


class Made(NamedTuple):
    """The results of a tick's forward.

    Attributes:
      y: for the next stage.
      output: what the last stage returns.
      residuals: the slots for backwards, with this forward's stored.
      states: the rank's states.
      loss, aux: those of this microbatch.
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
    """Runs one forward, of the stage that `work` names.

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
    """Runs one backward, of the stage that `work` names.

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
    """Zeros as the gradients of the last stage's outputs, which are not differentiated."""
    return member.traced.body.cotangent(member.traced.places.y[place])  # pyright: ignore[reportArgumentType]


def _switch(line: TracedLine, work: Work, run: Callable[[Member], Any], idle: Callable[[], Any]) -> Any:
    last = line.members[-1]  # it alone returns what it makes
    kinds = [(member is last, member.runs) for member in line.members]
    branches = {kind: lambda member=member: run(member) for kind, member in zip(kinds, line.members, strict=True)}
    functions = [branches[kind] for kind in kinds]
    return one_of(work.stage, [*functions, idle], [*(member.looks for member in line.members), None])


# --------------------------------------------------------------------------------------------------
# How a tick gets the weights of its stage and adds their gradients: read in every tick, or kept from turn to turn.
#
# A rank turns to another of its stages rarely (in an interleaved schedule every S ticks). What `Stage.read` gives may
# be kept until then, and `Stage.sync` called once when the rank leaves the stage.
# --------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The weights and gradients that a rank keeps of the stages that it is at.

    Attributes:
      forward, backward: weights as read, of the last forward's stage and of the last backward's.
      grads: gradients of the latter since the rank turned to it.
    """

    forward: Buffers
    backward: Buffers
    grads: Buffers


@dataclass(frozen=True)
class EachTick:
    """Gathers parameters in every forward and backward of a stage, and reduces gradients right after.

    Attributes:
      held: this rank's weights.
    """

    held: Held

    def start(self) -> Kept | None:
        """Nothing is kept from tick to tick."""
        return None

    def turned(self, kept: Any, table: Table) -> Any:
        """The value that is kept while this tick works."""
        return kept

    def forward(self, kept: Any) -> Read:
        """The reader of a forward's weights."""
        return lambda member: _read(member, self.held)

    def backward(self, kept: Any) -> Read:
        """The reader of a backward's weights."""
        return self.forward(kept)

    def adding(self, kept: Any, grads: Buffers) -> Buffers:
        """The buffers to which this tick's backward adds gradients."""
        return grads

    def accumulate(self, member: Member, grads: Buffers, of_weights: Sequence[Any]) -> Buffers:
        """Adds the gradients of a stage's weights."""
        return _accumulated(member, grads, of_weights)

    def added(self, kept: Any, grads: Buffers, added: Buffers, table: Table) -> tuple[Buffers, Any]:
        """The rank's gradients, and the value that is kept, after this tick's backward."""
        return added, kept


@dataclass(frozen=True)
class EachTurn:
    """Gathers parameters when a rank turns to a stage, and reduces gradients when it leaves it; methods as `EachTick`'s.

    Attributes:
      line: the stages.
      held: this rank's weights.
      grads: the rank's gradients, of which only groups and dtypes are read; empty: nothing is differentiated.
    """

    line: TracedLine
    held: Held
    grads: Buffers

    def start(self) -> Kept:
        """Empty buffers of weights and gradients."""
        sizes = largest(self._packing(member).sizes for member in self.line.members)
        return Kept(nothing(self.line.read), nothing(self.line.read) if self.grads else {}, nothing(sizes))

    def turned(self, kept: Any, table: Table) -> Any:
        """Gathers the weights of a stage that begins. Communicates: what `Stage.read` does, in that stage's branch."""
        assert table.turns is not None
        forward = self._begun(kept.forward, table.turns.forward)
        return kept._replace(
            forward=forward, backward=self._begun(kept.backward, table.turns.backward) if self.grads else {}
        )

    def forward(self, kept: Any) -> Read:
        """Unpacks the weights that are kept."""
        return lambda member: member.read.unpack(kept.forward)

    def backward(self, kept: Any) -> Read:
        """Unpacks the weights that are kept."""
        return lambda member: member.read.unpack(kept.backward)

    def adding(self, kept: Any, grads: Buffers) -> Buffers:
        """The gradients that are kept since the rank turned to the stage."""
        return kept.grads

    def accumulate(self, member: Member, grads: Buffers, of_weights: Sequence[Any]) -> Buffers:
        """Adds gradients in the form in which weights were read."""
        return self._packing(member).add(grads, [of_weights[i] for i in self._trained(member)])

    def added(self, kept: Any, grads: Buffers, added: Buffers, table: Table) -> tuple[Buffers, Any]:
        """Reduces the gradients of a stage that the rank leaves. Communicates: what `Stage.sync` does, in its branch."""
        if table.turns is None or table.turns.left is None:
            return grads, kept

        def sync(member: Member) -> tuple[Buffers, Buffers]:
            of_weights: list[Any] = [None] * len(member.weights.slots)
            for i, value in zip(self._trained(member), self._packing(member).unpack(added), strict=True):
                of_weights[i] = value
            zeros = {group: vary_like(jnp.zeros_like(buffer), buffer) for group, buffer in added.items()}
            return _accumulated(member, grads, of_weights), zeros

        new, begun = self._switch(table.turns.left, sync, (grads, added))
        return new, kept._replace(grads=begun)

    def _begun(self, kept: Buffers, begins: Any) -> Buffers:
        def read(member: Member) -> Buffers:
            return member.read.pack(list(_read(member, self.held)), self.line.read)

        return self._switch(begins, read, kept)

    def _switch(self, stage: Any, run: Callable[[Member], Any], otherwise: Any) -> Any:
        branches = [lambda member=member: run(member) for member in self.line.members]
        looks = [*(member.looks for member in self.line.members), None]
        return one_of(stage, [*branches, lambda: otherwise], looks)

    def _trained(self, member: Member) -> list[int]:
        return [i for i, slot in enumerate(member.weights.slots) if slot.group in self.grads]

    def _packing(self, member: Member) -> Packing:
        """The packing of the gradients of read weights, in the dtype in which they accumulate."""
        ends: dict = {}
        slots: list[Slot] = []
        for i in self._trained(member):
            slot, dtype = member.read.slots[i], self.grads[member.weights.slots[i].group].dtype
            group = slot.group._replace(dtype=jnp.dtype(dtype).name)
            slots.append(slot._replace(group=group, offset=ends.get(group, 0), place=None))
            ends[group] = slots[-1].offset + slot.size
        return Packing(tuple(slots)).at(member.places)


def _read(member: Member, held: Held) -> Sequence[jax.Array]:
    return member.stage.read(member.weights.unpack(held.weights))


def _accumulated(member: Member, grads: Buffers, of_weights: Sequence[Any]) -> Buffers:
    stored = member.stage.sync(of_weights)
    trained = [i for i, slot in enumerate(member.weights.slots) if slot.group in grads and stored[i] is not None]
    packing = replace(member.weights, slots=tuple(member.weights.slots[i] for i in trained))
    return packing.add(grads, [stored[i] for i in trained])
