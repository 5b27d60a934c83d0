"""`context_attention`: exact attention of sequences whose positions are split over the ranks of a mesh axis."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axonml_jax.collectives.along_dim import exchange_along, gather_along
from axonml_jax.collectives.primitives import axis_index, axis_size
from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.compat.around import platform_around
from axonml_jax.compat.random_bits import can_draw_elements
from axonml_jax.parallel.context.across_ranks import Places, Ring, read_backward, read_forward
from axonml_jax.parallel.context.context_split import ContextSplit, current_split
from axonml_jax.parallel.context.kernels.by_kernel import FORMS, attend_by_cudnn, kernel_for
from axonml_jax.parallel.context.kernels.splash_pieces import by_splash
from axonml_jax.parallel.context.method import Method, heads_and_gathers
from axonml_jax.parallel.context.pieces.attention_dropout import WeightsDropout
from axonml_jax.parallel.context.pieces.attention_pieces import Attention, Given, Where, merged
from axonml_jax.parallel.context.pieces.sinks import sinks_gradient, sunk
from axonml_jax.parallel.context.pieces.tile_attention import Tiles
from axonml_jax.parallel.context.pieces.tiles import block_for
from axonml_jax.parallel.context.visible import Visible
from axonml_jax.program.recomputed import KEPT
from axonml_jax.sharding.sequence_order import Order

Bias = Callable[..., jax.Array]
"""`bias(query positions [x], key positions [y], *arrays) -> [n or 1, x, y]`."""

SCOPE = "axonml.attention"
"""The name scope of everything here, by which the ledger knows what it sends."""

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
    """Attention of whole sequences, of which every rank of `axis` holds some positions: exact, with a backward by hand.

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
      ValueError: for shapes, rules or methods that do not fit, all of them at once.

    Communicates: "gather": an all-gather of keys and values, 2(N-1)bcgd elements, and again in the backward, with a
    reduce-scatter of as many. "ulysses": four all-to-alls each way, (N-1)/N of all elements of q, k, v and the result. "ring":
    at most N-1 permutes of 2bcgd forward; backward as many, and as many of their gradients in float32.
    """
    split = current_split(axis)
    ranks = 1 if split is None else axis_size(axis)
    split = split or ContextSplit(axis)
    window = (window, window) if isinstance(window, int) else window
    ids = segment_ids if isinstance(segment_ids, tuple) or segment_ids is None else (segment_ids, segment_ids)
    if problems := list(_problems(q, k, v, window, ids, dropout_rate, dropout_key, bias, score_mod, sinks, kernel)):
        raise ValueError("context_attention: " + "; ".join(problems))
    heads, each_has = q.shape[2], (q.shape[1], k.shape[1])
    sizes = {"ranks": ranks, "heads": heads, "kv_heads": k.shape[2], "places": q.shape[1]}
    order = order or split.order
    count, gathers = heads_and_gathers(method or split.method, **sizes, window=window, causal=causal, order=order)
    ring = Ring(axis if ranks > 1 else None, ranks, count, gathers, order)

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
    given = Given(tuple(jnp.asarray(x) for x in arrays), key, first_head)
    given, q, k, v, sinks = vary((given, q, k, v, sinks), how.axes)
    if sinks is not None:
        sinks = jax.lax.dynamic_slice_in_dim(sinks, first_head, heads // ring.heads)
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
    """q [b, g, r, c, d], k [b, g, t, d], v [b, g, t, e], sinks [g * r] or None -> [b, g, r, c, e]."""
    return _attended_forward(how, ring, given, q, k, v, sinks, places)[0]


def _attended_forward(how: Attention, ring: Ring, given: Given, q, k, v, sinks, places: Places):
    read = read_forward(how, ring, given, q, k, v, places)
    read = read if sinks is None else merged(read, sunk(read, sinks))
    read = jax.tree.map(lambda x: checkpoint_name(x, KEPT), read._replace(out=read.out.astype(v.dtype)))
    return how.queries.joined(read.out, 3), (given, q, k, v, sinks, places, read)


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
    """All of a group's positions, of this rank's part of the heads. Communicates: three all-to-alls."""
    if ring.heads == 1 or ring.axis is None:
        return [q, k, v]
    among = None if ring.groups == 1 else ring.neighbours
    repeats = max(1, ring.heads // k.shape[2])
    parts = [q, *(jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (k, v))]
    return [exchange_along(x, (ring.axis,), 2, 1, among=among) for x in parts]


def _heads_together(ring: Ring, out: jax.Array) -> jax.Array:
    """The inverse, for results. Communicates: one all-to-all."""
    if ring.heads == 1 or ring.axis is None:
        return out
    return exchange_along(out, (ring.axis,), 1, 2, among=None if ring.groups == 1 else ring.neighbours)


def _places(ring: Ring, how: Attention, ids: tuple[jax.Array, jax.Array] | None) -> Places:
    """Where this rank's queries are. Communicates: all-gathers of segment ids, int [b, c], where there are any."""
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


def _problems(q, k, v, window, ids, rate, key, bias, score_mod, sinks, kernel) -> Iterator[str]:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
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
    if kernel not in FORMS:
        yield f"kernel={kernel!r} must be one of {', '.join(FORMS)}"
    if bias is not None and score_mod is not None:
        yield "bias and score_mod both change scores: give one, which may do both"
    if not 0 <= rate < 1:
        yield f"dropout_rate={rate!r} must be at least 0 and below 1"
    if rate and key is None:
        yield f"dropout_rate={rate!r} needs a dropout_key"
    if rate and key is not None and not can_draw_elements(key):
        yield (
            "dropout_key must be of the generator threefry (jax_threefry_partitionable=True): of others a rank "
            "cannot draw its own elements alone"
        )


def _is_window(window: Any) -> bool:
    return (
        isinstance(window, tuple) and len(window) == 2 and all(isinstance(side, int) and side >= 0 for side in window)
    )
