"""Buffers with slots that ticks write and read in turn, and the shift of a buffer to the neighbouring rank."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from axonml_jax.collectives.primitives import shift
from axonml_jax.collectives.varying import vary
from axonml_jax.compat.versions import BRANCHES_WRITE_IN_PLACE
from axonml_jax.parallel.pipeline.resting.packing import Buffers, Sizes


def nothing(sizes: Sizes) -> Buffers:
    """What an idle rank writes and sends; it goes to the trash and is never read."""
    return {group: vary(jnp.zeros(group.shape(size), group.dtype), group.axes) for group, size in sizes.items()}


def slots(sizes: Sizes, count: int) -> Buffers:
    """Empty buffers of `count` slots, [count, n]; where idle ranks write, the last one is for trash."""
    empty = lambda group, size: jnp.zeros((count, *group.shape(size)), group.dtype)
    return {group: vary(empty(group, size), group.axes) for group, size in sizes.items()}


def store(buffers: Buffers, values: Buffers, slot: ArrayLike) -> Buffers:
    """The buffers with one slot replaced."""
    put = partial(jax.lax.dynamic_update_index_in_dim, axis=0, allow_negative_indices=False)
    return {group: put(buffer, values[group], slot) for group, buffer in buffers.items()}


def lend(buffers: Buffers, slot: ArrayLike) -> tuple[Buffers, ArrayLike]:
    """What a branch writes one slot of, and which: the buffers themselves, or an empty slot of its own."""
    if BRANCHES_WRITE_IN_PLACE:
        return buffers, slot
    return slots({group: buffer.shape[-1] for group, buffer in buffers.items()}, 1), jnp.zeros_like(slot)


def take_back(buffers: Buffers, written: Buffers, slot: ArrayLike) -> Buffers:
    """The buffers after a branch wrote to what was lent to it."""
    return (
        written if BRANCHES_WRITE_IN_PLACE else store(buffers, {group: one[0] for group, one in written.items()}, slot)
    )


def shift_ring(values: Buffers, axis: str, num_ranks: int, step: int, wraps: bool) -> Buffers:
    """Send to the next rank (`step` 1) or the previous one (-1).

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
