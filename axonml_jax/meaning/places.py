"""How ranks hold a value of the whole batch: the same on all, a dim split over them, or as a sum of what they hold."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from axonml_jax.sharding.layout import Order

SUM = "sum"
"""The value is the sum of what the ranks hold, each at the whole shape."""


class Split(NamedTuple):
    """A dim is split over the ranks: part i is on rank i.

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
      order: in which they hold positions: their parts are not one after the other, unless it is "contiguous".
      positions: they split positions, not rows.
    """

    axes: tuple[str, ...]
    ranks: int
    order: Order = "contiguous"
    positions: bool = False


def local_shape(shape: Sequence[int], places: Places, groups: Sequence[Group]) -> tuple[int, ...]:
    """The shape of one rank's part."""
    found = list(shape)
    for place, group in zip(places, groups, strict=True):
        if isinstance(place, Split):
            found[place.dim] //= group.ranks
    return tuple(found)


def local_outer(places: Places, groups: Sequence[Group], number: int) -> int:
    """`outer` of one group's split on a rank, where other groups split the same dim further out."""
    own = places[number]
    assert isinstance(own, Split)
    further_out = [
        group.ranks
        for place, group in zip(places, groups, strict=True)
        if isinstance(place, Split) and place.dim == own.dim and place.outer < own.outer
    ]
    return own.outer // math.prod(further_out)


def reshaped(place: Split, old: Sequence[int], new: Sequence[int], ranks: int, *, whole: bool = False) -> Split | None:
    """Where a split dim is after a reshape; None: in no dim.

    `whole`: what is split must stay in one piece, as positions that ranks hold in an order of their own.

    Behind each other in memory, the parts are the middle of [before, ranks, rest]: the new shape must have a dim that begins
    at or around `before` and divides there.

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
    """What one group of ranks does for an operation.

    Attributes:
      wanted: the places that its operands must have.
      made: those of its results.
      act: how ranks join what each of them makes of its part (`ACTS` in `values.py`); "": there is nothing to join.
    """

    wanted: tuple[Place, ...]
    made: tuple[Place, ...]
    act: str = ""


def settled_sums(places: Sequence[Place]) -> list[Place]:
    """The places with every sum completed."""
    return [None if place == SUM else place for place in places]
