"""Where a stage's arrays begin in their buffers, as values of the running program instead of constants.

XLA:CPU compiles a kernel for every operation that differs, and a constant is part of one: blocks of one kind that read, write
and add at places of their own share no kernel. The places are those of the rank's own stages. Each of them comes out of a
conditional between ranks: an array of places would be read at constant indices.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from axonml_jax.collectives.varying import vary
from axonml_jax.compat.around import platform_around
from axonml_jax.parallel.pipeline.resting.packing import Slot
from axonml_jax.parallel.pipeline.resting.stage_store import on_own_rank
from axonml_jax.parallel.pipeline.running.traced_line import Member, TracedLine

LIMIT = 2**31
"""Elements of a buffer that an index of 32 bits does not reach."""


def with_places(line: TracedLine, rank: jax.Array, num_ranks: int, axis: str) -> TracedLine:
    """The line, whose members read and write at places that the running program says.

    Args:
      line: the stages; stage p is one of rank p mod S.
      rank: this rank, inside `shard_map`.
      num_ranks: S.
      axis: the pipeline's mesh axis.
    """
    slots = [_slots(member) for member in line.members]
    if platform_around() != "cpu" or any(slot.offset + slot.size >= LIMIT for found in slots for slot in found):
        return line
    offsets, members = [sorted({slot.offset for slot in found}) for found in slots], []
    for first in range(0, len(offsets), num_ranks):
        chunk = offsets[first : first + num_ranks]
        values = _values(chunk, rank, axis)
        for member, found in zip(line.members[first:], chunk, strict=False):
            members.append(_placed(member, dict(zip(found, values, strict=False))))
    return replace(line, members=tuple(members))


def _values(chunk: Sequence[Sequence[int]], rank: jax.Array, axis: str) -> list[jax.Array]:
    """The offsets of the rank's own stage among one stage per rank: as many values as the stage with most of them has."""
    count = max(map(len, chunk))

    def own(rank: int) -> list[jax.Array]:
        return [vary(jnp.asarray(offset, jnp.int32), axis) for offset in (*chunk[rank], *[0] * count)[:count]]

    return on_own_rank(rank, len(chunk), own)


def _slots(member: Member) -> list[Slot]:
    packings = [member.weights, member.state, member.read, member.x, member.dy, member.residuals]
    return [slot for packing in packings if packing is not None for slot in packing.slots]


def _placed(member: Member, places: dict[int, jax.Array]) -> Member:
    return replace(
        member,
        weights=member.weights.at(places),
        state=member.state.at(places),
        read=member.read.at(places),
        x=member.x.at(places),
        residuals=None if member.residuals is None else member.residuals.at(places),
        places=places,
    )
