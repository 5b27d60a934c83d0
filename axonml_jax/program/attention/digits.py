"""Which dims of an attention the dims of a value run over, through reshapes, transposes and broadcasts.

An index along a dim is written in digits, as a number is: heads that were two dims, groups and their members, are one dim of
two digits. A reshape only writes the same digits down in other dims.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from axonml_jax.compat.operation import Operation
from axonml_jax.compat.varying_types import CASTS
from axonml_jax.program.rules import follow


@dataclass(frozen=True)
class Digit:
    """A part of an index: `index // stride % size` of the index along what the label names.

    Attributes:
      label: what it is an index of, such as "head".
      stride: what one step of it counts in whole steps of the label.
      size: how many values it takes.
    """

    label: Any
    stride: int
    size: int

    def __str__(self) -> str:
        return str(self.label) if self.stride == 1 else f"{self.label}/{self.stride}"


Index = tuple[Digit, ...]
"""What one dim runs over, the most significant digit first; () for a dim of size 1, or one along which nothing changes."""

Indices = tuple[Index, ...]
"""Of every dim of a value."""


def whole(label: Any, size: int) -> Index:
    """The index of a dim that runs over all of a label."""
    return (Digit(label, 1, size),) if size > 1 else ()


def labels_of(indices: Iterable[Index]) -> frozenset[Any]:
    """What some dims run over, in whole or in part."""
    return frozenset(digit.label for index in indices for digit in index)


def joined(digits: Iterable[Digit]) -> Index:
    """Digits as few as say the same."""
    found: list[Digit] = []
    for digit in digits:
        last = found[-1] if found else None
        if last is not None and last.label == digit.label and last.stride == digit.stride * digit.size:
            found[-1] = Digit(digit.label, digit.stride, last.size * digit.size)
        elif digit.size > 1:
            found.append(digit)
    return tuple(found)


def regrouped(indices: Indices, shape: Sequence[int]) -> Indices | None:
    """The same digits, row by row, in dims of another shape; None where a dim would end within a digit."""
    rest = [digit for index in indices for digit in index][::-1]
    found: list[Index] = []
    for size in shape:
        own: list[Digit] = []
        while size > 1:
            if not rest:
                return None
            digit = rest.pop()
            if digit.size > size:
                if digit.size % size:
                    return None
                low = digit.size // size
                rest.append(Digit(digit.label, digit.stride, low))
                digit = Digit(digit.label, digit.stride * low, size)
            if size % digit.size:
                return None
            own.append(digit)
            size //= digit.size
        found.append(joined(own))
    return None if rest else tuple(found)


def after(op: Operation, k: int, indices: Indices) -> Indices | None:
    """The indices of an operation's result, of those of operand k: () where it is spread; None where they are not followed."""
    given, made = op.given[k].shape, op.made[0].shape
    if op.name == "reshape":
        return None if op.options["dimensions"] is not None else regrouped(indices, made)
    if op.name in KEEPING:
        return indices
    found: list[Index] = [()] * len(made)
    for dim, index in enumerate(indices):
        if given[dim] > 1:
            goes = follow(op, k, dim, 1)
            if goes is None or made[goes] != given[dim]:
                return None
            found[goes] = index
    return tuple(found)


def before(op: Operation, indices: Indices) -> Indices | None:
    """The indices of the operand of an operation that only places, of those of its result; None: it does something else."""
    if not op.given:
        return None
    given = op.given[0].shape
    if op.name == "reshape":
        return None if op.options["dimensions"] is not None else regrouped(indices, given)
    if op.name == "tile":
        parts = [regrouped((index,), pair) for index, *pair in zip(indices, op.options["reps"], given, strict=True)]
        return None if None in parts else tuple([part[1] for part in parts if part is not None])
    if op.name in KEEPING:
        return indices
    if op.name not in ("broadcast_in_dim", "squeeze", "transpose"):
        return None
    goes = [follow(op, 0, dim, 1) if size > 1 else None for dim, size in enumerate(given)]
    return tuple([() if to is None else indices[to] for to in goes])


KEEPING = (
    *CASTS,
    "convert_element_type",
    "copy",
    "name",
    "reshard",
    "sharding_constraint",
    "stop_gradient",
    "layout_constraint",
)
"""Operations that leave every element where it is, and what it is but for its dtype."""


def arranged(x: Any, indices: Indices, wanted: Indices, *, spread: bool = False) -> Any:
    """An array with its dims in another order, joined and parted.

    Args:
      x: its dims run over `indices`.
      wanted: what the dims of the result run over.
      spread: whether dims along which `x` does not change have their whole size; else they have size 1.
    """
    cuts = _cuts([*indices, *wanted])
    parts = [part for index in indices for digit in index for part in _parts(digit, cuts)]
    x = jnp.reshape(x, [part.size for part in parts])
    asked = [[part for digit in index for part in _parts(digit, cuts)] for index in wanted]
    order = [part for index in asked for part in index if part in parts]
    assert sorted(map(parts.index, order)) == list(range(len(parts))), (indices, wanted)
    x = jnp.transpose(x, [parts.index(part) for part in order])
    there = [spread or any(part in parts for part in index) for index in asked]
    x = jnp.reshape(x, [part.size if part in parts else 1 for index in asked for part in index])
    full = [part.size if yes or part in parts else 1 for index, yes in zip(asked, there, strict=True) for part in index]
    x = jnp.broadcast_to(x, full) if list(x.shape) != full else x
    sizes = [math.prod(part.size for part in index) if yes else 1 for index, yes in zip(asked, there, strict=True)]
    return jnp.reshape(x, sizes)


def _cuts(indices: Iterable[Index]) -> Mapping[Any, set[int]]:
    """Where digits of each label begin and end."""
    found: dict[Any, set[int]] = {}
    for index in indices:
        for digit in index:
            found.setdefault(digit.label, set()).update((digit.stride, digit.stride * digit.size))
    return found


def _parts(digit: Digit, cuts: Mapping[Any, set[int]]) -> list[Digit]:
    """A digit as several that no other one overlaps in part."""
    ends = sorted(cut for cut in cuts[digit.label] if digit.stride <= cut <= digit.stride * digit.size)
    pairs = list(itertools.pairwise(ends))
    assert all(high % low == 0 for low, high in pairs), (digit, cuts)
    return [Digit(digit.label, low, high // low) for low, high in reversed(pairs)]
