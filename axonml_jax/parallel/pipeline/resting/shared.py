"""Leaves that several stages share, such as a tied embedding: copied to their ranks, one gradient, counted once.

Communicates: what `sum_shared` says.
"""

import jax
import jax.numpy as jnp

from axonml_jax.collectives.primitives import axis_index, sum_over
from axonml_jax.collectives.varying import vary_like
from axonml_jax.parallel.pipeline.resting.packing import Buffers, Packing, Slot, slot_value
from axonml_jax.parallel.pipeline.resting.stage_buffers import StageBuffers


def sum_shared(layout: StageBuffers, grads: Buffers, axis: str = "pipe") -> Buffers:
    """Gradients in which every copy of a shared leaf has the sum of all copies' gradients, inside `shard_map`.

    Args:
      layout: where the leaves lie.
      grads: this rank's gradients.
      axis: the pipeline's mesh axis.

    Communicates: one all-reduce over `axis` per leaf that several ranks hold.
    """
    holders = [slots for slots in _copied(layout).values() if next(iter(slots.values())).group in grads]
    if not holders:
        return grads
    rank = axis_index(axis)

    def own(r: int):
        # A leaf that this rank does not hold adds zeros.
        return lambda: [
            slot_value(slots[r], grads[slots[r].group]) if r in slots else _zeros(next(iter(slots.values())), grads)
            for slots in holders
        ]

    totals = [sum_over(part, axis) for part in jax.lax.switch(rank, [own(r) for r in range(layout.num_ranks)])]

    def put(r: int):
        held = [(slots[r], total) for slots, total in zip(holders, totals, strict=True) if r in slots]
        return lambda: Packing(tuple(slot for slot, _ in held)).write(grads, [total for _, total in held])

    return jax.lax.switch(rank, [put(r) for r in range(layout.num_ranks)])


def without_copies(layout: StageBuffers, buffers: Buffers, axis: str = "pipe") -> Buffers:
    """Buffers in which all but the first rank's copy of a shared leaf is zero: what a norm over `axis` counts."""
    copied = {name: slots for name, slots in _copied(layout).items() if next(iter(slots.values())).group in buffers}
    if not copied:
        return buffers

    def drop(r: int):
        later = [slots[r] for slots in copied.values() if r in slots and r != min(slots)]
        return lambda: Packing(tuple(later)).write(buffers, [jnp.zeros(slot.shape) for slot in later])

    return jax.lax.switch(axis_index(axis), [drop(r) for r in range(layout.num_ranks)])


def _copied(layout: StageBuffers) -> dict[str, dict[int, Slot]]:
    return {name: slots for name, slots in layout.shared.items() if len(slots) > 1}


def _zeros(slot: Slot, grads: Buffers) -> jax.Array:
    return vary_like(jnp.zeros(slot.shape, grads[slot.group].dtype), grads[slot.group])
