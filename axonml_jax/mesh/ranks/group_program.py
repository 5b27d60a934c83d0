"""One rank's program as the whole group's: `jit(shard_map)` over the group's sub-mesh, compiled once and kept."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Program = Callable[[Any], Any]
"""`program(x) -> y` for use inside `shard_map` over one axis named `data`: this rank's tree to this rank's tree."""

_STACKED = PartitionSpec("data")


def place(value: Any, device: Any) -> Any:
    """Every leaf of one rank's value on its device with a leading dim of 1: its row of the stacked array."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, device)[None], value)


def stack(rows: Sequence[Any], mesh: Mesh, num_rows: int) -> Any:
    """The rows that this process holds as global arrays [num_rows, ...] over the mesh (nothing is copied)."""
    sharding = NamedSharding(mesh, _STACKED)

    def assemble(*leaves):
        return jax.make_array_from_single_device_arrays((num_rows, *leaves[0].shape[1:]), sharding, list(leaves))

    return jax.tree.map(assemble, *rows)


def row(stacked: Any, device: Any) -> Any:
    """The row that lives on `device`, without its leading dim."""

    def own(leaf):
        (data,) = (shard.data for shard in leaf.addressable_shards if shard.device == device)
        return data.reshape(data.shape[1:])

    return jax.tree.map(own, stacked)


def compiled(program: Program, mesh: Mesh) -> Callable[[Any], Any]:
    """The program over stacked arrays, compiled once for equal programs on equal meshes.

    Programs are equal when they are the same function, or `functools.partial`s (nested too) of the same function with
    equal arguments. A closure made for each call compiles at each call.
    """
    key = _key(program)
    return _compiled(key, mesh) if _hashable(key) else _compile(program, mesh)


@functools.lru_cache(maxsize=512)
def _compiled(key, mesh):
    return _compile(_rebuild(key), mesh)


def _compile(program, mesh):
    def one_row(stacked):
        result = program(jax.tree.map(lambda leaf: leaf[0], stacked))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], result)

    return jax.jit(jax.shard_map(one_row, mesh=mesh, in_specs=_STACKED, out_specs=_STACKED, check_vma=False))


class _Partial(tuple):
    """A `functools.partial` as (function, arguments, keywords), so that equal ones are found equal."""


class _Argument(tuple):
    """An argument as (type, value): 1, 1.0 and True are equal but compute different things."""


def _key(program):
    if not isinstance(program, functools.partial):
        return program
    keywords = tuple((name, _argument_key(value)) for name, value in sorted(program.keywords.items()))
    return _Partial((_key(program.func), tuple(_argument_key(value) for value in program.args), keywords))


def _argument_key(value):
    return _key(value) if isinstance(value, functools.partial) else _Argument((type(value), value))


def _rebuild(key):
    if isinstance(key, _Argument):
        return key[1]
    if not isinstance(key, _Partial):
        return key
    function, arguments, keywords = key
    rebuilt = {name: _rebuild(value) for name, value in keywords}
    return functools.partial(_rebuild(function), *(_rebuild(value) for value in arguments), **rebuilt)


def _hashable(key):
    try:
        hash(key)
    except TypeError:
        return False
    return True
