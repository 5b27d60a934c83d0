"""`Group`: weights that a step treats alike, joined; `Weights`: all of a model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from axonml_jax.cost.amounts import Many, most, several, varies
from axonml_jax.cost.flow import named
from axonml_jax.cost.placed import Placed
from axonml_jax.cost.weight import Place
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.strategies.transfer import Transfer


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A collective by which the weights of a group move once.

    Attributes:
      axis: along which.
      kind, dtype: as of a `Transfer`.
      itemsize: of the dtype.
      sharded: whether they rest sharded over the axis.
      buffered: whether a pipeline's rank moves all that lies over the same axes as one array: along the outermost axis.
      elements, padding: of the full arrays.
      launches: arrays that travel.
      launches_alone: the same in a step of one microbatch.
      ranks: that take part.
      every: it moves in one of so many steps.
    """

    axis: AxisNames
    kind: str
    dtype: str
    itemsize: int
    sharded: bool
    buffered: bool
    elements: Many
    padding: Many
    launches: Many
    launches_alone: Many
    ranks: Many
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class Group:
    """Weights that are alike in everything but size. Sizes are of one of each.

    Attributes:
      place, again, rebuilds, trained, layers: as of a `Weight`.
      count: how many of each the model has.
      scanned: whether the backward of a scan redoes work that reads them.
      closes: whether they are the last product of a block.
      summed: the layers' axes over which layers sum their gradients.
      axes: over which ranks hold different parts.
      sharded: the outermost axis over which they rest sharded; None: none does.
      as_they_rest: whether they are read as they rest.
      rest_dtype, read_dtype, sum_dtype: names.
      gathers: from the outermost axis inwards.
      syncs: of gradients, in the order of `Placement.sync`.
      joins: of what parameters changed by, at the end of a round.
      read: elements that the model reads on a rank.
      arrays: how many weights they are.
      rest_bytes, padding_bytes: between steps, padding apart.
      read_bytes, sum_bytes: as they are read, and of gradients of that.
      shard_sum_bytes: of gradients of what rests.
      left_bytes: of what sums leave out of a rank's gradients and feed back.
    """

    place: Place
    again: bool
    rebuilds: bool
    trained: bool
    layers: int
    count: int
    scanned: bool
    closes: bool
    summed: tuple[str, ...]
    axes: tuple[str, ...]
    sharded: AxisNames | None
    as_they_rest: bool
    rest_dtype: str
    read_dtype: str
    sum_dtype: str
    gathers: tuple[Sent, ...]
    syncs: tuple[Sent, ...]
    joins: tuple[Sent, ...]
    read: Many
    arrays: Many
    rest_bytes: Many
    padding_bytes: Many
    read_bytes: Many
    sum_bytes: Many
    shard_sum_bytes: Many
    left_bytes: Many


@dataclass(frozen=True)
class Weights:
    """All weights of a model under a plan.

    Attributes:
      groups: of weights that are alike.
      unit_bytes: what is whole at once where units are gathered at their use: those that are read, prefetched ones among
        them, and the largest unit's gradients.
      sliced: whether a scan gathers its layers one by one.
    """

    groups: tuple[Group, ...]
    unit_bytes: Many
    sliced: bool

    def sizes(self, change: Callable[[Many], Many]) -> "Weights":
        """The same with every size changed."""
        new = lambda value, names: {name: change(getattr(value, name)) for name in names}
        sent = lambda moves: tuple(replace(each, **new(each, _SENT)) for each in moves)
        groups = (
            replace(each, **{name: sent(getattr(each, name)) for name in _MOVES}, **new(each, _SIZES))
            for each in self.groups
        )
        return Weights(tuple(groups), change(self.unit_bytes), self.sliced)


def grouped(placed: Sequence[Placed]) -> Weights:
    """Weights joined with those that are alike, in the order of the first of each."""
    found: dict[tuple, list[Group]] = {}
    for each in placed:
        one = _group(each)
        found.setdefault(_kind(one), []).append(one)
    return Weights(tuple(map(_joined, found.values())), _unit_bytes(placed), any(each.slices > 1 for each in placed))


_SIZES = ("read", "arrays", "rest_bytes", "padding_bytes", "read_bytes", "sum_bytes", "shard_sum_bytes", "left_bytes")
_SENT = ("elements", "padding", "launches", "launches_alone", "ranks")
_MOVES = ("gathers", "syncs", "joins")
_KINDS = tuple(field.name for field in fields(Group) if field.name not in (*_SIZES, *_MOVES))


def _kind(one: Group) -> tuple:
    ranks = lambda sent: "many" if varies(sent.ranks) else sent.ranks
    each = [getattr(one, name) for name in _MOVES]
    moves = tuple((sent.axis, sent.kind, sent.dtype, ranks(sent)) for some in each for sent in some)
    return *(getattr(one, name) for name in _KINDS), *map(len, each), moves


def _joined(alike: list[Group]) -> Group:
    if len(alike) == 1:
        return alike[0]
    total = lambda name: sum(getattr(one, name) for one in alike)
    return replace(
        alike[0],
        **{name: _added([getattr(one, name) for one in alike]) for name in _MOVES},
        **{name: total(name) for name in _SIZES},
    )


def _added(alike: list[tuple[Sent, ...]]) -> tuple[Sent, ...]:
    add = lambda same: replace(
        same[0], **{name: sum(getattr(one, name) for one in same) for name in _SENT if name != "ranks"}
    )
    return tuple(add(same) for same in zip(*alike, strict=True))


def _group(each: Placed) -> Group:
    weight, (rest, item) = each.weight, named(each.rest_dtype)
    read, (summed, sum_item) = named(each.read_dtype)[0], named(each.sum_dtype)
    return Group(
        place=weight.place, again=weight.again, rebuilds=weight.rebuilds, trained=weight.trained, layers=weight.layers,
        count=weight.count, scanned=weight.layers > 1 and weight.redone, closes=weight.name.endswith("down/kernel"),
        summed=weight.summed, axes=each.layout.axes, sharded=next(iter(each.sharded), None), rest_dtype=rest,
        read_dtype=read, sum_dtype=summed, as_they_rest=read == rest and not each.sharded,
        gathers=tuple(_gathers(each)), syncs=tuple(_syncs(each)) if weight.trained else (),
        joins=tuple(_joins(each)) if weight.trained else (), read=each.read, arrays=1,
        rest_bytes=(each.shard - each.padding) * item, padding_bytes=each.padding * item,
        read_bytes=each.read_bytes, sum_bytes=each.sum_bytes, shard_sum_bytes=each.shard * sum_item,
        left_bytes=each.left_bytes,
    )  # fmt: skip


def _gathers(each: Placed) -> Iterator[Sent]:
    slices = each.slices
    elements = each.shard // slices
    layout = each.layout if slices == 1 else each.layout.sliced(len(each.layout.stored) - 1)
    for axis, strategy in each.sharded.items():
        ranks = each.setting.ranks(axis)
        # The last trips of a scan that gathers ahead gather as many slices in vain (see `units/gathered.py`).
        trips = slices if slices == 1 else slices + min(strategy.prefetch, slices)
        for sent in strategy.gather_flows(elements, layout, axis, ranks, each.read_dtype):
            yield _sent(axis, sent, True, False, (trips, trips * each.gathers_alone), trips)
        elements = elements * ranks


def _syncs(each: Placed) -> Iterator[Sent]:
    """In the order of `Placement.sync`: every microbatch's first, then what is scattered, and from the inside outwards."""
    elements, outwards = each.gathered, list(each.setting.strategies.items())[::-1]
    roles = each.setting.roles
    later = lambda role: (role.reduces != "microbatch", role.parameters != "sharded")
    for axis, strategy in sorted(outwards, key=lambda own: later(roles[own[0]])):
        ranks, sharded = each.setting.ranks(axis), axis in each.sharded
        buffered = axis == outwards[-1][0] and roles[axis].parameters == "whole"
        often = each.reductions(axis)
        layout = each.layout if often == 1 else each.layout.sliced(len(each.layout.stored) - 1)
        part = elements // often
        for sent in strategy.sync_flows(part, layout, axis, ranks, each.reduce_dtype) if several(ranks) else ():
            yield _sent(axis, sent, sharded, buffered, (often, often), often)
        elements = elements // ranks if sharded else elements


def _joins(each: Placed) -> Iterator[Sent]:
    for axis, rounds in each.setting.rounds.items():
        ranks = each.setting.ranks(axis)
        for sent in rounds.round_flows(each.shard, each.layout, axis, ranks, each.rest_dtype):
            yield replace(_sent(axis, sent, False, False, (1, 1), 1), every=rounds.every)


def _sent(
    axis: AxisNames, sent: Transfer, sharded: bool, buffered: bool, launches: tuple[int, int], times: int
) -> Sent:
    """A transfer so many times, in so many launches, and in so many in a step of one microbatch."""
    dtype, itemsize = named(sent.dtype)
    return Sent(
        axis=axis, kind=sent.kind, dtype=dtype, itemsize=itemsize, sharded=sharded, buffered=buffered,
        elements=sent.elements * times, padding=sent.padding * times, launches=launches[0], launches_alone=launches[1],
        ranks=sent.ranks,
    )  # fmt: skip


def _unit_bytes(placed: Iterable[Placed]) -> Many:
    units: dict[str, tuple[Many, Many]] = {}
    ahead = 0
    for each in placed:
        ahead = max([ahead, *(strategy.prefetch for strategy in each.sharded.values())])
        read, summed = units.get(name := each.weight.unit or each.weight.name, (0, 0))
        number = 1 if each.weight.unit else each.weight.count
        grads = each.weight.trained * number * each.reduce_bytes // each.slices
        units[name] = read + number * each.read_bytes // each.slices, summed + grads
    return (1 + ahead) * most(*(read for read, _ in units.values())) + most(*(summed for _, summed in units.values()))
