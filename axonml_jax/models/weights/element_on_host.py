"""One element of an array that is split over devices, such as one expert's or one layer's weights out of a stack."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.collectives.primitives import axis_index, sum_over
from axonml_jax.mesh.axes import as_axes


def element_on_host(array: Any, index: tuple[int, ...]) -> np.ndarray:
    """`array[index]` in this process's memory. Between devices only that element is sent, never the stack that it is in.

    Args:
      array: [..., *rest], anything that has elements; every process of its mesh calls alike.
      index: one number per leading dim; () is the whole array.
    """
    if not isinstance(array, jax.Array) or not isinstance(sharding := array.sharding, NamedSharding):
        return np.asarray(array[index] if index else array)
    spec = (*sharding.spec, *(None,) * (array.ndim - len(sharding.spec)))
    if any(as_axes(each or ()) for each in spec[: len(index)]) and sharding.memory_kind not in (None, "device"):
        array = jax.device_put(array, sharding.with_memory_kind("device"))
    found = _program(sharding.mesh, spec, len(index))(array, np.asarray(index, np.int32))
    return np.asarray(found.addressable_data(0))


@functools.lru_cache(maxsize=256)
def _program(mesh: Mesh, spec: tuple[Any, ...], count: int) -> Any:
    """The program that reads `array[index]`, of `count` numbers, for every array that rests alike."""
    axes = tuple(as_axes(each or ()) for each in spec[:count])
    if not any(axes):
        read = lambda array, index: array[tuple(index)] if count else array.copy()
    else:
        read = jax.shard_map(
            lambda block, index: _from_owner(block, index, axes),
            mesh=mesh,
            in_specs=(PartitionSpec(*spec), PartitionSpec()),
            out_specs=PartitionSpec(*spec[count:]),
        )
    return jax.jit(read, out_shardings=NamedSharding(mesh, PartitionSpec()))


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
