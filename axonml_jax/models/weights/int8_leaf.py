"""Weights from files into matrices that rest as int8: read as floats where they will rest, and quantized there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from axonml_jax.model.lora.int8_base import quantized
from axonml_jax.sharding.layout import Layout
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.sharding.stored import from_stored, to_stored


def filled_int8(leaf: Leaf, fill: Callable[[Leaf], Any]) -> tuple[Any, Any]:
    """int8 and scales as a leaf and its scales rest; of one matrix, or stack of them, each device holds its part as floats.

    Args:
      leaf: with scales.
      fill: reads a leaf from the files, in its dtype, layout and place.
    """
    scales = leaf.column_scales
    assert scales is not None
    like = jax.ShapeDtypeStruct(np.shape(leaf.array), scales.dtype, sharding=getattr(leaf.array, "sharding", None))
    floats = fill(replace(leaf, array=like))
    places = getattr(leaf.array, "sharding", None), getattr(scales.array, "sharding", None)
    if not isinstance(places[0], NamedSharding) or not isinstance(places[1], NamedSharding):
        return _stored(floats, leaf.layout, scales.layout)
    on_device = places[0].with_memory_kind("device"), places[1].with_memory_kind("device")
    make: Any = jax.jit(_stored, static_argnums=(1, 2), out_shardings=on_device)
    made = make(jax.device_put(floats, on_device[0]), leaf.layout, scales.layout)
    return tuple(jax.block_until_ready(jax.device_put(made, places)))


def _stored(floats: Any, layout: Layout | None, scales_layout: Layout | None) -> tuple[Any, Any]:
    matrix, scales = quantized(floats if layout is None else from_stored(floats, layout))
    layouts = (matrix, layout), (scales, scales_layout)
    stored = [array if own is None else to_stored(array, own) for array, own in layouts]
    return stored[0], stored[1]
