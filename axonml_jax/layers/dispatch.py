"""Sends tokens to their experts and back, and computes the experts' products."""

import functools
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from axonml_jax.collectives.primitives import (
    axis_index,
    exchange_along,
    exchange_ragged,
    gather_along,
    scatter_along,
    vary,
)
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.layers.kernels import target_platform
from axonml_jax.program.cut import KEPT

# --------------------------------------------------------------------------------------------------
# What the experts of a rank compute, and their weights as one value.
# --------------------------------------------------------------------------------------------------

Activation = Literal["swiglu", "clamped_swiglu", "gelu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
CLAMP, SHARPNESS = 7.0, 1.702


class ExpertWeights(NamedTuple):
    """The weights of E experts of width h and inner width f, in their compute dtype.

    Attributes:
      gate: [E, h, f]; None where experts are not gated.
      up: [E, h, f].
      down: [E, f, h].
      gate_bias, up_bias: [E, f], or None.
      down_bias: [E, h], or None.
    """

    gate: jax.Array | None
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


def activated(activation: str, gate: jax.Array | None, up: jax.Array) -> jax.Array:
    """The inner features: for "swiglu" silu(gate) * up; for "gelu" its tanh approximation of up.

    "clamped_swiglu" is gpt-oss's: the gate is at most 7, up lies in [-7, 7], and gate * sigmoid(1.702 * gate) * (up + 1).
    """
    if gate is None:
        return jax.nn.gelu(up, approximate=True)
    if activation == "swiglu":
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return gate * jax.nn.sigmoid(SHARPNESS * gate) * (up + 1)


# --------------------------------------------------------------------------------------------------
# Who sends which token where: the pairs of a token and one of its experts, in queues by expert.
# --------------------------------------------------------------------------------------------------


class Queues(NamedTuple):
    """A rank's (token, expert) pairs, sorted by expert, and within an expert by token.

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
        """The start of each expert's queue, int32 [E + 1]; the last entry is where pairs without an expert start."""
        return from_zero(self.counts)


def queued(experts: jax.Array, count: int) -> Queues:
    """Sort pairs into queues by expert.

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
    """`experts` with E (none) for the pairs beyond the first `capacity` of an expert in their group.

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
    """What a rank sends in a round: equally many slots for every rank, some of them empty.

    Attributes:
      pair: int32 [slots], the pair in each slot; T * k in an empty one.
      slot: int32 [T, k], its inverse: the number of slots for a pair that is not in this round.
    """

    pair: jax.Array
    slot: jax.Array


def slots_of_round(queues: Queues, ranks: int, each: int, number: int | jax.Array) -> Slots:
    """The slots of one round: for each rank, the pairs number `number * each` to `(number + 1) * each`.

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
    """A fixed number of slots for every expert, filled from the front.

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
    """The order by expert of the slots that a rank received in a round.

    Attributes:
      row: int32 [slots], the row of each slot; the number of slots for an empty one.
      slot: int32 [slots], its inverse; the number of slots for a row behind the last.
      counts: int32 [E/N], the rows of each expert.
    """

    row: jax.Array
    slot: jax.Array
    counts: jax.Array


def received(counts: jax.Array, each: int, number: int | jax.Array) -> Received:
    """The order by expert of a round's received slots, from the counts of every rank.

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
    """Cumulative counts: the start of each of E queues, and the end of the last, [E + 1]."""
    return jnp.concatenate([jnp.zeros(1, counts.dtype), jnp.cumsum(counts, dtype=counts.dtype)])


# --------------------------------------------------------------------------------------------------
# Tokens into slots and slots back into tokens: two gathers, each the transpose of the other.
# --------------------------------------------------------------------------------------------------


@jax.custom_vjp
def spread(x: jax.Array, pair_of_slot: jax.Array, slot_of_pair: jax.Array) -> jax.Array:
    """Copy each pair's token into its slot; empty slots are zeros.

    Args:
      x: [T, ...].
      pair_of_slot: int32 [S]: pair p belongs to token p // k; T * k where a slot has none.
      slot_of_pair: int32 [T, k], its inverse; S where a pair has no slot.

    Returns:
      [S, ...].
    """
    pairs = slot_of_pair.size
    return _rows(x, jnp.where(pair_of_slot < pairs, pair_of_slot // slot_of_pair.shape[1], x.shape[0]))


@jax.custom_vjp
def collect(slots: jax.Array, pair_of_slot: jax.Array, slot_of_pair: jax.Array) -> jax.Array:
    """Sum the slots of each token's pairs: slots [S, ...] -> [T, ...]."""
    count = slot_of_pair.shape[1]
    parts = [_rows(slots, slot_of_pair[:, j]) for j in range(count)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _rows(x: jax.Array, at: jax.Array) -> jax.Array:
    """Take rows of x; the index behind the last row gives zeros."""
    return jnp.take(x, at, axis=0, mode="fill", fill_value=0)


def no_gradient(index: jax.Array) -> np.ndarray:
    """The cotangent of an integer array."""
    return np.zeros(index.shape, jax.dtypes.float0)


def _spread_forward(x, pair_of_slot, slot_of_pair):
    return spread(x, pair_of_slot, slot_of_pair), (pair_of_slot, slot_of_pair)


def _spread_backward(at, grad):
    return collect(grad, *at), *map(no_gradient, at)


def _collect_forward(slots, pair_of_slot, slot_of_pair):
    return collect(slots, pair_of_slot, slot_of_pair), (pair_of_slot, slot_of_pair)


def _collect_backward(at, grad):
    return spread(grad, *at), *map(no_gradient, at)


spread.defvjp(_spread_forward, _spread_backward)
collect.defvjp(_collect_forward, _collect_backward)


@jax.custom_vjp
def row_by_row(y: jax.Array, x: jax.Array) -> jax.Array:
    """Returns y. It tells those who follow rows through a program that each row of y is made of x's row (`is_row_by_row`).

    Args:
      y: what came back of the experts; slots and sorts hide whose it is.
      x: what they were given, in the same shape; under `jax.vmap` their dims may be in another order.
    """
    return y


row_by_row.defvjp(lambda y, x: (y, None), lambda _, grad: (grad, None))


# --------------------------------------------------------------------------------------------------
# The experts' products on rows sorted by expert, by JAX's ragged product, which TPUs and GPUs have kernels for.
# --------------------------------------------------------------------------------------------------


def ragged_products(activation: str, rows: jax.Array, counts: jax.Array, weights: ExpertWeights) -> jax.Array:
    """The experts' outputs [S, h] for rows [S, h] that are sorted by expert, by ragged products.

    Args:
      activation: one of `ACTIVATIONS`.
      rows: [S, h]; rows behind the last expert's belong to none, and what is returned for them means nothing.
      counts: int32 [E], the rows of each expert.
      weights: of E experts.
    """

    def product(x, kernel, bias):
        y = jax.lax.ragged_dot(x, kernel, counts)
        if bias is None:
            return y
        expert = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(rows.shape[0]), side="right", method="compare_all")
        return y + jnp.take(bias, expert, axis=0, mode="fill", fill_value=0)

    gate = None if weights.gate is None else product(rows, weights.gate, weights.gate_bias)
    inner = activated(activation, gate, product(rows, weights.up, weights.up_bias))
    return product(inner, weights.down, weights.down_bias)


def equal_products(activation: str, rows: jax.Array, weights: ExpertWeights) -> jax.Array:
    """The experts' outputs if every expert has equally many rows: [E, n, h] -> [E, n, h]."""

    def product(x, kernel, bias):
        y = jnp.einsum("enh,ehf->enf", x, kernel)
        return y if bias is None else y + bias[:, None]

    gate = None if weights.gate is None else product(rows, weights.gate, weights.gate_bias)
    inner = activated(activation, gate, product(rows, weights.up, weights.up_bias))
    return product(inner, weights.down, weights.down_bias)


# --------------------------------------------------------------------------------------------------
# The experts' products where JAX's ragged product multiplies all rows with all experts: expert after expert, in blocks.
#
# XLA has no product of as many rows as a number says. On CPUs a loop over the experts takes for each the smallest of a
# few static sizes that holds its rows; an expert with more takes the largest size several times first. On GPUs, where XLA
# tries dozens of kernels for every shape of a product before a program runs, all blocks have one size, and an expert
# takes as many as hold its rows.
# --------------------------------------------------------------------------------------------------

SHARES = (0.25, 0.5, 1, 1.25, 1.5, 2)
"""Sizes of blocks, as multiples of an expert's mean number of rows."""
FEW = 32
"""Mean rows of an expert below which blocks have one size: the products are cheap then, and compiling several is not."""
SEVERAL_SIZES = ("cpu",)
"""Platforms on which another shape of a product is cheap to compile."""
TILE, LEAST = 128, 256
"""On other platforms a block's size is a multiple of TILE, and at least LEAST: smaller products wait for the weights."""


class Sorted(NamedTuple):
    """The order of S rows by expert.

    Attributes:
      row: int32 [S], the row at each place of the order by expert; S at places behind the last expert's rows.
      place: int32 [S], where each row stands among them; S for a row of no expert.
      counts: int32 [E].
    """

    row: jax.Array
    place: jax.Array
    counts: jax.Array


def block_sizes(rows: int, expected: int, experts: int, platform: str = "cpu") -> tuple[int, ...]:
    """Block sizes, ascending, for a number of rows of which an expected number is filled.

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
    """The result of `block_products`, by multiplying all rows with all experts: the fastest for few rows."""
    begins = from_zero(order.counts)
    expert = jnp.searchsorted(begins, order.place, side="right", method="compare_all") - 1
    own = (expert == jnp.arange(order.counts.size)[:, None])[:, :, None]
    made = equal_products(activation, jnp.where(own, rows, 0), weights)
    return jnp.where(own, made, 0).sum(0)


def block_products(
    activation: str, sizes: tuple[int, ...], rows: jax.Array, order: Sorted, weights: ExpertWeights
) -> jax.Array:
    """The experts' outputs for their rows, block by block.

    Args:
      activation: one of `ACTIVATIONS`.
      sizes: of blocks, ascending.
      rows: [S, h], in any order.
      order: which rows belong to which expert.
      weights: of E experts.

    Returns:
      [S, h], in the same order; zeros for a row of no expert.
    """
    one = order.place[:, None]
    given = (spread(rows, order.row, one), order.counts, weights)
    axes = tuple(sorted(frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(given)))))
    return collect(_products(activation, sizes, *vary(given, axes)), order.row, one)


class _Kept(NamedTuple):
    """The residuals that the backward reads."""

    rows: jax.Array
    gate: jax.Array | None
    up: jax.Array
    counts: jax.Array
    weights: ExpertWeights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(activation, sizes, rows, counts, weights):
    """The experts' outputs for sorted rows; rows behind the last expert's hold any finite values."""
    return _products_forward(activation, sizes, rows, counts, weights)[0]


def _products_forward(activation: str, sizes: tuple[int, ...], rows, counts, weights: ExpertWeights):
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
    if (
        len(sizes) == 1
    ):  # a rematerialized backward would run this loop, whose trip count is data, once more without the name
        made = checkpoint_name(made, KEPT)
    y, up, *gate = made
    return y[: rows.shape[0]], _Kept(rows, gate[0] if gated else None, up, counts, weights)


def _products_backward(activation: str, sizes: tuple[int, ...], kept: _Kept, grad: jax.Array):
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


_products.defvjp(_products_forward, _products_backward)


def _gradients(activation: str, kept: _Kept, grads: jax.Array, size: int, at, count, own: ExpertWeights):
    """The gradients of a block's rows and its expert's weights; rows from `count` on belong to another expert."""
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
    """One expert's weights, the start of its rows and their number."""
    own = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, e, keepdims=False), weights)
    begin = jnp.where(jnp.arange(counts.size) < e, counts, 0).sum(dtype=counts.dtype)
    return own, begin, jax.lax.dynamic_index_in_dim(counts, e, keepdims=False)


def _cut(sizes: tuple[int, ...], count: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The number of blocks of the largest size in an expert's rows, and the rows left for a smaller block.

    Where all blocks have one size the last one is like the others, whatever rows of the next expert it holds, which that
    expert writes again: one copy of the products is compiled, not two.
    """
    if len(sizes) == 1:
        return -(-count // sizes[0]), None
    whole = count // sizes[-1]
    return whole, count - whole * sizes[-1]


def _nothing(make, like: jax.Array) -> Any:
    """Zeros shaped as the result of `make`, varying over the ranks as `like` does."""
    shapes = jax.eval_shape(make)
    return jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), tuple(varying_axes(like))), shapes)


def _by_size(sizes: tuple[int, ...], rows: jax.Array, make) -> Any:
    """Call `make` with the smallest size that holds the rows; zeros if there are none."""
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
    """Write blocks at their place; a block's padding is overwritten by the next expert's rows."""
    put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, at, 0)
    return tuple(put(whole, part) for whole, part in zip(all, parts, strict=True))


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias


# --------------------------------------------------------------------------------------------------
# How tokens reach their experts on other ranks: one value, chosen by name, or by platform and sizes.
# --------------------------------------------------------------------------------------------------

DispatchName = Literal["auto", "rounds", "ragged", "gather"]
DISPATCHES: tuple[str, ...] = get_args(DispatchName)
SLACK = 1.25
"""Slots of a round over the pairs that travel at uniform load: what random routing needs, and little more."""
RAGGED_PLATFORMS = ("tpu", "cuda", "rocm")
"""Where XLA has a ragged all-to-all."""
RAGGED_PRODUCTS = ("tpu",)
"""Where XLA has kernels for ragged products; elsewhere it multiplies all rows with all experts."""
LITTLE = 2**18
"""Rows x a rank's experts x width up to which all experts multiply all rows (`little_products`), except where products are
ragged."""


@dataclass(frozen=True)
class Dispatch:
    """How a rank's (token, expert) pairs are sent, with every choice made.

    N ranks hold E experts; a rank has T tokens with k pairs each.

    Attributes:
      name: "rounds": all-to-alls of as many slots for every rank, as often as the fullest needs; "ragged": the same, but only
        filled slots travel; "gather": every rank gets all tokens, and outputs are summed.
      ranks: N.
      experts: E.
      capacity: slots of each expert for each rank's tokens; pairs behind them are dropped. None: none is dropped.
      slots: in a round for each rank.
      products: "ragged" (JAX's ragged product, on TPUs), "blocks", or, for few rows, "all" experts on all rows.
      blocks: the sizes of blocks, for "blocks".
    """

    name: str
    ranks: int
    experts: int
    capacity: int | None
    slots: int
    products: str
    blocks: tuple[int, ...]

    @classmethod
    def of(
        cls, name: str, *, ranks: int, experts: int, tokens: int, top_k: int, width: int, capacity: int | None
    ) -> "Dispatch":
        """Choose the dispatch for a layer's call.

        Args:
          name: one of `DISPATCHES`.
          ranks, experts, capacity: see the class.
          tokens: T.
          top_k: k.
          width: h.

        Raises:
          ValueError: for "ragged" over several ranks, on a platform without a ragged all-to-all.
        """
        platform, pairs = target_platform(), tokens * top_k
        fast = platform in RAGGED_PRODUCTS
        if name == "ragged" and ranks > 1 and platform not in RAGGED_PLATFORMS:
            raise ValueError(
                f"dispatch='ragged': XLA has no ragged all-to-all for {platform}: use 'rounds', which sends the same tokens"
            )
        if name == "auto":
            name = "gather" if capacity is None and 1 < ranks <= top_k else "ragged" if fast else "rounds"
        local = experts // ranks
        if capacity is not None:
            name, slots, expected = "rounds", capacity * local, pairs
        elif ranks == 1:
            slots = expected = pairs
        elif name == "gather":
            slots, expected = min(int(SLACK * pairs), ranks * tokens * min(top_k, local)), pairs
        else:
            slots, expected = min(-(-int(SLACK * pairs) // ranks), tokens * min(top_k, local)), pairs
        slots = max(1, slots)
        rows = slots if name == "gather" else slots * ranks
        products = "ragged" if fast else "all" if rows * local * width <= LITTLE else "blocks"
        return cls(name, ranks, experts, capacity, slots, products, block_sizes(rows, expected, local, platform))

    @property
    def local(self) -> int:
        """The number of experts per rank, E/N."""
        return self.experts // self.ranks

    def alone(self) -> "Dispatch":
        """The dispatch among the experts of one rank, whose tokens are already there."""
        return replace(self, ranks=1, experts=self.local)


def capacity_of(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """The slots per expert: ceil(factor * k * T / E), at least one and at most T.

    >>> capacity_of(64, 2, 8, 1.0), capacity_of(3, 1, 8, 1.0)
    (16, 1)
    >>> capacity_of(50, 2, 10, 1.1)
    11
    """
    return max(1, min(tokens, math.ceil(Fraction(str(factor)) * top_k * tokens / experts)))


# --------------------------------------------------------------------------------------------------
# Tokens through their experts: in rounds of a fixed number of slots, as many as all ranks need.
# --------------------------------------------------------------------------------------------------

LABEL = "axonml.experts"
"""The name scope under which the ledger lists what dispatches send."""


class CameBack(NamedTuple):
    """The results of a dispatch.

    Attributes:
      y: [T, h], the weighed sum of each token's outputs.
      rounds: int32 (), the rounds that this rank took.
    """

    y: jax.Array
    rounds: jax.Array


class Index(NamedTuple):
    """The integers that say where tokens go.

    Attributes:
      experts: int32 [T, k]; E for a pair that goes nowhere.
      queues: of these.
      there: int32 [N, E/N], how many pairs every rank has for each of this rank's experts.
      rounds: int32 ().
    """

    experts: jax.Array
    queues: Queues
    there: jax.Array
    rounds: jax.Array


def through_experts(
    how: Dispatch,
    activation: str,
    axes: tuple[str, ...],
    x: jax.Array,
    gates: jax.Array,
    experts: jax.Array,
    weights: ExpertWeights,
) -> CameBack:
    """Send tokens through their experts; returns the weighted sums of the outputs.

    Args:
      how: the dispatch.
      activation: of the experts.
      axes: the bound mesh axis over which N ranks hold the experts; none where one holds all.
      x: [T, h], in the dtype in which experts multiply.
      gates: [T, k], at least float32.
      experts: int32 [T, k]; E for a pair that goes nowhere. With capacity no expert has more pairs than slots.
      weights: of this rank's E/N experts.

    Communicates: with capacity two all-to-alls of [N * slots, h]; in rounds these as often as `rounds` says, and an all-gather
    of [E] integers; gathering an all-gather of x, gates and experts, and a reduce-scatter of y.
    """
    with jax.named_scope(LABEL):
        if how.name == "gather" and axes:
            return _gathered(how, activation, axes, x, gates, experts, weights)
        return _exchange(how, activation, axes, x, gates, experts, weights)


def _exchange(how, activation, axes, x, gates, experts, weights) -> CameBack:
    """Send tokens to the ranks of their experts, compute there, and send the outputs back."""
    queues = queued(experts, how.experts)
    there, rounds = queues.counts[None], jnp.ones((), jnp.int32)
    if axes and how.capacity is None:
        counts = gather_along(vary(queues.counts, axes), axes, 0, tiled=False, invarying=True)
        there = jax.lax.dynamic_slice_in_dim(vary(counts, axes), axis_index(axes) * how.local, how.local, 1)
        most = counts.reshape(how.ranks, how.ranks, -1).sum(2).max()  # the same on all ranks, which therefore agree
        rounds = jnp.maximum(1, -(-most // how.slots))
    index = Index(experts, queues, there, rounds)
    return CameBack(_rounds(how, activation, axes, index, x, gates, weights), rounds)


def _gathered(how, activation, axes, x, gates, experts, weights) -> CameBack:
    """Gather all tokens on every rank, compute its own experts' part of their outputs, and sum."""
    x, gates, experts = (gather_along(vary(part, axes), axes, 0) for part in (x, gates, experts))
    own = experts - axis_index(axes) * how.local
    own = jnp.where((own >= 0) & (own < how.local), own, how.local)
    alone = how.alone()
    queues = queued(own, how.local)
    rounds = jnp.maximum(1, -(-queues.counts.sum() // alone.slots))
    index = Index(own, queues, queues.counts[None], rounds)
    y = scatter_along(_rounds(alone, activation, (), index, x, gates, weights), axes, 0)
    return CameBack(y, rounds)


def _rounds(how: Dispatch, activation: str, axes: tuple[str, ...], index: Index, x, gates, weights) -> jax.Array:
    given = (index, x, gates, weights)
    over = tuple(sorted(frozenset().union(axes, *(varying_axes(leaf) for leaf in jax.tree.leaves(given)))))
    once = how.capacity is not None or (how.ranks == 1 and how.slots == index.experts.size)
    run = (
        functools.partial(_round, how, activation, axes, 0)
        if once
        else functools.partial(_all_rounds, how, activation, axes)
    )
    return run(*vary(given, over)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _all_rounds(how, activation, axes, index, x, gates, weights):
    return _exchange_forward(how, activation, axes, index, x, gates, weights)[0]


def _exchange_forward(how, activation, axes, index: Index, x, gates, weights):
    """Run all rounds; only the first keeps residuals, the others, due to uneven loads, are recomputed in the backward."""
    of = lambda number: functools.partial(_round, how, activation, axes, number, index)
    y, back = jax.vjp(of(0), x, gates, weights)
    step = lambda carry: (carry[0] + 1, carry[1] + of(carry[0])(x, gates, weights))
    _, y = jax.lax.while_loop(lambda carry: carry[0] < index.rounds, step, (_one(index), y))
    return y, (back, index, x, gates, weights)


def _exchange_backward(how, activation, axes, kept, grad):
    back, index, *given = kept

    def step(carry):
        number, grads = carry
        _, own = jax.vjp(functools.partial(_round, how, activation, axes, number, index), *given)
        return number + 1, jax.tree.map(jnp.add, grads, own(grad))

    _, grads = jax.lax.while_loop(lambda carry: carry[0] < index.rounds, step, (_one(index), back(grad)))
    return jax.tree.map(no_gradient, index), *grads


_all_rounds.defvjp(_exchange_forward, _exchange_backward)


def _one(index: Index) -> jax.Array:
    return jnp.ones_like(index.rounds)


def _round(how: Dispatch, activation: str, axes: tuple[str, ...], number, index: Index, x, gates, weights) -> jax.Array:
    """The part of the output that one round computes, in the dtype of the gates."""
    if how.capacity is not None:
        slots = slots_of_capacity(index.experts, index.queues, how.capacity)
    else:
        slots = slots_of_round(index.queues, how.ranks, how.slots, number)
    rows = spread(x, slots.pair, slots.slot)
    made = _there_and_back(how, activation, axes, number, index, slots, rows, weights)
    weight = jnp.take(gates.reshape(-1), slots.pair, mode="fill", fill_value=0)
    weighed = made.astype(gates.dtype) * weight[:, None]
    return collect(weighed, slots.pair, slots.slot)


def _there_and_back(how: Dispatch, activation, axes, number, index: Index, slots: Slots, rows, weights) -> jax.Array:
    """Send a rank's slots to their experts, compute, and send the outputs back: [N * slots, h] -> [N * slots, h]."""
    if how.capacity is not None:
        width = rows.shape[1]
        there = exchange_along(rows, axes, 0, 0) if axes else rows
        there = there.reshape(how.ranks, how.local, how.capacity, width).swapaxes(0, 1)
        made = equal_products(activation, there.reshape(how.local, -1, width), weights)
        made = made.reshape(how.local, how.ranks, how.capacity, width).swapaxes(0, 1).reshape(-1, width)
        return exchange_along(made, axes, 0, 0) if axes else made
    came = received(index.there, how.slots, number)
    filled = None
    if how.name == "ragged" and axes:
        sizes = jnp.clip(index.queues.counts.reshape(how.ranks, -1).sum(1) - number * how.slots, 0, how.slots)
        filled = (sizes, jnp.clip(index.there.sum(1) - number * how.slots, 0, how.slots))
    there = _exchanged(rows, axes, filled)
    order = Sorted(came.slot, came.row, came.counts)
    if how.products == "all":
        made = little_products(activation, there, order, weights)
    elif how.products == "blocks":
        made = block_products(activation, how.blocks, there, order, weights)
    else:
        one = came.row[:, None]
        packed = spread(there, came.slot, one)
        made = collect(ragged_products(activation, packed, came.counts, weights), came.slot, one)
    return _exchanged(made, axes, None if filled is None else (filled[1], filled[0]))


def _exchanged(rows: jax.Array, axes: tuple[str, ...], filled: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    if not axes:
        return rows
    return exchange_along(rows, axes, 0, 0) if filled is None else exchange_ragged(rows, axes, *filled)
