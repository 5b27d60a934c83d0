"""Tokens into slots and slots back into tokens: two gathers, each the transpose of the other."""

import jax
import jax.numpy as jnp
import numpy as np


@jax.custom_vjp
def spread(x: jax.Array, pair_of_slot: jax.Array, slot_of_pair: jax.Array) -> jax.Array:
    """The token of each slot's pair; zeros in slots without one.

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
    """The sum of the slots of each token's pairs: slots [S, ...] -> [T, ...]."""
    count = slot_of_pair.shape[1]
    parts = [_rows(slots, slot_of_pair[:, j]) for j in range(count)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _rows(x: jax.Array, at: jax.Array) -> jax.Array:
    """Rows of x, zeros for the index behind the last."""
    return jnp.take(x, at, axis=0, mode="fill", fill_value=0)


def no_gradient(index: jax.Array) -> np.ndarray:
    """The cotangent of integers."""
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
