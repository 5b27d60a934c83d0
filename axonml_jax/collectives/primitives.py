"""JAX's communicating primitives over bound axes, along a dim, with checks of sizes and of varying types."""

import contextlib
import enum
import functools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.compat.order import manual_axes, mesh_around, platform_around, typed_axes
from axonml_jax.compat.varying_types import cast_to_varying, varying_axes
from axonml_jax.mesh.axes import BATCH_AXES, STAGES, AxisNames, as_axes

# --------------------------------------------------------------------------------------------------
# The reductions, the dtypes each is defined for, and each on a stack of rows held by one rank.
# --------------------------------------------------------------------------------------------------


class ReduceOp(enum.Enum):
    """The reductions of several ranks' values into one.

    SUM and AVERAGE are undefined on booleans, AVERAGE also on integers; MIN and MAX of booleans are their and and or.
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVERAGE = "average"


def check_op(name: str, op: ReduceOp, dtype) -> ReduceOp:
    """Return `op`, or refuse it where it has no meaning for `dtype`.

    Raises:
      TypeError: when `op` is no ReduceOp, or is undefined for the dtype; the message names the remedy.
    """
    if not isinstance(op, ReduceOp):
        raise TypeError(f"{name}: op is {op!r}, but it must be one of {', '.join(map(str, ReduceOp))}")
    if jnp.issubdtype(dtype, jnp.bool_) and op not in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(
            f"{name}: {op} of booleans is undefined: use ReduceOp.MAX (any rank), ReduceOp.MIN (every rank), "
            "or cast to int32 to count"
        )
    if op is ReduceOp.AVERAGE and jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{name}: {op} of {jnp.dtype(dtype).name} would be cut to an integer: cast to a floating dtype, "
            "or use ReduceOp.SUM and divide as you mean it"
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{name}: {op} of {jnp.dtype(dtype).name} is undefined: reduce its absolute value or its parts")
    return op


def reduce_rows(rows: jax.Array, op: ReduceOp) -> jax.Array:
    """Reduce the first dim: the dense meaning of every op, in the rows' own dtype."""
    if op is ReduceOp.MIN:
        return rows.min(axis=0)
    if op is ReduceOp.MAX:
        return rows.max(axis=0)
    if op is ReduceOp.PRODUCT:
        return rows.prod(axis=0, dtype=rows.dtype)
    total = rows.sum(axis=0, dtype=rows.dtype)
    return total / rows.shape[0] if op is ReduceOp.AVERAGE else total


def identity_of(op: ReduceOp, dtype):
    """The value that SUM, MIN or MAX ignores, which ranks outside a group contribute."""
    if op is ReduceOp.SUM:
        # -0.0 + x is x for every x, -0.0 included: adding 0.0 would lose the sign of a negative zero.
        return -0.0 if jnp.issubdtype(dtype, jnp.inexact) else 0
    if jnp.issubdtype(dtype, jnp.bool_):
        return op is ReduceOp.MIN
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.inf if op is ReduceOp.MIN else -jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.max if op is ReduceOp.MIN else limits.min


# --------------------------------------------------------------------------------------------------
# Checks of dims and positions that several collectives share, with the errors they raise.
# --------------------------------------------------------------------------------------------------


def checked_dim(name: str, dim: int, shape: Sequence[int]) -> int:
    """Counts `dim` from the front.

    Raises:
      ValueError: when the array has no such dim.
    """
    ndim = len(shape)
    if not -ndim <= dim < ndim:
        rule = f"it must be in {-ndim}..{ndim - 1}" if ndim else "a scalar has none: give it one with x[None]"
        raise ValueError(f"{name}: dim {dim} of shape {tuple(shape)} does not exist: {rule}")
    return dim % ndim


def require_divisible(name: str, shape: Sequence[int], dim: int, parts: int) -> None:
    """Refuse a shape whose `dim` does not split into `parts` equal parts.

    Raises:
      ValueError: naming the shape, the dim, the remainder and the remedy.
    """
    if shape[dim] % parts:
        padded = -(-shape[dim] // parts) * parts
        raise ValueError(
            f"{name}: dim {dim} of shape {tuple(shape)} does not split evenly over {parts} ranks "
            f"({shape[dim]} % {parts} = {shape[dim] % parts}): pad it to {padded} (jnp.pad) and cut the result, "
            "or choose a dim that divides"
        )


def checked_position(name: str, word: str, position: int, size: int) -> int:
    """Returns `position` where the group has it.

    Raises:
      ValueError: when it is outside 0..size-1.
    """
    if not 0 <= position < size:
        raise ValueError(
            f"{name}: {word}={position}, but the group has {size} ranks: {word} is a position in the group, "
            f"0..{size - 1}, not a rank of the world"
        )
    return position


# --------------------------------------------------------------------------------------------------
# Casting values to a varying type, in this floor's words: trees and axis names. `compat/varying_types.py` reads the
# types.
#
# With `check_vma=False` no value has a varying type: `varying_axes` is empty and `vary` changes nothing.
# --------------------------------------------------------------------------------------------------

T = TypeVar("T")


def vary(tree: T, axes: AxisNames) -> T:
    """Type every leaf of `tree` as varying over `axes`: costs nothing, may be repeated; its transpose sums over `axes`.

    Args:
      tree: a pytree of arrays, inside `shard_map`.
      axes: mesh axis names; those a leaf already varies over are skipped.
    """
    typed = typed_axes()  # an axis that vmap names has no varying type
    names = [axis for axis in as_axes(axes) if axis in typed]

    def cast(x):
        missing = tuple(axis for axis in names if axis not in varying_axes(x))
        return cast_to_varying(x, missing) if missing else x

    return jax.tree.map(cast, tree)


def vary_like(x, like):
    """`x` typed as varying over at least the axes that `like` varies over."""
    return vary(x, tuple(varying_axes(like)))


def types_are_checked(axis: str) -> bool:
    """Whether this `shard_map` over `axis` runs with `check_vma=True`: there a rank's own index varies."""
    return bool(varying_axes(jax.lax.axis_index(axis)))


# --------------------------------------------------------------------------------------------------
# Over which ranks one microbatch is split, as the code around a model says it: for layers that join values of all
# tokens.
# --------------------------------------------------------------------------------------------------

JOINS = "joins_ranks"
"""The class attribute, True, of a module that asks for `joined_ranks`."""

# Known to JAX: a function under an inner `jax.jit` that was traced over some axes is traced anew over others.
_JOINED = jax.make_user_context(None)


@contextlib.contextmanager
def joined_over(axes: tuple[str, ...]) -> Iterator[None]:
    """Context in which `joined_ranks` are those along `axes`, of which some may not be bound."""
    with _JOINED(axes):
        yield


def joined_ranks() -> tuple[str, ...]:
    """The axes over which this code's microbatch is split among ranks that train one model; none outside `shard_map`.

    Inside `shard_map` without `joined_over`, the bound ones of the library's axes that split rows or positions.
    """
    if (axes := _JOINED.value) is None:
        there = manual_axes()
        return tuple(axis for axis in (*BATCH_AXES, "context") if axis in there)
    return tuple(axis for axis in axes if _is_bound(axis))


def _is_bound(axis: str) -> bool:
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# An all-to-all of parts of different lengths: what TPUs and GPUs have a collective for.
# --------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def exchange_ragged(x: jax.Array, axes: tuple[str, ...], sent: jax.Array, coming: jax.Array) -> jax.Array:
    """A tiled all-to-all of n equal parts along dim 0, of which only the first rows are filled, and travel.

    Args:
      x: [n * s, ...].
      axes: bound mesh axes of n ranks.
      sent: int32 [n], the filled rows of each part.
      coming: int32 [n], how many each rank sends here.

    Returns:
      [n * s, ...]; zeros in rows that are not filled. Its gradient is the exchange back.

    Communicates: one ragged all-to-all.
    """
    each = x.shape[0] // sent.size
    starts = jnp.arange(sent.size, dtype=jnp.int32) * each
    mine = jnp.full(sent.shape, jax.lax.axis_index(axes) * each, jnp.int32)
    empty = vary(jnp.zeros_like(x), axes)
    return jax.lax.ragged_all_to_all(x, empty, starts, sent, mine, coming, axis_name=axes)


def _forward(x, axes, sent, coming):
    return exchange_ragged(x, axes, sent, coming), (sent, coming)


def _backward(axes, sizes, grad):
    sent, coming = sizes
    none = np.zeros(sent.shape, jax.dtypes.float0)
    return exchange_ragged(grad, axes, coming, sent), none, none


exchange_ragged.defvjp(_forward, _backward)


# --------------------------------------------------------------------------------------------------
# JAX's primitives that join or split a dim over ranks. An array without elements is not sent: XLA refuses dims of size
# 0.
# --------------------------------------------------------------------------------------------------

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
    to = "invarying" if invarying and typed_axes().issuperset(axes) else "varying"
    return jax.lax.all_gather(x, axes, axis=dim, tiled=tiled, axis_index_groups=among, to=to)


def scatter_along(
    x: jax.Array, axes: tuple[str, ...], dim: int, *, tiled: bool = True, among: Among = None
) -> jax.Array:
    """`jax.lax.psum_scatter` of values that vary over `axes`: their sum, of which each rank keeps a part of `dim`.

    Args:
      x: [..., n*d, ...], or [..., n, d, ...] untiled.
      axes: bound mesh axes.
      dim: the dim that is split; untiled, the dim n that is removed.
      tiled: whether the result keeps the dim.
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


# --------------------------------------------------------------------------------------------------
# Thin wrappers of JAX's communicating primitives for higher floors: no groups, no gradient rules of their own.
#
# Inputs are typed as varying over the axes first, so that a replicated value may be passed in both `check_vma` modes.
# For collectives whose gradients count every rank's loss see `collectives/collectives.py`; for
# those of one step of training see `collectives/gradients.py`.
# --------------------------------------------------------------------------------------------------


def axis_size(axes: AxisNames) -> int:
    """The number of ranks along `axes`, a Python integer: the product of their sizes."""
    return int(jax.lax.axis_size(as_axes(axes)))


def axis_index(axes: AxisNames) -> jax.Array:
    """This rank's position along `axes`, the first axis slowest; an int32 scalar that varies over `axes`."""
    return jnp.asarray(jax.lax.axis_index(as_axes(axes)))


def sum_over(x: jax.Array, axes: AxisNames) -> jax.Array:
    """The sum of x over `axes`, typed as the same on every rank. Communicates: one all-reduce."""
    return jax.lax.psum(vary(x, axes), as_axes(axes))


def max_over(x: jax.Array, axes: AxisNames, *, nan: bool = True) -> jax.Array:
    """The element-wise maximum of x over `axes`, typed as the same on every rank. Communicates: one all-reduce.

    It has no gradient (JAX defines none for `pmax`): pass it through `jax.lax.stop_gradient`, or use `all_reduce_max`.

    Args:
      x: numbers.
      axes: mesh axes.
      nan: whether a NaN on any rank is the result, as of `jnp.max`; False: it may vanish (`extreme_along`), which does no harm
        where what follows is NaN all the same, and spares a pass.
    """
    return extreme_along(vary(x, axes), as_axes(axes), ReduceOp.MAX, nan=nan)


def min_over(x: jax.Array, axes: AxisNames) -> jax.Array:
    """The element-wise minimum of x over `axes`, typed as the same on every rank. Communicates: one all-reduce.

    A NaN on any rank is the result, as of `jnp.min`. It has no gradient (JAX defines none for `pmin`): pass it through
    `jax.lax.stop_gradient`, or use `all_reduce_min`.
    """
    return extreme_along(vary(x, axes), as_axes(axes), ReduceOp.MIN)


def extreme_along(
    x: jax.Array, axes: tuple[str, ...], op: ReduceOp, among: Among = None, *, nan: bool = True
) -> jax.Array:
    """`jax.lax.pmax` or `pmin` in which a NaN is the result.

    XLA:CPU's all-reduce leaves NaN out: the maximum of NaN alone is -inf there. So floating numbers travel as integers in the
    same order, in which NaN is the largest, or the smallest (as many bytes; 16 bits and fewer as 32).

    Args:
      x: numbers or truth values.
      axes: bound mesh axes.
      op: `ReduceOp.MAX` or MIN.
      among: groups of ranks.
      nan: False leaves NaN to the backend.

    Communicates: one all-reduce.
    """
    reduce = jax.lax.pmin if op is ReduceOp.MIN else jax.lax.pmax
    if not nan or not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, axes, axis_index_groups=among)
    wide = x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
    limits = jnp.iinfo(f"int{8 * wide.dtype.itemsize}")
    # The bits of floats are in their order as integers, those of negative ones in the opposite order; both ends are NaN.
    ordered = lambda bits: jnp.where(bits < 0, bits ^ limits.max, bits)
    number = ordered(jax.lax.bitcast_convert_type(wide, limits.dtype))
    joined = reduce(
        jnp.where(jnp.isnan(wide), limits.min if op is ReduceOp.MIN else limits.max, number),
        axes,
        axis_index_groups=among,
    )
    return jax.lax.bitcast_convert_type(ordered(joined), wide.dtype).astype(x.dtype)


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
    in_order = tuple(name for name in mesh_around().axis_names if name in names)
    # JAX's ppermute counts positions in the mesh's order of axes, whatever order they are given in.
    perm = [tuple(_recounted(position, names, in_order) for position in pair) for pair in pairs]
    return jax.lax.ppermute(vary(x, names), in_order, perm)


def _among_stages(names: tuple[str, ...]) -> bool:
    """Whether this code may be in a branch that ranks of other stages do not take, on CPU."""
    bound = STAGES in manual_axes() and STAGES not in names
    return bound and axis_size(STAGES) > 1 and platform_around() == "cpu"


def _picked(x: jax.Array, names: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """The result of `shift`, picked from an all-gather of every rank's x."""
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


# --------------------------------------------------------------------------------------------------
# Which of a layer's mesh axes are bound here: inside `shard_map` over them a layer sees shards, elsewhere whole arrays.
# --------------------------------------------------------------------------------------------------


def bound(axes: AxisNames) -> tuple[str, ...]:
    """The axes, among `axes`, over which this code runs inside `shard_map`.

    An axis that `shard_map` leaves to the partitioner (partial-manual) is not bound, nor is one that only `vmap` names.

    >>> bound("tensor")
    ()
    """
    manual = manual_axes()
    return tuple(axis for axis in as_axes(axes) if axis in manual)


def degree(axes: AxisNames) -> int:
    """The number of parts into which bound axes split a dim: the product of their sizes."""
    names = bound(axes)
    return axis_size(names) if names else 1


def vary_alike(tree):
    """`tree` with every leaf typed as varying over the axes that any leaf varies over (nothing with `check_vma=False`)."""
    axes = frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(tree)))
    return vary(tree, tuple(sorted(axes)))
