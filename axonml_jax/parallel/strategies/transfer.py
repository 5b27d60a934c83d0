"""`Transfer`: one collective by which a strategy moves one leaf, as it says before anything is traced."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of one leaf.

    Attributes:
      kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute".
      elements: of the full array: what an all-gather returns, a reduce-scatter takes.
      ranks: that take part.
      dtype: on the wire.
      padding: how many of the elements are padding.
    """

    kind: str
    elements: int
    ranks: int
    dtype: Any
    padding: int = 0

    def in_hops(self, hop: int | None) -> "tuple[Transfer, ...]":
        """A gather or reduce-scatter as it goes: across the groups of `hop` neighbours, where it is whole, and among them."""
        if hop is None or hop in (1, self.ranks):
            return (self,)
        across = self.ranks // hop
        return replace(self, ranks=across), replace(self, ranks=hop, elements=self.elements // across, padding=0)
