"""JAX's primitives that join or split a dim over ranks. An array without elements is not sent: XLA refuses dims of size 0."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from axonml_jax.collectives.varying import vary, varying_axes

Among = Sequence[Sequence[int]] | None
"""Positions along the axes in groups, each of which communicates for itself; None: all together."""


def gather_along(
    x: jax.Array, axes: tuple[str, ...], dim: int, *, tiled: bool = True, among: Among = None, invarying: bool = False
) -> jax.Array:
    """`jax.lax.all_gather` of values that vary over `axes`, along `dim`.

    Args:
      x: [..., d, ...], this rank's part.
      axes: bound mesh axes.
      dim: where the n parts are joined; untiled, a new dim.
      tiled: True gives [..., n*d, ...], False [..., n, d, ...].
      among: groups of ranks.
      invarying: whether the result is typed as the same on every rank.

    Communicates: one all-gather.
    """
    if not x.size:
        return _empty(x, axes, _joined(x.shape, dim, _count(axes, among), tiled), invarying)
    to = "invarying" if invarying else "varying"
    return jax.lax.all_gather(x, axes, axis=dim, tiled=tiled, axis_index_groups=among, to=to)


def scatter_along(
    x: jax.Array, axes: tuple[str, ...], dim: int, *, tiled: bool = True, among: Among = None
) -> jax.Array:
    """`jax.lax.psum_scatter` of values that vary over `axes`: their sum, of which each rank keeps a part of `dim`.

    Args:
      x: [..., n*d, ...], or [..., n, d, ...] untiled.
      axes: bound mesh axes.
      dim: the dim that is split; untiled, the one that goes.
      tiled: whether the dim stays.
      among: groups of ranks.

    Communicates: one reduce-scatter.
    """
    if not x.size:
        kept = (x.shape[dim] // _count(axes, among),) if tiled else ()
        return _empty(x, axes, (*x.shape[:dim], *kept, *x.shape[dim + 1 :]))
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=tiled, axis_index_groups=among)


def exchange_along(x: jax.Array, axes: tuple[str, ...], split: int, concat: int, *, among: Among = None) -> jax.Array:
    """Tiled `jax.lax.all_to_all` of values that vary over `axes`.

    Args:
      x: [..., s, ..., c, ...].
      axes: bound mesh axes.
      split: the dim s, of which each rank gets a part.
      concat: the dim c, along which what arrives is joined; it may be `split`.
      among: groups of ranks.

    Communicates: one all-to-all.
    """
    if not x.size:
        count, shape = _count(axes, among), list(x.shape)
        shape[split] //= count
        return _empty(x, axes, _joined(shape, concat, count, tiled=True))
    return jax.lax.all_to_all(x, axes, split, concat, tiled=True, axis_index_groups=among)


def _count(axes: tuple[str, ...], among: Among) -> int:
    return len(among[0]) if among else int(jax.lax.axis_size(axes))


def _joined(shape: Sequence[int], dim: int, count: int, tiled: bool) -> tuple[int, ...]:
    return (*shape[:dim], *((count * shape[dim],) if tiled else (count, shape[dim])), *shape[dim + 1 :])


def _empty(x: jax.Array, axes: tuple[str, ...], shape: Sequence[int], invarying: bool = False) -> jax.Array:
    over = varying_axes(x) - set(axes) if invarying else varying_axes(x) | set(axes)
    return vary(jnp.zeros(shape, x.dtype), tuple(sorted(over)))
