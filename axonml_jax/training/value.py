"""A value of an update's program, as it is read: whose elements it holds, if it is not the same on all ranks."""

from typing import Any, NamedTuple


class Value(NamedTuple):
    """A value of the program.

    Attributes:
      number: its number.
      aval: its whole shape and dtype.
      owner: the parameter (position) of which it holds elements; None: it is the same on all ranks.
      uniform: whether all its elements are one number, which is then kept in its place.
      level: how many rounds of totals come before it.
    """

    number: int
    aval: Any
    owner: int | None
    uniform: bool
    level: int

    @property
    def is_number(self) -> bool:
        """Whether it may meet any part of a parameter: one number for all elements, the same on all ranks."""
        return self.owner is None and (not self.aval.shape or self.uniform)
