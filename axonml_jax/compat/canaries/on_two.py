"""Tracing over a mesh of two ranks that needs no devices: where most canaries sing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

AXIS = "canary"
SPLIT, WHOLE = PartitionSpec(AXIS), PartitionSpec()
MESH = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,))


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of a float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def on_two(
    fun: Callable[..., Any], *specs: PartitionSpec, check_vma: bool, out: PartitionSpec = SPLIT
) -> Callable[..., Any]:
    """`fun` inside `shard_map` over two ranks, one spec per argument."""
    return jax.shard_map(fun, mesh=MESH, in_specs=specs, out_specs=out, check_vma=check_vma)


def body_of(fun: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> list[Any]:
    """The equations inside the one `shard_map` that a function consists of."""
    (mapped,) = jax.make_jaxpr(fun)(*args).eqns
    return list(mapped.params["jaxpr"].eqns)


def names(equations: list[Any]) -> list[str]:
    """Of their primitives."""
    return [equation.primitive.name for equation in equations]
