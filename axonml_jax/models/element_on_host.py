"""One element of an array that is split over devices, such as one expert's or one layer's weights out of a stack."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axonml_jax.collectives.primitives import axis_index, sum_over
from axonml_jax.mesh.axes import as_axes


def element_on_host(array: Any, index: tuple[int, ...]) -> np.ndarray:
    """`array[index]` in this process's memory. Between devices only that element is sent, never the stack that it is in.

    Args:
      array: [..., *rest], anything that has elements; every process of its mesh calls alike.
      index: one number per leading dim; () is the whole array.
    """
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
        return np.asarray(array[index] if index else array)
    mesh, everywhere = array.sharding.mesh, NamedSharding(array.sharding.mesh, PartitionSpec())
    spec = (*array.sharding.spec, *(None,) * (array.ndim - len(array.sharding.spec)))
    axes = tuple(as_axes(each or ()) for each in spec[: len(index)])
    if not any(axes):
        found = jax.jit(_plain, out_shardings=everywhere)(array, index)
    else:
        if array.sharding.memory_kind not in (None, "device"):
            array = jax.device_put(array, array.sharding.with_memory_kind("device"))
        one = jax.shard_map(
            lambda block, index: _from_owner(block, index, axes),
            mesh=mesh,
            in_specs=(PartitionSpec(*spec), PartitionSpec()),
            out_specs=PartitionSpec(*spec[len(index) :]),
        )
        found = jax.jit(one, out_shardings=everywhere)(array, jnp.asarray(index))
    return np.asarray(found.addressable_data(0))


def _plain(array: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    return array[index] if index else array.copy()


def _from_owner(block: jax.Array, index: jax.Array, axes: tuple[tuple[str, ...], ...]) -> jax.Array:
    """A rank's part of the element, which the one rank that has it sends to the others: bits, which sums with 0 keep."""
    mine = jnp.asarray(True)
    for at, over in zip(index, axes, strict=True):
        size = block.shape[0]
        place = at - size * (axis_index(over) if over else 0)
        mine &= (place >= 0) & (place < size)
        block = jax.lax.dynamic_index_in_dim(block, jnp.clip(place, 0, size - 1), 0, keepdims=False)
    bits = jax.lax.bitcast_convert_type(block, jnp.dtype(f"uint{8 * block.dtype.itemsize}"))
    names = tuple(axis for over in axes for axis in over)
    return jax.lax.bitcast_convert_type(sum_over(jnp.where(mine, bits, 0), names), block.dtype)
