"""Pieces of attention by splash attention, the kernel of TPUs: any positions of queries, keys whose positions grow."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.compat.splash import SplashCall, SplashPiece, splash_backward, splash_forward
from axonml_jax.parallel.context.across_ranks import Ring
from axonml_jax.parallel.context.kernels.block_visits import block_sizes, most_visits, visits
from axonml_jax.parallel.context.pieces.attention_pieces import Attention, Given, KeptQueries, ReadPiece, may_see
from axonml_jax.parallel.context.pieces.tiles import Side, TileCut, side_of
from axonml_jax.parallel.tensor.megatron.softcap import Softcap


@dataclass(frozen=True)
class SplashPieces:
    """Pieces by the kernel, which takes all queries and all keys of one at once: each is one tile here.

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
        """As of tiles: q [1, b, g, r, c, d], k [1, b, g, t, d], v [1, b, g, t, e]. Nothing is read of `given`."""
        out, lse = splash_forward(self.call, self._piece(how, q, at, k, v, side))
        lse = lse.reshape(q.shape[:-1])
        return ReadPiece(out.astype(jnp.float32).reshape(*q.shape[:-1], -1), lse, jnp.zeros_like(lse))

    def backward(
        self, how: Attention, given: Given, kept: KeptQueries, at: Side, k: jax.Array, v: jax.Array, side: Side
    ) -> tuple[jax.Array, jax.Array, jax.Array, tuple[None, ...]]:
        """As of tiles, in float32, of what the kernel returns in the dtypes of q, k and v."""
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
        """The places of queries [c] among keys [t]."""
        ahead = [queries - keys[first] for first in self.firsts]
        if len(ahead) == 1:
            return ahead[0]
        counts: Any = sum(jnp.clip(each // self.step + 1, 0, self.run) for each in ahead)
        return counts - 1


def _blocks(size: int, positions: jax.Array, segments: jax.Array | None) -> Side:
    cut = TileCut(positions.shape[0], positions.shape[0] // size, size)
    return side_of(cut, positions, segments)


def _joined(x: jax.Array, trailing: int) -> jax.Array:
    """[1, b, g, r, ...] -> [b, g * r, ...], the heads of queries in their order."""
    return x[0].reshape(x.shape[1], -1, *x.shape[4:])


def even_runs(ring: Ring, keys: int) -> tuple[tuple[int, ...], int, int]:
    """Where the even runs of a piece of so many keys begin, the keys of each, and how far apart they are; keys in order."""
    if ring.piece_ranks == ring.ranks or ring.order == "contiguous":
        return (0,), keys, 1
    if ring.order == "zigzag":
        return (0, keys // 2), keys // 2, 1
    return tuple(range(ring.heads)), keys // ring.heads, ring.ranks


def by_splash(how: Attention, ring: Ring) -> Attention:
    """An attention whose pieces splash computes; `by_kernel.kernel_for` has said that it can."""
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
