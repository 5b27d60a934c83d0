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

A collective over one rank moves nothing.
"""

from collections.abc import Callable
from fractions import Fraction

Amount = int | Fraction
"""A number of elements or bytes: an int where it is whole, else the exact fraction."""

_FORMULAS: dict[str, Callable[[int, int], Fraction]] = {
    "all_reduce": lambda n, ranks: Fraction(2 * n * (ranks - 1), ranks),
    "all_gather": lambda n, ranks: Fraction(n * (ranks - 1), ranks),
    "reduce_scatter": lambda n, ranks: Fraction(n * (ranks - 1), ranks),
    "all_to_all": lambda n, ranks: Fraction(n * (ranks - 1), ranks),
    "permute": lambda n, ranks: Fraction(n),
    "broadcast": lambda n, ranks: Fraction(n),
    "ragged_all_to_all": lambda n, ranks: Fraction(n),
}

KINDS: tuple[str, ...] = tuple(_FORMULAS)
"""Every kind of collective the ledger knows, by the name StableHLO gives it (permute and broadcast shortened)."""


def exact(amount: Amount) -> Amount:
    """`amount` as an int when it is whole.

    >>> exact(Fraction(6, 3)), exact(Fraction(1, 3))
    (2, Fraction(1, 3))
    """
    return int(amount) if amount == int(amount) else amount


def wire_elements(kind: str, elements: int, group_size: int) -> Amount:
    """Elements one rank puts on the wire for one collective (multiply by the itemsize for bytes).

    Args:
      kind: one of `KINDS`.
      elements: n, the size of the full array on one rank.
      group_size: N, the ranks that take part.

    Returns:
      An int where whole, else a Fraction.

    Raises:
      ValueError: for an unknown kind, a negative size or an empty group.

    >>> wire_elements("all_reduce", 1000, 8), wire_elements("all_gather", 1000, 3)
    (1750, Fraction(2000, 3))
    """
    if kind not in _FORMULAS:
        raise ValueError(f"unknown collective kind {kind!r}: it must be one of {', '.join(KINDS)}")
    if elements < 0 or group_size < 1:
        raise ValueError(
            f"{kind} of {elements} elements over {group_size} ranks: give elements >= 0 and at least one rank"
        )
    return 0 if group_size == 1 else exact(_FORMULAS[kind](elements, group_size))
