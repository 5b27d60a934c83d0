"""Checking that a global batch divides, and placing it over the batch axes of a mesh."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.mesh.axes import batch_axes


def batch_spec(leaf: Any, axes: tuple[str, ...]) -> PartitionSpec:
    """Dim 0 of a batch leaf is split over the batch axes; scalars are the same everywhere."""
    return PartitionSpec(axes) if np.ndim(leaf) and axes else PartitionSpec()


def batch_specs(batch: PyTree, mesh: Mesh) -> PyTree:
    """The spec of every leaf of a global batch on `mesh`."""
    axes = batch_axes(mesh.axis_names)
    return jax.tree.map(lambda leaf: batch_spec(leaf, axes), batch)


def batch_degree(mesh: Mesh) -> int:
    """How many shards the global batch has on `mesh`."""
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh.axis_names))


def check_batch(batch: PyTree, mesh: Mesh, microbatches: int = 1) -> None:
    """Refuse a batch whose leaves do not split evenly into shards and microbatches.

    Raises:
      ValueError: naming every leaf that does not divide, the rule and the nearest sizes that do; or that the batch has no
        leaf with a batch dim.
    """
    degree = batch_degree(mesh)
    parts = degree * microbatches
    leaves = named_leaves(batch)
    if texts := {name or "batch": kind for name, leaf in leaves.items() if (kind := _not_numeric(leaf))}:
        raise TypeError(f"the batch's leaves must be arrays of numbers, but some are not: {texts}; take them out")
    split = {name: np.shape(leaf) for name, leaf in leaves.items() if np.ndim(leaf)}
    if not split:
        raise ValueError(
            f"the batch has no array with a batch dim to split over {degree} shards: leaves {list(leaves)}"
        )
    sizes = {shape[0] for shape in split.values()}
    wrong = {name: shape for name, shape in split.items() if shape[0] % parts or shape[0] == 0}
    if not wrong and len(sizes) == 1:
        return
    rows = "\n".join(f"  {name or 'batch'}: shape {shape}" for name, shape in (wrong or split).items())
    if not wrong:
        raise ValueError(
            f"the batch's leaves differ in the size of dim 0, which is the batch dim of all of them:\n{rows}"
        )
    size = min(shape[0] for shape in wrong.values())
    below, above = size // parts * parts, (size // parts + 1) * parts
    how = f"{degree} batch shards (mesh {dict(mesh.shape)})" + (
        f" x {microbatches} microbatches = {parts} parts" if microbatches > 1 else ""
    )
    raise ValueError(
        f"the global batch does not split evenly into {how}:\n{rows}\n"
        f"dim 0 must be a multiple of {parts}: use {f'{below} or ' if below else ''}{above} rows"
        f"{', another number of microbatches,' if microbatches > 1 else ''} or another mesh"
    )


def _not_numeric(leaf: Any) -> str | None:
    """The kind of a leaf that no device can hold; None for numbers."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return str(dtype) if isinstance(dtype, np.dtype) and dtype.kind in "OSUMm" else None


def place_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """The global batch as arrays split over the batch axes.

    Args:
      batch: arrays with the global batch as dim 0 (the same in every process), or arrays already placed.

    Returns:
      Global arrays; each process has moved only the rows that its devices hold.
    """
    axes = batch_axes(mesh.axis_names)

    def place(leaf):
        sharding = NamedSharding(mesh, batch_spec(leaf, axes))
        if not isinstance(leaf, jax.Array):
            leaf = np.asarray(leaf)
        elif leaf.sharding == sharding:
            return leaf
        elif not leaf.is_fully_addressable:
            return jax.jit(lambda x: x, out_shardings=sharding)(leaf)
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, batch)
