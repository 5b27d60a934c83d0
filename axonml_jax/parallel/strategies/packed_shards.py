"""Parts of parameters as they travel in few bits: integers or small floats, with a scale for every block of elements.

As in ZeRO++'s quantized weights (Wang et al. 2023): the scale follows the largest element of a block of at most 256, so that an
outlier costs its neighbours precision, not the whole leaf.
"""

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from axonml_jax.sharding.layout import Layout

Wire = Literal["int8", "fp8"]

WIRES: tuple[Wire, ...] = get_args(Wire)

BLOCK = 256
"""Elements that share a scale, at most."""

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_SENT = {"int8": jnp.dtype("int8"), "fp8": jnp.dtype("uint8")}


def wire_dtype(wire: Wire) -> Any:
    """What the collectives carry: fp8 (e4m3) travels as its bits."""
    return _SENT[wire]


def travels_packed(layout: Layout, dtype: Any) -> bool:
    """Whether a leaf is packed: a floating one of two dims or more of its own. Norms' scales and biases travel as they are."""
    return len(layout.shape) - layout.stack_dims > 1 and bool(jnp.issubdtype(dtype, jnp.floating))


def packed_sizes(elements: Any) -> tuple[Any, Any]:
    """How many elements and how many scales are sent of so many (numbers, or arrays of them)."""
    blocks = -(-elements // BLOCK) + (elements == 0)
    return -(-elements // blocks) * blocks, blocks


def packed(shard: jax.Array, wire: Wire) -> tuple[jax.Array, jax.Array]:
    """A shard as it is sent.

    Args:
      shard: [*dims], floating, of n elements.
      wire: "int8", or "fp8" (e4m3).

    Returns:
      Values [s], n of them and zeros to fill the last block, and float32 scales [blocks]. A block with an element that is
      not finite is NaN throughout where it is read.
    """
    sent, blocks = packed_sizes(shard.size)
    flat = jnp.pad(shard.astype(jnp.float32).ravel(), (0, sent - shard.size)).reshape(blocks, -1)
    most = jnp.max(jnp.abs(flat), axis=1, initial=0)
    # A division by a constant would round as the compiler likes. A scale must be a normal number, or it is flushed to zero.
    scales = jnp.maximum(most * (1 / _LARGEST[wire]), jnp.finfo(jnp.float32).tiny)
    values = flat / scales[:, None]
    if wire == "int8":
        made = jnp.round(values).astype(jnp.int8)
    else:
        made = jax.lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)
    return made.ravel(), scales


def unpacked(values: jax.Array, scales: jax.Array, shape: tuple[int, ...], dtype: Any, wire: Wire) -> jax.Array:
    """What was sent by several ranks: values [k * s] and scales [k * blocks] -> [k, *shape]."""
    _, blocks = packed_sizes(size := math.prod(shape))
    grid = values.reshape(scales.size // blocks, blocks, values.size // scales.size)
    if wire == "fp8":
        grid = jax.lax.bitcast_convert_type(grid, jnp.float8_e4m3fn)
    found = grid.astype(jnp.float32) * scales.reshape(-1, blocks, 1)
    return found.reshape(len(found), grid[0].size)[:, :size].reshape(len(found), *shape).astype(dtype)


def round_trip(shard: jax.Array, wire: Wire) -> jax.Array:
    """What ranks read of a shard that was sent."""
    return unpacked(*packed(shard, wire), shard.shape, shard.dtype, wire)[0]
