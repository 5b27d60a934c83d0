"""The ranks that share keys and values, and the two ways in which a rank reads those of the others: gathered, or in a ring."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.along_dim import gather_along, scatter_along
from axonml_jax.collectives.primitives import axis_index, shift
from axonml_jax.parallel.context.context_split import positions_of
from axonml_jax.parallel.context.in_sequence import by_rank, in_sequence
from axonml_jax.parallel.context.pieces.attention_pieces import Attention, Given, KeptQueries, ReadPiece, merged
from axonml_jax.parallel.context.pieces.tiles import Side, TileCut, side_of
from axonml_jax.parallel.context.ring_rounds import Pairs, RingRounds
from axonml_jax.sharding.sequence_order import Order, order_parts, sequence_order


@dataclass(frozen=True)
class Ring:
    """How a mesh axis's ranks work together: `heads` neighbours split the heads, and their groups share keys and values.

    Attributes:
      axis: the mesh axis; None: one rank.
      ranks: N, of the axis.
      heads: U, the ranks of a group, which hold the same positions of other heads (Ulysses); it divides N.
      gathers: whether a rank gathers all keys and values; else they go round.
      order: in which order ranks hold positions.
    """

    axis: str | None
    ranks: int
    heads: int
    gathers: bool
    order: Order

    @property
    def groups(self) -> int:
        """R: the groups, each of which holds other positions."""
        return self.ranks // self.heads

    @property
    def chunks(self) -> int:
        """In how many chunks of growing positions a group's places lie."""
        return self.heads * order_parts(self.order, self.ranks) // self.ranks

    @property
    def piece_ranks(self) -> int:
        """How many ranks' keys are read at once."""
        return self.ranks if self.gathers or self.groups == 1 else self.heads

    @property
    def neighbours(self) -> list[list[int]]:
        """The ranks of each group."""
        return np.arange(self.ranks).reshape(self.groups, self.heads).tolist()

    @property
    def across(self) -> list[list[int]]:
        """The ranks that hold the same heads."""
        return np.arange(self.ranks).reshape(self.groups, self.heads).T.tolist()

    def cuts(self, queries: int, keys: int, most: int) -> tuple[TileCut, TileCut]:
        """How a group's queries are cut into tiles, and the keys that it reads at once, given the places of a rank."""
        pieces = self.groups if self.gathers else 1
        return TileCut(self.heads * queries, self.chunks, most), TileCut(
            self.heads * keys * pieces, self.chunks * pieces, most
        )

    def index(self) -> int | jax.Array:
        """This rank's group."""
        return 0 if self.axis is None else axis_index(self.axis) // self.heads

    def positions(self, group: int | jax.Array, places: int) -> jax.Array:
        """The positions of a group's places, int32 [places]."""
        own = [group * self.heads + i for i in range(self.heads)]
        return jnp.concatenate([positions_of(self.order, rank, self.ranks, places // self.heads) for rank in own])

    def spans(self, places: int) -> list[list[tuple[int, int]]]:
        """The first and the last position of each chunk of each group."""
        held = sequence_order(self.order, places * self.groups, self.ranks).reshape(self.groups, self.chunks, -1)
        return [[(int(chunk[0]), int(chunk[-1])) for chunk in group] for group in held]

    def rounds(self, how: Attention) -> RingRounds:
        """The rounds in which keys and values go round."""
        return RingRounds.of(how.visible, self.spans(how.queries.places), self.spans(how.keys.places))

    def pieces(self, queries: int, keys: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The positions of a group's queries, and those of the keys that it reads at once, in order: of all groups and rounds.

        Args:
          queries: of a group.
          keys: that are read at once.
        """
        held = lambda places: sequence_order(self.order, places * self.groups, self.ranks).reshape(self.groups, -1)
        whole = self.piece_ranks == self.ranks
        sources = [np.arange(keys)] if whole else [np.sort(each) for each in held(keys)]
        return itertools.product(held(queries), sources)

    def sent(self, x: jax.Array, pairs: Pairs) -> jax.Array:
        """x from each source's group to its target's, to the rank of the same heads; zeros elsewhere.

        Communicates: one permute, unless there are no pairs.
        """
        if self.axis is None or not pairs:
            return jnp.zeros_like(x)
        return shift(
            x, self.axis, [(a * self.heads + i, b * self.heads + i) for a, b in pairs for i in range(self.heads)]
        )


class Places(NamedTuple):
    """Where the queries are, and the segments of all.

    Attributes:
      positions: of the queries, int32 [c].
      segments: of the queries, int32 [b, c], or None.
      of_keys: of the keys of all groups, one group after the other, int32 [b, R * t], or None.
    """

    positions: jax.Array
    segments: jax.Array | None
    of_keys: jax.Array | None


def read_forward(how: Attention, ring: Ring, given: Given, q: jax.Array, k: jax.Array, v: jax.Array, places: Places):
    """All of a group's queries read all keys: q [b, g, r, c, d], k [b, g, t, d], v [b, g, t, e] -> a `ReadPiece`.

    Communicates: an all-gather of keys and values, or a permute of them in every round but the first.
    """
    tiles, at = how.queries.tiles(q, 3), side_of(how.queries, places.positions, places.segments)
    if ring.gathers or ring.groups == 1:
        k, v = (_sorted(how, ring, x, 2) for x in _gathered(ring, k, v))
        return how.work.forward(
            how, given, tiles, at, how.keys.tiles(k, 2), how.keys.tiles(v, 2), _gathered_side(how, ring, places)
        )
    rounds, both = ring.rounds(how), _sorted(how, ring, jnp.concatenate([k, v], -1), 2)
    parts = []
    for number in range(rounds.count):
        coming = ring.sent(both, rounds.keys(number + 1))  # it may travel while this round computes
        keys, values = _tiled(how, both, k.shape[-1])
        parts.append(how.work.forward(how, given, tiles, at, keys, values, _side(how, ring, places, number)))
        both = coming
    return functools.reduce(merged, parts)


def read_backward(how: Attention, ring: Ring, given: Given, q, k, v, places: Places, read: ReadPiece, grad):
    """The gradients of q, k, v and `given.arrays`, given what `read_forward` returned, and the gradient of its `out`.

    Communicates: the keys and values again; with an all-gather, a reduce-scatter of their gradients, which travel with them in
    a ring.
    """
    grads = how.queries.tiles(grad, 3)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    inner = (grads.astype(wide) * read.out.astype(wide)).sum(-1)
    kept = KeptQueries(how.queries.tiles(q, 3), grads, read.top, read.total, inner)
    at = side_of(how.queries, places.positions, places.segments)
    if ring.gathers or ring.groups == 1:
        keys, values = (how.keys.tiles(_sorted(how, ring, x, 2), 2) for x in _gathered(ring, k, v))
        side = _gathered_side(how, ring, places)
        dq, dk, dv, arrays = how.work.backward(how, given, kept, at, keys, values, side)
        dk, dv = how.keys.joined(dk, 2).astype(k.dtype), how.keys.joined(dv, 2).astype(v.dtype)
        dk, dv = _scattered(ring, *(_unsorted(how, ring, x, 2) for x in (dk, dv)))
    else:
        dq, dk, dv, arrays = _ring_backward(how, ring, given, kept, at, k, v, places)
    return how.queries.joined(dq, 3), dk, dv, arrays


def _ring_backward(how: Attention, ring: Ring, given: Given, kept: KeptQueries, at: Side, k, v, places: Places):
    rounds, both, size = ring.rounds(how), _sorted(how, ring, jnp.concatenate([k, v], -1), 2), k.shape[-1]
    total, own, travelling = None, jnp.zeros(()), jnp.zeros(())
    for number in range(rounds.count):
        coming = ring.sent(both, rounds.keys(number + 1))
        piece = *_tiled(how, both, size), _side(how, ring, places, number)
        dq, dk, dv, arrays = how.work.backward(how, given, kept, at, *piece)
        made = jnp.concatenate([how.keys.joined(dk, 2), how.keys.joined(dv, 2)], -1)
        if total is None:
            total, own, travelling = (dq, arrays), made, jnp.zeros_like(made)
        else:
            total = jax.tree.map(jnp.add, total, (dq, arrays))
            travelling = travelling + made
            own = own + ring.sent(travelling, rounds.home(number))
        travelling = ring.sent(travelling, rounds.gradients(number + 1))
        both = coming
    dq, arrays = total or ()
    own = _unsorted(how, ring, own, 2)
    return dq, own[..., :size], own[..., size:], arrays


def _tiled(how: Attention, both: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    tiles = how.keys.tiles(both, 2)
    return tiles[..., :size], tiles[..., size:]


def _side(how: Attention, ring: Ring, places: Places, round: int) -> Side:
    """The places of the keys that a rank has in a round."""
    source, count = (ring.index() - round) % ring.groups, how.keys.places
    segments = None
    if places.of_keys is not None:
        segments = jax.lax.dynamic_slice_in_dim(places.of_keys, source * count, count, axis=1)
        segments = _sorted(how, ring, segments, 1)
    return side_of(how.keys, _sorted(how, ring, ring.positions(source, count), 0), segments)


def _gathered_side(how: Attention, ring: Ring, places: Places) -> Side:
    held = jnp.asarray(sequence_order(ring.order, how.keys.places, ring.ranks))
    segments = None if places.of_keys is None else _sorted(how, ring, places.of_keys, 1)
    return side_of(how.keys, _sorted(how, ring, held, 0), segments)


def _sorted(how: Attention, ring: Ring, x: jax.Array, dim: int) -> jax.Array:
    """A piece's keys, or what is known of their places, in the order in which they are computed."""
    return in_sequence(x, ring.order, ring.piece_ranks, dim) if how.work.sorts else x


def _unsorted(how: Attention, ring: Ring, x: jax.Array, dim: int) -> jax.Array:
    return by_rank(x, ring.order, ring.piece_ranks, dim) if how.work.sorts else x


def _gathered(ring: Ring, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The keys and values of all groups: k [b, g, R*t, d], v [b, g, R*t, e]. Communicates: one all-gather."""
    if ring.groups == 1 or ring.axis is None:
        return k, v
    both = gather_along(jnp.concatenate([k, v], -1), (ring.axis,), 2, among=_among(ring))
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]


def _scattered(ring: Ring, dk: jax.Array, dv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Their sums over the groups, of which each keeps its own places. Communicates: one reduce-scatter."""
    if ring.groups == 1 or ring.axis is None:
        return dk, dv
    both = scatter_along(jnp.concatenate([dk, dv], -1), (ring.axis,), 2, among=_among(ring))
    return both[..., : dk.shape[-1]], both[..., dk.shape[-1] :]


def _among(ring: Ring) -> list[list[int]] | None:
    return None if ring.heads == 1 else ring.across
