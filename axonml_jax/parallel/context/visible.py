"""Which positions see which, as positions alone decide it: causal attention and sliding windows."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Visible:
    """What a query at position i sees of the keys: all of them, but for these rules.

    Its methods take NumPy arrays and traced ones.

    Attributes:
      causal: none after i.
      window: (left, right): those from i - left to i + right.

    >>> Visible(causal=True).may_see(0, 3, 4, 7), Visible(window=(1, 0)).may_see(4, 7, 0, 3)
    (False, True)
    """

    causal: bool = False
    window: tuple[int, int] | None = None

    @property
    def everything(self) -> bool:
        """Whether no rule hides anything."""
        return not self.causal and self.window is None

    def sees(self, queries: Any, keys: Any) -> Any:
        """bool [q, k], of positions int [q] and [k]; a key of a negative position is no key and never seen."""
        ahead = keys[None, :] - queries[:, None]
        seen = (keys >= 0)[None, :] & (ahead == ahead)
        if self.causal:
            seen = seen & (ahead <= 0)
        if self.window is not None:
            seen = seen & (ahead >= -self.window[0]) & (ahead <= self.window[1])
        return seen

    def may_see(self, first_query: Any, last_query: Any, first_key: Any, last_key: Any) -> Any:
        """Whether any query of a range may see any key of another, bounds included; False is certain."""
        may = last_key >= first_key
        if self.causal:
            may = may & (first_key <= last_query)
        if self.window is not None:
            may = may & (last_key >= first_query - self.window[0]) & (first_key <= last_query + self.window[1])
        return may
