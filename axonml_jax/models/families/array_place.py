"""Where an array of a model is among published ones, and how it lies there: read and written in parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Index = tuple[slice, ...]
"""Of each dim from where to where, without steps."""


class Sliced(Protocol):
    """An array of which parts can be read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def __getitem__(self, index: Index) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class Place:
    """An array there, or a part of one.

    Attributes:
      name: of the array there.
      turned: whether its last two dims are exchanged there (`torch.nn.Linear`: [out, in]).
      part: which of `parts` equal parts of the last dim there this is.
      parts: how many arrays lie side by side there.
      mixed: whether these take turns element by element, instead of one after the other.
    """

    name: str
    turned: bool = False
    part: int = 0
    parts: int = 1
    mixed: bool = False

    def shape(self, there: Sequence[int]) -> tuple[int, ...]:
        """The shape here.

        >>> Place(name="c_attn", part=1, parts=3).shape((4, 12)), Place(name="up", turned=True).shape((8, 4))
        ((4, 4), (4, 8))
        """
        *first, last = there
        if last % self.parts:
            raise ValueError(
                f"{self.name} of shape {tuple(there)} holds {self.parts} arrays side by side: its last dim must divide"
            )
        own = (*first, last // self.parts)
        return (*own[:-2], own[-1], own[-2]) if self.turned else own

    def read(self, array: Sliced, index: Index) -> np.ndarray:
        """A part of what is here, of which no more is read than that.

        Args:
          array: the one there.
          index: of each dim here.
        """
        there = (*index[:-2], index[-1], index[-2]) if self.turned else index
        if self.parts > 1:
            size = array.shape[-1] // self.parts
            start, stop, _ = there[-1].indices(size)
            spread = (
                slice(start * self.parts, stop * self.parts)
                if self.mixed
                else slice(self.part * size + start, self.part * size + stop)
            )
            there = (*there[:-1], spread)
        found = array[there]
        if self.mixed:
            found = found[..., self.part :: self.parts]
        return np.swapaxes(found, -1, -2) if self.turned else found


def joined(places: Sequence[Place], values: Sequence[Any]) -> np.ndarray:
    """The array there, of all its parts here: the inverse of `Place.read`."""
    order = sorted(zip(places, values, strict=True), key=lambda pair: pair[0].part)
    arrays = [np.swapaxes(value, -1, -2) if place.turned else value for place, value in order]
    if len(arrays) == 1:
        return arrays[0]
    if places[0].mixed:
        return np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1)
    return np.concatenate(arrays, axis=-1)
