"""How the positions that this code sees are split over ranks, as the plan around it says."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from axonml_jax.collectives.primitives import axis_index, axis_size
from axonml_jax.parallel.context.method import Method
from axonml_jax.parallel.tensor.bound_axes import bound
from axonml_jax.sharding.sequence_order import Order, order_parts


@dataclass(frozen=True)
class ContextSplit:
    """The split of sequences over one mesh axis.

    Attributes:
      axis: the mesh axis.
      order: in which order its ranks hold positions (see `sequence_order`).
      method: how attention reads the keys and values of other ranks (see `context_attention`).
    """

    axis: str
    order: Order = "contiguous"
    method: Method = "auto"

    def own_positions(self, count: int) -> jax.Array:
        """The global positions of this rank's `count` places, int32 [count]; inside `shard_map` over the axis."""
        rank, ranks = axis_index(self.axis), axis_size(self.axis)
        return positions_of(self.order, rank, ranks, count)


def positions_of(order: Order, rank: int | jax.Array, ranks: int, count: int) -> jax.Array:
    """The global positions of a rank's `count` places, int32 [count]: the rank may be traced."""
    places = jnp.arange(count, dtype=jnp.int32)
    if order == "striped":
        return places * ranks + rank
    if order == "zigzag":
        half = count * ranks // order_parts(order, ranks)
        second = 2 * ranks - 1 - rank
        return jnp.where(places < half, rank * half + places, second * half + places - half)
    return rank * count + places


# Known to JAX: a function under an inner `jax.jit` that was traced under one split is traced anew under another.
_SPLITS = jax.make_user_context(())


@contextlib.contextmanager
def split_by(split: ContextSplit) -> Iterator[None]:
    """Within it code that runs inside `shard_map` over the split's axis sees sequences split so."""
    with _SPLITS((*_SPLITS.value, (split.axis, split))):
        yield


@contextlib.contextmanager
def seen_whole(axis: str) -> Iterator[None]:
    """Within it code that runs inside `shard_map` over the axis sees whole sequences, the same on all its ranks."""
    with _SPLITS((*_SPLITS.value, (axis, None))):
        yield


def current_split(axis: str = "context") -> ContextSplit | None:
    """The split of the sequences that this code sees over an axis; None: it sees whole sequences.

    Inside `shard_map` over the axis, but under no plan that says how, it is contiguous.
    """
    if not bound(axis) or axis_size(axis) == 1:
        return None
    return next((split for name, split in reversed(_SPLITS.value) if name == axis), ContextSplit(axis))


def context_positions(count: int, axis: str = "context") -> jax.Array:
    """The positions, in the whole sequence, of the `count` places that this code has of it, int32 [count].

    Inside a model that runs under `ax.Context` they are this rank's, in the plan's order; elsewhere 0 to count - 1.
    """
    split = current_split(axis)
    return jnp.arange(count, dtype=jnp.int32) if split is None else split.own_positions(count)
