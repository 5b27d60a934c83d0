"""Attention of some queries to some keys, tile by tile, with the backward written by hand: no more scores than of one tile.

Forward and backward are those of FlashAttention-2 (Dao 2023): the forward keeps the logarithm of every query's sum of weights,
the backward computes the weights anew from it, so that keys may come in any number of pieces, in any order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.collectives.varying import vary
from axonml_jax.compat.barrier import together
from axonml_jax.parallel.context.pieces.attention_pieces import Attention, Given, KeptQueries, ReadPiece, Where, may_see
from axonml_jax.parallel.context.pieces.tiles import Side


class Tile(NamedTuple):
    """Where a tile's places are: positions [x], and segments [b, x] or None."""

    positions: jax.Array
    segments: jax.Array | None


def forward(how: Attention, given: Given, q: jax.Array, at: Side, k: jax.Array, v: jax.Array, side: Side):
    """Queries read a piece's keys.

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
    """The gradients of `forward`, merged with whatever other pieces: `kept.top` and `kept.total` are those of all of them.

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
    """The parts that a tile of queries and one of keys have in dq, dk, dv and the gradients of the floating arrays."""
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
    """[b, g, r, x, y] in at least float32, scaled."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return jnp.einsum("bgrxd,bgyd->bgrxy", q, k, preferred_element_type=wide) * how.scale


def _changed(how: Attention, given: Given, scores: jax.Array, here: Tile, there: Tile) -> jax.Array:
    """Scores as the softmax takes them: -inf where a query does not see a key."""
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
    """[b, g, r, x, y] with some of them 0 and the others larger."""
    if how.dropout is None or given.key is None:
        return weights
    rows, groups, each = weights.shape[:3]
    heads = given.first_head + jnp.arange(groups * each)
    keep = how.dropout.keep(given.key, rows, heads, here.positions, there.positions)
    keep = jnp.broadcast_to(keep, (rows, groups * each, *weights.shape[3:])).reshape(weights.shape)
    return jnp.where(keep, weights / (1 - how.dropout.rate), 0)


def _where_seen(how: Attention, here: Side, there: Side, more: Callable, carry: Any) -> Any:
    """`more(carry)` where a query of the tile may see a key of the other; else the carry as it is."""
    return jax.lax.cond(may_see(how, here, there), more, lambda carry: carry, carry) if how.skips else more(carry)


def _tied(q: jax.Array, at: Side, side: Side) -> tuple[jax.Array, Side, Side]:
    """The same, of which places seem to depend on the queries.

    What depends on places alone, such as masks, is the same in every trip of a loop over layers: differentiating such a loop
    JAX would compute it before the loop, for all tiles at once, and keep it.
    """
    tied: Any = together((q, at, side))
    return tied


def _tile(side: Side) -> Tile:
    return Tile(side.positions, side.segments)


def _loop(body: Callable, carry: Any, xs: Any) -> tuple[Any, Any]:
    """`jax.lax.scan`; without a loop for one tile."""
    if len(jax.tree.leaves(xs)[0]) > 1:
        return jax.lax.scan(body, carry, xs)
    carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


@dataclass(frozen=True)
class Tiles:
    """Pieces computed tile by tile, by XLA."""

    sorts = False
    forward = staticmethod(forward)
    backward = staticmethod(backward)
