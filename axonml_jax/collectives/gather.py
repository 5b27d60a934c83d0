"""Collectives that put the ranks' values side by side: `all_gather` on every rank, `gather` on one."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from axonml_jax.collectives.along_dim import gather_along
from axonml_jax.collectives.dim_checks import checked_dim, checked_position
from axonml_jax.collectives.scope import Group, Scope, run_collective


def all_gather(x: ArrayLike, group: Group, dim: int = 0) -> jax.Array:
    """Concatenate the values of all ranks along `dim`, in the group's order.

    Args:
      x: [..., d, ...], this rank's value, of any dtype and the same shape on every rank. A scalar counts as shape [1].
      group: the n ranks that take part; axis names inside `shard_map`.
      dim: the dim along which values are joined, counted from either end.

    Returns:
      [..., n*d, ...] on every rank; traced, ranks outside the group get zeros. With `check_vma=True` it is typed as
      varying (see `collectives`), like `jax.lax.all_gather`. Its gradient is `reduce_scatter_sum` of the cotangents.

    Raises:
      ValueError: when the dim does not exist.

    Communicates: one all-gather.
    """
    return run_collective(f"all_gather(dim={dim})", _all_gather, x, group, dim=dim)


def _all_gather(x, scope: Scope, name: str, dim: int):
    return scope.only_members(joined(name, x, scope, dim))


def gather(x: ArrayLike, group: Group, dst: int = 0, dim: int = 0) -> jax.Array:
    """`all_gather` that only the rank at position `dst` keeps; the others get zeros of the same shape.

    Args:
      x: [..., d, ...], this rank's value.
      group: the n ranks that take part; axis names inside `shard_map`.
      dst: the position in the group that receives.
      dim: the dim along which values are joined.

    Returns:
      [..., n*d, ...]: the values on `dst`, zeros elsewhere (one program gives every rank one shape).

    Raises:
      ValueError: when the dim or the position does not exist.

    Communicates: one all-gather.
    """
    return run_collective(f"gather(dst={dst}, dim={dim})", _gather, x, group, dst=dst, dim=dim)


def _gather(x, scope: Scope, name: str, dst: int, dim: int):
    checked_position(name, "dst", dst, scope.size)
    whole = joined(name, x, scope, dim)
    return scope.only_members(jnp.where(scope.index() == dst, whole, jnp.zeros_like(whole)))


def joined(name: str, x: jax.Array, scope: Scope, dim: int) -> jax.Array:
    """The members' values concatenated along `dim`, traced; whatever comes out on ranks outside is to be masked."""
    x = x[None] if x.ndim == 0 else x
    axis = checked_dim(name, dim, x.shape)
    if scope.members is None:
        return gather_along(x, scope.axes, axis)
    if scope.partition is not None:
        return gather_along(x, scope.axes, axis, among=scope.partition)
    return jnp.concatenate(list(member_rows(x, scope)), axis=axis)


def member_rows(x: jax.Array, scope: Scope) -> jax.Array:
    """[n, ...]: every member's value, on every rank, by one all-gather over the whole axes.

    For groups that do not divide the axes: XLA wants `axis_index_groups` of one size wherever shapes depend on it.
    """
    return gather_along(x, scope.axes, 0, tiled=False)[jnp.asarray(scope.positions)]
