"""`BatchLayout`: how a global batch is split over a mesh; it checks batches, places them, and gives their specs."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.mesh.axes import batch_axes


@dataclass(frozen=True)
class BatchLayout:
    """Which mesh axes split the rows of a batch: dim 0 of every leaf that is no scalar. Scalars are the same everywhere.

    Attributes:
      rows: these axes, outermost first.
      degrees: (axis, size) of every mesh axis.

    >>> layout = BatchLayout.of({"data": 2, "fsdp": 2, "tensor": 2})
    >>> layout.degree, layout.rows
    (4, ('data', 'fsdp'))
    """

    rows: tuple[str, ...]
    degrees: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, degrees: Mapping[str, int], rows: Iterable[str] | None = None) -> "BatchLayout":
        """On a mesh of these degrees.

        Args:
          degrees: size of every mesh axis.
          rows: the axes that split rows; None: those of the library's own axes that do.
        """
        return cls(batch_axes(degrees) if rows is None else tuple(rows), tuple(degrees.items()))

    @cached_property
    def degree(self) -> int:
        """The number of batch shards."""
        sizes = dict(self.degrees)
        return math.prod(sizes[axis] for axis in self.rows)

    @property
    def by_rank(self) -> PartitionSpec:
        """The spec of a value stacked by rank: one entry of dim 0 per batch shard."""
        return PartitionSpec(self.rows)

    def spec(self, leaf: Any) -> PartitionSpec:
        """The spec of one leaf."""
        return PartitionSpec(self.rows) if np.ndim(leaf) and self.rows else PartitionSpec()

    def specs(self, batch: PyTree) -> PyTree:
        """The spec of every leaf."""
        return jax.tree.map(self.spec, batch)

    def check(self, batch: PyTree, microbatches: int = 1) -> None:
        """Refuse a batch whose leaves do not split evenly into shards and microbatches.

        Raises:
          ValueError: naming every leaf that does not divide, the rule and the nearest sizes that do; or that the batch has
            no leaf with a batch dim.
        """
        degree, parts = self.degree, self.degree * microbatches
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
        how = f"{degree} batch shards (mesh {dict(self.degrees)})" + (
            f" x {microbatches} microbatches = {parts} parts" if microbatches > 1 else ""
        )
        raise ValueError(
            f"the global batch does not split evenly into {how}:\n{rows}\n"
            f"dim 0 must be a multiple of {parts}: use {f'{below} or ' if below else ''}{above} rows"
            f"{', another number of microbatches,' if microbatches > 1 else ''} or another mesh"
        )

    def place(self, batch: PyTree, mesh: Mesh) -> PyTree:
        """The global batch as arrays split over the batch shards of `mesh`.

        Args:
          batch: arrays with the global batch as dim 0 (the same in every process), or arrays already placed.
          mesh: a mesh of these degrees.

        Returns:
          Global arrays; each process has moved only the rows that its devices hold.
        """

        def place(leaf):
            sharding = NamedSharding(mesh, self.spec(leaf))
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

    def microbatches(self, rows: PyTree, count: int) -> PyTree:
        """One rank's rows [b, ...] -> [count, b/count, ...]; scalars are repeated."""

        def split(x: Any) -> jax.Array:
            x = jax.numpy.asarray(x)
            return (
                x.reshape(count, x.shape[0] // count, *x.shape[1:]) if x.ndim else jax.numpy.broadcast_to(x, (count,))
            )

        return jax.tree.map(split, rows)


def _not_numeric(leaf: Any) -> str | None:
    """The kind of a leaf that no device can hold; None for numbers."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return str(dtype) if isinstance(dtype, np.dtype) and dtype.kind in "OSUMm" else None
