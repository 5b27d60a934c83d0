"""Thin wrappers of JAX's communicating primitives for higher floors: no groups, no gradient rules of their own.

Inputs are typed as varying over the axes first, so that a replicated value may be passed in both `check_vma`
modes. For collectives whose gradients count every rank's loss see `reduce.py` and `gather.py`; for those of one step of
training see `pairs.py`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.along_dim import gather_along, scatter_along
from axonml_jax.collectives.dim_checks import require_divisible
from axonml_jax.collectives.varying import vary
from axonml_jax.compat.around import manual_axes, platform_around
from axonml_jax.mesh.axes import STAGES, AxisNames, as_axes


def axis_size(axes: AxisNames) -> int:
    """The number of ranks along `axes`, a Python integer: the product of their sizes."""
    return int(jax.lax.axis_size(as_axes(axes)))


def axis_index(axes: AxisNames) -> jax.Array:
    """This rank's position along `axes`, the first axis slowest; an int32 scalar that varies over `axes`."""
    return jnp.asarray(jax.lax.axis_index(as_axes(axes)))


def sum_over(x: jax.Array, axes: AxisNames) -> jax.Array:
    """The sum of x over `axes`, typed as the same on every rank. Communicates: one all-reduce."""
    return jax.lax.psum(vary(x, axes), as_axes(axes))


def max_over(x: jax.Array, axes: AxisNames) -> jax.Array:
    """The element-wise maximum of x over `axes`, typed as the same on every rank. Communicates: one all-reduce.

    It has no gradient (JAX defines none for `pmax`): pass it through `jax.lax.stop_gradient`, or use `all_reduce_max`.
    """
    return jax.lax.pmax(vary(x, axes), as_axes(axes))


def min_over(x: jax.Array, axes: AxisNames) -> jax.Array:
    """The element-wise minimum of x over `axes`, typed as the same on every rank. Communicates: one all-reduce.

    It has no gradient (JAX defines none for `pmin`): pass it through `jax.lax.stop_gradient`, or use `all_reduce_min`.
    """
    return jax.lax.pmin(vary(x, axes), as_axes(axes))


def scatter_sum(x: jax.Array, axes: AxisNames, dim: int = 0) -> jax.Array:
    """Sum x over `axes` and keep this rank's slice of `dim`. Communicates: one reduce-scatter.

    Args:
      x: [..., d, ...]; d must divide by n.
      axes: mesh axes of total size n, the first slowest.
      dim: the dim that is split, counted from either end.

    Returns:
      [..., d/n, ...], varying over `axes`. Its transpose is `gather_whole(..., invarying=False)`.

    Raises:
      ValueError: when the dim does not divide.
    """
    names, axis = as_axes(axes), dim % x.ndim
    require_divisible(f"scatter_sum over {names}", x.shape, axis, axis_size(names))
    return scatter_along(vary(x, names), names, axis)


def gather_whole(x_shard: jax.Array, axes: AxisNames, dim: int = 0, *, invarying: bool) -> jax.Array:
    """Concatenate the ranks' shards along `dim`. Communicates: one all-gather.

    Args:
      x_shard: [..., d/n, ...], this rank's part.
      axes: mesh axes of total size n, the first slowest.
      dim: the dim that is split, counted from either end.
      invarying: how the result is typed with `check_vma=True`. True: as the same on every rank, and then the transpose
        is an all-reduce and a slice; False: as varying, and then it is `scatter_sum`. With `check_vma=False` the
        transpose is `scatter_sum` either way.

    Returns:
      [..., d, ...].
    """
    names = as_axes(axes)
    return gather_along(vary(x_shard, names), names, dim % x_shard.ndim, invarying=invarying)


def swap_parts(x: jax.Array, axes: AxisNames) -> jax.Array:
    """Send part i of x [n, ...] to rank i of `axes`, and put what rank i sent in its place. Communicates: one all-to-all."""
    names = as_axes(axes)
    return jax.lax.all_to_all(vary(x, names), names, 0, 0, tiled=True)


def shift(x: jax.Array, axis: AxisNames, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Send x along `axis` from each pair's source to its target; a rank that receives nothing gets zeros.

    Args:
      x: the value every rank holds.
      axis: one mesh axis, or several that count as one, the first slowest.
      pairs: (source, target) positions on it; no source and no target twice.

    Returns:
      What this rank received, shaped like x. The transpose sends back along the reversed pairs.

    Communicates: one collective-permute. On CPU, within a pipeline, an all-gather: a stage is a branch that other ranks do not
    take, and a permute of XLA:CPU waits for all devices, whatever pairs it has.
    """
    names = as_axes(axis)
    if _among_stages(names):
        return _picked(x, names, pairs)
    in_order = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in names)
    # JAX's ppermute counts positions in the mesh's order of axes, whatever order they are given in.
    perm = [tuple(_recounted(position, names, in_order) for position in pair) for pair in pairs]
    return jax.lax.ppermute(vary(x, names), in_order, perm)


def _among_stages(names: tuple[str, ...]) -> bool:
    """Whether this may be a branch that ranks of other stages do not take, on CPU."""
    bound = STAGES in manual_axes() and STAGES not in names
    return bound and axis_size(STAGES) > 1 and platform_around() == "cpu"


def _picked(x: jax.Array, names: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """What `shift` gives, out of every rank's x."""
    sources = np.full(axis_size(names), -1, np.int32)
    for source, target in pairs:
        sources[target] = source
    own = jnp.asarray(sources)[axis_index(names)]
    came = jax.lax.dynamic_index_in_dim(gather_whole(x[None], names, invarying=False), own, keepdims=False)
    return jnp.where(own >= 0, came, jnp.zeros_like(came))


def _recounted(position: int, names: tuple[str, ...], in_order: tuple[str, ...]) -> int:
    """A position along `names` as the position of the same rank along the same axes `in_order`."""
    along = dict(zip(names, np.unravel_index(position, [axis_size(name) for name in names]), strict=True))
    return int(np.ravel_multi_index([along[name] for name in in_order], [axis_size(name) for name in in_order]))
