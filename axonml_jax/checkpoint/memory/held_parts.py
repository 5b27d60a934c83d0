"""What one process holds of arrays, part by part, and arrays made of such parts again, as they were."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

Part = tuple[str, tuple[tuple[int, int], ...]]
"""An array's name, and from where to where the part reaches in every dim."""


def parts_of(arrays: Mapping[str, jax.Array]) -> dict[Part, tuple[np.dtype, tuple[int, ...]]]:
    """The parts that this process's devices hold, each once, with dtype and shape. Nothing is copied."""
    found = {}
    for name, array in _plain(arrays).items():
        for index in _places(array):
            found[name, index] = np.dtype(array.dtype), tuple(stop - start for start, stop in index)
    return found


def shard_name(arrays: Mapping[str, jax.Array]) -> str:
    """A short text, the same for processes that hold the same parts of the same arrays."""
    shapes = {name: [list(array.shape), str(array.dtype)] for name, array in _plain(arrays).items()}
    parts = sorted((name, index) for name, index in parts_of(arrays))
    return hashlib.sha256(json.dumps([shapes, parts], sort_keys=True).encode()).hexdigest()[:32]


def values_of(arrays: Mapping[str, jax.Array]) -> Iterator[tuple[Part, np.ndarray]]:
    """The parts with their values on the host, in the order of `parts_of`; all copies off the devices begin at once."""
    plain = _plain(arrays)
    held = [(name, index, data) for name, array in plain.items() for index, data in _places(array).items()]
    for _, _, data in held:
        data.copy_to_host_async()
    for name, index, data in held:
        yield (name, index), np.asarray(data)


def assembled(like: Mapping[str, jax.Array], read: Callable[[Part], np.ndarray]) -> dict[str, jax.Array]:
    """Arrays on the devices of those given.

    Args:
      like: arrays as they shall be.
      read: a part's values, in memory of their own at every call: JAX may make it the array's, which a step then writes.
    """
    return {name: _assembled(name, array, read) for name, array in like.items()}


def _assembled(name: str, like: jax.Array, read: Callable[[Part], np.ndarray]) -> jax.Array:
    if _is_key(like):
        words = _assembled(name, jax.random.key_data(like), read)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    kind = like.sharding.memory_kind
    shards = [
        jax.device_put(
            read((name, _bounds(shard.index, like.shape))), SingleDeviceSharding(shard.device, memory_kind=kind)
        )
        for shard in like.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _plain(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jax.random.key_data(array) if _is_key(array) else array for name, array in arrays.items()}


def _places(array: jax.Array) -> dict[tuple[tuple[int, int], ...], jax.Array]:
    # Arrays of their own, one per device, so that no view of a buffer outlives this: the next step donates it.
    shards, held = array.addressable_shards, {}
    for number, shard in enumerate(shards):
        held.setdefault(_bounds(shard.index, array.shape), number)
    return {index: array.addressable_data(number) for index, number in held.items()}


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
