"""The norms of gradients and parameters layer by layer: of whole arrays, though every rank squares only what it holds."""

import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from axonml_jax.collectives.primitives import sum_over

Square = tuple[str, jax.Array, tuple[str, ...]]
"""A parameter's name, the sum of squares of this rank's part of it, and the mesh axes over which it is split."""


def layer_of(name: str) -> str:
    """The layer of a parameter: up to the first part of its path with a number in it, else the module that has it.

    >>> layer_of("blocks/3/mlp/up/kernel"), layer_of("Dense_0/kernel"), layer_of("model/embed/table"), layer_of("scale")
    ('blocks/3', 'Dense_0', 'model/embed', 'scale')
    """
    parts = name.split("/")
    numbered = next((i for i, part in enumerate(parts[:-1]) if re.search(r"\d", part)), None)
    return "/".join(parts[: numbered + 1] if numbered is not None else parts[:-1] or parts)


def layer_norms(squares: Iterable[Square]) -> dict[str, jax.Array]:
    """The 2-norm of every layer over all ranks.

    Communicates: inside `shard_map` one all-reduce of a number per layer for every set of axes that splits parameters.
    """
    by_axes: dict[tuple[str, ...], dict[str, jax.Array]] = {}
    for name, square, axes in squares:
        sums, layer = by_axes.setdefault(axes, {}), layer_of(name)
        sums[layer] = sums.get(layer, jnp.zeros((), square.dtype)) + square
    totals: dict[str, jax.Array] = {}
    with jax.named_scope("axonml.norm"):
        for axes, sums in by_axes.items():
            own = jnp.stack([*sums.values()])
            for layer, total in zip(sums, sum_over(own, axes) if axes else own, strict=True):
                totals[layer] = totals.get(layer, 0.0) + total
    return {layer: jnp.sqrt(total) for layer, total in totals.items()}


def square(array: jax.Array) -> jax.Array:
    """The sum of squares of an array, in at least float32."""
    size = jnp.abs(array)
    return jnp.sum(jnp.square(size.astype(jnp.promote_types(size.dtype, jnp.float32))))
