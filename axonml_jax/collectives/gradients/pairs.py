"""Gradient-correct pairs: a forward with the backward that makes a step of training right in both `check_vma` modes.

| function | forward | backward |
| --- | --- | --- |
| `copy_to` | identity | sum over the axes |
| `reduce_from` | sum over the axes | identity |
| `gather_from` | concatenate the shards | own slice |
| `split_to` | own slice | concatenate the shards |

The value on the replicated side is typed invarying, on the other side varying. These are Megatron's f and g operators
(Shoeybi et al. 2019) and their gather and scatter forms. A bare `psum` is no substitute: with `check_vma=False` its
transpose sums again (docs/adr/0002).
"""

from functools import partial

import jax
import jax.numpy as jnp

from axonml_jax.collectives.along_dim import gather_along
from axonml_jax.collectives.dim_checks import require_divisible
from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.mesh.axes import AxisNames, as_axes


def copy_to(x: jax.Array, axes: AxisNames) -> jax.Array:
    """Read a replicated value on every rank of `axes`; its gradient is the sum of the ranks' gradients.

    Communicates: nothing forward, one all-reduce of x backward.
    """
    return _copy_to(x, as_axes(axes))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copy_to(x, axes):
    return vary(x, axes)


def _copy_to_backward(axes, _, ct):
    return (jax.lax.psum(ct, axes),)


_copy_to.defvjp(lambda x, axes: (vary(x, axes), None), _copy_to_backward)


def reduce_from(x: jax.Array, axes: AxisNames) -> jax.Array:
    """Sum the ranks' partial values into a replicated one; every rank's partial receives the whole gradient.

    Communicates: one all-reduce of x forward, nothing backward.
    """
    return _reduce_from(x, as_axes(axes))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduce_from(x, axes):
    return jax.lax.psum(vary(x, axes), axes)


_reduce_from.defvjp(
    lambda x, axes: (_reduce_from(x, axes), None),
    lambda axes, _, ct: (vary(ct, axes),),
)


def gather_from(x_shard: jax.Array, axes: AxisNames, dim: int = -1) -> jax.Array:
    """Concatenate the ranks' shards along `dim` into a replicated value; the backward takes the rank's own slice.

    Args:
      x_shard: [..., d/n, ...], this rank's part.
      axes: mesh axes of total size n.
      dim: the dim that is split.

    Returns:
      [..., d, ...], the same on every rank.

    Communicates: one all-gather forward, nothing backward.
    """
    return _gather_from(x_shard, as_axes(axes), dim % x_shard.ndim)


def split_to(x: jax.Array, axes: AxisNames, dim: int = -1) -> jax.Array:
    """Take the rank's own slice of a replicated value along `dim`; the backward concatenates the slices' gradients.

    Args:
      x: [..., d, ...], the same on every rank; d must divide by n.
      axes: mesh axes of total size n.
      dim: the dim to split.

    Returns:
      [..., d/n, ...].

    Raises:
      ValueError: when the dim does not divide.

    Communicates: nothing forward, one all-gather backward.
    """
    return _split_to(x, as_axes(axes), dim % x.ndim)


def own_slice(x: jax.Array, axes: AxisNames, dim: int) -> jax.Array:
    """The slice of `x` along `dim` that belongs to this rank of `axes` (no gradient rule of its own)."""
    names = as_axes(axes)
    count = jax.lax.axis_size(names)
    require_divisible(f"split over {names}", x.shape, dim, count)
    size = x.shape[dim] // count
    return jax.lax.dynamic_slice_in_dim(vary(x, names), jax.lax.axis_index(names) * size, size, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_from(x, axes, dim):
    return gather_along(vary(x, axes), axes, dim, invarying=True)


_gather_from.defvjp(
    lambda x, axes, dim: (_gather_from(x, axes, dim), None),
    lambda axes, dim, _, ct: (own_slice(ct, axes, dim),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _split_to(x, axes, dim):
    return own_slice(x, axes, dim)


_split_to.defvjp(
    lambda x, axes, dim: (own_slice(x, axes, dim), None),
    lambda axes, dim, _, ct: (gather_along(vary(ct, axes), axes, dim, invarying=True),),
)


def zeros_like_varying(x: jax.Array, dtype=None) -> jax.Array:
    """Zeros of x's shape that are typed as varying like x: the start of an accumulator inside `shard_map`."""
    return vary(jnp.zeros(x.shape, dtype or x.dtype), tuple(varying_axes(x)))
