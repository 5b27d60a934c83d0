"""What a query sees of the keys, in terms that must all hold: told by positions alone, or by arrays that the program has."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from axonml_jax.program.attention.operand import Operand


@dataclass(frozen=True)
class Band:
    """Keys from `before` places before the query to `after` places after it; None: as far as there are any.

    >>> print(Band(None, 0), Band(3, 0), Band(2, 2), Band(None, 4), sep=" | ")
    causal | causal window 3 | window 2 2 | causal, keys 4 ahead
    """

    before: int | None
    after: int | None

    def __str__(self) -> str:
        if self.before is None:
            return "causal" if self.after == 0 else f"causal, keys {self.after} ahead"
        return f"causal window {self.before}" if self.after == 0 else f"window {self.before} {self.after}"


@dataclass(frozen=True)
class Prefix:
    """Keys that are not after the query, and the first `length` of all."""

    length: int

    def __str__(self) -> str:
        return f"prefix {self.length}"


@dataclass(frozen=True)
class Chunks:
    """Keys of the query's own chunk of `size` positions."""

    size: int

    def __str__(self) -> str:
        return f"chunks of {self.size}"


@dataclass(frozen=True)
class KeyMask:
    """Keys where an array over keys, of each row, is nonzero; or zero, where `seen` is false: a padding mask."""

    mask: Operand
    seen: bool = True

    def __str__(self) -> str:
        return f"keys where {self.mask}{'' if self.seen else ' is zero'}"


@dataclass(frozen=True)
class QueryMask:
    """All keys where an array over queries is nonzero, or zero, where `seen` is false; no key elsewhere."""

    mask: Operand
    seen: bool = True

    def __str__(self) -> str:
        return f"queries where {self.mask}{'' if self.seen else ' is zero'}"


@dataclass(frozen=True)
class Compared:
    """Keys whose number compares with the query's: of one segment where `how` is "eq", none later by position where it is "ge".

    Attributes:
      how: "eq", "ne", "ge", "gt", "le" or "lt", the query's number on the left.
      queries, keys: the numbers.
    """

    how: str
    queries: Operand
    keys: Operand

    def __str__(self) -> str:
        return f"{'segments' if self.how == 'eq' else self.how} of {self.queries} and {self.keys}"


@dataclass(frozen=True)
class MaskArray:
    """Keys where an array over queries and keys is nonzero; or zero, where `seen` is false."""

    mask: Operand
    seen: bool = True

    def __str__(self) -> str:
        return f"{'' if self.seen else 'not '}the mask {self.mask}"


Term = Band | Prefix | Chunks | KeyMask | QueryMask | Compared | MaskArray
"""A rule of what is seen."""


def sees(term: Term, queries: Any, keys: Any, given: Any) -> Any:
    """bool [batch or 1, heads or 1, queries, keys]: what a term lets be seen.

    Args:
      term: the term.
      queries, keys: their positions, int [queries] and [keys].
      given: `given(operand)`: an operand as `Operand.layout` says.
    """
    i, j = queries[:, None], keys[None, :]
    match term:
        case Band(before, after):
            seen = (j <= i + after) if after is not None else (i == i) & (j == j)
            return (seen if before is None else seen & (j >= i - before))[None, None]
        case Prefix(length):
            return ((j <= i) | (j < length))[None, None]
        case Chunks(size):
            return (i // size == j // size)[None, None]
        case KeyMask(mask, seen):
            return ((given(mask) != 0) == seen)[:, None, None, :]
        case QueryMask(mask, seen):
            return ((given(mask) != 0) == seen)[:, None, :, None]
        case Compared(how, numbers, others):
            return HOW[how](given(numbers)[:, None, :, None], given(others)[:, None, None, :])
        case MaskArray(mask, seen):
            return (given(mask) != 0) == seen


HOW: Mapping[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "ge", "gt", "le", "lt")
}
"""What comparisons of `Compared` do."""
