"""Collectives with one source: `broadcast` gives every rank its value, `scatter` one slice each."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from axonml_jax.collectives.dim_checks import checked_dim, checked_position, require_divisible
from axonml_jax.collectives.ops import ReduceOp, identity_of
from axonml_jax.collectives.reduce import summed
from axonml_jax.collectives.reduce_scatter import own_reduction
from axonml_jax.collectives.scope import Group, Scope, run_collective


def broadcast(x: ArrayLike, group: Group, src: int = 0) -> jax.Array:
    """Give every rank the value of the rank at position `src`, bit for bit.

    Args:
      x: this rank's value, of any shape and dtype, the same on every rank; only that of `src` is read.
      group: the ranks that take part; axis names inside `shard_map`.
      src: the source's position in the group.

    Returns:
      The source's value; traced, ranks outside the group keep their x. With `check_vma=True` it is typed as varying
      (see `collectives`). The source's gradient is the sum of all ranks' cotangents, the others' is zero.

    Raises:
      ValueError: when the position does not exist.

    Communicates: one all-reduce of x's bits as unsigned integers (those of 16-bit floats in 32, which NCCL can add).
    """
    return run_collective(f"broadcast(src={src})", broadcasted, x, group, src=src)


def broadcasted(x: jax.Array, scope: Scope, name: str, src: int) -> jax.Array:
    """`broadcast` as traced code over a scope."""
    checked_position(name, "src", src, scope.size)
    return scope.only_members(_exactly_from(x, scope, src), x)


def scatter(x: ArrayLike, group: Group, src: int = 0, dim: int = 0) -> jax.Array:
    """Split the value of the rank at position `src` along `dim` and give every rank one slice, in the group's order.

    Args:
      x: [..., d, ...], the same shape on every rank; only that of `src` is read. d must divide by n.
      group: the n ranks that take part; axis names inside `shard_map`.
      src: the source's position in the group.
      dim: the dim that is split, counted from either end.

    Returns:
      [..., d/n, ...]; traced, ranks outside the group get zeros. The source's gradient is the concatenation of all
      ranks' cotangents, the others' is zero.

    Raises:
      ValueError: when the position or the dim does not exist, or the dim does not divide.

    Communicates: one reduce-scatter.
    """
    return run_collective(f"scatter(src={src}, dim={dim})", _scatter, x, group, src=src, dim=dim)


def _scatter(x, scope: Scope, name: str, src: int, dim: int):
    checked_position(name, "src", src, scope.size)
    axis = checked_dim(name, dim, x.shape)
    require_divisible(name, x.shape, axis, scope.size)
    sent = _only_from(src, x, scope)
    return scope.only_members(own_reduction(sent, scope, ReduceOp.SUM, axis).astype(x.dtype))


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _exactly_from(x, scope: Scope, src: int):
    """The source's value by a sum of bits: a sum of floats may flush denormals and lose the sign of a zero."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_exactly_from(x.real, scope, src), _exactly_from(x.imag, scope, src))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return summed(_only_from(src, x, scope), scope).astype(x.dtype)
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    wire = jnp.uint32 if bits == jnp.uint16 else bits
    sent = jax.lax.bitcast_convert_type(x, bits).astype(wire)
    return jax.lax.bitcast_convert_type(summed(_only_from(src, sent, scope), scope).astype(bits), x.dtype)


@_exactly_from.defjvp
def _exactly_from_jvp(scope, src, primals, tangents):
    (x,), (tangent,) = primals, tangents
    return _exactly_from(x, scope, src), summed(_only_from(src, tangent, scope), scope)


def _only_from(src: int, x, scope: Scope):
    """x on `src` and the neutral value of a sum elsewhere; booleans travel as uint8."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    return jnp.where(scope.index() == src, x, jnp.asarray(identity_of(ReduceOp.SUM, x.dtype), x.dtype))
