"""Hold a traced count against a lowered one, launch by launch."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from axonml_jax.ledger.entry import Collective, Loop


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """One kind of launch that the two programs hold a different number of times."""

    kind: str
    dtype: str
    elements: int
    group_size: int
    in_loop: bool
    traced: int
    lowered: int

    def __str__(self) -> str:
        where = "in a loop" if self.in_loop else "outside loops"
        group = f" over {self.group_size} ranks" if self.group_size else ""
        what = f"{self.kind} of {self.dtype}[{self.elements}]{group}, {where}"
        return f"{what}: traced {self.traced}, lowered {self.lowered}"


def agreement(traced: Iterable[Collective], lowered: Iterable[Collective]) -> list[Difference]:
    """Every difference between a traced program's collectives and its lowered program's; empty when they agree.

    Compared are launches as the program text holds them: a call on a tree is one launch per leaf, a loop's body is one
    text (or as many as `unroll` makes), every branch counts.

    Args:
      traced: from `collectives_in`.
      lowered: from `collectives_in_lowered`, of the same step and arguments.

    Returns:
      A sorted list of `Difference`.
    """
    ours, theirs = Counter(_launches(traced)), Counter(_launches(lowered))
    return sorted(
        Difference(*launch, traced=ours[launch], lowered=theirs[launch])
        for launch in ours.keys() | theirs.keys()
        if ours[launch] != theirs[launch]
    )


def _launches(entries: Iterable[Collective]) -> Iterator[tuple[str, str, int, int, bool]]:
    for entry in entries:
        group = 0 if entry.kind == "permute" else entry.group_size
        for in_loop, copies in _copies(entry.loops).items():
            for elements in entry.leaf_elements:
                for _ in range(copies):
                    yield entry.kind, entry.dtype, elements, group, in_loop


def _copies(loops: Iterable[Loop]) -> Counter[bool]:
    """How often a collective's text stands inside and outside loops once its enclosing loops are lowered."""
    copies: Counter[bool] = Counter({False: 1})
    for loop in loops:
        inside, outside = _loop_copies(loop)
        total = copies[True] + copies[False]
        copies = Counter({True: total * inside + copies[True] * outside, False: copies[False] * outside})
    return copies


def _loop_copies(loop: Loop) -> tuple[int, int]:
    """Copies of a loop's body inside the lowered while loop, and beside it (what `lax.scan(unroll=)` leaves over)."""
    if loop.trips is None:
        return 1, 0
    if loop.unroll == 1:
        return min(1, loop.trips), 0
    trips, rest = divmod(loop.trips, loop.unroll) if loop.unroll else (0, loop.trips)
    if trips == 1 and rest == 0:
        return 0, loop.trips
    return (loop.unroll if trips else 0), rest
