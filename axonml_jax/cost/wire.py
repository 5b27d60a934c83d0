"""Ring formulas: how many elements (or bytes) one rank sends for one collective. Pure arithmetic, exact.

A ring moves the least any algorithm can for these collectives (Patarasuk and Yuan 2009), so the same formula is the
cost and the theoretical minimum. `n` is always the *full* array: what an all-gather returns, a reduce-scatter takes.

| kind | elements sent per rank, N ranks |
| --- | --- |
| all_reduce | 2n(N-1)/N |
| all_gather, reduce_scatter, all_to_all | n(N-1)/N |
| permute | n |
| broadcast | n (a pipelined ring: every rank but the last forwards the array once) |
| ragged_all_to_all | n (an upper bound: the sizes are data) |

A collective over one rank moves nothing. Of arrays (see `amounts.py`) the formulas give floats.
"""

from collections.abc import Callable
from fractions import Fraction

from axonml_jax.cost.amounts import Many, either, varies

Amount = int | Fraction
"""A number of elements or bytes: an int where it is whole, else the exact fraction."""

_FORMULAS: dict[str, Callable[[Many, Many], Many]] = {
    "all_reduce": lambda n, ranks: _part(2 * n * (ranks - 1), ranks),
    "all_gather": lambda n, ranks: _part(n * (ranks - 1), ranks),
    "reduce_scatter": lambda n, ranks: _part(n * (ranks - 1), ranks),
    "all_to_all": lambda n, ranks: _part(n * (ranks - 1), ranks),
    "permute": lambda n, ranks: n,
    "broadcast": lambda n, ranks: n,
    "ragged_all_to_all": lambda n, ranks: n,
}


def _part(whole: Many, ranks: Many) -> Many:
    return whole / ranks if varies(whole) or varies(ranks) else Fraction(whole, ranks)


KINDS: tuple[str, ...] = tuple(_FORMULAS)
"""Every kind of collective the ledger knows, by the name StableHLO gives it (permute and broadcast shortened)."""


def exact(amount: Many) -> Many:
    """`amount` as an int when it is whole; arrays as they are.

    >>> exact(Fraction(6, 3)), exact(Fraction(1, 3))
    (2, Fraction(1, 3))
    """
    if varies(amount):
        return amount
    return int(amount) if amount == int(amount) else amount


def wire_elements(kind: str, elements: Many, group_size: Many) -> Many:
    """Elements one rank puts on the wire for one collective (multiply by the itemsize for bytes).

    Args:
      kind: one of `KINDS`.
      elements: n, the size of the full array on one rank, or an array of such sizes.
      group_size: N, the ranks that take part, or an array.

    Returns:
      An int where whole, else a Fraction; of arrays an array of floats.

    Raises:
      ValueError: for an unknown kind, a negative size or an empty group.

    >>> wire_elements("all_reduce", 1000, 8), wire_elements("all_gather", 1000, 3)
    (1750, Fraction(2000, 3))
    """
    if kind not in _FORMULAS:
        raise ValueError(f"unknown collective kind {kind!r}: it must be one of {', '.join(KINDS)}")
    if varies(elements) or varies(group_size):
        return either(group_size > 1, _FORMULAS[kind](elements, group_size), 0)
    if elements < 0 or group_size < 1:
        raise ValueError(
            f"{kind} of {elements} elements over {group_size} ranks: give elements >= 0 and at least one rank"
        )
    return 0 if group_size == 1 else exact(_FORMULAS[kind](elements, group_size))
