"""Attention of queries to pieces of the keys, tile by tile: masks, score changes, dropout, and merging of pieces."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.primitives import vary
from axonml_jax.compat.order import bernoulli_at, together
from axonml_jax.compat.row_keys import times
from axonml_jax.compat.splash import Visits
from axonml_jax.sharding.layout import Order

# --------------------------------------------------------------------------------------------------
# Which positions see which, as positions alone decide it: causal attention and sliding windows.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visible:
    """The mask rules: which keys a query at position i may see.

    Its methods take NumPy arrays and traced ones.

    Attributes:
      causal: none after i.
      window: (left, right): those from i - left to i + right.

    >>> Visible(causal=True).may_see(0, 3, 4, 7), Visible(window=(1, 0)).may_see(4, 7, 0, 3)
    (False, True)
    """

    causal: bool = False
    window: tuple[int, int] | None = None

    @property
    def everything(self) -> bool:
        """Whether no rule hides any key."""
        return not self.causal and self.window is None

    def sees(self, queries: Any, keys: Any) -> Any:
        """bool [q, k], for positions int [q] and [k]; a key with a negative position is padding, and never seen."""
        ahead = keys[None, :] - queries[:, None]
        seen = (keys >= 0)[None, :] & (ahead == ahead)
        if self.causal:
            seen = seen & (ahead <= 0)
        if self.window is not None:
            seen = seen & (ahead >= -self.window[0]) & (ahead <= self.window[1])
        return seen

    def may_see(self, first_query: Any, last_query: Any, first_key: Any, last_key: Any) -> Any:
        """Whether any query of one range of positions may see any key of another (bounds included); False is certain."""
        may = last_key >= first_key
        if self.causal:
            may = may & (first_key <= last_query)
        if self.window is not None:
            may = may & (last_key >= first_query - self.window[0]) & (first_key <= last_query + self.window[1])
        return may


# --------------------------------------------------------------------------------------------------
# Dropout of attention weights, tile by tile: the masks are those that one device draws for all weights at once.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightsDropout:
    """The mask of the weights: `bernoulli(key, 1 - rate, shape)` over rows, heads, queries and keys, or over some of these.

    With `by_head` each head has its own key, and a mask over the others.

    Attributes:
      rate: the probability of being dropped.
      dims: (what it runs over, size) of each dim of that array: "row", "head", "query", "key", or "" for a dim of size 1; the
        size of the first is not read.
      by_head: whether every head has a key of its own.
    """

    rate: float
    dims: tuple[tuple[str, int], ...]
    by_head: bool = False

    def keep(self, key: jax.Array, rows: int, heads: jax.Array, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """The mask of a tile's weights that are kept.

        Args:
          key: key data, uint32 [2], or [n, 2] by head.
          rows: b.
          heads: int [h], which heads of the whole mask the tile has.
          queries: int32 [x], their positions.
          keys: int32 [y].

        Returns:
          bool [b, h, x, y], of size 1 along what the mask does not run over.
        """
        along = {"row": jnp.arange(rows), "head": heads, "query": queries, "key": keys, "": jnp.zeros(1, int)}
        places = ("row", "head", "query", "key")
        high = low = jnp.zeros((1, 1, 1, 1), jnp.uint32)
        for name, size in self.dims:
            own = along[name].astype(jnp.uint32)
            if name:
                own = jnp.expand_dims(own, [i for i, each in enumerate(places) if each != name])
            more, low = times(low, size)
            ends = low + own
            high, low = high * jnp.uint32(size) + more + (ends < low).astype(jnp.uint32), ends
        if not self.by_head:
            return bernoulli_at(key, 1 - self.rate, high, low)
        one = lambda own: bernoulli_at(own, 1 - self.rate, high[:, 0], low[:, 0])
        return jnp.moveaxis(jax.vmap(one)(key[heads]), 0, 1)


# --------------------------------------------------------------------------------------------------
# A rank's positions cut into tiles of one size, so that scores of one tile of queries and one of keys are there at
# once.
# --------------------------------------------------------------------------------------------------


def block_for(platform: str) -> int:
    """The largest number of positions in a tile, by what is fast on a platform."""
    return 256 if platform == "cpu" else 512


@dataclass(frozen=True)
class TileCut:
    """How places are cut into tiles.

    Places lie in chunks, within which positions grow; no tile has places of two. A chunk that its tiles do not divide is
    filled up with places that are no positions.

    Attributes:
      places: how many there are.
      chunks: of how many equal chunks.
      most: places of a tile at most.

    >>> cut = TileCut(places=12, chunks=2, most=4)
    >>> cut.size, cut.count
    (3, 4)
    """

    places: int
    chunks: int = 1
    most: int = 512

    @property
    def per_chunk(self) -> int:
        """The number of tiles in a chunk."""
        return max(1, math.ceil(self.places // self.chunks / self.most))

    @property
    def size(self) -> int:
        """The number of places in a tile."""
        return math.ceil(self.places // self.chunks / self.per_chunk)

    @property
    def count(self) -> int:
        """The total number of tiles."""
        return self.chunks * self.per_chunk

    def tiles(self, x: jax.Array, dim: int, fill: int = 0) -> jax.Array:
        """Cut a dim into tiles: [..., places, ...] -> [count, ..., size, ...]."""
        dim = dim % x.ndim
        chunk, filled = self.places // self.chunks, self.per_chunk * self.size
        x = x.reshape(*x.shape[:dim], self.chunks, chunk, *x.shape[dim + 1 :])
        if filled != chunk:
            ends = [(0, filled - chunk if i == dim + 1 else 0) for i in range(x.ndim)]
            x = jnp.pad(x, ends, constant_values=fill)
        x = x.reshape(*x.shape[:dim], self.count, self.size, *x.shape[dim + 2 :])
        return jnp.moveaxis(x, dim, 0)

    def untiled(self, tiles: jax.Array, dim: int) -> jax.Array:
        """The inverse of `tiles`; `dim` counts in the result."""
        dim = dim % (tiles.ndim - 1)
        chunk, filled = self.places // self.chunks, self.per_chunk * self.size
        x = jnp.moveaxis(tiles, 0, dim)
        x = x.reshape(*x.shape[:dim], self.chunks, filled, *x.shape[dim + 2 :])
        x = jax.lax.slice_in_dim(x, 0, chunk, axis=dim + 1)
        return x.reshape(*x.shape[:dim], self.places, *x.shape[dim + 2 :])


class Side(NamedTuple):
    """Positions and segments of the queries, or of the keys, tile by tile (t tiles, s places each, b rows).

    Attributes:
      positions: int32 [t, s]; -1: no position.
      first, last: the lowest and the highest position of each tile, int32 [t].
      segments: int32 [t, b, s], or None.
      least, most: the lowest and the highest segment of each tile, int32 [t]; None without segments.
    """

    positions: jax.Array
    first: jax.Array
    last: jax.Array
    segments: jax.Array | None = None
    least: jax.Array | None = None
    most: jax.Array | None = None


def side_of(cut: TileCut, positions: jax.Array, segments: jax.Array | None) -> Side:
    """The `Side` of a piece from its positions and segments.

    Args:
      cut: how its places are cut.
      positions: int32 [p], global.
      segments: int32 [b, p], or None.
    """
    own = cut.tiles(positions, 0, fill=-1)
    first, last = jnp.where(own < 0, np.iinfo(np.int32).max, own).min(-1), own.max(-1)
    if segments is None:
        return Side(own, first, last)
    ids, real = cut.tiles(segments, 1), (own >= 0)[:, None, :]
    least = jnp.where(real, ids, np.iinfo(np.int32).max).min((-1, -2))
    most = jnp.where(real, ids, np.iinfo(np.int32).min).max((-1, -2))
    return Side(own, first, last, ids, least, most)


# --------------------------------------------------------------------------------------------------
# Places of neighbouring ranks, one rank after the other, brought into the sequence's order and back.
# --------------------------------------------------------------------------------------------------


def in_sequence(x: jax.Array, order: Order, ranks: int, dim: int) -> jax.Array:
    """Reorder [..., s, ...] from the order in which `ranks` neighbours hold positions to increasing positions.

    They are all ranks of an axis, or those of one group of a size that divides them.
    """
    dim = dim % x.ndim
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if order == "striped":
        return x.reshape(*before, ranks, -1, *after).swapaxes(dim, dim + 1).reshape(x.shape)
    if order == "zigzag":  # a rank has one chunk of the first half, and its mirror image of the second
        chunks = x.reshape(*before, ranks, 2, -1, *after)
        first, second = (jax.lax.index_in_dim(chunks, i, dim + 1, keepdims=False) for i in range(2))
        return jnp.concatenate([first, jnp.flip(second, dim)], dim).reshape(x.shape)
    return x


def by_rank(x: jax.Array, order: Order, ranks: int, dim: int) -> jax.Array:
    """The inverse of `in_sequence`."""
    dim = dim % x.ndim
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if order == "striped":
        return x.reshape(*before, -1, ranks, *after).swapaxes(dim, dim + 1).reshape(x.shape)
    if order == "zigzag":
        first, second = jnp.split(x.reshape(*before, 2 * ranks, -1, *after), 2, axis=dim)
        return jnp.stack([first, jnp.flip(second, dim)], dim + 1).reshape(x.shape)
    return x


# --------------------------------------------------------------------------------------------------
# Which blocks of keys a kernel visits for every block of queries, in tables of one size for all ranks.
# --------------------------------------------------------------------------------------------------

BLOCK = 128
"""Splash takes queries and keys in multiples of it: the lanes of a TPU's vectors."""

_PAIRS = 2**17  # of blocks in a table, which lies in the scalar memory of a chip: 1 MiB of all but the oldest
_MOST = 512

LARGEST_PIECE = _PAIRS * (2 * _MOST) ** 2
"""Pairs of positions in the largest piece that has a table, where blocks of the largest size divide it."""


def block_sizes(queries: int, keys: int) -> tuple[int, int] | None:
    """Splash's block sizes of queries and of keys, multiples of 128 that divide them; None if there were too many blocks.

    At most 512; at most 1,024 where the table of pairs of blocks would be too large.

    >>> block_sizes(1024, 384), block_sizes(2**17, 2**20), block_sizes(2**20, 2**21)
    ((512, 384), (1024, 1024), None)
    """
    for most in (_MOST, 2 * _MOST):
        rows, columns = largest_block(queries, most), largest_block(keys, most)
        if queries // rows * (keys // columns) <= _PAIRS:
            return rows, columns
    return None


def largest_block(length: int, most: int = _MOST) -> int:
    """The largest multiple of `BLOCK`, at most `most`, that divides a sequence."""
    return next(size for size in range(most, 0, -BLOCK) if length % size == 0)


def most_visits(
    visible: Visible, pairs: Iterable[tuple[np.ndarray, np.ndarray]], rows: int, columns: int
) -> tuple[int, int]:
    """The most blocks of keys that any block of queries visits, and the most blocks of queries that visit any block of keys.

    Args:
      visible: what positions see.
      pairs: positions of queries and of keys, int [s] and [t], of each rank and round.
      rows, columns: positions of a block of queries, of one of keys.
    """
    most = 1, 1
    for queries, keys in pairs:
        here, there = queries.reshape(-1, rows, 1), keys.reshape(-1, 1, columns)
        may = visible.may_see(here.min(1), here.max(1), there.min(2).T, there.max(2).T)
        most = max(most[0], int(may.sum(1).max())), max(most[1], int(may.sum(0).max()))
    return most


def visits(may: jax.Array, most: tuple[int, int]) -> Visits:
    """For every block the blocks that it visits, in order, padded with repeats of the last, which are masked.

    The kernel does not fetch a block again that is named twice in a row.

    Args:
      may: bool [i, j], whether a block of queries sees a block of keys.
      most: of `most_visits`.
    """
    return Visits(_firsts(may, most[0]), tuple(x.T for x in _firsts(may.T, most[1])))  # pyright: ignore[reportArgumentType]


def _firsts(may: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    counts = may.sum(1, dtype=jnp.int32, keepdims=True)
    places = jnp.arange(most, dtype=jnp.int32)[None]
    order = jnp.argsort(~may, axis=1, stable=True).astype(jnp.int32)
    chosen = jnp.take_along_axis(order, jnp.clip(places, 0, jnp.maximum(counts - 1, 0)), axis=1)
    return chosen, places < counts


# --------------------------------------------------------------------------------------------------
# In which rounds which ranks of a ring compute, and what they send: device-free, known before anything runs.
# --------------------------------------------------------------------------------------------------

Pairs = tuple[tuple[int, int], ...]
"""(source, target) ranks of one permute."""

Spans = Sequence[tuple[int, int]]
"""The first and the last position of each chunk that a rank holds."""


@dataclass(frozen=True)
class RingRounds:
    """The rounds of a ring: in round r rank i has the keys and values of rank i - r, if it or a rank after it needs them.

    Attributes:
      needed: `needed[i][j]`: whether queries of rank i may see keys of rank j.

    >>> rounds = RingRounds.of(Visible(causal=True), [[(0, 1)], [(2, 3)], [(4, 5)]])
    >>> rounds.count, rounds.keys(1), rounds.keys(2)
    (3, ((0, 1), (1, 2)), ((1, 2),))
    """

    needed: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, visible: Visible, queries: Sequence[Spans], keys: Sequence[Spans] | None = None) -> "RingRounds":
        """The rounds for ranks whose queries, and keys if they differ, lie in these spans of positions."""
        may = lambda own, other: any(bool(visible.may_see(*a, *b)) for a in own for b in other)
        sources = list(enumerate(queries if keys is None else keys))
        return cls(tuple(tuple(i == j or may(own, other) for j, other in sources) for i, own in enumerate(queries)))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.needed)

    def computing(self, round: int) -> tuple[int, ...]:
        """The ranks that compute in a round."""
        return tuple(i for i in range(self.ranks) if self.needed[i][(i - round) % self.ranks])

    def _rounds_of(self, source: int) -> list[int]:
        """The rounds after the first in which a rank's keys are needed."""
        return [r for r in range(1, self.ranks) if self.needed[(source + r) % self.ranks][source]]

    @property
    def count(self) -> int:
        """The number of rounds."""
        return 1 + max((r for source in range(self.ranks) for r in self._rounds_of(source)), default=0)

    def keys(self, round: int) -> Pairs:
        """The (source, target) pairs that pass keys and values on before a round."""
        return self._step(round, lambda rounds: 1 <= round <= max(rounds))

    def gradients(self, round: int) -> Pairs:
        """The pairs that pass the gradients of keys and values on before a round."""
        return self._step(round, lambda rounds: min(rounds) < round <= max(rounds))

    def home(self, round: int) -> Pairs:
        """The pairs that send these gradients to their owner after the last round that needs the keys."""
        ends = {source: rounds for source in range(self.ranks) if (rounds := self._rounds_of(source))}
        return tuple(((source + round) % self.ranks, source) for source, at in ends.items() if max(at) == round)

    def _step(self, round: int, moves: Callable[[list[int]], bool]) -> Pairs:
        sources = [source for source in range(self.ranks) if (rounds := self._rounds_of(source)) and moves(rounds)]
        return tuple(((source + round - 1) % self.ranks, (source + round) % self.ranks) for source in sources)


# --------------------------------------------------------------------------------------------------
# An attention in pieces: queries read some keys after others, and what they read of each is merged.
# --------------------------------------------------------------------------------------------------


class PieceWork(Protocol):
    """Protocol of what computes pieces of an attention; equal values compute the same."""

    @property
    def sorts(self) -> bool:
        """Whether a piece's keys must be in the order of the sequence."""
        ...

    @property
    def forward(self) -> Callable[..., "ReadPiece"]:
        """Attend to a piece, as `forward` in this module."""
        ...

    @property
    def backward(self) -> Callable[..., tuple]:
        """The gradients of a piece, as `backward` in this module."""
        ...


@dataclass(frozen=True)
class Attention:
    """The settings that all pieces of one attention share.

    Letters of all shapes here: b rows, g key and value heads, r query heads of each, x places of a tile of queries, y of keys,
    d head size, e that of values, t tiles of queries, u tiles of keys.

    Attributes:
      visible: what positions see.
      segmented: whether queries see the keys of their own segment only.
      scale: of the scores.
      queries, keys: how places are cut into tiles.
      modify: `modify(scores [b, heads, x, y], where, *arrays) -> scores`: what is done to the scaled scores before what is not
        seen is left out; or None.
      dropout: of the weights, or None.
      axes: the mesh axes over which everything here is typed as varying.
      work: what computes its pieces.
    """

    visible: Visible
    segmented: bool
    scale: float
    queries: TileCut
    keys: TileCut
    modify: Callable[..., jax.Array] | None
    dropout: WeightsDropout | None
    axes: tuple[str, ...]
    work: PieceWork

    @property
    def skips(self) -> bool:
        """Whether pairs of tiles may be skipped."""
        return self.segmented or not self.visible.everything


class Given(NamedTuple):
    """The other inputs of an attention, besides queries, keys and values.

    Attributes:
      arrays: what `modify` reads.
      key: the dropout's key data; None without.
      first_head: the index of this rank's first query head among all heads, by which `modify` and the dropout count.
    """

    arrays: tuple[jax.Array, ...] = ()
    key: jax.Array | None = None
    first_head: int | jax.Array = 0


class Where(NamedTuple):
    """The place of a tile of scores: its heads [h], and the positions of its queries [x] and keys [y]."""

    heads: jax.Array
    queries: jax.Array
    keys: jax.Array


class ReadPiece(NamedTuple):
    """The result of queries attending to some of the keys, which can be merged with others.

    Attributes:
      out: [t, b, g, r, x, e]; 0 for a query that sees none of them.
      top: the highest score, [t, b, g, r, x]; -inf for such a query.
      total: the logarithm of the sum of exp(score - top), as top. Their sum would lose it where all scores are a very low
        number, which stands for keys that are not seen.
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array


def merged(one: ReadPiece, other: ReadPiece) -> ReadPiece:
    """Merge what queries read of two sets of keys."""
    top = jnp.maximum(one.top, other.top)
    shown = jnp.where(jnp.isneginf(top), 0, top)
    first, second = (jnp.exp(each.top - shown + each.total) for each in (one, other))
    total = jnp.where(first + second > 0, first + second, 1)
    out = (one.out * first[..., None] + other.out * second[..., None]) / total[..., None]
    return ReadPiece(out, top, jnp.log(total))


class KeptQueries(NamedTuple):
    """What the backward reads of the queries.

    Attributes:
      q: the queries, [t, b, g, r, x, d].
      grad: the gradient of the output, [t, b, g, r, x, e].
      top, total: those of the `ReadPiece` of all keys, [t, b, g, r, x].
      inner: `output * gradient` summed over the head, [t, b, g, r, x].
    """

    q: jax.Array
    grad: jax.Array
    top: jax.Array
    total: jax.Array
    inner: jax.Array


def may_see(how: Attention, here: Side, there: Side) -> jax.Array:
    """Whether a query of one tile may see a key of another, by bounds of positions and segments; False is certain."""
    may = how.visible.may_see(here.first, here.last, there.first, there.last)
    if here.least is not None and here.most is not None and there.least is not None and there.most is not None:
        may = may & (here.least <= there.most) & (there.least <= here.most)
    return may


# --------------------------------------------------------------------------------------------------
# Sinks of attention: a score of each head that takes its part of the softmax and stands for no key (Xiao et al. 2023).
# --------------------------------------------------------------------------------------------------


def sunk(read: ReadPiece, sinks: jax.Array) -> ReadPiece:
    """The sinks as a `ReadPiece`: an output of 0 with the sinks' weight, to be merged with what queries read of all keys.

    Args:
      read: [t, b, g, r, x, ...], what they read of keys; its shapes and dtypes are used.
      sinks: [g * r], of the same heads.
    """
    top = jnp.broadcast_to(_by_head(read, sinks), read.top.shape)
    return ReadPiece(jnp.zeros_like(read.out), top, jnp.zeros_like(read.total))


def sinks_gradient(sinks: jax.Array, read: ReadPiece, grad: jax.Array) -> jax.Array:
    """The gradient of the sinks, [g * r]: that of a score whose value is 0.

    Args:
      sinks: [g * r].
      read: what queries read of keys and sinks.
      grad: of `read.out`.
    """
    wide = read.top.dtype
    weights = jnp.exp(_by_head(read, sinks) - read.top - read.total)
    inner = (grad.astype(wide) * read.out.astype(wide)).sum(-1)
    return -(weights * inner).sum((0, 1, 4)).reshape(-1)


def _by_head(read: ReadPiece, sinks: jax.Array) -> jax.Array:
    return sinks.astype(read.top.dtype).reshape(*read.top.shape[2:4], 1)


# --------------------------------------------------------------------------------------------------
# Attention of some queries to some keys, tile by tile, with the backward written by hand: only one tile's scores exist
# at once.
#
# Forward and backward are those of FlashAttention-2 (Dao 2023): the forward keeps the logarithm of every query's sum of
# weights, the backward computes the weights anew from it, so that keys may come in any number of pieces, in any order.
# --------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """The place of one tile: positions [x], and segments [b, x] or None."""

    positions: jax.Array
    segments: jax.Array | None


def forward(how: Attention, given: Given, q: jax.Array, at: Side, k: jax.Array, v: jax.Array, side: Side):
    """Attention of queries to a piece's keys, tile by tile.

    Args:
      how, given: the attention.
      q: [t, b, g, r, x, d].
      at: their places.
      k: [u, b, g, y, d].
      v: [u, b, g, y, e].
      side: their places.

    Returns:
      A `ReadPiece`, in at least float32.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q, at, side = _tied(q, at, side)

    def of_queries(_, own):
        q_tile, here = own
        shape = q_tile.shape[:-1]
        zero = jnp.zeros((*shape, v.shape[-1]), wide), jnp.zeros(shape, wide)

        def with_keys(carry, keys):
            k_tile, v_tile, there = keys

            def more(carry):
                out, total, highest = carry
                scores = _changed(how, given, _scores(how, q_tile, k_tile), _tile(here), _tile(there))
                top = jnp.maximum(highest, scores.max(-1))
                shown = jnp.where(jnp.isneginf(top), 0, top)
                weights, again = jnp.exp(scores - shown[..., None]), jnp.exp(highest - shown)
                total = total * again + weights.sum(-1)
                weights = _dropped(how, given, weights, _tile(here), _tile(there)).astype(v.dtype)
                part = jnp.einsum("bgrxy,bgye->bgrxe", weights, v_tile, preferred_element_type=wide)
                return out * again[..., None] + part, total, top

            return _where_seen(how, here, there, more, carry), None

        start = vary((*zero, jnp.full(shape, -jnp.inf, wide)), how.axes)
        (out, total, top), _ = _loop(with_keys, start, (k, v, side))
        total = jnp.where(total > 0, total, 1)
        return None, ReadPiece(out / total[..., None], top, jnp.log(total))

    return _loop(of_queries, None, (q, at))[1]


def backward(how: Attention, given: Given, kept: KeptQueries, at: Side, k: jax.Array, v: jax.Array, side: Side):
    """The gradients of `forward`, merged over pieces: `kept.top` and `kept.total` are those of all keys.

    Returns:
      (dq like q, dk like k, dv like v, a gradient of each of `given.arrays`, None of those without one), in at least float32.
    """
    wide = jnp.promote_types(kept.q.dtype, jnp.float32)
    q, at, side = _tied(kept.q, at, side)
    kept = kept._replace(q=q)
    floating = [i for i, x in enumerate(given.arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
    zeros = tuple(jnp.zeros(given.arrays[i].shape, wide) for i in floating)

    def of_keys(carry, keys):
        k_tile, v_tile, there = keys

        def with_queries(carry, own):
            index, tile, here = own

            def more(carry):
                dq, *sums = carry
                dq_tile, *parts = _pair_backward(how, given, floating, tile, _tile(here), k_tile, v_tile, _tile(there))
                return dq.at[index].add(dq_tile), *jax.tree.map(jnp.add, tuple(sums), tuple(parts))

            return _where_seen(how, here, there, more, carry), None

        dq, darrays = carry
        empty = vary((jnp.zeros(k_tile.shape, wide), jnp.zeros(v_tile.shape, wide)), how.axes)
        xs = (jnp.arange(len(kept.q)), kept, at)
        (dq, dk, dv, darrays), _ = _loop(with_queries, (dq, *empty, darrays), xs)
        return (dq, darrays), (dk, dv)

    start = vary((jnp.zeros(kept.q.shape, wide), zeros), how.axes)
    (dq, darrays), (dk, dv) = _loop(of_keys, start, (k, v, side))
    made = dict(zip(floating, darrays, strict=True))
    return dq, dk, dv, tuple(made.get(i) for i in range(len(given.arrays)))


def _pair_backward(
    how: Attention,
    given: Given,
    floating: list[int],
    own: KeptQueries,
    here: Tile,
    k: jax.Array,
    v: jax.Array,
    there: Tile,
):
    """The contributions of one tile of queries and one of keys to dq, dk, dv and the floating arrays' gradients."""
    wide = jnp.promote_types(own.q.dtype, jnp.float32)

    def changed(scores, *floats):
        arrays = list(given.arrays)
        for i, x in zip(floating, floats, strict=True):
            arrays[i] = x
        return _changed(how, given._replace(arrays=tuple(arrays)), scores, here, there)

    scores, undo = jax.vjp(changed, _scores(how, own.q, k), *(given.arrays[i] for i in floating))
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(own.top), 0, own.top)[..., None] - own.total[..., None])
    into = jnp.einsum("bgrxe,bgye->bgrxy", own.grad, v, preferred_element_type=wide)
    into = _dropped(how, given, into, here, there)
    dropped = _dropped(how, given, weights, here, there).astype(own.grad.dtype)
    dscores, *darrays = undo(weights * (into - own.inner[..., None]))
    scaled = (dscores * how.scale).astype(own.q.dtype)
    dq = jnp.einsum("bgrxy,bgyd->bgrxd", scaled, k, preferred_element_type=wide)
    dk = jnp.einsum("bgrxy,bgrxd->bgyd", scaled, own.q, preferred_element_type=wide)
    dv = jnp.einsum("bgrxy,bgrxe->bgye", dropped, own.grad, preferred_element_type=wide)
    return dq, dk, dv, tuple(x.astype(wide) for x in darrays)


def _scores(how: Attention, q: jax.Array, k: jax.Array) -> jax.Array:
    """Scaled scores [b, g, r, x, y] in at least float32."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return jnp.einsum("bgrxd,bgyd->bgrxy", q, k, preferred_element_type=wide) * how.scale


def _changed(how: Attention, given: Given, scores: jax.Array, here: Tile, there: Tile) -> jax.Array:
    """The scores that the softmax takes: modified, and -inf where a query does not see a key."""
    if how.modify is not None:
        rows, groups, each, *tile = scores.shape
        heads = given.first_head + jnp.arange(groups * each)
        where = Where(*vary((heads, here.positions, there.positions), how.axes))
        changed = how.modify(scores.reshape(rows, groups * each, *tile), where, *given.arrays)
        scores = changed.astype(scores.dtype).reshape(scores.shape)
    seen = how.visible.sees(here.positions, there.positions)
    if here.segments is not None and there.segments is not None:
        seen = seen & (here.segments[:, :, None] == there.segments[:, None, :])[:, None, None]
    return jnp.where(seen, scores, -jnp.inf)


def _dropped(how: Attention, given: Given, weights: jax.Array, here: Tile, there: Tile) -> jax.Array:
    """Apply dropout to weights [b, g, r, x, y]."""
    if how.dropout is None or given.key is None:
        return weights
    rows, groups, each = weights.shape[:3]
    heads = given.first_head + jnp.arange(groups * each)
    keep = how.dropout.keep(given.key, rows, heads, here.positions, there.positions)
    keep = jnp.broadcast_to(keep, (rows, groups * each, *weights.shape[3:])).reshape(weights.shape)
    return jnp.where(keep, weights / (1 - how.dropout.rate), 0)


def _where_seen(how: Attention, here: Side, there: Side, more: Callable, carry: Any) -> Any:
    """Call `more(carry)` if a query of the tile may see a key of the other; else return the carry."""
    return jax.lax.cond(may_see(how, here, there), more, lambda carry: carry, carry) if how.skips else more(carry)


def _tied(q: jax.Array, at: Side, side: Side) -> tuple[jax.Array, Side, Side]:
    """Make places depend on the queries, so that XLA does not hoist them.

    Masks and other values that depend on places alone are the same in every trip of a loop over layers. When JAX differentiates
    such a loop it would compute them before the loop, for all tiles at once, and keep them.
    """
    tied: Any = together((q, at, side))
    return tied


def _tile(side: Side) -> Tile:
    return Tile(side.positions, side.segments)


def _loop(body: Callable, carry: Any, xs: Any) -> tuple[Any, Any]:
    """`jax.lax.scan`, or one plain call for a single tile."""
    if len(jax.tree.leaves(xs)[0]) > 1:
        return jax.lax.scan(body, carry, xs)
    carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


@dataclass(frozen=True)
class Tiles:
    """Computes pieces tile by tile, by XLA."""

    sorts = False
    forward = staticmethod(forward)
    backward = staticmethod(backward)
