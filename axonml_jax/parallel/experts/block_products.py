"""The experts' products where JAX's ragged product multiplies all rows with all experts: expert after expert, in blocks.

XLA has no product of as many rows as a number says. On CPUs a loop over the experts takes for each the smallest of a few
static sizes that holds its rows; an expert with more takes the largest several times before. On GPUs, where XLA tries dozens of
kernels for every shape of a product before a program runs, all blocks have one size, and an expert takes as many as hold its
rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.parallel.experts.expert_weights import ExpertWeights, activated
from axonml_jax.parallel.experts.queues import from_zero
from axonml_jax.parallel.experts.ragged_products import equal_products
from axonml_jax.parallel.experts.spread import collect, no_gradient, spread
from axonml_jax.program.recomputed import KEPT

SHARES = (0.25, 0.5, 1, 1.25, 1.5, 2)
"""Sizes of blocks in parts of an expert's mean share of the rows."""
FEW = 32
"""Rows on average under which there is one size: the products are cheap then, and compiling them is not."""
SEVERAL_SIZES = ("cpu",)
"""Platforms on which another shape of a product is cheap to compile."""
TILE, LEAST = 128, 256
"""On others: of what a block's size is a multiple, and how large it is at least, since smaller ones wait for the weights."""


class Sorted(NamedTuple):
    """Which of S rows belong to which expert.

    Attributes:
      row: int32 [S], the rows sorted by expert; behind the last expert's S.
      place: int32 [S], where each row stands among them; S for a row of no expert.
      counts: int32 [E].
    """

    row: jax.Array
    place: jax.Array
    counts: jax.Array


def block_sizes(rows: int, expected: int, experts: int, platform: str = "cpu") -> tuple[int, ...]:
    """The sizes of blocks, growing, for so many rows, of which so many are expected to be filled.

    >>> block_sizes(640, 512, 8), block_sizes(80, 64, 8)
    ((16, 32, 64, 80, 96, 128), (16,))
    >>> block_sizes(640, 512, 8, "cuda"), block_sizes(40_960, 32_768, 8, "cuda"), block_sizes(80, 64, 8, "cuda")
    ((256,), (1024,), (80,))
    """
    mean, eights = max(1, -(-expected // experts)), lambda size: min(-(-int(size) // 8) * 8, -(-rows // 8) * 8)
    if platform not in SEVERAL_SIZES:
        return (eights(max(LEAST, -(-mean // (4 * TILE)) * TILE)),)
    if mean < FEW:
        return (eights(2 * mean),)
    return tuple(dict.fromkeys(eights(share * mean) for share in SHARES))


def little_products(activation: str, rows: jax.Array, order: Sorted, weights: ExpertWeights) -> jax.Array:
    """What `block_products` returns, by all experts' products of all rows: quickest where these are few."""
    begins = from_zero(order.counts)
    expert = jnp.searchsorted(begins, order.place, side="right", method="compare_all") - 1
    own = (expert == jnp.arange(order.counts.size)[:, None])[:, :, None]
    made = equal_products(activation, jnp.where(own, rows, 0), weights)
    return jnp.where(own, made, 0).sum(0)


def block_products(
    activation: str, sizes: tuple[int, ...], rows: jax.Array, order: Sorted, weights: ExpertWeights
) -> jax.Array:
    """What the experts make of their rows.

    Args:
      activation: one of `ACTIVATIONS`.
      sizes: of blocks, growing.
      rows: [S, h], in any order.
      order: which belong to which expert.
      weights: of E experts.

    Returns:
      [S, h], in the same order; zeros for a row of no expert.
    """
    one = order.place[:, None]
    given = (spread(rows, order.row, one), order.counts, weights)
    axes = tuple(sorted(frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(given)))))
    return collect(_products(activation, sizes, *vary(given, axes)), order.row, one)


class _Kept(NamedTuple):
    """What the backward reads again."""

    rows: jax.Array
    gate: jax.Array | None
    up: jax.Array
    counts: jax.Array
    weights: ExpertWeights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(activation, sizes, rows, counts, weights):
    """Of sorted rows; behind the last expert's anything finite."""
    return _forward(activation, sizes, rows, counts, weights)[0]


def _forward(activation: str, sizes: tuple[int, ...], rows, counts, weights: ExpertWeights):
    most, longer, gated = sizes[-1], _longer(rows, sizes[-1]), weights.gate is not None
    empty = lambda width: jnp.zeros_like(longer, shape=(longer.shape[0], width))

    def block(size: int, at, own: ExpertWeights):
        x = jax.lax.dynamic_slice_in_dim(longer, at, size)
        gate = None if own.gate is None else _plus(x @ own.gate, own.gate_bias)
        up = _plus(x @ own.up, own.up_bias)
        y = _plus(activated(activation, gate, up) @ own.down, own.down_bias)
        return _padded((y, up) if gate is None else (y, up, gate), most)

    def expert(e, kept):
        own, begin, count = _expert(weights, counts, e)
        whole, rest = _cut(sizes, count)

        def step(state):
            at = begin + state[0] * most
            return state[0] + 1, _written(state[1], block(most, at, own), at)

        _, kept = jax.lax.while_loop(lambda state: state[0] < whole, step, (jnp.zeros_like(whole), kept))
        if rest is None:
            return kept
        at = begin + whole * most
        return _written(kept, _by_size(sizes, rest, lambda size: block(size, at, own)), at)

    inner = weights.up.shape[-1]
    start = (empty(rows.shape[1]), empty(inner), *([empty(inner)] if gated else []))
    made = jax.lax.fori_loop(0, counts.size, expert, start)
    if len(sizes) == 1:  # JAX makes again what a loop of as many trips as data says returns, unless it has this name
        made = checkpoint_name(made, KEPT)
    y, up, *gate = made
    return y[: rows.shape[0]], _Kept(rows, gate[0] if gated else None, up, counts, weights)


def _backward(activation: str, sizes: tuple[int, ...], kept: _Kept, grad: jax.Array):
    most, weights = sizes[-1], kept.weights
    grads = _longer(grad, most)
    block = functools.partial(_gradients, activation, kept._replace(rows=_longer(kept.rows, most)), grads)

    def expert(e, state):
        dx, dweights = state
        own, begin, count = _expert(weights, kept.counts, e)
        whole, rest = _cut(sizes, count)
        at = begin + whole * most
        if rest is None:
            last, made = None, _nothing(lambda: block(most, begin, count, own), count)[1]
        else:
            last, made = _by_size(sizes, rest, lambda size: _padded_first(block(size, at, rest, own), most))

        def step(state):
            i, dx, made = state
            filled = count - i * most if rest is None else most
            part, more = block(most, begin + i * most, filled, own)
            return i + 1, _written(dx, (part,), begin + i * most), jax.tree.map(jnp.add, made, more)

        _, dx, made = jax.lax.while_loop(lambda state: state[0] < whole, step, (jnp.zeros_like(whole), dx, made))
        put = lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, e, 0)
        return dx if last is None else _written(dx, (last,), at), jax.tree.map(put, dweights, made)

    start = (jnp.zeros_like(grads),), jax.tree.map(jnp.zeros_like, weights)
    (dx,), dweights = jax.lax.fori_loop(0, kept.counts.size, expert, start)
    return dx[: grad.shape[0]], no_gradient(kept.counts), dweights


_products.defvjp(_forward, _backward)


def _gradients(activation: str, kept: _Kept, grads: jax.Array, size: int, at, count, own: ExpertWeights):
    """Of a block's rows and of its expert's weights; rows behind the first `count` are another expert's."""
    part = lambda x: jax.lax.dynamic_slice_in_dim(x, at, size)
    x, gate, up = part(kept.rows), None if kept.gate is None else part(kept.gate), part(kept.up)
    dy = jnp.where(jnp.arange(size)[:, None] < count, part(grads), 0)
    inner, back = jax.vjp(functools.partial(activated, activation), gate, up)
    dgate, dup = back((dy @ own.down.T).astype(inner.dtype))
    of_bias = lambda bias, d: None if bias is None else d.sum(0)
    made = ExpertWeights(
        gate=None if own.gate is None else x.T @ dgate,
        up=x.T @ dup,
        down=inner.T @ dy,
        gate_bias=of_bias(own.gate_bias, dgate),
        up_bias=of_bias(own.up_bias, dup),
        down_bias=of_bias(own.down_bias, dy),
    )
    return dup @ own.up.T if own.gate is None else dup @ own.up.T + dgate @ own.gate.T, made


def _expert(weights: ExpertWeights, counts: jax.Array, e) -> tuple[ExpertWeights, jax.Array, jax.Array]:
    """An expert's weights, where its rows begin, and how many they are."""
    own = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, e, keepdims=False), weights)
    begin = jnp.where(jnp.arange(counts.size) < e, counts, 0).sum(dtype=counts.dtype)
    return own, begin, jax.lax.dynamic_index_in_dim(counts, e, keepdims=False)


def _cut(sizes: tuple[int, ...], count: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """How many blocks of the largest size an expert's rows take, and how many rows are left for a smaller one.

    Where all blocks have one size the last one is like the others, whatever rows of the next expert it holds, which that
    expert writes again: one copy of the products is compiled, not two.
    """
    if len(sizes) == 1:
        return -(-count // sizes[0]), None
    whole = count // sizes[-1]
    return whole, count - whole * sizes[-1]


def _nothing(make, like: jax.Array) -> Any:
    """Zeros of what `make` returns, varying over the ranks as `like` does."""
    shapes = jax.eval_shape(make)
    return jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), tuple(varying_axes(like))), shapes)


def _by_size(sizes: tuple[int, ...], rows: jax.Array, make) -> Any:
    """`make` of the smallest size that holds so many rows; zeros for none."""
    none = lambda: _nothing(lambda: make(sizes[-1]), rows)
    index = jnp.where(rows == 0, 0, 1 + jnp.searchsorted(jnp.asarray(sizes), rows, method="compare_all"))
    return jax.lax.switch(index, [none, *(functools.partial(make, size) for size in sizes)])


def _longer(x: jax.Array, more: int) -> jax.Array:
    return jnp.concatenate([x, jnp.zeros_like(x, shape=(more, *x.shape[1:]))])


def _padded(parts: tuple[jax.Array, ...], size: int) -> tuple[jax.Array, ...]:
    return tuple(x if x.shape[0] == size else _longer(x, size - x.shape[0]) for x in parts)


def _padded_first(made: tuple[jax.Array, ExpertWeights], size: int) -> tuple[jax.Array, ExpertWeights]:
    return _padded(made[:1], size)[0], made[1]


def _written(all: tuple[jax.Array, ...], parts: tuple[jax.Array, ...], at) -> tuple[jax.Array, ...]:
    """Blocks in their place; the padding of one is written over by the next expert's."""
    put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, at, 0)
    return tuple(put(whole, part) for whole, part in zip(all, parts, strict=True))


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias
