"""`Operand`: a value that an attention reads, and which dims of the attention each of its dims runs over."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from axonml_jax.program.attention.digits import Indices, arranged, joined, labels_of, whole

LABELS = ("batch", "head", "member", "query", "key", "size", "value")
"""What dims of an attention are: rows; heads of keys and values; the heads of queries that read one of them; positions of
queries and of keys; the size of a head of queries and keys, and that of values."""

Layout = tuple[tuple[str, ...], ...]
"""The labels of every dim of an array."""

HEADS = ("head", "member")
QUERIES: Layout = (("batch",), ("query",), HEADS, ("size",))
KEYS: Layout = (("batch",), ("key",), ("head",), ("size",))
VALUES: Layout = (("batch",), ("key",), ("head",), ("value",))
RESULT: Layout = (("batch",), ("query",), HEADS, ("value",))
SCORES: Layout = (("batch",), HEADS, ("query",), ("key",))
OF_KEYS: Layout = (("batch",), ("key",))
OF_QUERIES: Layout = (("batch",), ("query",))


@dataclass(frozen=True)
class Operand:
    """A value of the program.

    Attributes:
      value: its name in the `Nested` program.
      shape: its own.
      dtype: the one that it is read in, to which it is cast.
      indices: for each of its dims what it runs over: digits of `LABELS`.
      layout: the dims in which it is given to whoever computes the attention.
    """

    value: int
    shape: tuple[int, ...]
    dtype: Any
    indices: Indices
    layout: Layout

    @property
    def labels(self) -> frozenset[str]:
        """What it runs over, in whole or in part."""
        return labels_of(self.indices)

    def given(self, x: Any, sizes: Mapping[str, int], *, spread: bool = False) -> Any:
        """The value in its layout.

        Args:
          x: the value.
          sizes: of every label.
          spread: whether dims along which it does not change have their whole size; else they have size 1.
        """
        return arranged(jnp.asarray(x, self.dtype), self.indices, self.wanted(sizes), spread=spread)

    def taken(self, x: Any, sizes: Mapping[str, int]) -> Any:
        """The inverse: a value in its layout as the program has it."""
        return arranged(x, self.wanted(sizes), self.indices).reshape(self.shape)

    def wanted(self, sizes: Mapping[str, int]) -> Indices:
        """What the dims run over in its layout."""
        return tuple([joined(digit for label in dim for digit in whole(label, sizes[label])) for dim in self.layout])

    def __str__(self) -> str:
        says = ["*".join(map(str, index)) or "1" for index in self.indices]
        return f"{jnp.dtype(self.dtype).name}[{', '.join(map(str, self.shape))}] ({', '.join(says)})"
