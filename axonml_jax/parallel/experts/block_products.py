"""The experts' products on CPUs: as many rows of every expert at once, then what is left in blocks of one expert's rows.

XLA has no product of as many rows as a number says, and on CPUs JAX's ragged product multiplies all rows with all experts. A
batch of equal products reads each expert's weights where they lie; a block copies them first.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.parallel.experts.expert_weights import ExpertWeights
from axonml_jax.parallel.experts.queues import from_zero
from axonml_jax.parallel.experts.ragged_products import equal_products
from axonml_jax.parallel.experts.spread import collect, no_gradient, spread


def little_products(activation: str, rows: jax.Array, order: "Sorted", weights: ExpertWeights) -> jax.Array:
    """What `block_products` returns, by all experts' products of all rows: quickest where these are few."""
    experts = jnp.arange(order.counts.size)[:, None]
    own = (_expert_of(order) == experts)[:, :, None]
    made = equal_products(activation, jnp.where(own, rows, 0), weights)
    return jnp.where(own, made, 0).sum(0)


class Blocks(NamedTuple):
    """Static sizes.

    Attributes:
      at_once: rows of every expert that are multiplied together.
      sizes: rows of the blocks for what is left, falling.
    """

    at_once: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, rows: int, expected: int, experts: int) -> "Blocks":
        """For so many rows, of which so many are expected to be filled.

        >>> Blocks.of(1280, 1024, 8), Blocks.of(40, 32, 8)
        (Blocks(at_once=144, sizes=(256, 64)), Blocks(at_once=8, sizes=(8,)))
        """
        mean = max(1, -(-expected // experts))
        eights = lambda size: min(-(-int(size) // 8) * 8, -(-rows // 8) * 8)
        small = eights(mean / 2)
        return cls(min(eights(1.125 * mean), rows), (eights(2 * mean), small) if small >= 32 else (small,))


class Sorted(NamedTuple):
    """Which of S rows belong to which expert.

    Attributes:
      row: int32 [S], the rows sorted by expert; behind the last expert's anything.
      place: int32 [S], where each row stands among them; S or more for a row of no expert.
      counts: int32 [E].
    """

    row: jax.Array
    place: jax.Array
    counts: jax.Array


def block_products(
    activation: str, blocks: Blocks, rows: jax.Array, order: Sorted, weights: ExpertWeights
) -> jax.Array:
    """What the experts make of their rows.

    Args:
      activation: one of `ACTIVATIONS`.
      blocks: sizes.
      rows: [S, h], in any order.
      order: which belong to which expert.
      weights: of E experts.

    Returns:
      [S, h], in the same order; zeros for a row of no expert.
    """
    given = (rows, order, weights)
    axes = tuple(sorted(frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(given)))))
    return _products(activation, blocks, *vary(given, axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(activation, blocks, rows, order, weights):
    return _forward(activation, blocks, rows, order, weights)[0]


def _forward(activation: str, blocks: Blocks, rows: jax.Array, order: Sorted, weights: ExpertWeights):
    first = functools.partial(_at_once, activation, blocks, order=order)
    y, back = jax.vjp(lambda rows, weights: first(rows, weights=weights), rows, weights)

    def block(y, size, at, left, expert):
        x, mine = _block(rows, order, size, at, left)
        made = equal_products(activation, x[None], _of(weights, expert))[0]
        return y.at[mine].set(made, mode="drop")

    return _rest(blocks, order, y, block), (back, rows, order, weights)


def _backward(activation: str, blocks: Blocks, kept, grad: jax.Array):
    back, rows, order, weights = kept

    def block(state, size, at, left, expert):
        drows, dweights = state
        x, mine = _block(rows, order, size, at, left)
        dy = jnp.take(grad, mine, axis=0, mode="fill", fill_value=0)
        own = _of(weights, expert)
        _, of_block = jax.vjp(lambda x, own: equal_products(activation, x, own), x[None], own)
        dx, down = of_block(dy[None])
        more = lambda all, one: jax.lax.dynamic_update_slice_in_dim(
            all, jax.lax.dynamic_slice_in_dim(all, expert, 1) + one, expert, 0
        )
        return drows.at[mine].set(dx[0], mode="drop"), jax.tree.map(more, dweights, down)

    drows, dweights = _rest(blocks, order, back(grad), block)
    return drows, jax.tree.map(no_gradient, order), dweights


_products.defvjp(_forward, _backward)


def _at_once(activation: str, blocks: Blocks, rows: jax.Array, *, order: Sorted, weights: ExpertWeights) -> jax.Array:
    """The first rows of every expert, unless most rows are of a few: these are left to blocks."""
    count, many = order.counts.size, rows.shape[0]
    taken, begins = _taken(blocks, order), from_zero(order.counts)
    at = begins[:-1, None] + jnp.arange(blocks.at_once, dtype=jnp.int32)
    there = jnp.arange(blocks.at_once) < taken[:, None]
    row = jnp.where(there, order.row[jnp.clip(at, 0, many - 1)], many).reshape(-1)
    expert = _expert_of(order)
    known = jnp.clip(expert, 0, count - 1)
    within = order.place - begins[known]
    inside = (expert < count) & (within < taken[known])
    slot = jnp.where(inside, known * blocks.at_once + within, count * blocks.at_once)[:, None]
    packed = spread(rows, row, slot).reshape(count, blocks.at_once, -1)
    products = lambda packed, weights: equal_products(activation, packed, weights)
    none = lambda packed, weights: jnp.zeros_like(packed)
    made = jax.lax.cond(taken.sum() > 0, products, none, packed, weights)
    return collect(made.reshape(-1, made.shape[-1]), row, slot)


def _expert_of(order: Sorted) -> jax.Array:
    """The expert of each row, int32 [S]; E or -1 where there is none."""
    return (
        jnp.searchsorted(from_zero(order.counts), order.place, side="right", method="compare_all").astype(jnp.int32) - 1
    )


def _taken(blocks: Blocks, order: Sorted) -> jax.Array:
    """How many rows of each expert are multiplied together, int32 [E]."""
    taken = jnp.minimum(order.counts, blocks.at_once)
    return jnp.where(2 * taken.sum() < order.counts.sum(), 0, taken)


def _rest(blocks: Blocks, order: Sorted, state, block):
    """`block(state, size, at, rows, expert)` for what is left of every expert, in blocks of the largest size that it fills."""
    begins = from_zero(order.counts)[:-1] + _taken(blocks, order)
    left = order.counts - _taken(blocks, order)
    for size, next_size in zip(blocks.sizes, (*blocks.sizes[1:], None), strict=True):
        if next_size is None:
            number = -(-left // size)
        else:  # the last block may be filled in part, if smaller ones would be as many rows
            number = (left + next_size - 1) // size
        ends = jnp.cumsum(number)

        def step(carry, size=size, number=number, ends=ends, begins=begins, left=left):
            i, state = carry
            expert = jnp.searchsorted(ends, i, side="right", method="compare_all").astype(jnp.int32)
            inside = (i - (ends[expert] - number[expert])) * size
            return i + 1, block(state, size, begins[expert] + inside, left[expert] - inside, expert)

        start = jnp.zeros_like(ends[0])
        _, state = jax.lax.while_loop(lambda carry, ends=ends: carry[0] < ends[-1], step, (start, state))
        done = jnp.minimum(number * size, left)
        begins, left = begins + done, left - done
    return state


def _block(rows: jax.Array, order: Sorted, size: int, at, left) -> tuple[jax.Array, jax.Array]:
    """A block's rows, zeros behind the last, and where they lie; the number of all rows for none."""
    many = rows.shape[0]
    place = at + jnp.arange(size, dtype=jnp.int32)
    mine = jnp.where(jnp.arange(size) < left, order.row[jnp.clip(place, 0, many - 1)], many)
    return jnp.take(rows, mine, axis=0, mode="fill", fill_value=0), mine


def _of(weights: ExpertWeights, expert) -> ExpertWeights:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, expert, 1), weights)
