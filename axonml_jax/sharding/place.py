"""Placing whole arrays on a mesh in their layout, and getting whole arrays back."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax._types import PyTree


def place(tree: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Copies of whole arrays (the same in every process), each device holding what `specs` says.

    The result never shares memory with `tree`, so that it may be donated.
    """
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    # Moving alone may alias: the part that lands on the device where an array is already can be that array's buffer.
    return copies(jax.tree.map(move, tree, shardings))


def move(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """A whole array (the same in every process) on a sharding; itself or sharing its memory where nothing has to move."""
    if isinstance(leaf, Tracer):  # under `jax.eval_shape`: there is nothing to move
        return leaf
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.jit(_copy, out_shardings=sharding)(leaf)
    if jax.process_count() == 1:
        return jax.device_put(_on_host(leaf, sharding), sharding)
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = move(jax.random.key_data(leaf), NamedSharding(sharding.mesh, PartitionSpec()))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _on_host(leaf: Any, sharding: NamedSharding) -> Any:
    """An array of one CPU device as NumPy sees it, in the same memory: JAX would compile a program that slices it."""
    if not isinstance(leaf, jax.Array) or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.weak_type:
        return leaf  # NumPy has neither keys nor weak types
    (device, *others) = leaf.sharding.device_set
    splits = not sharding.is_fully_replicated
    return np.asarray(leaf) if splits and not others and device.platform == "cpu" else leaf


def copies(tree: PyTree) -> PyTree:
    """The same arrays in memory of their own, each where it is."""
    return jax.jit(_copy)(tree)


def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(jax.numpy.copy, tree)


def cast(leaf: Any, dtype: Any) -> Any:
    """An array in `dtype`: a host array stays on the host, a JAX array where it is; typed keys as they are."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return leaf
    return jax.numpy.astype(leaf, dtype) if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype)


def is_deleted(x: Any) -> bool:
    """Whether x is an array whose buffers were donated. Using one can end the process (jax 0.10 on several CPU devices)."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()


def replicated(tree: PyTree, mesh: Mesh) -> PyTree:
    """Copies of arrays, whole on every device of `mesh`."""
    return place(tree, jax.tree.map(lambda _: PartitionSpec(), tree), mesh)


def to_host(tree: PyTree) -> PyTree:
    """Whole arrays in this process's memory as NumPy arrays (typed keys as keys of their own); every process must call it."""

    def fetch(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(fetch(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            leaf = jax.jit(_copy, out_shardings=NamedSharding(leaf.sharding.mesh, PartitionSpec()))(leaf)  # pyright: ignore
        return np.asarray(leaf) if leaf.is_fully_addressable else np.asarray(leaf.addressable_data(0))

    return jax.tree.map(fetch, tree)
