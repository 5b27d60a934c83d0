"""`all_reduce`: one value from all ranks' values, on every rank."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from axonml_jax.collectives.gather import joined, member_rows
from axonml_jax.collectives.ops import ReduceOp, check_op, identity_of, reduce_rows
from axonml_jax.collectives.reduce_scatter import own_reduction
from axonml_jax.collectives.scope import Group, Scope, run_collective
from axonml_jax.collectives.varying import vary


def all_reduce(x: ArrayLike, group: Group, op: ReduceOp = ReduceOp.SUM) -> jax.Array:
    """Reduce x over the ranks, element by element; every rank gets the result.

    Args:
      x: this rank's value, of any shape, the same on every rank.
      group: the ranks that take part; axis names inside `shard_map`.
      op: the reduction.

    Returns:
      The reduced value, shaped and typed like x; traced, ranks outside the group keep their x. The value feeds every
      rank's own loss, and each loss counts: the gradient of SUM is the all-reduce of the cotangents, that of AVERAGE
      their mean, that of MIN, MAX and PRODUCT the dense reference's (ties share equally, products may hold zeros).
      With `check_vma=True` it is therefore typed as varying (see `collectives`).

    Raises:
      TypeError: when the op is undefined for the dtype (SUM of booleans, AVERAGE of integers, MIN of complex numbers).

    Communicates: one all-reduce; for PRODUCT an all-to-all and an all-gather, which together move the same bytes. The
    gradients of MIN and MAX communicate the number of ties too.
    """
    return run_collective(f"all_reduce(op={op})", reduced, x, group, op=op)


def reduced(x: jax.Array, scope: Scope, name: str, op: ReduceOp) -> jax.Array:
    """`all_reduce` as traced code over a scope."""
    check_op(name, op, x.dtype)
    return scope.only_members(_reduction(x, scope, op), x)


def all_reduce_sum(x: ArrayLike, group: Group) -> jax.Array:
    """`all_reduce` with SUM."""
    return all_reduce(x, group, ReduceOp.SUM)


def all_reduce_mean(x: ArrayLike, group: Group) -> jax.Array:
    """`all_reduce` with AVERAGE."""
    return all_reduce(x, group, ReduceOp.AVERAGE)


def all_reduce_min(x: ArrayLike, group: Group) -> jax.Array:
    """`all_reduce` with MIN."""
    return all_reduce(x, group, ReduceOp.MIN)


def all_reduce_max(x: ArrayLike, group: Group) -> jax.Array:
    """`all_reduce` with MAX."""
    return all_reduce(x, group, ReduceOp.MAX)


def all_reduce_product(x: ArrayLike, group: Group) -> jax.Array:
    """`all_reduce` with PRODUCT."""
    return all_reduce(x, group, ReduceOp.PRODUCT)


def _reduction(x, scope: Scope, op: ReduceOp):
    if op is ReduceOp.SUM:
        return summed(x, scope)
    if op is ReduceOp.AVERAGE:
        return summed(x, scope) / scope.size
    return _product(x, scope) if op is ReduceOp.PRODUCT else _extreme(x, scope, op)


def summed(x: jax.Array, scope: Scope) -> jax.Array:
    """The members' sum, traced and typed as varying; whatever comes out on ranks outside is to be masked.

    The casts make JAX's own transpose the all-reduce of the cotangents in both `check_vma` modes.
    """
    if scope.members is None:
        return vary(jax.lax.psum(x, scope.axes), scope.axes)
    # psum has no axis_index_groups with check_vma=True; then outsiders take part with zeros.
    if scope.partition is not None and not scope.types_are_checked:
        return jax.lax.psum(x, scope.axes, axis_index_groups=scope.partition)
    masked = scope.only_members(x, identity_of(ReduceOp.SUM, x.dtype))
    return vary(jax.lax.psum(masked, scope.axes), scope.axes)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extreme(x, scope: Scope, op: ReduceOp):
    """MIN or MAX over the members. JAX gives pmin and pmax no derivative; this one is linear, so that it transposes."""
    reduce = jax.lax.pmin if op is ReduceOp.MIN else jax.lax.pmax
    if scope.members is None:
        best = reduce(x, scope.axes)
    elif scope.partition is not None:
        best = reduce(x, scope.axes, axis_index_groups=scope.partition)
    else:
        best = reduce(scope.only_members(x, identity_of(op, x.dtype)), scope.axes)
    return vary(best, scope.axes)


@_extreme.defjvp
def _extreme_jvp(scope, op, primals, tangents):
    (x,), (tangent,) = primals, tangents
    best = _extreme(x, scope, op)
    attained = x == best
    ties = summed(attained.astype(jnp.int32), scope)
    return best, summed(jnp.where(attained, tangent, 0) / ties.astype(x.dtype), scope)


def _product(x, scope: Scope):
    """Each rank multiplies one slice of all values, then the slices are gathered: the traffic of a ring all-reduce."""
    if scope.members is not None and scope.partition is None:
        return reduce_rows(member_rows(x, scope), ReduceOp.PRODUCT)
    padding = -x.size % scope.size
    flat = jnp.pad(x.ravel(), (0, padding), constant_values=1)
    product = joined("all_reduce", own_reduction(flat, scope, ReduceOp.PRODUCT, 0), scope, 0)
    return product[: x.size].reshape(x.shape)
