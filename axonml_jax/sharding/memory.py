"""Moving arrays between device and host memory, inside and outside compiled programs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from axonml_jax._types import PyTree

HOST = "pinned_host"
"""The memory kind of what is offloaded."""


def movable(leaf: Any) -> bool:
    """Whether a leaf is worth moving; a scalar that changed its memory kind would only force a recompile."""
    return leaf.ndim > 0 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host_memory(tree: PyTree, when: bool = True) -> PyTree:
    """Inside a compiled program: arrays moved to host memory, if `when`."""
    return _moved(tree, jax.memory.Space.Host) if when else tree


def to_device_memory(tree: PyTree, when: bool = True) -> PyTree:
    """Inside a compiled program: arrays moved to device memory, if `when`."""
    return _moved(tree, jax.memory.Space.Device) if when else tree


def offloaded(tree: PyTree, when: bool = True) -> PyTree:
    """Outside: arrays in host memory, each sharded as it is, if `when`."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not movable(leaf) or not isinstance(leaf.sharding, NamedSharding):
            return leaf
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST))

    return jax.tree.map(move, tree) if when else tree


def _moved(tree: PyTree, space: Any) -> PyTree:
    return jax.tree.map(lambda leaf: jax.device_put(leaf, space) if movable(leaf) else leaf, tree)
