"""A linear layer's product over all positions at once: [b, s, i] times [i, o] as [b*s, i] times [i, o]."""

from typing import Any

import jax


def flat_dot_general(x: jax.Array, kernel: jax.Array, dimension_numbers, **options: Any) -> jax.Array:
    """`jax.lax.dot_general` of [..., i] and [i, o] (or [o, i]), with the leading dims made one.

    The same numbers; on CPU the gradient of the kernel is then one plain product, where for three dims XLA makes a slow
    one of two transposed operands (docs/performance.md). Any other product, and one that asks for an output sharding, is
    left as it is.

    Returns:
      [..., o].
    """
    (contracted, _), (batch, _) = dimension_numbers
    plain = x.ndim < 3 or kernel.ndim != 2 or tuple(contracted) != (x.ndim - 1,) or batch
    if plain or options.get("out_sharding") is not None:
        return jax.lax.dot_general(x, kernel, dimension_numbers, **options)
    numbers = (((1,), dimension_numbers[0][1]), dimension_numbers[1])
    y = jax.lax.dot_general(x.reshape(-1, x.shape[-1]), kernel, numbers, **options)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def logits_of(query: jax.Array, table: jax.Array) -> jax.Array:
    """[..., f] and the rows [v, f] of a table -> [..., v], the product of each query with each row."""
    return flat_dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())))
