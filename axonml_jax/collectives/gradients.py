"""Gradients summed over ranks: several leaves as one reduction, pairs of a forward and its backward, buckets, synchronizers."""

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from axonml_jax.base import member
from axonml_jax.collectives.collectives import Group, Scope, all_reduce_mean, reduced, run_collective
from axonml_jax.collectives.primitives import (
    ReduceOp,
    check_op,
    exchange_along,
    gather_along,
    require_divisible,
    scatter_along,
    vary,
)
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.mesh.axes import AxisNames, as_axes

# --------------------------------------------------------------------------------------------------
# Several leaves summed over mesh axes as one reduction, with or without a flat copy; traced, no gradient rules.
# --------------------------------------------------------------------------------------------------

CommHook = Callable[[jax.Array, tuple[str, ...]], jax.Array]
"""`hook(flat, axes) -> reduced`: takes a bucket's flat array, returns its sum over `axes`, shaped alike."""


def all_reduce_leaves(
    leaves: Sequence[jax.Array], axes: AxisNames, *, flat: bool, comm_dtype=None, comm_hook: CommHook | None = None
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
    """Splits a dim into n parts along a new dim 0: [..., n*d, ...] -> [n, ..., d, ...]."""
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


# --------------------------------------------------------------------------------------------------
# Which gradients are reduced together: buckets filled in the order gradients become ready, nothing ever dropped.
# --------------------------------------------------------------------------------------------------

DEFAULT_BUCKET_SIZE = 25_000_000
"""Elements per bucket, as in AxonML's synchronizer (DDP's `bucket_size_mb` counts MiB)."""


class GradSyncStrategy(enum.Enum):
    """When gradients are averaged over the ranks.

    SYNCHRONOUS: after the last gradient is there. OVERLAPPED: each bucket as soon as it is full, while later gradients
    are still being computed. NO_SYNC: not at all; every rank keeps its own.
    """

    SYNCHRONOUS = "synchronous"
    OVERLAPPED = "overlapped"
    NO_SYNC = "no_sync"

    @classmethod
    def _missing_(cls, value: object) -> "GradSyncStrategy | None":
        return member(cls, "sync_strategy", value)


def assign_buckets(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Fill buckets with consecutive leaves, in the order given.

    Args:
      sizes: elements of each leaf, in the order in which they become ready (the last layer's first).
      capacity: elements that a bucket holds; a leaf larger than that gets a bucket of its own.

    Returns:
      Indices into `sizes` per bucket; every leaf is in exactly one, leaves of size 0 too.

    Raises:
      ValueError: when the capacity is not positive.

    >>> assign_buckets([3, 4, 10, 1, 2], capacity=7)
    [[0, 1], [2], [3, 4]]
    """
    _check_capacity(capacity)
    buckets: list[list[int]] = []
    room = -1
    for index, size in enumerate(sizes):
        if not buckets or size > room:
            buckets.append([])
            room = capacity
        buckets[-1].append(index)
        room -= size
    return buckets


def _check_capacity(capacity: int) -> None:
    if capacity <= 0:
        raise ValueError(f"a bucket's capacity is a positive number of elements, not {capacity!r}")


class GradientBucket:
    """Gradients that travel as one flat array per dtype.

    Args:
      capacity: elements it holds; a first gradient larger than that is taken nevertheless, alone.

    Raises:
      ValueError: when the capacity is not positive.

    >>> bucket = GradientBucket(capacity=4)
    >>> bucket.add(jnp.zeros((3,))), bucket.add(jnp.zeros((2,))), bucket.full
    (True, False, False)
    """

    def __init__(self, capacity: int):
        _check_capacity(capacity)
        self.capacity = capacity
        self._gradients: list[jax.Array] = []

    def __len__(self) -> int:
        return len(self._gradients)

    @property
    def size(self) -> int:
        """Elements it holds now."""
        return sum(gradient.size for gradient in self._gradients)

    @property
    def full(self) -> bool:
        """Whether not one more element fits."""
        return self.size >= self.capacity

    def add(self, gradient: jax.Array) -> bool:
        """Take a gradient if it fits.

        Returns:
          True when taken; False when it does not fit, and then the bucket is unchanged and the gradient still the
          caller's: reduce and clear this bucket, or open another.
        """
        gradient = jnp.asarray(gradient)
        if self._gradients and self.size + gradient.size > self.capacity:
            return False
        self._gradients.append(gradient)
        return True

    def flat(self) -> list[jax.Array]:
        """The arrays that are communicated: one [elements] array per dtype, dtypes in order of first appearance."""
        return [jnp.concatenate([self._gradients[i].ravel() for i in indices]) for indices in self._by_dtype()]

    def extract(self, flat: Sequence[jax.Array] | None = None) -> list[jax.Array]:
        """The gradients in the order added, each with its shape.

        Args:
          flat: arrays laid out as `flat()` gave them, such as their averages; None for the gradients as added.

        Raises:
          ValueError: when `flat` does not have that layout.
        """
        if flat is None:
            return list(self._gradients)
        groups = self._by_dtype()
        expected = [(sum(self._gradients[i].size for i in indices),) for indices in groups]
        if [array.shape for array in flat] != expected:
            raise ValueError(f"extract got shapes {[array.shape for array in flat]}, but flat() has {expected}")
        gradients = list(self._gradients)
        for indices, array in zip(groups, flat, strict=True):
            ends = np.cumsum([self._gradients[i].size for i in indices])[:-1]
            for i, part in zip(indices, jnp.split(array, ends), strict=True):
                gradients[i] = part.reshape(self._gradients[i].shape)
        return gradients

    def clear(self) -> None:
        """Forget the gradients; the capacity stays."""
        self._gradients = []

    def _by_dtype(self) -> list[list[int]]:
        groups: dict[np.dtype, list[int]] = {}
        for i, gradient in enumerate(self._gradients):
            groups.setdefault(jnp.dtype(gradient.dtype), []).append(i)
        return list(groups.values())


# --------------------------------------------------------------------------------------------------
# Gradient-correct pairs: a forward with the backward that makes a step of training right in both `check_vma` modes.
#
# | function | forward | backward |
# | --- | --- | --- |
# | `copy_to` | identity | sum over the axes |
# | `reduce_from` | sum over the axes | identity |
# | `gather_from` | concatenate the shards | own slice |
# | `split_to` | own slice | concatenate the shards |
#
# The value on the replicated side is typed invarying, on the other side varying. These are Megatron's f and g operators
# (Shoeybi et al. 2019) and their gather and scatter forms. A bare `psum` is no substitute: with `check_vma=False` its
# transpose sums again (docs/adr/0002).
# --------------------------------------------------------------------------------------------------


def copy_to(x: jax.Array, axes: AxisNames) -> jax.Array:
    """Read a replicated value on every rank of `axes`; its gradient is the sum of the ranks' gradients.

    Communicates: nothing forward, one all-reduce of x backward.
    """
    return _copy_to(x, as_axes(axes))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copy_to(x, axes):
    return vary(x, axes)


_copy_to.defvjp(lambda x, axes: (_copy_to(x, axes), None), lambda axes, _, ct: (_reduce_from(ct, axes),))


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
    lambda axes, _, ct: (_copy_to(ct, axes),),
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
    """This rank's slice of `x` along `dim` (no gradient rule of its own)."""
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
    lambda axes, dim, _, ct: (_split_to(ct, axes, dim),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _split_to(x, axes, dim):
    return own_slice(x, axes, dim)


_split_to.defvjp(
    lambda x, axes, dim: (_split_to(x, axes, dim), None),
    lambda axes, dim, _, ct: (_gather_from(ct, axes, dim),),
)


def zeros_like_varying(x: jax.Array, dtype=None) -> jax.Array:
    """Zeros of x's shape that are typed as varying like x: the start of an accumulator inside `shard_map`."""
    return vary(jnp.zeros(x.shape, dtype or x.dtype), tuple(varying_axes(x)))


# --------------------------------------------------------------------------------------------------
# Gradients averaged over a group after the backward pass, leaf by leaf.
# --------------------------------------------------------------------------------------------------


def sync_gradient(gradient: ArrayLike, group: Group) -> jax.Array:
    """The mean of one gradient over the group's ranks; traced, ranks outside the group keep theirs.

    Communicates: one all-reduce.
    """
    return all_reduce_mean(gradient, group)


def sync_gradients(gradients, group: Group):
    """The mean of every gradient over the group's ranks.

    Args:
      gradients: a pytree of floating arrays; None leaves (frozen parameters) stay None.
      group: the ranks that take part; axis names inside `shard_map`.

    Returns:
      A pytree of the same structure; traced, ranks outside the group keep their gradients.

    Raises:
      TypeError: when leaves have a dtype that has no mean; all of them are named by path.

    Communicates: one all-reduce per leaf, none depending on another.
    """
    _check_floating(gradients)
    return run_collective("sync_gradients", _averaged, gradients, group)


def _averaged(gradients, scope: Scope, name: str):
    return jax.tree.map(lambda leaf: reduced(leaf, scope, name, ReduceOp.AVERAGE), gradients)


def _check_floating(gradients) -> None:
    offenders = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        try:
            check_op("sync_gradients", ReduceOp.AVERAGE, jax.numpy.result_type(leaf))
        except TypeError:
            offenders.append(f"  {jax.tree_util.keystr(path)}: {jax.numpy.result_type(leaf).name}")
    if offenders:
        raise TypeError(
            "sync_gradients: these leaves have no mean over ranks:\n"
            + "\n".join(offenders)
            + "\ncast them to a floating dtype, or leave them out (buffers are no gradients)"
        )


# --------------------------------------------------------------------------------------------------
# `GradientSynchronizer`: averages gradients handed to it one by one, bucket after bucket, traced or eager.
# --------------------------------------------------------------------------------------------------


class GradientSynchronizer:
    """Collects a step's gradients in the order they become ready and averages them over a group.

    Every rank adds gradients of the same shapes in the same order.

    Args:
      group: the ranks to average over; axis names inside `shard_map`.
      strategy: when. OVERLAPPED dispatches a bucket's reduction as soon as the bucket is full or the next gradient does
        not fit, without waiting for it: later gradients are computed meanwhile (ranks that are threads meet there).
      bucket_size: elements per bucket.

    Example:
      >>> synchronizer = GradientSynchronizer(group)           # doctest: +SKIP
      >>> synchronizer.prepare(len(gradients))                 # doctest: +SKIP
      >>> for i in reversed(range(len(gradients))):            # doctest: +SKIP
      ...     synchronizer.add_gradient(i, gradients[i])
      >>> synchronizer.sync_all()                              # doctest: +SKIP
      >>> gradients = synchronizer.results()                   # doctest: +SKIP
    """

    def __init__(
        self,
        group: Group,
        strategy: GradSyncStrategy = GradSyncStrategy.SYNCHRONOUS,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
    ):
        self.group = group
        self.strategy = GradSyncStrategy(strategy)
        self.bucket_size = bucket_size
        self._results: list[jax.Array | None] = []
        self._synced = False
        self.clear()

    def prepare(self, num_gradients: int) -> None:
        """Begin a step that has this many gradients; what an earlier step left is forgotten."""
        self.clear()
        self._results = [None] * num_gradients

    def add_gradient(self, index: int, gradient: jax.Array) -> None:
        """Hand over gradient `index` of 0..num_gradients-1, in the order gradients become ready.

        Raises:
          ValueError: when the index was not prepared or was added before.
        """
        if not 0 <= index < len(self._results):
            raise ValueError(f"gradient {index} was not prepared: prepare({len(self._results)}) allows 0..n-1")
        if index in self._added or self._synced:
            raise ValueError(f"gradient {index} came twice, or after sync_all: call prepare() to begin a new step")
        self._added.add(index)
        if self._num_reduced == len(self._buckets) or not self._buckets[-1].add(gradient):
            self._reduce_early()
            self._buckets.append(GradientBucket(self.bucket_size))
            self._indices.append([])
            self._buckets[-1].add(gradient)
        self._indices[-1].append(index)
        if self._buckets[-1].full:
            self._reduce_early()

    def sync_all(self) -> None:
        """Average what has not been averaged yet, and make `results` available.

        Raises:
          ValueError: when gradients are missing; all of them are named.
        """
        missing = [i for i in range(len(self._results)) if i not in self._added]
        if missing:
            raise ValueError(
                f"gradients {missing} of {len(self._results)} were not added: an unused parameter's gradient is zeros, "
                "add those, so that every rank reduces the same buckets"
            )
        for position in range(self._num_reduced, len(self._buckets)):
            self._reduce(position)
        self._synced = True

    def results(self) -> list[jax.Array]:
        """The gradients by index: averages, or with NO_SYNC this rank's own.

        Raises:
          ValueError: before `sync_all`.
        """
        if not self._synced:
            raise ValueError("results are available only after sync_all()")
        return [result for result in self._results if result is not None]

    def clear(self) -> None:
        """Forget every gradient, bucket and result."""
        self._buckets: list[GradientBucket] = []
        self._indices: list[list[int]] = []
        self._added: set[int] = set()
        self._num_reduced = 0
        self._results = []
        self._synced = False

    @property
    def num_buckets(self) -> int:
        """Buckets opened since `prepare`."""
        return len(self._buckets)

    def _reduce_early(self) -> None:
        if self.strategy is GradSyncStrategy.OVERLAPPED and self._num_reduced < len(self._buckets):
            self._reduce(len(self._buckets) - 1)

    def _reduce(self, position: int) -> None:
        bucket = self._buckets[position]
        if self.strategy is GradSyncStrategy.NO_SYNC:
            averages = bucket.extract()
        else:
            averages = bucket.extract(sync_gradients(bucket.flat(), self.group))
        bucket.clear()
        for index, average in zip(self._indices[position], averages, strict=True):
            self._results[index] = average
        self._num_reduced = position + 1


# --------------------------------------------------------------------------------------------------
# A gradient that knows over which axes it is still to be summed, so that a sum missed or made twice is an error.
# --------------------------------------------------------------------------------------------------


class SumError(TypeError):
    """Raised in tracing when a gradient is summed over an axis twice or never, or is added to one that lacks other sums."""


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Partial:
    """One rank's part of a gradient.

    `lacking` is static: it costs nothing in a program, loops carry it, and it is known with `check_vma=False` too, where arrays
    have no varying type.

    Attributes:
      value: the array.
      lacking: the axes of a plan over which ranks' parts are still to be summed.

    >>> one = Partial(jnp.ones(2), frozenset({"data"}))
    >>> one.summed("data", one.value * 8).taken().tolist()
    [8.0, 8.0]
    >>> one.taken()
    Traceback (most recent call last):
    axonml_jax.collectives.gradients.SumError: a gradient lacks sums over ['data'], where sums over none may be lacking
    """

    value: jax.Array
    lacking: frozenset[AxisNames]

    def summed(self, axis: AxisNames, total: jax.Array) -> "Partial":
        """Replaces the value by its sum over an axis; where ranks have nothing to sum along it, `total` is the value itself.

        Raises:
          SumError: when no sum over the axis is lacking.
        """
        if axis not in self.lacking:
            raise SumError(f"a gradient is summed over {axis!r} already: it lacks sums over {_named(self.lacking)}")
        return Partial(total, self.lacking - {axis})

    def __add__(self, other: "Partial") -> "Partial":
        if not isinstance(other, Partial) or other.lacking != self.lacking:
            theirs = f"lacks sums over {_named(other.lacking)}" if isinstance(other, Partial) else "does not say"
            raise SumError(
                f"a gradient that lacks sums over {_named(self.lacking)} cannot be added to one that {theirs}"
            )
        return Partial(self.value + other.value, self.lacking)

    def taken(self, lacking: Collection[AxisNames] = ()) -> jax.Array:
        """Returns the array, which must lack exactly these sums.

        Raises:
          SumError: when it lacks others.
        """
        if self.lacking != frozenset(lacking):
            allowed = _named(frozenset(lacking))
            raise SumError(
                f"a gradient lacks sums over {_named(self.lacking)}, where sums over {allowed} may be lacking"
            )
        return self.value

    def map(self, fun: Callable[[jax.Array], jax.Array]) -> "Partial":
        """Applies a linear function, which sums over no axis, to the array."""
        return Partial(fun(self.value), self.lacking)

    def astype(self, dtype: Any) -> "Partial":
        """Casts the array."""
        return self.map(lambda value: value.astype(dtype))

    def tree_flatten(self) -> tuple:
        """The array as the child; what it lacks is static."""
        return (self.value,), self.lacking

    @classmethod
    def tree_unflatten(cls, lacking: frozenset[AxisNames], children: tuple) -> "Partial":
        """The inverse of `tree_flatten`."""
        return cls(children[0], lacking)


def _named(axes: frozenset[AxisNames]) -> str:
    return str(sorted(map(str, axes))) if axes else "none"
