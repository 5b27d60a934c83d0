"""Tracing over a mesh of two ranks that needs no devices: where most canaries sing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from axonml_jax.compat.canaries.canary import expect
from axonml_jax.compat.jaxpr import opened
from axonml_jax.compat.operation import Operation

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


def operations(fun: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> list[Operation]:
    """What a function traces to."""
    return [Operation(eqn) for eqn in opened(jax.make_jaxpr(fun)(*args)).equations]


def body_of(fun: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> list[Operation]:
    """What is inside the one `shard_map` that a function consists of."""
    (outer,) = operations(fun, *args)
    mapped = outer.mapped
    expect(mapped is not None, f"a shard_map traces to {outer.name}")
    return [Operation(eqn) for eqn in opened(mapped.body).equations] if mapped else []


def names(found: list[Operation]) -> list[str]:
    """Of their primitives."""
    return [operation.name for operation in found]
