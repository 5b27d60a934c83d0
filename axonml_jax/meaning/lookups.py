"""Rules of lookups (`gather`) and of what adds into places (`scatter-add`): see `rules.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

from axonml_jax.compat.jaxpr import Operation
from axonml_jax.meaning.places import SUM, Place, Split
from axonml_jax.meaning.step import Step, settled_sums


def _lookup(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    table, index = places
    if table == SUM and index is None:
        return Step((SUM, None), (SUM,))
    table, index = settled_sums(places)
    if isinstance(table, Split):
        return _in_split_table(op, table, index)
    return _by_split_indices(op, index) if isinstance(index, Split) else None


def _batch_dims(op: Operation) -> list[int]:
    """The dims of the result that stand for those of the indices."""
    return [dim for dim in range(op.made[0].ndim) if dim not in op.options["dimension_numbers"].offset_dims]


def _by_split_indices(op: Operation, index: Split) -> Step | None:
    """Each index is a lookup of its own; batching dims pair it with the table's."""
    numbers, made = op.options["dimension_numbers"], index._replace
    if index.dim == op.given[1].ndim - 1:
        return None
    table: Place = None
    if index.dim in numbers.start_indices_batching_dims:
        table = made(dim=numbers.operand_batching_dims[numbers.start_indices_batching_dims.index(index.dim)])
    return Step((table, index), (made(dim=_batch_dims(op)[index.dim]),))


def _in_split_table(op: Operation, table: Split, index: Place) -> Step | None:
    numbers, dim = op.options["dimension_numbers"], table.dim
    if dim in numbers.operand_batching_dims:
        own = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
        return Step((table, table._replace(dim=own)), (table._replace(dim=_batch_dims(op)[own]),))
    windows = [
        d for d in range(op.given[0].ndim) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    if (
        dim in windows
        and dim not in numbers.start_index_map
        and op.options["slice_sizes"][dim] == op.given[0].shape[dim]
    ):
        return Step((table, None), (table._replace(dim=numbers.offset_dims[windows.index(dim)]),))
    if dim in numbers.start_index_map and dim in numbers.collapsed_slice_dims and table.outer == 1:
        return Step((table, None), (None if op.made[0].dtype == bool else SUM,), "lookup")
    return None


def _added(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    """Updates that are split are added on the rank that has them: a partial sum (bincount, segment sums, histograms)."""
    table, index, updates = places[0], *settled_sums(places[1:])
    numbers = op.options["dimension_numbers"]
    if places[2] == SUM and index is None and not isinstance(table, Split):
        return Step((SUM, None, SUM), (SUM,))
    scattered = [dim for dim in range(op.given[2].ndim) if dim not in numbers.update_window_dims]
    if isinstance(table, Split):
        return _into_split(op, table, numbers, scattered)
    if isinstance(index, Split) and index.dim < op.given[1].ndim - 1:
        if index.dim in numbers.scatter_indices_batching_dims:
            return None
        return Step((SUM, index, index._replace(dim=scattered[index.dim])), (SUM,))
    if isinstance(updates, Split) and updates.dim in scattered:
        place = updates._replace(dim=scattered.index(updates.dim))
        return None if place.dim in numbers.scatter_indices_batching_dims else Step((SUM, place, updates), (SUM,))
    return Step((SUM, None, None), (SUM,)) if table == SUM else None


def _into_split(op: Operation, table: Split, numbers: Any, scattered: Sequence[int]) -> Step | None:
    """Into rows of a split array: batching dims pair them with their own indices and updates; whole windows are local."""
    if table.dim in numbers.operand_batching_dims:
        own = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(table.dim)]
        return Step((table, table._replace(dim=own), table._replace(dim=scattered[own])), (table,))
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [dim for dim in range(op.given[0].ndim) if dim not in inserted]
    if table.dim in windows and table.dim not in numbers.scatter_dims_to_operand_dims:
        to = numbers.update_window_dims[windows.index(table.dim)]
        if op.given[2].shape[to] == op.given[0].shape[table.dim]:
            return Step((table, None, table._replace(dim=to)), (table,))
    return None


def _written(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    table, numbers = settled_sums(places)[0], op.options["dimension_numbers"]
    scattered = [dim for dim in range(op.given[2].ndim) if dim not in numbers.update_window_dims]
    return _into_split(op, table, numbers, scattered) if isinstance(table, Split) else None


LOOKUPS: Mapping[str, Any] = {
    "gather": _lookup,
    **dict.fromkeys(("scatter-add", "scatter_add"), _added),
    **dict.fromkeys(
        ("scatter", "scatter-mul", "scatter-min", "scatter-max", "scatter_mul", "scatter_min", "scatter_max"), _written
    ),
}
