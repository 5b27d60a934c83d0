"""Where every array of a model is among published ones: stacks of layers and of experts made of many there."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families.array_place import Index, Place, Sliced
from axonml_jax.models.families.family import Family


@dataclass(frozen=True)
class ArraySource:
    """Where one array of a model is.

    Attributes:
      dims: sizes of its first dims, each index of which has a place of its own.
      places: of these, the last dim's index growing fastest.
    """

    dims: tuple[int, ...]
    places: tuple[Place, ...]

    def shape(self, arrays: Mapping[str, Sliced]) -> tuple[int, ...]:
        """The shape of the array."""
        return (*self.dims, *self.places[0].shape(arrays[self.places[0].name].shape))

    def read(self, arrays: Mapping[str, Sliced], index: Index, dtype: Any) -> np.ndarray:
        """A part of the array, of which no more is read than that.

        Args:
          arrays: those there.
          index: from where to where, of each dim.
          dtype: of the result.
        """
        shape = self.shape(arrays)
        ranges = [range(*each.indices(size)) for each, size in zip(index, shape, strict=True)]
        rest = tuple(slice(each.start, each.stop) for each in ranges[len(self.dims) :])
        found = np.empty([len(each) for each in ranges], dtype)
        for at, indices in enumerate(itertools.product(*ranges[: len(self.dims)])):
            place = self.places[np.ravel_multi_index(indices, self.dims) if self.dims else 0]
            own = np.unravel_index(at, found.shape[: len(self.dims)]) if self.dims else ()
            found[own] = place.read(arrays[place.name], rest)
        return found


def sources(family: Family, config: TransformerConfig) -> dict[str, ArraySource]:
    """The source of every array of a model, by its name in a `state_dict`."""
    found = {name: ArraySource((), (place,)) for name, place in family.places(config).items()}
    found = _together(found, r"(.*)@(\d+)", lambda match: (match[1], int(match[2])))
    if config.scan_layers:
        found = _together(found, r"blocks/(\d+)/(.*)", lambda match: (f"blocks/layer/{match[2]}", int(match[1])))
    return found


def names_there(every: Mapping[str, ArraySource]) -> dict[str, list[tuple[str, tuple[int, ...], Place]]]:
    """For each array there, of which parts of arrays here it is made: (name here, index of the first dims, place)."""
    found: dict[str, list[tuple[str, tuple[int, ...], Place]]] = {}
    for name, source in every.items():
        for place, index in zip(source.places, np.ndindex(*source.dims), strict=True):
            found.setdefault(place.name, []).append((name, index, place))
    return found


def shape_there(places: Sequence[Place], here: Sequence[int]) -> tuple[int, ...]:
    """The shape of an array there, of whose parts each is of the shape `here`.

    >>> shape_there([Place(name="c_attn", part=i, parts=3) for i in range(3)], (4, 4))
    (4, 12)
    """
    own = tuple(here)
    if places[0].turned:
        own = (*own[:-2], own[-1], own[-2])
    return (*own[:-1], own[-1] * places[0].parts)


def _together(every: Mapping[str, ArraySource], pattern: str, named: Any) -> dict[str, ArraySource]:
    """Sources whose names match a pattern as one with a dim more in front; the others as they are."""
    found: dict[str, ArraySource] = {}
    parts: dict[str, dict[int, ArraySource]] = {}
    for name, source in every.items():
        if (match := re.fullmatch(pattern, name)) is None:
            found[name] = source
        else:
            whole, index = named(match)
            parts.setdefault(whole, {})[index] = source
    for whole, own in parts.items():
        inner = own[0].dims
        places = tuple(place for index in sorted(own) for place in own[index].places)
        assert len(places) == len(own) * math.prod(inner), whole
        found[whole] = ArraySource((len(own), *inner), places)
    return found
