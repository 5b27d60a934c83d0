"""Sums of gradients that travel in few bits: ranks swap parts, and each rank adds up its own.

A reduce-scatter in a small dtype rounds every partial sum. Here each part is rounded once, where it is sent, and summed in
float32, as in ZeRO++'s quantized gradients (Wang et al. 2023). The bytes are those of a reduce-scatter in the small dtype.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from axonml_jax.collectives.gradients.bucketed import exchange_leaves, parts_along
from axonml_jax.collectives.primitives import axis_size
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.strategies.packed_shards import packed, packed_sizes, round_trip, travels_packed, unpacked
from axonml_jax.parallel.strategies.transfer import Transfer
from axonml_jax.sharding.layout import Layout

ReduceWire = Literal["bf16", "int8", "int8-feedback"]

REDUCE_WIRES: tuple[ReduceWire, ...] = get_args(ReduceWire)
_INT8 = ("int8", "int8-feedback")


def sums_packed(wire: ReduceWire | None, layout: Layout, dtype: Any) -> bool:
    """Whether parts of a gradient are packed.

    Args:
      wire: as "bf16" all travel that are wider, or bf16 themselves: those are summed in float32 then, not by a collective in
        bf16; as int8 those that `travels_packed` names. None: none are.
      layout: the leaf's.
      dtype: in which gradients are reduced.
    """
    if wire in _INT8:
        return travels_packed(layout, dtype)
    wider = bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize > 2
    return wire == "bf16" and (wider or jnp.dtype(dtype) == jnp.bfloat16)


def sum_transfers(wire: ReduceWire, elements: Any, ranks: int, padding: Any) -> tuple[Transfer, ...]:
    """What one such sum sends.

    Args:
      wire: the gradient's.
      elements: of the whole gradient with its padding (a number, or an array of them).
      ranks: of the axis.
      padding: how many of the elements are padding.
    """
    if wire == "bf16":
        return (Transfer(kind="all_to_all", elements=elements, ranks=ranks, dtype="bfloat16", padding=padding),)
    sent, scales = packed_sizes(elements // ranks)
    padding = padding + sent * ranks - elements
    return (
        Transfer(kind="all_to_all", elements=sent * ranks, ranks=ranks, dtype="int8", padding=padding),
        Transfer(kind="all_to_all", elements=scales * ranks, ranks=ranks, dtype="float32"),
    )


def filled_of(wire: ReduceWire, elements: int) -> int:
    """Zeros behind a part of so many elements: they fill its last block."""
    return packed_sizes(elements)[0] - elements if wire in _INT8 else 0


def scatter_sum_packed(
    leaves: Sequence[jax.Array],
    axis: AxisNames,
    dims: Sequence[int],
    wire: ReduceWire,
    *,
    flat: bool,
) -> list[jax.Array]:
    """Sum each leaf over the ranks of `axis` and keep this rank's part of its dim.

    Args:
      leaves: whole gradients, each [..., n*d, ...], inside `shard_map`.
      axis: the mesh axes to sum over, of n ranks.
      dims: the dim of each leaf that is split.
      wire: as what parts travel.
      flat: whether what travels together is copied into one array.

    Returns:
      [..., d, ...] each, in the dtype in which it was summed (`wide`).

    Communicates: one all-to-all of all leaves; as int8 another of their scales.
    """
    count = axis_size(axis)
    parts = [parts_along(leaf, dim, count) for leaf, dim in zip(leaves, dims, strict=True)]
    if wire == "bf16":
        sent = [part.astype(jnp.bfloat16).reshape(count, -1) for part in parts]
    else:
        sent = [each for part in parts for each in jax.vmap(lambda own: packed(own, "int8"))(part)]
    found = iter(exchange_leaves(sent, axis, flat=flat))
    sums = []
    for part in parts:
        if wire == "bf16":
            rounded = next(found).reshape(part.shape)
        else:
            values, scales = next(found), next(found)
            rounded = unpacked(values.ravel(), scales.ravel(), part.shape[1:], wide(part.dtype), "int8")
        sums.append(rounded.astype(wide(part.dtype)).sum(0))
    return sums


def sum_round_trip(part: jax.Array, wire: ReduceWire) -> jax.Array:
    """What is added of a part that a rank sent."""
    return round_trip(part, "int8") if wire in _INT8 else part.astype(jnp.bfloat16).astype(part.dtype)


def wide(dtype: Any) -> Any:
    """The dtype in which values of a dtype are added up: float32, or their own where that is wider."""
    return jnp.promote_types(dtype, jnp.float32)
