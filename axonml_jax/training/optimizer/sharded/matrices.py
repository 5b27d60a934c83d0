"""Work on whole matrices, such as Muon's: each matrix is gathered by one rank, its owner, worked on there, and scattered back.

Matrices of one shape and place, with the same work to do, share one exchange: of N ranks each owns every N-th. A rank sends its
part of a matrix to the owner and gets its part of the result back, so that N matrices of P elements cost it 2 P (N-1)/N, and it
holds one N-th of them whole. Where they do not divide, the last owners work on zeros.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.primitives import axis_index, axis_size, gather_whole, swap_parts
from axonml_jax.sharding.layout import Layout


@dataclass(frozen=True)
class MatrixWork:
    """What is done to whole arrays of one parameter.

    Attributes:
      run: from whole arrays of the parameter's shape, then what is the same on all ranks, to one array.
      parts: how many of the values that it reads are parts of the parameter; the others are the same on all ranks.
      part: whether the result has the parameter's elements, of which each rank gets its part; else all ranks get all of it.
      like: equal where works do the same.
    """

    run: Callable[[Sequence[Any]], Any]
    parts: int
    part: bool
    like: Hashable


def on_owners(work: MatrixWork, layout: Layout, given: Sequence[Sequence[Any]]) -> list[jax.Array]:
    """The results of equal works on parameters of equal layouts.

    Args:
      work: any of them.
      layout: any of the parameters'.
      given: of each, the values that it reads, parts first.

    Communicates: one all-to-all of each part that is read, and one of the results, or an all-gather of these.
    """
    ranks, count = axis_size(layout.axes), len(given)
    slots = -(-count // ranks)
    stacks = [_stacked([values[k] for values in given], ranks * slots) for k in range(len(given[0]))]
    whole = [_whole(stack, layout, slots) for stack in stacks[: work.parts]]
    mine = axis_index(layout.axes)
    same = [
        jax.lax.dynamic_index_in_dim(stack.reshape(slots, ranks, *stack.shape[1:]), mine, 1, keepdims=False)
        for stack in stacks[work.parts :]
    ]
    made = jax.lax.map(lambda values: work.run(values), [*whole, *same])
    results = _parts(made, layout, slots) if work.part else _everywhere(made, layout)
    return list(results[:count])


def _stacked(values: Sequence[Any], count: int) -> jax.Array:
    """[count, ...], zeros behind the last."""
    stack = jnp.stack([jnp.asarray(value) for value in values])
    return jnp.pad(stack, [(0, count - len(values))] + [(0, 0)] * (stack.ndim - 1))


def _whole(stack: jax.Array, layout: Layout, slots: int) -> jax.Array:
    """Parts [slots * N, *shard] of matrices, number k of which rank k % N owns -> those that this rank owns [slots, *shape]."""
    ranks = axis_size(layout.axes)
    to_owner = stack.reshape(slots, ranks, *layout.shard).swapaxes(0, 1)
    parts = swap_parts(to_owner, layout.axes)  # [N, slots, *shard], by the rank that held them
    grid = parts.reshape(*(axis_size(axis) for axis in layout.axes), slots, *layout.shard)
    grid = grid.transpose(_joined_dims(layout))
    whole = grid.reshape(slots, *layout.stored)
    return whole[(slice(None), *map(slice, layout.shape))]


def _parts(whole: jax.Array, layout: Layout, slots: int) -> jax.Array:
    """The inverse of `_whole`: matrices that this rank owns [slots, *shape] -> its parts of all [slots * N, *shard]."""
    whole = whole.reshape(slots, *layout.shape)
    more = [(0, stored - size) for size, stored in zip(layout.shape, layout.stored, strict=True)]
    whole = jnp.pad(whole, [(0, 0), *more])
    sizes = [
        n for dim, size in enumerate(layout.shard) for n in (*(axis_size(axis) for axis in layout.axes_of(dim)), size)
    ]
    order = _joined_dims(layout)
    back = [order.index(k) for k in range(len(order))]
    grid = whole.reshape(slots, *sizes).transpose(back)
    from_owner = swap_parts(grid.reshape(-1, slots, *layout.shard), layout.axes)  # [N, slots, *shard], by owner
    return from_owner.swapaxes(0, 1).reshape(-1, *layout.shard)


def _joined_dims(layout: Layout) -> list[int]:
    """The order of dims (axes, slot, shard's dims) in which every dim's axes stand before it, the slot first."""
    count = len(layout.axes)
    order = [count]
    for dim in range(len(layout.shard)):
        order += [layout.axes.index(axis) for axis in layout.axes_of(dim)]
        order.append(count + 1 + dim)
    return order


def _everywhere(made: jax.Array, layout: Layout) -> jax.Array:
    """What owners made [slots, ...] -> of all [slots * N, ...], on every rank."""
    found = gather_whole(made[None], layout.axes, 0, invarying=True)
    return found.swapaxes(0, 1).reshape(-1, *made.shape[1:])


def same_place(layout: Layout) -> Hashable:
    """Equal for layouts whose parts may travel together."""
    return layout.shape, layout.stored, layout.parts, tuple(map(layout.axes_of, range(len(layout.shard))))
