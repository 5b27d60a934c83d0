"""A leaf of a model on a mesh from the arrays of files, of which each device reads its part, and back."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from axonml_jax.model.lora.adapters import merged
from axonml_jax.model.lora.int8_base import dequantized
from axonml_jax.model.stored_arrays import StoredArrays
from axonml_jax.model.stored_shards import Pending
from axonml_jax.models.families.array_place import Place, joined
from axonml_jax.models.families.source import ArraySource, shape_there
from axonml_jax.models.weights.element_on_host import element_on_host
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.sharding.stored import to_stored


def filled(leaf: Leaf, source: ArraySource, stored: StoredArrays) -> Any:
    """An array from the files in the shape, dtype and place of a leaf; each device's part is read alone.

    Args:
      leaf: says where it will rest, and how.
      source: where it is among the arrays of the files.
      stored: these.
    """
    sharding = getattr(leaf.array, "sharding", None)
    whole, shape = leaf.shape, tuple(np.shape(leaf.array))
    if sharding is None:
        return source.read(stored, (slice(None),) * len(whole), leaf.dtype)
    on_device = sharding.with_memory_kind("device") if sharding.memory_kind not in (None, "device") else sharding
    parts: dict[tuple, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        bounds = tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
        if bounds not in parts:
            parts[bounds] = _padded_part(source, stored, whole, bounds, leaf.dtype)
        return parts[bounds]

    if len(shape) == len(whole):
        array = jax.make_array_from_callback(shape, on_device, part)
    else:
        assert leaf.layout is not None
        value = to_stored(source.read(stored, (slice(None),) * len(whole), leaf.dtype), leaf.layout)
        array = jax.make_array_from_callback(shape, on_device, lambda index: np.asarray(value)[index])
    array = jax.block_until_ready(array if on_device is sharding else jax.device_put(array, sharding))
    parts.clear()  # the host's copies go before the next array is read, not when cycles are collected
    return array


def _padded_part(
    source: ArraySource, stored: StoredArrays, whole: tuple[int, ...], bounds: tuple, dtype: Any
) -> np.ndarray:
    """A part of an array as it is stored: zeros behind the last element of every dim."""
    inside = tuple(slice(min(start, size), min(stop, size)) for (start, stop), size in zip(bounds, whole, strict=True))
    if any(each.start >= each.stop for each in inside):  # padding alone
        return np.zeros([stop - start for start, stop in bounds], dtype)
    found = source.read(stored, inside, dtype)
    more = [(0, stop - start - size) for (start, stop), size in zip(bounds, found.shape, strict=True)]
    return np.pad(found, more) if any(end for _, end in more) else found


def pending(name: str, parts: list[tuple[Leaf, tuple[int, ...], Place]]) -> Pending:
    """An array there of parts of leaves here.

    Args:
      name: of the array there.
      parts: of each the leaf, the index of its first dims, and its place in the array there.
    """
    leaf, index, _ = parts[0]
    places = [place for _, _, place in parts]
    shape = shape_there(places, leaf.shape[len(index) :])
    fetch: Callable[[], np.ndarray] = lambda: joined(places, [_on_host(own, at) for own, at, _ in parts])
    return Pending(name, shape, jax.numpy.dtype((leaf.column_scales or leaf).dtype).name, fetch)


def _on_host(leaf: Leaf, index: tuple[int, ...]) -> np.ndarray:
    """`whole[index]` of a leaf in this process's memory, as floats, merged with its adapters."""
    if leaf.low_rank is not None:
        first, second, scale = leaf.low_rank
        own, a, b = (_on_host(each, index) for each in (replace(leaf, low_rank=None), first, second))
        return merged(own, a, b, scale)
    if leaf.column_scales is not None:
        own = replace(leaf, column_scales=None)
        return dequantized(_on_host(own, index), _on_host(leaf.column_scales, index))
    return element_on_host(leaf.whole(), index)
