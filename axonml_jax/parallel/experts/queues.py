"""Who sends which token where: the pairs of a token and one of its experts, in queues by expert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Queues(NamedTuple):
    """A rank's pairs, sorted by expert; of one expert in the order of their tokens.

    N ranks hold E experts, E/N neighbours each; a rank has T tokens with k pairs each.

    Attributes:
      order: int32 [T * k], the pairs as they stand in the queues; those without an expert stand last.
      place: int32 [T, k], where each pair stands.
      counts: int32 [E], the pairs of each expert.
    """

    order: jax.Array
    place: jax.Array
    counts: jax.Array

    @property
    def starts(self) -> jax.Array:
        """Where each expert's queue begins, int32 [E + 1]; the last is where pairs without an expert do."""
        return from_zero(self.counts)


def queued(experts: jax.Array, count: int) -> Queues:
    """The queues of pairs by their expert.

    Args:
      experts: int32 [T, k]; pairs whose value is not in [0, E) have none.
      count: E.
    """
    flat = experts.reshape(-1)
    known = jnp.where((flat >= 0) & (flat < count), flat, count)
    order = jnp.argsort(known, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    counts = jnp.zeros(count + 1, jnp.int32).at[known].add(1)[:count]
    return Queues(order, place.reshape(experts.shape), counts)


def within_capacity(experts: jax.Array, count: int, capacity: int, groups: tuple[int, ...] = (1,)) -> jax.Array:
    """`experts` with E, which is none, for the pairs that come after the first `capacity` of an expert in their group.

    Args:
      experts: int32 [..., k]; of n leading dims.
      count: E.
      capacity: pairs of an expert in a group.
      groups: into how many equal parts each of the first leading dims is cut; tokens of the same parts are a group.
    """
    total, group = 1, jnp.zeros(experts.shape[:-1], jnp.int32)
    for dim, parts in enumerate(groups):
        index = jnp.arange(experts.shape[dim], dtype=jnp.int32) // (experts.shape[dim] // parts)
        group = group * parts + index.reshape([-1 if i == dim else 1 for i in range(group.ndim)])
        total *= parts
    known = (experts >= 0) & (experts < count)
    own = jnp.where(known, experts + group[..., None] * count, total * count).reshape(-1, experts.shape[-1])
    queues = queued(own, total * count)
    inside = queues.place - queues.starts[own] < capacity
    return jnp.where(known & inside.reshape(experts.shape), experts, count)


class Slots(NamedTuple):
    """What a rank sends in a round: for every rank as many slots, some of them empty.

    Attributes:
      pair: int32 [slots], the pair in each slot; T * k in an empty one.
      slot: int32 [T, k], its inverse: the number of slots for a pair that is not in this round.
    """

    pair: jax.Array
    slot: jax.Array


def slots_of_round(queues: Queues, ranks: int, each: int, number: int | jax.Array) -> Slots:
    """The pairs that travel in a round: of those for each rank the `each` after `number * each`.

    Args:
      queues: this rank's.
      ranks: N, to which it sends.
      each: slots for each of them.
      number: of the round, from 0.
    """
    first = queues.starts[:: queues.counts.size // ranks]  # of each rank's experts, and of what belongs to none
    places = first[:-1, None] + number * each + jnp.arange(each, dtype=jnp.int32)
    there = places < first[1:, None]
    pairs = queues.order.size
    pair = jnp.where(there, queues.order[jnp.clip(places, 0, pairs - 1)], pairs).reshape(-1)
    rank = jnp.searchsorted(first, queues.place.reshape(-1), side="right", method="compare_all").astype(jnp.int32) - 1
    within = queues.place.reshape(-1) - first[jnp.clip(rank, 0, ranks)] - number * each
    inside = (rank < ranks) & (within >= 0) & (within < each)
    return Slots(pair, jnp.where(inside, rank * each + within, ranks * each).reshape(queues.place.shape))


def slots_of_capacity(experts: jax.Array, queues: Queues, capacity: int) -> Slots:
    """Slots of a fixed number for every expert, filled from the front.

    Args:
      experts: int32 [T, k], those that are not dropped.
      queues: of these.
      capacity: slots of one expert.
    """
    count, pairs = queues.counts.size, queues.order.size
    places = queues.starts[:-1, None] + jnp.arange(capacity, dtype=jnp.int32)
    there = jnp.arange(capacity) < queues.counts[:, None]
    pair = jnp.where(there, queues.order[jnp.clip(places, 0, pairs - 1)], pairs).reshape(-1)
    known = (experts >= 0) & (experts < count)
    within = queues.place - queues.starts[jnp.clip(experts, 0, count)]
    return Slots(pair, jnp.where(known, experts * capacity + within, count * capacity))


class Received(NamedTuple):
    """How the slots that a rank received in a round lie sorted by expert.

    Attributes:
      row: int32 [slots], the row of each slot; the number of slots for an empty one.
      slot: int32 [slots], its inverse; the number of slots for a row behind the last.
      counts: int32 [E/N], the rows of each expert.
    """

    row: jax.Array
    slot: jax.Array
    counts: jax.Array


def received(counts: jax.Array, each: int, number: int | jax.Array) -> Received:
    """The rows of what came in a round, given what every rank has for this one.

    Args:
      counts: int32 [N, E/N], the pairs that each rank has for each of this rank's experts.
      each: slots from each rank.
      number: of the round.
    """
    ranks, slots = counts.shape[0], counts.shape[0] * each
    ends = jnp.clip(jnp.cumsum(counts, 1) - number * each, 0, each)  # in each rank's slots of this round
    begins = jnp.concatenate([jnp.clip(jnp.zeros_like(ends[:, :1]), 0, each), ends[:, :-1]], 1)
    own = ends - begins
    total = own.sum(0)
    first = from_zero(total)[:-1] + jnp.cumsum(own, 0) - own  # [N, E/N]: where a rank's rows of an expert begin
    at = jnp.arange(each, dtype=jnp.int32)
    expert = jax.vmap(lambda e: jnp.searchsorted(e, at, side="right", method="compare_all"))(ends).astype(jnp.int32)
    known = jnp.clip(expert, 0, counts.shape[1] - 1)
    row = jnp.take_along_axis(first, known, 1) + at - jnp.take_along_axis(begins, known, 1)
    row = jnp.where(expert < counts.shape[1], row, slots).reshape(-1).astype(jnp.int32)
    empty = jnp.full(slots + 1, slots, jnp.int32)
    slot = empty.at[row].set(jnp.arange(ranks * each, dtype=jnp.int32), mode="drop")[:slots]
    # Empty slots all write the last entry, which is cut off.
    return Received(row, slot, total.astype(jnp.int32))


def from_zero(counts: jax.Array) -> jax.Array:
    """Where each of E queues begins, and the last one ends: [E + 1]."""
    return jnp.concatenate([jnp.zeros(1, counts.dtype), jnp.cumsum(counts, dtype=counts.dtype)])
