"""A value of an update's program, as it is read: whose elements it holds, if it is not the same on all ranks."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from axonml_jax.compat.operation import Operation
from axonml_jax.program.rules import is_elementwise


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


def kind_of(op: Operation, given: Sequence[Value]) -> Hashable:
    """What an operation does to each element, whatever the shape; None: it may do anything else."""
    shape = op.made[0].shape
    spread = op.name == "broadcast_in_dim" and given[0].is_number
    if not spread and not is_elementwise(op.name):
        return None
    if any(not value.is_number and (value.owner is None or value.aval.shape != shape) for value in given):
        return None
    options = () if spread else tuple(sorted((name, str(value)) for name, value in op.options.items()))
    met = tuple(value.owner is None and (value.uniform, not value.aval.shape) for value in given)
    return op.name, options, met, *(str(aval.dtype) for aval in op.made)
