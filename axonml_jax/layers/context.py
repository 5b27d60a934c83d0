"""Attention across the ranks of `context`: ring, gather, all-to-all (Ulysses), and kernels."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from axonml_jax.collectives.primitives import (
    axis_index,
    axis_size,
    exchange_along,
    gather_along,
    gather_whole,
    scatter_along,
    shift,
    swap_parts,
    vary,
)
from axonml_jax.compat.order import can_draw_elements, platform_around
from axonml_jax.compat.row_keys import is_row_key
from axonml_jax.compat.splash import SplashCall, SplashPiece, splash_backward, splash_forward
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.layers.kernels import PLATFORMS, fused_attention, kernel_of, obstacles, target_platform
from axonml_jax.layers.linear import Softcap
from axonml_jax.layers.pieces import (
    BLOCK,
    Attention,
    Given,
    KeptQueries,
    Pairs,
    ReadPiece,
    RingRounds,
    Side,
    TileCut,
    Tiles,
    Visible,
    WeightsDropout,
    Where,
    block_for,
    block_sizes,
    by_rank,
    in_sequence,
    may_see,
    merged,
    most_visits,
    side_of,
    sinks_gradient,
    sunk,
    visits,
)
from axonml_jax.program.cut import KEPT
from axonml_jax.sharding.layout import Order, order_parts, sequence_order
from axonml_jax.strategies.strategy import ContextSplit, Method, current_split, heads_and_gathers, positions_of

# --------------------------------------------------------------------------------------------------
# The ranks that share keys and values, and the two ways in which a rank reads those of the others: gathered, or in a
# ring.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """How the ranks of a mesh axis share attention: neighbours in a group split the heads, groups exchange keys and values.

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
        """The number R of groups, each of which holds other positions."""
        return self.ranks // self.heads

    @property
    def chunks(self) -> int:
        """The number of chunks of increasing positions in a group's places."""
        return self.heads * order_parts(self.order, self.ranks) // self.ranks

    @property
    def piece_ranks(self) -> int:
        """The number of ranks whose keys are read at once."""
        return self.ranks if self.gathers or self.groups == 1 else self.heads

    @property
    def neighbours(self) -> list[list[int]]:
        """The ranks of each group."""
        return np.arange(self.ranks).reshape(self.groups, self.heads).tolist()

    @property
    def across(self) -> list[list[int]]:
        """The sets of ranks that hold the same heads."""
        return np.arange(self.ranks).reshape(self.groups, self.heads).T.tolist()

    def cuts(self, queries: int, keys: int, most: int) -> tuple[TileCut, TileCut]:
        """The cuts into tiles of a group's queries, and of the keys that it reads at once, from the places of a rank."""
        pieces = self.groups if self.gathers else 1
        return TileCut(self.heads * queries, self.chunks, most), TileCut(
            self.heads * keys * pieces, self.chunks * pieces, most
        )

    def index(self) -> int | jax.Array:
        """The index of this rank's group."""
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
        """The ring's rounds of exchanging keys and values."""
        return RingRounds.of(how.visible, self.spans(how.queries.places), self.spans(how.keys.places))

    def pieces(self, queries: int, keys: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield, for all groups and rounds, the positions of a group's queries and of the keys that it reads at once.

        Args:
          queries: of a group.
          keys: that are read at once.
        """
        held = lambda places: sequence_order(self.order, places * self.groups, self.ranks).reshape(self.groups, -1)
        whole = self.piece_ranks == self.ranks
        sources = [np.arange(keys)] if whole else [np.sort(each) for each in held(keys)]
        return itertools.product(held(queries), sources)

    def sent(self, x: jax.Array, pairs: Pairs) -> jax.Array:
        """Send x from each source group to its target group, between ranks of the same heads; zeros for others.

        Communicates: one permute, unless there are no pairs.
        """
        if self.axis is None or not pairs:
            return jnp.zeros_like(x)
        return shift(
            x, self.axis, [(a * self.heads + i, b * self.heads + i) for a, b in pairs for i in range(self.heads)]
        )


class Places(NamedTuple):
    """The positions of the queries, and the segments of queries and keys.

    Attributes:
      positions: of the queries, int32 [c].
      segments: of the queries, int32 [b, c], or None.
      of_keys: of the keys of all groups, one group after the other, int32 [b, R * t], or None.
    """

    positions: jax.Array
    segments: jax.Array | None
    of_keys: jax.Array | None


def read_forward(how: Attention, ring: Ring, given: Given, q: jax.Array, k: jax.Array, v: jax.Array, places: Places):
    """Attention of a group's queries to all keys: q [b, g, r, c, d], k [b, g, t, d], v [b, g, t, e] -> a `ReadPiece`.

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
    """The gradients of q, k, v and `given.arrays`, from the result of `read_forward` and the gradient of its `out`.

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
        dk, dv = how.keys.untiled(dk, 2).astype(k.dtype), how.keys.untiled(dv, 2).astype(v.dtype)
        dk, dv = _scattered(ring, *(_unsorted(how, ring, x, 2) for x in (dk, dv)))
    else:
        dq, dk, dv, arrays = _ring_backward(how, ring, given, kept, at, k, v, places)
    return how.queries.untiled(dq, 3), dk, dv, arrays


def _ring_backward(how: Attention, ring: Ring, given: Given, kept: KeptQueries, at: Side, k, v, places: Places):
    rounds, both, size = ring.rounds(how), _sorted(how, ring, jnp.concatenate([k, v], -1), 2), k.shape[-1]
    total, own, travelling = None, jnp.zeros(()), jnp.zeros(())
    for number in range(rounds.count):
        coming = ring.sent(both, rounds.keys(number + 1))
        piece = *_tiled(how, both, size), _side(how, ring, places, number)
        dq, dk, dv, arrays = how.work.backward(how, given, kept, at, *piece)
        made = jnp.concatenate([how.keys.untiled(dk, 2), how.keys.untiled(dv, 2)], -1)
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
    """The places of the keys that a rank holds in a round."""
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
    """Put a piece's keys, or facts about their places, in the order of the sequence if the computation needs that."""
    return in_sequence(x, ring.order, ring.piece_ranks, dim) if how.work.sorts else x


def _unsorted(how: Attention, ring: Ring, x: jax.Array, dim: int) -> jax.Array:
    return by_rank(x, ring.order, ring.piece_ranks, dim) if how.work.sorts else x


def _gathered(ring: Ring, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gather the keys and values of all groups: k [b, g, R*t, d], v [b, g, R*t, e]. Communicates: one all-gather."""
    if ring.groups == 1 or ring.axis is None:
        return k, v
    both = gather_along(jnp.concatenate([k, v], -1), (ring.axis,), 2, among=_among(ring))
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]


def _scattered(ring: Ring, dk: jax.Array, dv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum the gradients of keys and values over groups; each keeps its own places. Communicates: one reduce-scatter."""
    if ring.groups == 1 or ring.axis is None:
        return dk, dv
    both = scatter_along(jnp.concatenate([dk, dv], -1), (ring.axis,), 2, among=_among(ring))
    return both[..., : dk.shape[-1]], both[..., dk.shape[-1] :]


def _among(ring: Ring) -> list[list[int]] | None:
    return None if ring.heads == 1 else ring.across


# --------------------------------------------------------------------------------------------------
# Arrays whose positions lie in the ranks' order, brought back into the sequence's order, inside `shard_map`.
# --------------------------------------------------------------------------------------------------


def put_back(x: jax.Array, dim: int, axis: str, order: Order) -> jax.Array:
    """Returns a rank's contiguous part of the sequence, from the positions that it holds in another order.

    Args:
      x: [..., c, ...] (c positions of this rank).
      dim: the dim that holds positions.
      axis: the mesh axis over whose ranks they are split.
      order: the order in which the ranks hold them.

    Returns:
      [..., c, ...]: positions r * c to (r + 1) * c of the sequence.

    Communicates: "zigzag" two collective-permutes of half of x; "striped" an all-to-all of x, or, where c does not divide
    over the ranks, an all-gather; "contiguous" nothing.
    """
    ranks = axis_size(axis)
    if order == "contiguous" or ranks == 1:
        return x
    if order == "zigzag":
        return _from_zigzag(x, dim, axis, ranks)
    return _from_stripes(x, dim, axis, ranks)


def _from_zigzag(x: jax.Array, dim: int, axis: str, ranks: int) -> jax.Array:
    """From zigzag order: rank r trades the chunks r and 2 * ranks - 1 - r for the chunks 2 * r and 2 * r + 1."""
    head, tail = jnp.split(x, 2, axis=dim)
    swapped = axis_index(axis) % 2 == 1
    even, odd = jnp.where(swapped, tail, head), jnp.where(swapped, head, tail)
    chunks = [sorted((rank, 2 * ranks - 1 - rank), key=lambda chunk: chunk % 2) for rank in range(ranks)]
    sent = [
        shift(part, axis, [(rank, chunks[rank][parity] // 2) for rank in range(ranks)])
        for parity, part in enumerate((even, odd))
    ]
    return jnp.concatenate(sent, axis=dim)


def _from_stripes(x: jax.Array, dim: int, axis: str, ranks: int) -> jax.Array:
    """From striped order: rank r, with positions r, r + ranks, ..., receives an equal share of each rank's part."""
    count = x.shape[dim]
    if count % ranks:
        places = jnp.asarray(sequence_order("striped", count * ranks, ranks).argsort().reshape(ranks, count))
        return jnp.take(gather_whole(x, axis, dim, invarying=False), places[axis_index(axis)], axis=dim)
    first = jnp.moveaxis(x, dim, 0)
    parts = swap_parts(first.reshape(ranks, count // ranks, *first.shape[1:]), axis)
    return jnp.moveaxis(jnp.swapaxes(parts, 0, 1).reshape(first.shape), 0, dim)


# --------------------------------------------------------------------------------------------------
# Pieces of attention by splash attention, the kernel of TPUs: any positions of queries, keys whose positions grow.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplashPieces:
    """Computes pieces by the splash kernel, which takes all queries and keys of a piece as one tile.

    The kernel compares a query with the places that keys have in the piece. Where these follow each other evenly that is a
    query's distance from the first of them. Else, which causal attention alone allows, it is how many of them are not after it.

    Attributes:
      call: how the kernel is called.
      firsts: where the piece's even runs of keys begin.
      run: how many keys each has.
      step: how far apart in the sequence they are.
      most: how many blocks one visits, see `most_visits`.
    """

    call: SplashCall
    firsts: tuple[int, ...]
    run: int
    step: int
    most: tuple[int, int]
    sorts = True

    def forward(
        self, how: Attention, given: Given, q: jax.Array, at: Side, k: jax.Array, v: jax.Array, side: Side
    ) -> ReadPiece:
        """As `PieceWork.forward`, one tile: q [1, b, g, r, c, d], k [1, b, g, t, d], v [1, b, g, t, e]; ignores `given`."""
        out, lse = splash_forward(self.call, self._piece(how, q, at, k, v, side))
        lse = lse.reshape(q.shape[:-1])
        return ReadPiece(out.astype(jnp.float32).reshape(*q.shape[:-1], -1), lse, jnp.zeros_like(lse))

    def backward(
        self, how: Attention, given: Given, kept: KeptQueries, at: Side, k: jax.Array, v: jax.Array, side: Side
    ) -> tuple[jax.Array, jax.Array, jax.Array, tuple[None, ...]]:
        """As `PieceWork.backward`; the kernel's gradients, in the dtypes of q, k and v, are returned as float32."""
        piece, join = self._piece(how, kept.q, at, k, v, side), _joined
        dq, dk, dv = splash_backward(
            self.call, piece, join(kept.top + kept.total, 2), join(kept.inner, 2), join(kept.grad, 3)
        )
        wide = lambda x, like: x.astype(jnp.float32).reshape(like.shape)
        return wide(dq, kept.q) * how.scale, wide(dk, k), wide(dv, v), (None,) * len(given.arrays)

    def _piece(self, how: Attention, q: jax.Array, at: Side, k: jax.Array, v: jax.Array, side: Side) -> SplashPiece:
        scaled = (q * how.scale).astype(q.dtype)
        segments = None if at.segments is None or side.segments is None else (at.segments[0], side.segments[0])
        places = self._places(at.positions[0], side.positions[0]) if self.call.bounded else None
        chosen = None
        if how.skips:
            here = _blocks(self.call.rows, at.positions[0], segments and segments[0])
            there = _blocks(self.call.columns, side.positions[0], segments and segments[1])
            each = jax.vmap(lambda one, other: may_see(how, one, other), (None, 0))
            chosen = visits(jax.vmap(each, (0, None))(here, there), self.most)
        return SplashPiece(_joined(scaled, 3), k[0], v[0], places, segments, chosen)

    def _places(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """The indices of query positions [c] among key positions [t]."""
        ahead = [queries - keys[first] for first in self.firsts]
        if len(ahead) == 1:
            return ahead[0]
        counts: Any = sum(jnp.clip(each // self.step + 1, 0, self.run) for each in ahead)
        return counts - 1


def _blocks(size: int, positions: jax.Array, segments: jax.Array | None) -> Side:
    cut = TileCut(positions.shape[0], positions.shape[0] // size, size)
    return side_of(cut, positions, segments)


def _joined(x: jax.Array, trailing: int) -> jax.Array:
    """Merge the heads of queries: [1, b, g, r, ...] -> [b, g * r, ...]."""
    return x[0].reshape(x.shape[1], -1, *x.shape[4:])


def even_runs(ring: Ring, keys: int) -> tuple[tuple[int, ...], int, int]:
    """The starts of a piece's runs of equally spaced keys, the number of keys of each, and their spacing; keys are in order."""
    if ring.piece_ranks == ring.ranks or ring.order == "contiguous":
        return (0,), keys, 1
    if ring.order == "zigzag":
        return (0, keys // 2), keys // 2, 1
    return tuple(range(ring.heads)), keys // ring.heads, ring.ranks


def by_splash(how: Attention, ring: Ring) -> Attention:
    """The attention whose pieces splash computes; `kernel_for` must have chosen it."""
    queries, keys = how.queries.places, how.keys.places
    sizes = block_sizes(queries, keys)
    assert sizes is not None
    firsts, run, step = even_runs(ring, keys)
    visible, call = how.visible, SplashCall(*sizes, softcap=how.modify.cap if isinstance(how.modify, Softcap) else None)
    if len(firsts) > 1:
        call = replace(call, after=0 if visible.causal else None)
    else:
        before, after = visible.window or (None, None)
        call = replace(call, stride=step, before=before, after=0 if visible.causal else after)
    most = keys // sizes[1], queries // sizes[0]
    if visible.window is not None:
        most = most_visits(visible, ring.pieces(queries, keys), *sizes)
    work = SplashPieces(call, firsts, run, step, most)
    return replace(how, queries=TileCut(queries, 1, queries), keys=TileCut(keys, 1, keys), work=work)


# --------------------------------------------------------------------------------------------------
# Which kernel computes attention across ranks, if one does: splash its pieces, cuDNN whole sequences of some heads.
# --------------------------------------------------------------------------------------------------

FORMS = ("auto", "blocks", *PLATFORMS)
"""What `context_attention` may be asked to compute with."""


def kernel_for(
    asked: str,
    how: Attention,
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    block_size: int | None,
) -> str | None:
    """The kernel that computes an attention; None for tiles.

    Args:
      asked: one of `FORMS`.
      how: what is computed.
      ring: how ranks work together.
      q: [b, s, n, d], heads split already.
      k: [b, t, g, d].
      v: [b, t, g, e].
      sinks: scores of heads that stand for no key.
      block_size: positions of a block, where the user wants such blocks.

    Raises:
      ValueError: for a kernel that was asked for by name and does not apply, with every reason.
    """
    name = asked if asked in PLATFORMS else kernel_of(target_platform())
    if name is None or asked == "blocks":
        return None
    rules = {"segmented": how.segmented, "window": how.visible.window is not None}
    rules |= {"drops": how.dropout is not None, "softcap": isinstance(how.modify, Softcap)}
    reasons = [] if block_size is None else [f"block_size={block_size} is of blocks"]
    if how.modify is not None and not isinstance(how.modify, Softcap):
        reasons.append("it changes no scores (bias and score_mod must be None)")
    if name == "splash":  # sinks are merged with what it reads
        reasons += _splash_reasons(how, ring)
    else:
        reasons += _cudnn_reasons(how, ring, q, k)
    sinks_too = sinks is not None and name != "splash"
    reasons += obstacles(name, q, k, v, sinks=sinks_too, positions=how.keys.places, **rules)
    if reasons and asked == name:
        raise ValueError(f"context_attention: kernel={asked!r} does not apply here: {'; '.join(reasons)}")
    return None if reasons else name


def _splash_reasons(how: Attention, ring: Ring) -> Iterator[str]:
    queries, keys = how.queries.places, how.keys.places
    if how.visible.window is not None and len(even_runs(ring, keys)[0]) > 1:
        yield (
            f"in a ring its windows are of positions that follow each other evenly (order={ring.order!r} must be 'contiguous', "
            "or method 'gather' or 'ulysses')"
        )
    if queries % BLOCK == 0 and keys % BLOCK == 0 and block_sizes(queries, keys) is None:
        yield f"its table of blocks of {queries} queries and {keys} keys at once is too large (use a ring, or more ranks)"


def _cudnn_reasons(how: Attention, ring: Ring, q: jax.Array, k: jax.Array) -> Iterator[str]:
    if ring.groups > 1:
        yield f"a rank has the positions of one of {ring.groups} groups (method='ulysses' gives it all, of some heads)"
    if how.visible.causal and q.shape[1] != k.shape[1]:
        yield f"its causal attention is of as many queries as keys, and there are {q.shape[1]} and {k.shape[1]}"


def attend_by_cudnn(how: Attention, ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of full sequences of this rank's heads, [b, s, n, d], by the kernel that `kernel_for` chose.

    Args:
      how: what is computed.
      ring: says in which order positions lie.
      q: [b, s, n, d].
      k: [b, t, g, d].
      v: [b, t, g, d].
    """
    sees: dict[str, Any] = {"causal": how.visible.causal, "scale": how.scale}
    if not how.visible.causal:  # whatever the order
        return fused_attention("cudnn", q, k, v, **sees)
    q, k, v = (in_sequence(x, ring.order, ring.ranks, 1) for x in (q, k, v))
    return by_rank(fused_attention("cudnn", q, k, v, **sees), ring.order, ring.ranks, 1)


# --------------------------------------------------------------------------------------------------
# `context_attention`: exact attention of sequences whose positions are split over the ranks of a mesh axis.
# --------------------------------------------------------------------------------------------------

Bias = Callable[..., jax.Array]
"""`bias(query positions [x], key positions [y], *arrays) -> [n or 1, x, y]`."""

SCOPE = "axonml.attention"
"""The name scope of everything here, by which the ledger knows what it sends."""

NO_ELEMENTS = (
    'keys of draws="rows" cannot draw single elements, as attention in blocks does for its dropout: take draws="shards", or '
    'attention="xla" (kernel="xla" of a layer) where ranks have whole sequences'
)

ScoreMod = Callable[..., jax.Array]
"""`score_mod(scores [b, h, x, y], where, *arrays) -> scores`; `where` has `heads` [h], `queries` [x] and `keys` [y]."""


@jax.named_scope(SCOPE)
def context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str = "context",
    method: Method | None = None,
    order: Order | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    bias: Bias | None = None,
    score_mod: ScoreMod | None = None,
    arrays: tuple[jax.Array, ...] = (),
    scale: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_dims: tuple[tuple[str, int], ...] | None = None,
    block_size: int | None = None,
    kernel: str = "auto",
) -> jax.Array:
    """Exact attention of sequences whose positions are split over the ranks of `axis`, with a hand-written backward.

    Letters: b rows, c and c' this rank's positions of queries and of keys (s and t of all N ranks), n query heads, g key and
    value heads, d head size, e that of values. Where `axis` is not bound by `shard_map` a rank holds all positions, and
    nothing is sent.

    Scores of at most `block_size` queries and as many keys are in memory at once, in at least float32; pairs of such blocks
    that see nothing of each other are not computed. A query that sees no key has the result 0.

    Args:
      q: [b, c, n, d].
      k: [b, c', g, d]; query head i reads key head i // (n / g).
      v: [b, c', g, e].
      axis: the mesh axis.
      method: "gather": every rank gathers all keys and values; "ulysses": ranks exchange positions for heads and back (Jacobs
        et al. 2023); "ring": keys and values go round (Liu et al. 2023), in a window or causal attention only as far as they
        are needed; (U, "ring") or (U, "gather"): Ulysses among U neighbours, the other among their groups; "auto": what sends
        least. None: what the plan says, or "auto".
      order: the order in which ranks hold positions (see `sequence_order`); None: what the plan says, or "contiguous".
      causal: a query sees no position after its own.
      window: (left, right): a query at i sees positions from i - left to i + right; a number is both.
      segment_ids: int [b, c], this rank's part: a query sees the keys of its own segment only; for keys of other lengths a pair
        ([b, c], [b, c']).
      bias: `bias(query positions [x], key positions [y], *arrays) -> [n or 1, x, y]`, added to the scores of a block: ALiBi's
        slopes times distances, or what a table of relative positions says.
      score_mod: in its place any change of a block's scaled scores: `score_mod(scores [b, h, x, y], where, *arrays)`, with the
        block's heads, query positions and key positions in `where.heads`, `where.queries` and `where.keys` (as PyTorch's
        FlexAttention, block by block).
      arrays: what these two read; gradients reach those that are floating. Other arrays of a traced program they cannot read.
      scale: of the scores; None: d ** -0.5.
      sinks: [n], a score of each head that takes its part of the softmax and stands for no key (Xiao et al. 2023; gpt-oss).
      dropout_rate: of the weights. The mask is `jax.random.bernoulli(dropout_key, 1 - dropout_rate, [b, n, s, t])`, of which
        every rank draws what it reads.
      dropout_key: a threefry key; or n of them, one for every head, whose mask is then drawn as [b, s, t].
      dropout_dims: of the drawn mask, where it is not [b, n, s, t]: pairs of what a dim runs over ("row", "head", "query",
        "key", or "" for a dim of size 1) and its size.
      block_size: positions of a block at most; None: what is fast on the platform (256 on CPU, 512 elsewhere).
      kernel: "blocks"; "splash", the kernel of TPUs; "cudnn", that of GPUs, for ranks that have all positions of some heads
        ("ulysses", or one rank); "auto": such a kernel where it applies and no block_size is given, else blocks.

    Returns:
      [b, c, n, e], in the dtype of v.

    Raises:
      ValueError: for shapes and rules that do not fit, all at once; for a method that the heads or ranks do not allow; and for
        a kernel that is asked for by name and does not apply.

    Communicates: "gather": an all-gather of keys and values, 2(N-1)bcgd elements, and again in the backward, with a
    reduce-scatter of as many. "ulysses": four all-to-alls each way, (N-1)/N of all elements of q, k, v and the result. "ring":
    at most N-1 permutes of 2bcgd forward; backward as many, and as many of their gradients in float32.
    """
    split = current_split(axis)
    ranks = 1 if split is None else axis_size(axis)
    split, drops = split or ContextSplit(axis), (dropout_rate, dropout_key)
    window = (window, window) if isinstance(window, int) else window
    ids = segment_ids if isinstance(segment_ids, tuple) or segment_ids is None else (segment_ids, segment_ids)
    if problems := list(_problems(q, k, v, window, ids, drops, bias, score_mod, sinks, block_size, kernel)):
        raise ValueError("context_attention: " + "; ".join(problems))
    heads, each_has = q.shape[2], (q.shape[1], k.shape[1])
    sizes = {"ranks": ranks, "heads": heads, "kv_heads": k.shape[2], "places": q.shape[1]}
    order = order or split.order
    count, gathers = heads_and_gathers(method or split.method, **sizes, window=window, causal=causal, order=order)
    ring = Ring(axis if ranks > 1 else None, ranks, count, gathers, order)
    if 0 in (*q.shape[:3], k.shape[1], v.shape[3]):  # nothing is asked for, or no query sees a key
        nothing = jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype)
        return vary(nothing, _axes_of((q, k, v, ids, dropout_key, arrays, sinks), ring.axis))
    key = _key_data(dropout_key) if dropout_rate and dropout_key is not None else None
    queries, keys = ring.cuts(*each_has, block_size or block_for(platform_around()))
    how = Attention(
        visible=Visible(causal, window),
        segmented=ids is not None,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        queries=queries,
        keys=keys,
        modify=score_mod if bias is None else partial(_plus, bias),
        dropout=_dropout(dropout_rate, key, dropout_dims, heads, *(ranks * places for places in each_has)),
        axes=_axes_of((q, k, v, ids, key, arrays, sinks), ring.axis),
        work=Tiles(),
    )
    first_head = 0 if ring.heads == 1 else axis_index(axis) % ring.heads * (heads // ring.heads)
    given, q, k, v, sinks = vary((Given(tuple(map(jnp.asarray, arrays)), key, first_head), q, k, v, sinks), how.axes)
    sinks = None if sinks is None else jax.lax.dynamic_slice_in_dim(sinks, first_head, heads // ring.heads)
    q, k, v = _heads_apart(ring, q, k, v)
    name = kernel_for(kernel, how, ring, q, k, v, sinks, block_size)
    if name == "cudnn":
        return _heads_together(ring, attend_by_cudnn(how, ring, q, k, v))
    how = by_splash(how, ring) if name == "splash" else how
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3]).transpose(0, 2, 3, 1, 4)
    out = _attended(how, ring, given, grouped, k.swapaxes(1, 2), v.swapaxes(1, 2), sinks, _places(ring, how, ids))
    return _heads_together(ring, out.transpose(0, 3, 1, 2, 4).reshape(*q.shape[:3], v.shape[3]))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attended(how: Attention, ring: Ring, given: Given, q, k, v, sinks, places: Places) -> jax.Array:
    """Attention q [b, g, r, c, d], k [b, g, t, d], v [b, g, t, e], sinks [g * r] or None -> [b, g, r, c, e]."""
    return _attended_forward(how, ring, given, q, k, v, sinks, places)[0]


def _attended_forward(how: Attention, ring: Ring, given: Given, q, k, v, sinks, places: Places):
    read = read_forward(how, ring, given, q, k, v, places)
    read = read if sinks is None else merged(read, sunk(read, sinks))
    read = jax.tree.map(lambda x: checkpoint_name(x, KEPT), read._replace(out=read.out.astype(v.dtype)))
    return how.queries.untiled(read.out, 3), (given, q, k, v, sinks, places, read)


def _attended_backward(how: Attention, ring: Ring, kept, grad):
    given, q, k, v, sinks, places, read = kept
    dq, dk, dv, made = read_backward(how, ring, given, q, k, v, places, read, grad)
    none: Any = None
    arrays = tuple(none if x is None else x.astype(y.dtype) for x, y in zip(made, given.arrays, strict=True))
    if sinks is not None:
        sinks = sinks_gradient(sinks, read, how.queries.tiles(grad, 3)).astype(sinks.dtype)
    return Given(arrays, none, none), dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), sinks, None


_attended.defvjp(_attended_forward, _attended_backward)


def _heads_apart(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """Trade positions for heads: all of a group's positions, of a part of the heads. Communicates: three all-to-alls."""
    if ring.heads == 1 or ring.axis is None:
        return [q, k, v]
    among = None if ring.groups == 1 else ring.neighbours
    repeats = max(1, ring.heads // k.shape[2])
    parts = [q, *(jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (k, v))]
    return [exchange_along(x, (ring.axis,), 2, 1, among=among) for x in parts]


def _heads_together(ring: Ring, out: jax.Array) -> jax.Array:
    """Trade heads back for positions, for results. Communicates: one all-to-all."""
    if ring.heads == 1 or ring.axis is None:
        return out
    return exchange_along(out, (ring.axis,), 1, 2, among=None if ring.groups == 1 else ring.neighbours)


def _places(ring: Ring, how: Attention, ids: tuple[jax.Array, jax.Array] | None) -> Places:
    """The places of this rank's queries and keys. Communicates: all-gathers of segment ids, int [b, c], if there are any."""
    index, count = ring.index(), how.queries.places
    positions = ring.positions(index, count)
    if ids is None:
        return Places(positions, None, None)
    apart = ids[:1] if ids[0] is ids[1] else ids
    whole = [x if ring.axis is None else gather_along(vary(x, how.axes), (ring.axis,), 1) for x in apart]
    return Places(positions, jax.lax.dynamic_slice_in_dim(whole[0], index * count, count, axis=1), whole[-1])


def _plus(bias: Bias, scores: jax.Array, where: Where, *arrays: jax.Array) -> jax.Array:
    own, (queries, keys) = bias(where.queries, where.keys, *arrays), scores.shape[2:]
    if own.ndim != 3 or own.shape[1:] != (queries, keys):
        raise ValueError(
            f"context_attention: bias(query positions [{queries}], key positions [{keys}], *arrays) returned an array of shape "
            f"{own.shape}: it must be [heads, {queries}, {keys}], or [1, {queries}, {keys}] for the same on all heads"
        )
    return scores + (own if len(own) == 1 else own[where.heads])


def _dropout(
    rate: float, key: jax.Array | None, dims: tuple[tuple[str, int], ...] | None, heads: int, queries: int, keys: int
) -> WeightsDropout | None:
    if key is None:
        return None
    by_head = key.ndim == 2
    every = (("row", 1), *(() if by_head else (("head", heads),)), ("query", queries), ("key", keys))
    return WeightsDropout(rate, every if dims is None else dims, by_head)


def _key_data(key: jax.Array) -> jax.Array:
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def _axes_of(tree: Any, axis: str | None) -> tuple[str, ...]:
    axes = frozenset(() if axis is None else (axis,)).union(*(varying_axes(x) for x in jax.tree.leaves(tree)))
    return tuple(sorted(axes))


def _problems(q, k, v, window, ids, drops, bias, score_mod, sinks, block_size, kernel) -> Iterator[str]:
    shapes, (rate, key) = f"q {q.shape}, k {k.shape}, v {v.shape}", drops
    if not q.ndim == k.ndim == v.ndim == 4:
        yield f"{shapes} must be [rows, positions, heads, head size]"
        return
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        yield f"{shapes}: rows of all, positions and heads of k and v, and head sizes of q and k must be equal"
    if q.shape[2] % k.shape[2]:
        yield f"{shapes}: {q.shape[2]} query heads are no multiple of {k.shape[2]} key and value heads"
    if sinks is not None and sinks.shape != q.shape[2:3]:
        yield f"sinks of shape {sinks.shape}: one score for each of the {q.shape[2]} query heads"
    if window is not None and not _is_window(window):
        yield f"window={window!r} must be how many positions are seen before and after, or a pair of these"
    if ids is not None and (len(ids) != 2 or ids[0].shape != q.shape[:2] or ids[1].shape != k.shape[:2]):
        yield f"segment_ids of shapes {[x.shape for x in ids]} must be {q.shape[:2]} for queries and {k.shape[:2]} for keys"
    if block_size is not None and block_size < 1:
        yield f"block_size={block_size!r} must be a positive number of positions, or None"
    if kernel not in FORMS:
        yield f"kernel={kernel!r} must be one of {', '.join(FORMS)}"
    if bias is not None and score_mod is not None:
        yield "bias and score_mod both change scores: give one, which may do both"
    if not 0 <= rate < 1:
        yield f"dropout_rate={rate!r} must be at least 0 and below 1"
    if rate and key is None:
        yield f"dropout_rate={rate!r} needs a dropout_key"
    if rate and key is not None and is_row_key(key):
        yield NO_ELEMENTS
    elif rate and key is not None and not can_draw_elements(key):
        yield (
            "dropout_key must be of the generator threefry (jax_threefry_partitionable=True): of others a rank "
            "cannot draw its own elements alone"
        )
    elif rate and key is not None and _key_data(key).shape[:-1] not in ((), q.shape[2:3]):
        yield f"dropout_key has {_key_data(key).shape[0]} keys: give one, or one for each of the {q.shape[2]} query heads"


def _is_window(window: Any) -> bool:
    return (
        isinstance(window, tuple) and len(window) == 2 and all(isinstance(side, int) and side >= 0 for side in window)
    )
