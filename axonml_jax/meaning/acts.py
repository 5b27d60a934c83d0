"""What ranks do to join their parts' results where a reduction or a lookup goes along a split dim."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from axonml_jax.collectives.collectives import all_reduce
from axonml_jax.collectives.primitives import ReduceOp, axis_index, max_over, min_over, vary
from axonml_jax.compat.jaxpr import Operation
from axonml_jax.meaning.places import Group
from axonml_jax.meaning.values import Ranks

Act = Callable[[Ranks, Operation, Sequence[jax.Array], Sequence[Group]], jax.Array]
"""`act(ranks, op, arrays, groups)`: its result of this rank's operands, joined over groups whose split dims it goes along."""


def axes_of(groups: Sequence[Group]) -> tuple[str, ...]:
    """The mesh axes of some groups."""
    return tuple(axis for group in groups for axis in group.axes)


def _extreme(ranks: Ranks, op: Operation, arrays: Sequence[jax.Array], groups: Sequence[Group]) -> jax.Array:
    """A maximum or minimum over all ranks; all elements of all ranks that attain it share its gradient."""
    (x,), axes, dims = arrays, axes_of(groups), op.options["axes"]
    reduce = min_over if op.name == "reduce_min" else max_over
    top = lambda x: vary(reduce(op.bind([x])[0], axes), ranks.axes)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return top(x)
    best = jax.custom_jvp(top)

    @best.defjvp
    def _(primals, tangents):
        (x,), (tangent,) = primals, tangents
        most = best(x)
        attained = x == jnp.expand_dims(most, dims)
        number = all_reduce(attained.astype(x.dtype).sum(dims), axes)
        return most, all_reduce(jnp.where(attained, tangent, 0).sum(dims) / number, axes)

    return best(x)


def _logical(ranks: Ranks, op: Operation, arrays: Sequence[jax.Array], groups: Sequence[Group]) -> jax.Array:
    reduce = min_over if op.name == "reduce_and" else max_over
    own = op.bind(arrays)[0]
    joined = reduce(own.astype(jnp.int32), axes_of(groups))
    return vary(joined.astype(bool) if own.dtype == bool else joined.astype(own.dtype), ranks.axes)


def _product(ranks: Ranks, op: Operation, arrays: Sequence[jax.Array], groups: Sequence[Group]) -> jax.Array:
    return all_reduce(op.bind(arrays)[0], axes_of(groups), ReduceOp.PRODUCT)


def _best(ranks: Ranks, op: Operation, arrays: Sequence[jax.Array], groups: Sequence[Group]) -> jax.Array:
    """The index of the best element: of every rank its value and its index in the whole; the first rank that has the best."""
    (x,), (dim,), (group,) = arrays, op.options["axes"], groups
    own = op.bind(arrays)[0]
    value = jnp.take_along_axis(x, jnp.expand_dims(own, dim), dim).squeeze(dim)
    index = own + (axis_index(group.axes) * x.shape[dim]).astype(own.dtype)
    values, indices = (ranks.gather_quietly(each[None], 0, 1, group) for each in (value, index))
    first = (jnp.argmax if op.name == "argmax" else jnp.argmin)(values, 0)
    return jnp.take_along_axis(indices, first[None], 0)[0]


def _lookup(ranks: Ranks, op: Operation, arrays: Sequence[jax.Array], groups: Sequence[Group]) -> jax.Array:
    """A lookup along a split dim: each rank answers for its own rows, with zeros elsewhere, so that answers add up."""
    (table, index), (group,) = arrays, groups
    numbers, whole = op.options["dimension_numbers"], op.given[0].shape
    dim = next(d for d in numbers.start_index_map if d in numbers.collapsed_slice_dims and whole[d] != table.shape[d])
    column, mode = numbers.start_index_map.index(dim), str(op.options["mode"]).upper()
    at = index[..., column]
    if "CLIP" in mode:
        at = jnp.clip(at, 0, whole[dim] - 1)
    own = at - (axis_index(group.axes) * table.shape[dim]).astype(at.dtype)
    mine = (own >= 0) & (own < table.shape[dim])
    sizes = tuple(table.shape[d] if size == whole[d] else size for d, size in enumerate(op.options["slice_sizes"]))
    made = op.bind([table, index.at[..., column].set(jnp.where(mine, own, 0))], slice_sizes=sizes)[0]
    spread = lambda x: jnp.broadcast_to(jnp.expand_dims(x, numbers.offset_dims), made.shape)
    kept = jnp.where(spread(mine), made, jnp.zeros_like(made))
    if "FILL" in mode:  # what no rank has is filled, by the first
        outside = spread((at < 0) | (at >= whole[dim])) & (axis_index(group.axes) == 0)
        kept = jnp.where(outside, jnp.asarray(_filling(op), made.dtype), kept)
    if made.dtype == bool:
        return all_reduce(kept.astype(jnp.int32), group.axes).astype(bool)
    return kept


def _filling(op: Operation):
    """What a lookup outside of the table gives, where it fills."""
    dtype = op.made[0].dtype
    if (given := op.options["fill_value"]) is not None:
        return given
    if dtype == jnp.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max


ACTS: Mapping[str, Act] = {
    "extreme": _extreme,
    "logical": _logical,
    "product": _product,
    "best": _best,
    "lookup": _lookup,
}
"""By the name that rules give them (`Step.act`)."""

JOINT = ("extreme", "logical", "product")
"""Those that several groups may do together."""
