"""Collectives in which ranks swap parts: `all_to_all`, and `send_recv` along given pairs."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from axonml_jax.collectives.along_dim import exchange_along
from axonml_jax.collectives.dim_checks import checked_dim, checked_position, require_divisible
from axonml_jax.collectives.gather import member_rows
from axonml_jax.collectives.primitives import shift
from axonml_jax.collectives.scope import Group, Scope, run_collective


def all_to_all(x: ArrayLike, group: Group, split_dim: int = 0, concat_dim: int = 0) -> jax.Array:
    """Split x along `split_dim`, send the i-th part to the i-th rank, and join what arrives along `concat_dim`.

    Args:
      x: [..., s, ..., c, ...], the same shape on every rank; s must divide by n.
      group: the n ranks that take part; axis names inside `shard_map`.
      split_dim: the dim s, counted from either end.
      concat_dim: the dim c along which the received parts are joined, in the group's order; it may be `split_dim`.

    Returns:
      [..., s/n, ..., c*n, ...]; traced, ranks outside the group get zeros. Its gradient is the exchange back.

    Raises:
      ValueError: when x is a scalar, a dim does not exist or does not divide.

    Communicates: one all-to-all.
    """
    name = f"all_to_all(split_dim={split_dim}, concat_dim={concat_dim})"
    return run_collective(name, _all_to_all, x, group, split_dim=split_dim, concat_dim=concat_dim)


def _all_to_all(x, scope: Scope, name: str, split_dim: int, concat_dim: int):
    split, concat = checked_dim(name, split_dim, x.shape), checked_dim(name, concat_dim, x.shape)
    require_divisible(name, x.shape, split, scope.size)
    return scope.only_members(_exchanged(x, scope, split, concat))


def _exchanged(x, scope: Scope, split: int, concat: int):
    if scope.members is not None and scope.partition is None:
        size = x.shape[split] // scope.size
        own_parts = jax.lax.dynamic_slice_in_dim(member_rows(x, scope), scope.index() * size, size, split + 1)
        return jnp.concatenate(list(own_parts), axis=concat)
    groups = None if scope.members is None else scope.partition
    return exchange_along(x, scope.axes, split, concat, among=groups)


def send_recv(x: ArrayLike, pairs: Sequence[tuple[int, int]], group: Group) -> jax.Array:
    """Send x from each pair's source to its target, all at once.

    Args:
      x: this rank's value, of any shape and dtype, the same on every rank.
      pairs: (source, target) positions in the group; no source and no target twice.
      group: the ranks that take part; axis names inside `shard_map`.

    Returns:
      What this rank received; zeros on a rank that is no target. Traced, ranks outside the group keep their x. Its
      gradient is the sending back.

    Raises:
      ValueError: when a position does not exist, or is the source or the target of two pairs.

    Communicates: one collective-permute.
    """
    sent = tuple((int(source), int(target)) for source, target in pairs)
    return run_collective(f"send_recv(pairs={list(sent)})", _send_recv, x, group, pairs=sent)


def _send_recv(x, scope: Scope, name: str, pairs: tuple[tuple[int, int], ...]):
    _check_pairs(name, pairs, scope.size)
    along = [(scope.positions[source], scope.positions[target]) for source, target in pairs]
    return scope.only_members(shift(x, scope.axes, along), x)


def _check_pairs(name: str, pairs: tuple[tuple[int, int], ...], size: int) -> None:
    for word, positions in (("source", [s for s, _ in pairs]), ("target", [t for _, t in pairs])):
        for position in positions:
            checked_position(name, word, position, size)
        twice = sorted({p for p in positions if positions.count(p) > 1})
        if twice:
            raise ValueError(
                f"{name}: position {twice} is the {word} of more than one pair: each rank sends once and receives "
                "once; use several calls"
            )
