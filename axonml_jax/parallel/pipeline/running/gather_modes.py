"""How a tick gets the weights of its stage and adds their gradients: read in every tick, or kept from turn to turn.

A rank turns to another of its stages rarely (in an interleaved schedule every S ticks). What `Stage.read` gives may be kept
until then, and `Stage.sync` called once when the rank leaves the stage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.collectives.varying import vary_like
from axonml_jax.parallel.pipeline.resting.packing import Buffers, Packing, Slot, largest
from axonml_jax.parallel.pipeline.running.one_of import one_of
from axonml_jax.parallel.pipeline.running.rings import nothing
from axonml_jax.parallel.pipeline.running.tick import Read
from axonml_jax.parallel.pipeline.running.traced_line import Held, Member, TracedLine
from axonml_jax.parallel.pipeline.schedules.tick_table import Table


class Kept(NamedTuple):
    """What a rank keeps of the stages that it is busy with.

    Attributes:
      forward, backward: weights as read, of the last forward's stage and of the last backward's.
      grads: gradients of the latter since the rank turned to it.
    """

    forward: Buffers
    backward: Buffers
    grads: Buffers


@dataclass(frozen=True)
class EachTick:
    """Read in every forward and backward, gradients given back at once.

    Attributes:
      held: this rank's weights.
    """

    held: Held

    def start(self) -> Kept | None:
        """What is kept before the first tick."""
        return None

    def turned(self, kept: Any, table: Table) -> Any:
        """What is kept while this tick works."""
        return kept

    def forward(self, kept: Any) -> Read:
        """Gives a forward its weights."""
        return lambda member: _read(member, self.held)

    def backward(self, kept: Any) -> Read:
        """Gives a backward its weights."""
        return self.forward(kept)

    def adding(self, kept: Any, grads: Buffers) -> Buffers:
        """What this tick's backward adds gradients to."""
        return grads

    def accumulate(self, member: Member, grads: Buffers, of_weights: Sequence[Any]) -> Buffers:
        """How it adds them."""
        return _accumulated(member, grads, of_weights)

    def added(self, kept: Any, grads: Buffers, added: Buffers, table: Table) -> tuple[Buffers, Any]:
        """The rank's gradients and what is kept, after it."""
        return added, kept


@dataclass(frozen=True)
class EachTurn:
    """Read when a rank turns to another of its stages, gradients given back when it leaves one. The methods are `EachTick`'s.

    Attributes:
      line: the stages.
      held: this rank's weights.
      grads: the rank's gradients, of which only groups and dtypes are read; empty: nothing is differentiated.
    """

    line: TracedLine
    held: Held
    grads: Buffers

    def start(self) -> Kept:
        """Nothing."""
        sizes = largest(self._packing(member).sizes for member in self.line.members)
        return Kept(nothing(self.line.read), nothing(self.line.read) if self.grads else {}, nothing(sizes))

    def turned(self, kept: Any, table: Table) -> Any:
        """Communicates: what `Stage.read` does, in the branch of a stage that begins."""
        assert table.turns is not None
        forward = self._begun(kept.forward, table.turns.forward)
        return kept._replace(
            forward=forward, backward=self._begun(kept.backward, table.turns.backward) if self.grads else {}
        )

    def forward(self, kept: Any) -> Read:
        """Out of what is kept."""
        return lambda member: member.read.unpack(kept.forward)

    def backward(self, kept: Any) -> Read:
        """Out of what is kept."""
        return lambda member: member.read.unpack(kept.backward)

    def adding(self, kept: Any, grads: Buffers) -> Buffers:
        """To the gradients that are kept."""
        return kept.grads

    def accumulate(self, member: Member, grads: Buffers, of_weights: Sequence[Any]) -> Buffers:
        """As they were read."""
        return self._packing(member).add(grads, [of_weights[i] for i in self._trained(member)])

    def added(self, kept: Any, grads: Buffers, added: Buffers, table: Table) -> tuple[Buffers, Any]:
        """Communicates: what `Stage.sync` does, in the branch of a stage that the rank leaves."""
        if table.turns is None or table.turns.left is None:
            return grads, kept

        def sync(member: Member) -> tuple[Buffers, Buffers]:
            of_weights: list[Any] = [None] * len(member.weights.slots)
            for i, value in zip(self._trained(member), self._packing(member).unpack(added), strict=True):
                of_weights[i] = value
            zeros = {group: vary_like(jnp.zeros_like(buffer), buffer) for group, buffer in added.items()}
            return _accumulated(member, grads, of_weights), zeros

        new, left = self._switch(table.turns.left, sync, (grads, added))
        return new, kept._replace(grads=left)

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
        """How gradients of what a stage read are packed, in the dtype in which they accumulate."""
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
