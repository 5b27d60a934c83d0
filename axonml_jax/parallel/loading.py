"""Loading what rests in host memory when it is needed, inside a compiled program.

XLA:TPU copies arguments that rest in host memory to the device when the program starts, whatever barrier stands before the
`device_put`. It cannot copy slices before it knows where they begin: so they begin at a zero that comes out of a barrier.
"""

import functools
import math

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree
from axonml_jax.collectives.varying import varying_axes
from axonml_jax.compat.barrier import after
from axonml_jax.sharding.memory import movable, to_device_memory

TILE_ROWS: dict[int, int] = {1: 1024, 2: 8}
"""Rows of an array of so many dims at which one of XLA:TPU's tiles begins."""


def moment(values: PyTree) -> jax.Array:
    """An int32 zero that is not there before these values are, wherever they rest."""
    waited = [x for x in jax.tree.leaves(values) if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)]
    return after(jnp.int32(0), waited)


def load(leaf: jax.Array, at: jax.Array) -> jax.Array:
    """An array in host memory moved to device memory, not before the moment `at`.

    An array whose rows do not fill two of the chip's tiles is moved when XLA likes.
    """
    if not movable(leaf) or varying_axes(at) - varying_axes(leaf):
        return to_device_memory(leaf)
    rows, half = leaf.shape[0], leaf.shape[0] // 2
    if half == 0 or (half * 2 != rows and leaf.ndim < 3) or half % TILE_ROWS.get(leaf.ndim, 1):
        return to_device_memory(leaf)
    parts = [jax.lax.dynamic_slice_in_dim(leaf, at + i * half, size) for i, size in enumerate((half, rows - half))]
    return jnp.concatenate(to_device_memory(parts))


@functools.cache
def slices(shape: tuple[int, ...], itemsize: int, size: int) -> int:
    """The least number of equal slices along dim 0 of which none is over `size` bytes and all begin with a tile.

    As many as there can be where all are over it.

    Args:
      shape: of an array.
      itemsize: bytes of an element.
      size: bytes of a slice.
    """
    elements, tile = math.prod(shape), TILE_ROWS.get(len(shape), 1)
    if not shape or elements * itemsize <= size or shape[0] % tile:
        return 1
    tiles = shape[0] // tile
    small = [n for n in range(1, math.isqrt(tiles) + 1) if tiles % n == 0]
    counts = sorted({*small, *(tiles // n for n in small)})
    return next((n for n in counts if elements // n * itemsize <= size), counts[-1])
