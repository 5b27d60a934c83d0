"""`spmd`: run a function once per rank of a group, inside `shard_map`, on values stacked by rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from axonml_jax.mesh.fake_devices import bound_run_ahead
from axonml_jax.mesh.group import ProcessGroup

_RANK = PartitionSpec("data")


def spmd(fn: Callable[..., Any], group: ProcessGroup, *, check_vma: bool = False) -> Callable[..., Any]:
    """Turn `fn`, which computes one rank's value, into a function of all ranks' values.

    Collectives inside `fn` take `group` or the axis name "data". The result can be jitted and differentiated.

    Args:
      fn: called as `fn(*args)` with pytrees of arrays, one rank's part each; returns a pytree of arrays.
      group: the n ranks; each runs on its own device.
      check_vma: JAX's check of varying types. Off by default, because a model whose scan starts from plain
        zeros fails it.

    Returns:
      `run(*stacked)`: every leaf of the arguments and of the result has a leading dim n, one entry per rank in the
      group's order. With several processes every process gives all entries and calls it.

    Raises:
      ValueError: (from `run`) when a leaf's leading dim is not n; all of them are named by path.
    """
    sharding = NamedSharding(group.sub_mesh, _RANK)

    def per_rank(*stacked):
        result = fn(*jax.tree.map(lambda leaf: leaf[0], stacked))
        return jax.tree.map(lambda leaf: jax.numpy.asarray(leaf)[None], result)

    traced = jax.jit(jax.shard_map(per_rank, mesh=group.sub_mesh, in_specs=_RANK, out_specs=_RANK, check_vma=check_vma))

    def run(*stacked):
        _check_leading(stacked, group)
        return bound_run_ahead(traced(*jax.tree.map(partial(_place, sharding), stacked)))

    return run


def _check_leading(stacked, group: ProcessGroup) -> None:
    offenders = [
        f"  argument {jax.tree_util.keystr(path)}: shape {np.shape(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(stacked)
        if np.shape(leaf)[:1] != (group.size,)
    ]
    if offenders:
        raise ValueError(
            f"spmd over {group.size} ranks: the leading dim of every leaf must be {group.size}, one entry per rank:\n"
            + "\n".join(offenders)
            + f"\nstack the ranks' values (jnp.stack), or give all of them one value with "
            f"jnp.broadcast_to(x, ({group.size}, *x.shape))"
        )


def _place(sharding: NamedSharding, leaf):
    if isinstance(leaf, Tracer) or (isinstance(leaf, jax.Array) and leaf.sharding == sharding):
        return leaf
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    # device_put of a host array onto another process's devices gathers it everywhere first.
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
