"""Tokens through their experts: in rounds of a fixed number of slots, as many as all ranks need."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.collectives.along_dim import exchange_along, gather_along, scatter_along
from axonml_jax.collectives.primitives import axis_index
from axonml_jax.collectives.ragged import exchange_ragged
from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.parallel.experts.block_products import Sorted, block_products, little_products
from axonml_jax.parallel.experts.dispatch import Dispatch
from axonml_jax.parallel.experts.expert_weights import ExpertWeights
from axonml_jax.parallel.experts.queues import (
    Queues,
    Slots,
    queued,
    received,
    slots_of_capacity,
    slots_of_round,
)
from axonml_jax.parallel.experts.ragged_products import equal_products, ragged_products
from axonml_jax.parallel.experts.spread import collect, no_gradient, spread

LABEL = "axonml.experts"
"""Under which the ledger lists what dispatches send."""


class CameBack(NamedTuple):
    """What came back.

    Attributes:
      y: [T, h], the weighed sum of each token's outputs.
      rounds: int32 (), the rounds that this rank took.
    """

    y: jax.Array
    rounds: jax.Array


class Index(NamedTuple):
    """Where tokens go, in integers.

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
    """The outputs of every token's experts, weighed and summed.

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
    """Tokens travel to the ranks of their experts."""
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
    """Every rank gets all tokens, and computes its own experts' part of their outputs."""
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
    return _forward(how, activation, axes, index, x, gates, weights)[0]


def _forward(how, activation, axes, index: Index, x, gates, weights):
    """The first round keeps what its backward reads; later ones, which uneven loads need, compute it again there."""
    of = lambda number: functools.partial(_round, how, activation, axes, number, index)
    y, back = jax.vjp(of(0), x, gates, weights)
    step = lambda carry: (carry[0] + 1, carry[1] + of(carry[0])(x, gates, weights))
    _, y = jax.lax.while_loop(lambda carry: carry[0] < index.rounds, step, (_one(index), y))
    return y, (back, index, x, gates, weights)


def _backward(how, activation, axes, kept, grad):
    back, index, *given = kept

    def step(carry):
        number, grads = carry
        _, own = jax.vjp(functools.partial(_round, how, activation, axes, number, index), *given)
        return number + 1, jax.tree.map(jnp.add, grads, own(grad))

    _, grads = jax.lax.while_loop(lambda carry: carry[0] < index.rounds, step, (_one(index), back(grad)))
    return jax.tree.map(no_gradient, index), *grads


_all_rounds.defvjp(_forward, _backward)


def _one(index: Index) -> jax.Array:
    return jnp.ones_like(index.rounds)


def _round(how: Dispatch, activation: str, axes: tuple[str, ...], number, index: Index, x, gates, weights) -> jax.Array:
    """The part of y that one round computes, in the dtype of the gates."""
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
    """What the experts made of the rows in a rank's slots: [N * slots, h] -> [N * slots, h]."""
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
