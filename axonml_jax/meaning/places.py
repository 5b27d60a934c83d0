"""How ranks hold a value of the whole batch, and how operations change that: rules on places alone, without arrays."""

# What a rule says of places holds types apart, which the checker does not see.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from axonml_jax.compat.jaxpr import Operation
from axonml_jax.program.program import DIMS, is_elementwise, rule_of
from axonml_jax.sharding.layout import Order

SUM = "sum"
"""The place of a value that is the sum of the ranks' arrays, each of the whole shape."""


class Split(NamedTuple):
    """A place: a dim is split over the ranks, part i on rank i.

    Attributes:
      dim: which.
      outer: the dim is seen as [outer, n], of which n is split. More than 1 after dims before the split one were merged with
        it, as rows and positions are by `reshape(-1, vocabulary)`.
    """

    dim: int
    outer: int = 1


Place = Split | str | None
"""How the ranks of one group hold a value: `Split`, `SUM`, or None: the same on all."""

Places = tuple[Place, ...]
"""The place of a value for every group."""


class Group(NamedTuple):
    """Mesh axes that split one thing, a batch's rows or its positions.

    Attributes:
      axes: their names, the first slowest.
      ranks: the number of ranks along all of them.
      order: the order in which they hold positions: their parts are not one after the other, unless it is "contiguous".
      positions: they split positions, not rows.
    """

    axes: tuple[str, ...]
    ranks: int
    order: Order = "contiguous"
    positions: bool = False


def local_shape(shape: Sequence[int], places: Places, groups: Sequence[Group]) -> tuple[int, ...]:
    """The shape of one rank's part of a value."""
    found = list(shape)
    for place, group in zip(places, groups, strict=True):
        if isinstance(place, Split):
            found[place.dim] //= group.ranks
    return tuple(found)


def split_sizes(shapes: Iterable[Sequence[int]], places: Iterable[Place]) -> set[int]:
    """The sizes of the dims of values that are split in one group."""
    return {shape[at.dim] for shape, at in zip(shapes, places, strict=True) if isinstance(at, Split)}


def shifted(places: Places, by: int) -> Places:
    """The places of a stack of values (`by` 1), or of the slices of one (-1)."""
    return tuple(place._replace(dim=place.dim + by) if isinstance(place, Split) else place for place in places)


def local_outer(places: Places, groups: Sequence[Group], number: int) -> int:
    """The `outer` of one group's split as it is on a rank, where other groups split the same dim further out."""
    own = places[number]
    assert isinstance(own, Split)
    further_out = [
        group.ranks
        for place, group in zip(places, groups, strict=True)
        if isinstance(place, Split) and place.dim == own.dim and place.outer < own.outer
    ]
    return own.outer // math.prod(further_out)


def reshaped(place: Split, old: Sequence[int], new: Sequence[int], ranks: int, *, whole: bool = False) -> Split | None:
    """The place of a split dim after a reshape; None: it is not along one dim.

    `whole`: what is split must stay in one piece, as positions that ranks hold in an order of their own.

    In memory the array is [before, ranks, rest]. The new dim in which `before` ends must be [outer, ranks, n] by itself, such
    that `before` is `outer` times the new dims in front of it.

    >>> reshaped(Split(0), (32, 8, 5), (256, 5), 8), reshaped(Split(1), (32, 8, 5), (256, 5), 4)
    (Split(dim=0, outer=1), Split(dim=0, outer=32))
    >>> reshaped(Split(0), (32,), (4, 8), 8), reshaped(Split(0, 32), (256, 5), (32, 8, 5), 4)
    (None, Split(dim=1, outer=1))
    """
    before = math.prod(old[: place.dim]) * place.outer
    for dim, size in enumerate(new):
        start = math.prod(new[:dim])
        if size > 1 and start <= before < start * size:
            fits = before % start == 0 and size % (before // start * ranks) == 0
            fits &= not whole or size * place.outer * start == old[place.dim] * before
            return Split(dim, before // start) if fits else None
    return None


class Step(NamedTuple):
    """The places that an operation takes and makes in one group, and how ranks join their results.

    Attributes:
      wanted: the places that its operands must have.
      made: those of its results.
      act: how ranks join what each of them makes of its part (`ACTS` in `values.py`); "": there is nothing to join.
    """

    wanted: tuple[Place, ...]
    made: tuple[Place, ...]
    act: str = ""


JOINT = ("extreme", "logical", "product")
"""The acts that several groups may do together."""


def settled_sums(places: Sequence[Place]) -> list[Place]:
    """The places with every sum completed."""
    return [None if place == SUM else place for place in places]


# --------------------------------------------------------------------------------------------------
# Rules: where operands must be, and where results are then.
# --------------------------------------------------------------------------------------------------


Rule = Callable[[Operation, Sequence[Place], int], Step | None]


def step_of(op: Operation, given: Sequence[Places], groups: Sequence[Group]) -> list[Step]:
    """The step of each group for an operation.

    Args:
      op: the operation, which has no body.
      given: the places of its operands.
      groups: the groups.
    """
    found: list[Step] = []
    for number, group in enumerate(groups):
        places = [each[number] for each in given]
        step = _of_group(op, places, group.ranks) if any(places) else None
        if step is not None and group.order != "contiguous" and _breaks_order(op, step, places, group.ranks):
            step = None
        acts = {other.act for other in found if other.act}
        if step is not None and step.act and acts and (acts != {step.act} or step.act not in JOINT):
            step = None
        found.append(step if step is not None else whole(op))
    return found


def whole(op: Operation) -> Step:
    """The step of an operation on whole operands, whose results are whole."""
    return Step((None,) * len(op.given), (None,) * len(op.made))


def _breaks_order(op: Operation, step: Step, places: Sequence[Place], ranks: int) -> bool:
    """Whether an operation reads positions as contiguous that ranks hold in another order."""
    if op.name == "reshape" and isinstance(places[0], Split):
        return reshaped(places[0], op.given[0].shape, op.made[0].shape, ranks, whole=True) is None
    return step.act in ("best", "lookup")


def _of_group(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    if rule_of(op.name).passes or op.name in ("device_put", "layout_constraint", "reshard", "sharding_constraint"):
        return Step(tuple(places), tuple(places))
    if is_elementwise(op.name) or op.name == "name":
        return _elementwise(op, places, ranks)
    if rule_of(op.name).sends is not None:
        return _beside_ranks(op, places, ranks)
    rule = RULES.get(op.name)
    return None if rule is None else rule(op, places, ranks)


# Elementwise


def _elementwise(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    if SUM in places:
        if (step := _linear(op, places)) is not None:
            return step
        places = settled_sums(places)
    splits = [k for k, place in enumerate(places) if isinstance(place, Split)]
    if not splits:
        return None
    lead = max(splits, key=lambda k: op.given[k].size)
    place = places[lead]
    assert isinstance(place, Split)
    if len(op.made[0].shape) <= place.dim or op.made[0].shape[place.dim] != op.given[lead].shape[place.dim]:
        return None
    spread = [aval.ndim == 0 or aval.shape[place.dim] == 1 for aval in op.given]
    return Step(tuple(None if each else place for each in spread), (place,) * len(op.made))


_SAME = ("neg", "real", "imag", "copy", "stop_gradient", "name", "pvary", "pcast")


def _linear(op: Operation, places: Sequence[Place]) -> Step | None:
    """The step of a linear operation on partial sums; None where they must be completed."""
    name, dtype = op.name, op.made[0].dtype
    if any(isinstance(place, Split) for place in places) or dtype == jnp.bool_:
        return None
    if name in ("add", "sub", "add_any"):
        return Step((SUM,) * len(places), (SUM,))
    if name == "mul":
        small = min(range(2), key=lambda k: op.given[k].size)
        kept = next(k for k in (1 - small, small) if places[k] == SUM)
        return Step(tuple(SUM if k == kept else None for k in range(2)), (SUM,))
    if name == "div" and places[0] == SUM and jnp.issubdtype(dtype, jnp.inexact):
        return Step((SUM, None), (SUM,))
    if name == "select_n" and places[0] is None:
        return Step((None, *(SUM for _ in places[1:])), (SUM,))
    if name in _SAME or (name == "convert_element_type" and _keeps_sums(op.given[0].dtype, dtype)):
        return Step((SUM,), (SUM,))
    return None


def _keeps_sums(old, new) -> bool:
    """Whether a cast of each part is a part of the cast sum, but for rounding; sums of integers of 8 or 16 bits may wrap."""
    inexact = lambda dtype: jnp.issubdtype(dtype, jnp.inexact)
    wraps = not inexact(old) and old.itemsize < 4 and (inexact(new) or new.itemsize > old.itemsize)
    return jnp.bool_ not in (old, new) and not wraps and (inexact(new) or not inexact(old))


def _beside_ranks(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    """The step of a collective over mesh axes of other groups: it is local unless it goes along the split dim."""
    kind = rule_of(op.name).sends
    assert kind is not None
    if kind[0] == "all_reduce":
        if kind[1] != "sum":
            places = settled_sums(places)
        return Step(tuple(places), tuple(places))
    place = places[0]
    if kind[0] == "permute":
        return Step((place,), (place,))
    dims = [op.options.get(name) for name in ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")]
    tiled = op.options.get("tiled") and kind[0] in ("all_gather", "reduce_scatter", "all_to_all")
    kept = isinstance(place, Split) and place.dim not in dims
    return Step((place,), (place,)) if tiled and (kept or place == SUM) else None


# One operand, or several that are alike


def _placed(linear: bool) -> Rule:
    """The rule of operations that move dims as `program/program.py` says; `linear` ones take partial sums too.

    Beside a sum one rank alone pads with the value, and all others with zeros.
    """

    def rule(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
        data = _data(op)
        if SUM in places:
            others = any(isinstance(place, Split) for place in places)
            if linear and not others and not any(places[k] for k in range(len(places)) if k not in data):
                summed = (*data, 1) if op.name == "pad" else data
                return Step(tuple(SUM if k in summed else None for k in range(len(places))), (SUM,) * len(op.made))
            places = settled_sums(places)
        splits = [k for k in data if isinstance(places[k], Split)]
        if not splits:
            return None
        lead = max(splits, key=lambda k: op.given[k].size)
        place = places[lead]
        assert isinstance(place, Split)
        to = DIMS[op.name](op, lead, place.dim, ranks)
        if to is None or any(op.given[k].shape[place.dim] % (place.outer * ranks) for k in data):
            return None
        wanted = tuple(place if k in data else None for k in range(len(places)))
        return Step(wanted, (place._replace(dim=to),) * len(op.made))

    return rule


def _data(op: Operation) -> tuple[int, ...]:
    """The operands that are arrays of one kind; the others are indices, or values to fill in."""
    if op.name in ("concatenate", "sort", "triangular_solve"):
        return tuple(range(len(op.given)))
    return (0, 1) if op.name == "dynamic_update_slice" else (0,)


def _reshape(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    (place,) = places
    if place == SUM:
        return Step((SUM,), (SUM,))
    assert isinstance(place, Split)
    to = reshaped(place, op.given[0].shape, op.made[0].shape, ranks)
    return None if to is None or op.options["dimensions"] is not None else Step((place,), (to,))


def _reduction(act: str) -> Rule:
    """The rule of a reduction: local along other dims; along the split dim ranks join their results by `act`."""

    def rule(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
        if (place := places[0]) == SUM:
            return Step((SUM,), (SUM,)) if act == "sum" else None
        assert isinstance(place, Split)
        if place.dim not in op.options["axes"]:
            return _placed(False)(op, places, ranks)
        if act == "sum":
            return Step((place,), (SUM,))
        return None if act == "best" and place.outer > 1 else Step((place,), (None,), act)

    return rule


def _triangular(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    """The step of a solve with a triangular matrix: beside a whole one, right sides that stand side by side are apart."""
    matrix, right = settled_sums(places)
    beside = op.given[1].ndim - (1 if op.options["left_side"] else 2)
    if matrix is None and isinstance(right, Split) and right.dim == beside:
        return Step((None, right), (right,))
    return _placed(False)(op, places, ranks)


def _stack(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    """The step of a stack along a new dim: a sum if an operand is one, else split like the first split operand."""
    if SUM in places and not any(isinstance(place, Split) for place in places):
        return Step((SUM,) * len(places), (SUM,))
    splits = [place for place in places if isinstance(place, Split)]
    if not splits:
        return None
    place, along = splits[0], op.options["axis"] % op.made[0].ndim
    return Step((place,) * len(places), (place._replace(dim=place.dim + (place.dim >= along)),))


def _window(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    place, options = settled_sums(places)[0], op.options
    if not isinstance(place, Split):
        return None
    alone = all(options[name][place.dim] == 1 for name in ("window_dimensions", "window_strides"))
    alone = alone and tuple(options["padding"][place.dim]) == (0, 0)
    return Step((place, *(None for _ in places[1:])), (place,)) if alone else None


def _top(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    place = settled_sums(places)[0]
    along = op.options.get("axis", op.options.get("operand_dim", op.given[0].ndim - 1)) % op.given[0].ndim
    return Step((place,), (place,) * 2) if isinstance(place, Split) and place.dim != along else None


# Products


def _product(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    a, b = places
    if SUM in (a, b):
        if None in (a, b):
            return Step((a, b), (SUM,))
        a, b = settled_sums(places)
    contracted, batched = op.contraction
    if isinstance(a, Split) and isinstance(b, Split) and not _paired(a, b, contracted) and not _paired(a, b, batched):
        a, b = (None, b) if op.given[0].size < op.given[1].size else (a, None)
    lead = 0 if isinstance(a, Split) else 1
    place = (a, b)[lead]
    if not isinstance(place, Split):
        return None
    for dims, made in ((contracted, SUM), (batched, None)):
        if place.dim in dims[lead]:
            position = dims[lead].index(place.dim)
            wanted = tuple(place._replace(dim=dims[k][position]) for k in range(2))
            return Step(wanted, (made or place._replace(dim=position),))
    wanted = (place, None) if lead == 0 else (None, place)
    to = DIMS["dot_general"](op, lead, place.dim, ranks)
    return None if to is None else Step(wanted, (place._replace(dim=to),))


def _paired(a: Split, b: Split, dims: Sequence[Sequence[int]]) -> bool:
    there = a.dim in dims[0] and b.dim in dims[1] and a.outer == b.outer
    return there and dims[0].index(a.dim) == dims[1].index(b.dim)


def _convolution(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    place, kernel = places
    if SUM in places and None in places:
        return Step(tuple(places), (SUM,))
    numbers = op.options["dimension_numbers"]
    rows = isinstance(place, Split) and place.dim == numbers.lhs_spec[0] and op.options["batch_group_count"] == 1
    return Step((place, None), (place._replace(dim=numbers.out_spec[0]),)) if rows and kernel is None else None


# Lookups (`gather`), and what adds into places (`scatter-add`)


def _lookup(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    table, index = places
    if table == SUM and index is None and not _fills(op):
        return Step((SUM, None), (SUM,))
    table, index = settled_sums(places)
    if isinstance(table, Split):
        return _in_split_table(op, table, index)
    return _by_split_indices(op, index) if isinstance(index, Split) else None


def _fills(op: Operation) -> bool:
    """Whether a lookup outside of the table gives a number, of which a sum over ranks would be another one."""
    number = op.options["fill_value"] is not None or not jnp.issubdtype(op.made[0].dtype, jnp.inexact)
    return number and "FILL" in str(op.options["mode"]).upper()


def _batch_dims(op: Operation) -> list[int]:
    """The dims of a lookup's result that come from those of the indices."""
    return [dim for dim in range(op.made[0].ndim) if dim not in op.options["dimension_numbers"].offset_dims]


def _by_split_indices(op: Operation, index: Split) -> Step | None:
    """The step of a lookup by split indices, each of which looks up by itself; batching dims pair them with the table's."""
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
    """The step of a scatter-add: split updates are added where they are, which makes a partial sum (bincount, segment sums)."""
    table, index, updates = places[0], *settled_sums(places[1:])
    numbers = op.options["dimension_numbers"]
    if places[2] == SUM and index is None and not isinstance(table, Split):
        return Step((SUM, None, SUM), (SUM,))
    scattered = _scattered(op)
    if isinstance(table, Split):
        return _into_split(op, table, numbers, scattered)
    if (paired := _into_rows(op, index, updates)) is not None:
        return paired
    if isinstance(index, Split) and index.dim < op.given[1].ndim - 1:
        return Step((SUM, index, index._replace(dim=scattered[index.dim])), (SUM,))
    if isinstance(updates, Split) and updates.dim in scattered:
        return Step((SUM, updates._replace(dim=scattered.index(updates.dim)), updates), (SUM,))
    return Step((SUM, None, SUM), (SUM,)) if table == SUM else None


def _into_rows(op: Operation, index: Place, updates: Place) -> Step | None:
    """The step of a scatter into a whole table of which each split index or update has a row, as under `jax.vmap`."""
    numbers, scattered = op.options["dimension_numbers"], _scattered(op)
    if isinstance(updates, Split) and updates.dim in numbers.update_window_dims and not isinstance(index, Split):
        at = _windows(op)[numbers.update_window_dims.index(updates.dim)]
        step = _into_split(op, updates._replace(dim=at), numbers, scattered)
        return step if step is not None and step.wanted[2] == updates else None
    lead = index if isinstance(index, Split) else updates
    if not isinstance(lead, Split) or (lead is updates and lead.dim not in scattered):
        return None
    own = lead.dim if lead is index else scattered.index(lead.dim)
    if own not in numbers.scatter_indices_batching_dims:
        return None
    at = numbers.operand_batching_dims[numbers.scatter_indices_batching_dims.index(own)]
    table, index, updates = (lead._replace(dim=dim) for dim in (at, own, scattered[own]))
    return Step((table, index, updates), (table,))


def _scattered(op: Operation) -> list[int]:
    """The dims of a scatter's updates that are no windows."""
    return [dim for dim in range(op.given[2].ndim) if dim not in op.options["dimension_numbers"].update_window_dims]


def _windows(op: Operation) -> list[int]:
    """The dims of a scatter's table that windows of its updates lie along."""
    numbers = op.options["dimension_numbers"]
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    return [dim for dim in range(op.given[0].ndim) if dim not in inserted]


def _into_split(op: Operation, table: Split, numbers: Any, scattered: Sequence[int]) -> Step | None:
    """The step of a scatter into a split array: local along batching dims and whole windows."""
    if table.dim in numbers.operand_batching_dims:
        own = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(table.dim)]
        return Step((table, table._replace(dim=own), table._replace(dim=scattered[own])), (table,))
    windows = _windows(op)
    if table.dim in windows and table.dim not in numbers.scatter_dims_to_operand_dims:
        to = numbers.update_window_dims[windows.index(table.dim)]
        if op.given[2].shape[to] == op.given[0].shape[table.dim]:
            return Step((table, None, table._replace(dim=to)), (table,))
    return None


def _written(op: Operation, places: Sequence[Place], ranks: int) -> Step | None:
    table, index, updates = settled_sums(places)
    if isinstance(table, Split):
        return _into_split(op, table, op.options["dimension_numbers"], _scattered(op))
    return _into_rows(op, index, updates)


LOOKUPS: Mapping[str, Any] = {
    "gather": _lookup,
    **dict.fromkeys(("scatter-add", "scatter_add"), _added),
    **dict.fromkeys(
        ("scatter", "scatter-mul", "scatter-min", "scatter-max", "scatter_mul", "scatter_min", "scatter_max"), _written
    ),
}


_LINEAR = (
    *("broadcast_in_dim", "concatenate", "cumsum", "dynamic_slice", "dynamic_update_slice", "pad", "rev", "slice"),
    *("split", "squeeze", "tile", "transpose", "unstack"),
)

RULES: Mapping[str, Rule] = {
    **{name: _placed(name in _LINEAR) for name in DIMS},
    "reshape": _reshape,
    "reduce_sum": _reduction("sum"),
    "reduce_max": _reduction("extreme"),
    "reduce_min": _reduction("extreme"),
    "reduce_and": _reduction("logical"),
    "reduce_or": _reduction("logical"),
    "reduce_prod": _reduction("product"),
    "argmax": _reduction("best"),
    "argmin": _reduction("best"),
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "reduce_window_sum": _window,
    "stack": _stack,
    "top_k": _top,
    "triangular_solve": _triangular,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    **LOOKUPS,
}
"""Rules by the primitive's name; a primitive without one runs on whole values."""
