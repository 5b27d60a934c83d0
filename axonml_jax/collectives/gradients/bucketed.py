"""Several leaves summed over mesh axes as one reduction, with or without a flat copy; traced, no gradient rules.

`buckets.py` decides which leaves go together; here they travel.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.along_dim import exchange_along, gather_along, scatter_along
from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.mesh.axes import AxisNames, as_axes

CommHook = Callable[[jax.Array, tuple[str, ...]], jax.Array]
"""`hook(flat, axes) -> reduced`: takes a bucket's flat array, returns its sum over `axes`, shaped alike."""


def all_reduce_leaves(
    leaves: Sequence[jax.Array],
    axes: AxisNames,
    *,
    flat: bool,
    comm_dtype=None,
    comm_hook: CommHook | None = None,
) -> list[jax.Array]:
    """Sum each leaf over `axes`, all of them as one reduction.

    Args:
      leaves: arrays of any shapes, inside `shard_map`.
      axes: the mesh axes to sum over; none at all returns the leaves as they are.
      flat: False reduces the leaves side by side without a copy: JAX writes one all-reduce per leaf, none depending on
        another, and XLA's combiner makes one launch of them. True ravels them into one array and reduces that: one
        launch, one copy each way. Leaves that differ in dtype or in the axes they vary over cannot share an array and
        get one each.
      comm_dtype: floating leaves travel in this dtype and return in their own.
      comm_hook: replaces the reduction of each flat array; it implies `flat`.

    Returns:
      The sums, in order, each with its leaf's shape and dtype, the same on every rank of `axes`.

    Raises:
      ValueError: when the hook returns another shape than it was given.

    Communicates: one all-reduce of all leaves, or what the hook does.
    """
    names = as_axes(axes)
    if not names or not leaves:
        return list(leaves)
    sent = [vary(_to_wire(leaf, comm_dtype), names) for leaf in leaves]
    as_one_array = flat or comm_hook is not None
    sums = _reduce_flat(sent, names, comm_hook or jax.lax.psum) if as_one_array else jax.lax.psum(sent, names)
    return [total.astype(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True)]


def gather_leaves(
    shards: Sequence[jax.Array],
    axes: AxisNames,
    dims: Sequence[int | None],
    *,
    flat: bool,
    among: Sequence[Sequence[int]] | None = None,
) -> list[jax.Array]:
    """Concatenate the ranks' shards of each leaf along its dim, all of them as one all-gather.

    Args:
      shards: this rank's parts, inside `shard_map`.
      axes: the mesh axes to gather over.
      dims: the split dim of each leaf; None: every rank has the whole leaf already.
      flat: False gathers the leaves side by side; True copies them into one array per dtype and gathers that.
      among: groups of positions along the axes, each of which gathers for itself; None: all together.

    Returns:
      The whole leaves, typed as varying over `axes`: their transpose is `scatter_sum_leaves`.

    Communicates: one all-gather of all leaves.
    """
    names = as_axes(axes)
    wholes = [vary(shard, names) for shard in shards]
    split = {i: dim for i, dim in enumerate(dims) if dim is not None}
    if not flat:
        for i, dim in split.items():
            wholes[i] = gather_along(wholes[i], names, dim, among=among)
        return wholes
    for group in flat_groups([wholes[i] for i in split]):
        indices = [list(split)[k] for k in group]
        one = jnp.concatenate([wholes[i].ravel() for i in indices])
        whole = gather_along(one, names, 0, tiled=False, among=among)
        ends = np.cumsum([wholes[i].size for i in indices])[:-1]
        for i, part in zip(indices, jnp.split(whole, ends, axis=1), strict=True):
            stacked = jnp.moveaxis(part.reshape(part.shape[0], *wholes[i].shape), 0, split[i])
            wholes[i] = jax.lax.collapse(stacked, split[i], split[i] + 2)
    return wholes


def scatter_sum_leaves(
    leaves: Sequence[jax.Array],
    axes: AxisNames,
    dims: Sequence[int | None],
    *,
    flat: bool,
    among: Sequence[Sequence[int]] | None = None,
) -> list[jax.Array]:
    """Sum each leaf over `axes` and keep this rank's part of its dim, all of them as one reduce-scatter.

    Args:
      leaves: whole leaves, inside `shard_map`.
      axes: the mesh axes to sum over, of total size n.
      dims: the dim of each leaf to split, which must divide by n; None: the rank keeps the whole sum.
      flat: False reduces the leaves side by side; True copies them into one array per dtype and reduces that.
      among: groups of n positions along the axes, each of which reduces what it splits for itself; None: all together.

    Communicates: one reduce-scatter of all leaves (and one all-reduce of those that are not split).
    """
    names = as_axes(axes)
    sums = [vary(leaf, names) for leaf in leaves]
    if kept := [i for i, dim in enumerate(dims) if dim is None]:
        for i, total in zip(kept, jax.lax.psum([sums[i] for i in kept], names), strict=True):
            sums[i] = total
    split = {i: dim for i, dim in enumerate(dims) if dim is not None}
    if not flat:
        for i, dim in split.items():
            sums[i] = scatter_along(sums[i], names, dim, among=among)
        return sums
    count = len(among[0]) if among else int(jax.lax.axis_size(names))
    for group in flat_groups([sums[i] for i in split]):
        indices = [list(split)[k] for k in group]
        parts = [parts_along(sums[i], split[i], count) for i in indices]
        whole = jnp.concatenate([part.reshape(count, -1) for part in parts], axis=1)
        total = scatter_along(whole, names, 0, tiled=False, among=among)
        ends = np.cumsum([part.size // count for part in parts])[:-1]
        for i, part, shard in zip(indices, parts, jnp.split(total, ends), strict=True):
            sums[i] = shard.reshape(part.shape[1:])
    return sums


def exchange_leaves(rows: Sequence[jax.Array], axes: AxisNames, *, flat: bool) -> list[jax.Array]:
    """Send row i of each array to the i-th rank, all of them as one all-to-all.

    Args:
      rows: [n, w] each, of any widths, inside `shard_map`; n ranks take part.
      axes: the mesh axes of the ranks.
      flat: False sends the arrays side by side; True copies them into one array per dtype and sends that.

    Returns:
      [n, w] each: row i came from the i-th rank.

    Communicates: one all-to-all of all arrays.
    """
    names = as_axes(axes)
    sent = [vary(each, names) for each in rows]
    if not flat:
        return [exchange_along(each, names, 0, 0) for each in sent]
    found: list = [None] * len(sent)
    for group in flat_groups(sent):
        whole = exchange_along(jnp.concatenate([sent[i] for i in group], axis=1), names, 0, 0)
        ends = np.cumsum([sent[i].shape[1] for i in group])[:-1]
        for i, part in zip(group, jnp.split(whole, ends, axis=1), strict=True):
            found[i] = part
    return found


def parts_along(leaf: jax.Array, dim: int, count: int) -> jax.Array:
    """[..., n*d, ...] as its n parts: [n, ..., d, ...]."""
    shape = leaf.shape
    return jnp.moveaxis(leaf.reshape(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]), dim, 0)


def _to_wire(leaf, comm_dtype):
    leaf = jnp.asarray(leaf)
    if comm_dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return leaf.astype(comm_dtype)


def _reduce_flat(leaves, axes, reduce: CommHook) -> list[jax.Array]:
    sums: list = [None] * len(leaves)
    for indices in flat_groups(leaves):
        whole = jnp.concatenate([leaves[i].ravel() for i in indices])
        total = reduce(whole, axes)
        if (shape := getattr(total, "shape", None)) != whole.shape:
            what = f"{total!r}" if shape is None else f"shape {shape}"
            raise ValueError(
                f"comm_hook returned {what} for a flat bucket of shape {whole.shape} "
                f"(leaves {[leaves[i].shape for i in indices]}): it must return the reduced array, shaped alike"
            )
        ends = np.cumsum([leaves[i].size for i in indices])[:-1]
        for i, part in zip(indices, jnp.split(total, ends), strict=True):
            sums[i] = part.reshape(leaves[i].shape)
    return sums


def flat_groups(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """Indices of the leaves that may share one flat array: those of one dtype that vary over the same axes."""
    groups: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((jnp.dtype(leaf.dtype), varying_axes(leaf)), []).append(i)
    return list(groups.values())
