"""Collective matrix products (Wang et al. 2023): a gather or a scatter cut into hops of a ring, one between two products.

The bytes are those of the collective they replace; each hop moves one part while the rank multiplies another.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.dim_checks import require_divisible
from axonml_jax.collectives.primitives import axis_index, axis_size, shift
from axonml_jax.parallel.tensor.products.rerun import rerun


def ring_gathered(fn: Callable[..., Any], x_shard: jax.Array, weights: Any, axes: tuple[str, ...], dim: int) -> Any:
    """What `ordered` computes with a gathered x, for an `fn` that treats every position of `dim` alike.

    Args:
      fn: a function of some positions of x and the weights, such as a product over x's last dim.
      x_shard: [..., s/n, i].
      weights: a pytree of arrays.
      axes: bound mesh axes of total size n.
      dim: the dim that is split, counted from the end; `fn`'s results have it too.

    Returns:
      `fn`'s results, [..., s, o].

    Communicates: n - 1 permutes of the shard forward; twice as many backward.
    """
    count = axis_size(axes)

    def products(part, weights):
        # After k hops a rank holds the part of the rank k places ahead of it.
        parts = [part]
        for _ in range(count - 1):
            parts.append(shift(parts[-1], axes, [(i, (i - 1) % count) for i in range(count)]))
        results = [fn(each, weights) for each in parts]
        return jax.tree.map(lambda *each: _in_order(each, axes, dim), *results)

    return rerun(products, x_shard, weights)


def ring_scattered(fn: Callable[..., Any], x: jax.Array, weights: Any, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The sum over the ranks of `fn(x, weights)`, of which each keeps its part of `dim`.

    Args:
      fn: a function of some positions of x and the weights, such as a product over x's last dim.
      x: [..., s, i/n]; s must divide by n.
      weights: a pytree of arrays.
      axes: bound mesh axes of total size n.
      dim: the dim to split, counted from the end.

    Returns:
      [..., s/n, o].

    Raises:
      ValueError: when the dim does not divide.

    Communicates: n - 1 permutes of the result forward, as many of its gradient backward.
    """
    count = axis_size(axes)
    require_divisible(f"ring over {axes}", x.shape, dim % x.ndim, count)
    size = x.shape[dim] // count

    def products(x, weights):
        total = None
        for hop in range(count):
            # The sum for rank r begins at rank r + 1 and ends, n - 1 hops later, at r.
            target = (axis_index(axes) - hop - 1) % count
            part = fn(jax.lax.dynamic_slice_in_dim(x, target * size, size, dim % x.ndim), weights)
            total = part if total is None else part + shift(total, axes, [(i, (i + 1) % count) for i in range(count)])
        return total

    return rerun(products, x, weights)


def _in_order(parts, axes, dim) -> jax.Array:
    """Concatenate parts, of which number k belongs k places after this rank's own, in the order of the ranks."""
    turned = jnp.concatenate(parts, axis=dim)
    return jnp.roll(turned, axis_index(axes) * parts[0].shape[dim], axis=dim)
