"""The public collectives, traced inside `shard_map` over axis names or called eagerly by the ranks of a group."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from axonml_jax.base import from_every_process, named_leaves, refuse_not_held
from axonml_jax.collectives.primitives import (
    ReduceOp,
    check_op,
    checked_dim,
    checked_position,
    exchange_along,
    extreme_along,
    gather_along,
    identity_of,
    reduce_rows,
    require_divisible,
    scatter_along,
    shift,
    types_are_checked,
    vary,
)
from axonml_jax.compat.order import manual_axes, mesh_around, no_mesh_around
from axonml_jax.mesh.axes import as_axes
from axonml_jax.mesh.simulate import bound_run_ahead
from axonml_jax.mesh.world import ProcessGroup

# --------------------------------------------------------------------------------------------------
# Over which ranks a collective runs, and in which context: traced inside `shard_map`, or eagerly per rank.
# --------------------------------------------------------------------------------------------------

Group: TypeAlias = ProcessGroup | str | tuple[str, ...] | list[str]
"""A process group, or (inside `shard_map` only) one mesh axis name or several that count as one, the first slowest."""


@dataclasses.dataclass(frozen=True)
class Scope:
    """The ranks of a traced collective: all along `axes`, or only the `members` among them.

    Attributes:
      axes: bound mesh axes, the first slowest.
      members: positions along the axes, in the group's order; None for all of them.
    """

    axes: tuple[str, ...]
    members: tuple[int, ...] | None = None

    @property
    def extent(self) -> int:
        """The number of ranks along the axes, outsiders included."""
        return int(jax.lax.axis_size(self.axes))

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return self.extent if self.members is None else len(self.members)

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the group's ranks along the axes, in the group's order."""
        return tuple(range(self.extent)) if self.members is None else self.members

    @property
    def partition(self) -> list[list[int]] | None:
        """All ranks in groups of one size, the members first, as `axis_index_groups` wants them; None if impossible."""
        assert self.members is not None
        if self.extent % self.size:
            return None
        others = [i for i in range(self.extent) if i not in self.members]
        return [list(self.members)] + [others[i : i + self.size] for i in range(0, len(others), self.size)]

    @property
    def types_are_checked(self) -> bool:
        """Whether the surrounding `shard_map` runs with `check_vma=True`."""
        return types_are_checked(self.axes[0])

    def index(self) -> jax.Array:
        """This rank's position in the group; 0 outside the group, to be masked by `inside`."""
        along = jnp.asarray(jax.lax.axis_index(self.axes))
        if self.members is None:
            return along
        table = [self.members.index(i) if i in self.members else 0 for i in range(self.extent)]
        return jnp.asarray(table)[along]

    def inside(self) -> jax.Array:
        """Whether this rank is a member, a traced boolean."""
        assert self.members is not None
        return (jax.lax.axis_index(self.axes) == jnp.asarray(self.members)).any()

    def only_members(self, result: jax.Array, otherwise: jax.Array | float = 0) -> jax.Array:
        """`result` on the group's ranks, `otherwise` outside; typed as varying over the axes."""
        result = vary(result, self.axes)
        if self.members is None:
            return result
        return jnp.where(self.inside(), result, jnp.asarray(otherwise, result.dtype))


Program = Callable[..., Any]
"""A collective as traced code: `program(x, scope, **options)` is this rank's result.

A module's own function with hashable options, so that the group finds an eager call's compiled program again.
"""


@no_mesh_around()
def run_collective(name: str, program: Program, x, group: Group, **options) -> Any:
    """Run `program` in the context at hand: traced where the group's axes are bound, else eagerly through the group.

    Args:
      name: the public function with what distinguishes the call; errors and the ranks' agreement check show it.
      program: what one rank computes.
      x: this rank's value, an array or a pytree of arrays.
      group: where to run it.
      **options: passed on to `program`, with `name`.

    Raises:
      ValueError: when axis names are given outside `shard_map`, or a traced value meets unbound axes.
    """
    refuse_not_held(named_leaves(x))
    x = jax.tree.map(jnp.asarray, x)
    scope = bound_scope(group)
    if scope is not None:
        return program(vary(x, scope.axes), scope, name=name, **options)
    eager = require_eager(name, group, x)
    return eager.run(partial(_on_sub_mesh, program, name=name, **options), x, name=name)


def _on_sub_mesh(program: Program, x, **options):
    return program(vary(x, ("data",)), Scope(("data",)), **options)


def require_eager(name: str, group: Group, x=None) -> ProcessGroup:
    """The process group of an eager call, or a ValueError saying why this cannot be one."""
    if isinstance(group, str | tuple | list):
        raise ValueError(
            f"{name}: axis names {as_axes(group)} were given where they are not bound: call it inside jax.shard_map "
            "over these axes (manual, not auto ones), or pass a ProcessGroup to use it eagerly, one value per rank"
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x)) or manual_axes():
        raise ValueError(
            f"{name}: traced code met {group!r} where its axes {group.axes} are not bound. jax.jit and jax.grad "
            "alone cannot communicate: call it inside jax.shard_map over these axes, or inside ax.spmd(fn, group)"
        )
    return group


def bound_scope(group: Group) -> Scope | None:
    """The traced scope of `group`, or None where its axes are not bound (an eager call)."""
    if isinstance(group, str | tuple | list):
        axes = as_axes(group)
        return Scope(axes) if _bound_sizes(axes) else None
    sizes = _bound_sizes(group.axes)
    if sizes and sizes == tuple(group.mesh.shape[axis] for axis in group.axes):
        everyone = group.positions == tuple(range(math.prod(sizes)))
        return Scope(group.axes, None if everyone else group.positions)
    # Inside `spmd` the group's own sub-mesh is bound: one axis, just its ranks.
    bound = mesh_around()
    own = bound.axis_names == ("data",) and manual_axes() == {"data"} and bound.size == group.size
    if own and (around := _AROUND.get()) is not None and around.ranks != group.ranks:
        raise ValueError(
            f"ax.spmd runs on {around!r}, and a collective in it names {group!r}, of other ranks: these do not run this "
            "program. Give the collective the group that ax.spmd was given"
        )
    return Scope(("data",)) if own else None


def _bound_sizes(axes: tuple[str, ...]) -> tuple[int, ...] | None:
    try:
        return tuple(int(jax.lax.axis_size(axis)) for axis in axes)
    except NameError:
        return None


# --------------------------------------------------------------------------------------------------
# `spmd`: run a function once per rank of a group, inside `shard_map`, on values stacked by rank.
# --------------------------------------------------------------------------------------------------

_RANK = PartitionSpec("data")

_AROUND: ContextVar[ProcessGroup | None] = ContextVar("around", default=None)
"""The group whose `spmd` is being traced."""


def spmd(fn: Callable[..., Any], group: ProcessGroup, *, check_vma: bool = False) -> Callable[..., Any]:
    """Turn `fn`, which computes one rank's value, into a function of all ranks' values.

    Collectives inside `fn` take `group` or the axis name "data". The result can be jitted and differentiated.

    Args:
      fn: called as `fn(*args)` with pytrees of arrays, one rank's part each; returns a pytree of arrays.
      group: the n ranks; each runs on its own device.
      check_vma: JAX's check of varying types. Off by default, because a model whose scan starts from plain
        zeros fails it.

    Returns:
      `run(*stacked)`: every leaf of the arguments and of the result has a leading dim n, one entry per rank in the
      group's order. With several processes every process gives all entries and calls it.

    Raises:
      ValueError: (from `run`) when a leaf's leading dim is not n; all of them are named by path.
    """
    sharding = NamedSharding(group.sub_mesh, _RANK)

    def per_rank(*stacked):
        token = _AROUND.set(group)
        try:
            result = fn(*jax.tree.map(lambda leaf: leaf[0], stacked))
        finally:
            _AROUND.reset(token)
        return jax.tree.map(lambda leaf: jax.numpy.asarray(leaf)[None], result)

    traced = jax.jit(jax.shard_map(per_rank, mesh=group.sub_mesh, in_specs=_RANK, out_specs=_RANK, check_vma=check_vma))

    @no_mesh_around()
    def run(*stacked):
        _check_leading(stacked, group)
        return bound_run_ahead(traced(*jax.tree.map(partial(_place, sharding), stacked)))

    return run


def _check_leading(stacked, group: ProcessGroup) -> None:
    offenders = [
        f"  argument {jax.tree_util.keystr(path)}: shape {np.shape(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(stacked)
        if np.shape(leaf)[:1] != (group.size,)
    ]
    if offenders:
        raise ValueError(
            f"spmd over {group.size} ranks: the leading dim of every leaf must be {group.size}, one entry per rank:\n"
            + "\n".join(offenders)
            + f"\nstack the ranks' values (jnp.stack), or give all of them one value with "
            f"jnp.broadcast_to(x, ({group.size}, *x.shape))"
        )


def _place(sharding: NamedSharding, leaf):
    if isinstance(leaf, Tracer) or (isinstance(leaf, jax.Array) and leaf.sharding == sharding):
        return leaf
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    # device_put of a host array onto another process's devices gathers it everywhere first.
    return from_every_process(leaf, sharding)


# --------------------------------------------------------------------------------------------------
# Collectives that put the ranks' values side by side: `all_gather` on every rank, `gather` on one.
# --------------------------------------------------------------------------------------------------


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
    return scope.only_members(concatenated(name, x, scope, dim))


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
    whole = concatenated(name, x, scope, dim)
    return scope.only_members(jnp.where(scope.index() == dst, whole, jnp.zeros_like(whole)))


def concatenated(name: str, x: jax.Array, scope: Scope, dim: int) -> jax.Array:
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


# --------------------------------------------------------------------------------------------------
# Questions about this rank and its group, traced or eager.
# --------------------------------------------------------------------------------------------------


def get_rank(group: Group) -> int | jax.Array:
    """This rank's position in the group, counted from 0; traced inside `shard_map`, where outside the group it is -1.

    Raises:
      ValueError: when called eagerly by a rank that is no member, or with axis names that are not bound.
    """
    scope = bound_scope(group)
    if scope is None:
        return require_eager("get_rank", group).rank
    return scope.only_members(scope.index(), -1)


def get_world_size(group: Group) -> int:
    """The number of ranks in the group."""
    scope = bound_scope(group)
    return require_eager("get_world_size", group).size if scope is None else scope.size


def is_main_process(group: Group) -> bool | jax.Array:
    """Whether this rank is the group's first, the one that prints and writes; a traced boolean inside `shard_map`."""
    return get_rank(group) == 0


# --------------------------------------------------------------------------------------------------
# Collectives in which ranks swap parts: `all_to_all`, and `send_recv` along given pairs.
# --------------------------------------------------------------------------------------------------


def all_to_all(x: ArrayLike, group: Group, split_dim: int = 0, concat_dim: int = 0) -> jax.Array:
    """Split x along `split_dim`, send the i-th part to the i-th rank, and join what arrives along `concat_dim`.

    Args:
      x: [..., s, ..., c, ...], the same shape on every rank; s must divide by n.
      group: the n ranks that take part; axis names inside `shard_map`.
      split_dim: the dim s, counted from either end.
      concat_dim: the dim c along which the received parts are joined, in the group's order; it may be `split_dim`.

    Returns:
      [..., s/n, ..., c*n, ...]; traced, ranks outside the group get zeros. Its gradient is the exchange back.

    Raises:
      ValueError: when x is a scalar, a dim does not exist or does not divide.

    Communicates: one all-to-all.
    """
    name = f"all_to_all(split_dim={split_dim}, concat_dim={concat_dim})"
    return run_collective(name, _all_to_all, x, group, split_dim=split_dim, concat_dim=concat_dim)


def _all_to_all(x, scope: Scope, name: str, split_dim: int, concat_dim: int):
    split, concat = checked_dim(name, split_dim, x.shape), checked_dim(name, concat_dim, x.shape)
    require_divisible(name, x.shape, split, scope.size)
    return scope.only_members(_exchanged(x, scope, split, concat))


def _exchanged(x, scope: Scope, split: int, concat: int):
    if scope.members is not None and scope.partition is None:
        size = x.shape[split] // scope.size
        own_parts = jax.lax.dynamic_slice_in_dim(member_rows(x, scope), scope.index() * size, size, split + 1)
        return jnp.concatenate(list(own_parts), axis=concat)
    groups = None if scope.members is None else scope.partition
    return exchange_along(x, scope.axes, split, concat, among=groups)


def send_recv(x: ArrayLike, pairs: Sequence[tuple[int, int]], group: Group) -> jax.Array:
    """Send x from each pair's source to its target, all at once.

    Args:
      x: this rank's value, of any shape and dtype, the same on every rank.
      pairs: (source, target) positions in the group; no source and no target twice.
      group: the ranks that take part; axis names inside `shard_map`.

    Returns:
      What this rank received; zeros on a rank that is no target. Traced, ranks outside the group keep their x. Its
      gradient is the sending back.

    Raises:
      ValueError: when a position does not exist, or is the source or the target of two pairs.

    Communicates: one collective-permute.
    """
    sent = tuple((int(source), int(target)) for source, target in pairs)
    return run_collective(f"send_recv(pairs={list(sent)})", _send_recv, x, group, pairs=sent)


def _send_recv(x, scope: Scope, name: str, pairs: tuple[tuple[int, int], ...]):
    _check_pairs(name, pairs, scope.size)
    along = [(scope.positions[source], scope.positions[target]) for source, target in pairs]
    return scope.only_members(shift(x, scope.axes, along), x)


def _check_pairs(name: str, pairs: tuple[tuple[int, int], ...], size: int) -> None:
    for word, positions in (("source", [s for s, _ in pairs]), ("target", [t for _, t in pairs])):
        for position in positions:
            checked_position(name, word, position, size)
        twice = sorted({p for p in positions if positions.count(p) > 1})
        if twice:
            raise ValueError(
                f"{name}: position {twice} is the {word} of more than one pair: each rank sends once and receives "
                "once; use several calls"
            )


# --------------------------------------------------------------------------------------------------
# `reduce_scatter`: reduce over the ranks, and keep one slice of the result each.
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# `all_reduce`: one value from all ranks' values, on every rank.
# --------------------------------------------------------------------------------------------------


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
    """MIN or MAX over the members. JAX gives pmin and pmax no derivative; the JVP here is linear, so that it transposes."""
    if scope.members is None:
        best = extreme_along(x, scope.axes, op)
    elif scope.partition is not None:
        best = extreme_along(x, scope.axes, op, scope.partition)
    else:
        best = extreme_along(scope.only_members(x, identity_of(op, x.dtype)), scope.axes, op)
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
    product = concatenated("all_reduce", own_reduction(flat, scope, ReduceOp.PRODUCT, 0), scope, 0)
    return product[: x.size].reshape(x.shape)


# --------------------------------------------------------------------------------------------------
# Collectives with one source: `broadcast` gives every rank its value, `scatter` one slice each.
# --------------------------------------------------------------------------------------------------


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
