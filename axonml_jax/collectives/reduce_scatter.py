"""`reduce_scatter`: reduce over the ranks, and keep one slice of the result each."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from axonml_jax.collectives.along_dim import exchange_along, scatter_along
from axonml_jax.collectives.dim_checks import checked_dim, require_divisible
from axonml_jax.collectives.gather import member_rows
from axonml_jax.collectives.ops import ReduceOp, check_op, reduce_rows
from axonml_jax.collectives.scope import Group, Scope, run_collective


def reduce_scatter(x: ArrayLike, group: Group, op: ReduceOp = ReduceOp.SUM, dim: int = 0) -> jax.Array:
    """Reduce x over the ranks and keep this rank's slice of `dim`, in the group's order.

    Args:
      x: [..., d, ...], the same shape on every rank; d must divide by n.
      group: the n ranks that take part; axis names inside `shard_map`.
      op: the reduction.
      dim: the dim that is split, counted from either end.

    Returns:
      [..., d/n, ...]; traced, ranks outside the group get zeros. The gradient of SUM is `all_gather` of the cotangents,
      that of the other ops is the dense reference's (ties of MIN and MAX share equally).

    Raises:
      ValueError: when x is a scalar, the dim does not exist or does not divide.
      TypeError: when the op is undefined for the dtype.

    Communicates: one reduce-scatter for SUM and AVERAGE, one all-to-all (the same bytes) for PRODUCT, MIN and MAX.
    """
    return run_collective(f"reduce_scatter(op={op}, dim={dim})", _reduce_scatter, x, group, op=op, dim=dim)


def _reduce_scatter(x, scope: Scope, name: str, op: ReduceOp, dim: int):
    check_op(name, op, x.dtype)
    axis = checked_dim(name, dim, x.shape)
    require_divisible(name, x.shape, axis, scope.size)
    return scope.only_members(own_reduction(x, scope, op, axis))


def reduce_scatter_sum(x: ArrayLike, group: Group, dim: int = 0) -> jax.Array:
    """`reduce_scatter` with SUM."""
    return reduce_scatter(x, group, ReduceOp.SUM, dim)


def reduce_scatter_mean(x: ArrayLike, group: Group, dim: int = 0) -> jax.Array:
    """`reduce_scatter` with AVERAGE."""
    return reduce_scatter(x, group, ReduceOp.AVERAGE, dim)


def own_reduction(x: jax.Array, scope: Scope, op: ReduceOp, dim: int) -> jax.Array:
    """This rank's slice of the reduced value, traced; whatever comes out on ranks outside is to be masked."""
    if op is ReduceOp.SUM:
        return _own_sum(x, scope, dim)
    if op is ReduceOp.AVERAGE:
        return _own_sum(x, scope, dim) / scope.size
    return reduce_rows(_own_rows(x, scope, dim), op)


def _own_sum(x, scope: Scope, dim: int):
    if scope.members is None:
        return scatter_along(x, scope.axes, dim)
    if scope.partition is None:
        return reduce_rows(_own_rows(x, scope, dim), ReduceOp.SUM)
    return scatter_along(x, scope.axes, dim, among=scope.partition)


def _own_rows(x, scope: Scope, dim: int):
    """[n, ..., d/n, ...]: every member's value of this rank's slice."""
    if scope.members is not None and scope.partition is None:
        size = x.shape[dim] // scope.size
        return jax.lax.dynamic_slice_in_dim(member_rows(x, scope), scope.index() * size, size, dim + 1)
    pieces = jnp.stack(jnp.split(x, scope.size, axis=dim))
    groups = None if scope.members is None else scope.partition
    return exchange_along(pieces, scope.axes, 0, 0, among=groups)
