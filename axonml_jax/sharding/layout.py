"""Where one array lives between steps: its whole shape, the shape it is stored in, and the spec that splits that."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax._types import PyTree
from axonml_jax.mesh.axes import AxisNames, as_axes


@dataclass(frozen=True)
class Layout:
    """The place of one leaf.

    A bare PartitionSpec does not tell how a leaf is stored once it is padded to divide, so a strategy's `spec` refines a
    layout instead (docs/adr/0005).

    Attributes:
      shape: the whole array as the model knows it.
      dtype: its dtype between steps.
      spec: which mesh axes split which dims of the stored array.
      stored: the global shape in which it is stored; the same as `shape` unless a dim had to be padded to divide.
      parts: into how many parts each dim of the stored array is split.
      stack_dims: how many first dims number layers or experts, where the model says it (`Functional.stacked_dims`).

    >>> layout = Layout.whole(jax.ShapeDtypeStruct((8, 3), "float32")).on("fsdp", dim=1, size=2)
    >>> layout.axes, layout.stored, layout.shard
    (('fsdp',), (8, 4), (8, 2))
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    stored: tuple[int, ...]
    parts: tuple[int, ...]
    stack_dims: int = 0

    @staticmethod
    def whole(leaf: Any, stack_dims: int = 0) -> "Layout":
        """The layout of a leaf of which every device holds the whole."""
        shape = tuple(leaf.shape)
        return Layout(shape, leaf.dtype, PartitionSpec(), shape, (1,) * len(shape), stack_dims)

    def on(self, axis: AxisNames, dim: int, size: int) -> "Layout":
        """This layout with `dim` split over one more axis (or several) of `size` ranks, inside those that split it already.

        A dim that does not divide is stored with zeros behind it; a scalar is stored as one element per rank.
        """
        shard = list(self.shard or (1,))
        shard[dim] = -(-shard[dim] // size)
        entries = list(self.spec) + [None] * (len(shard) - len(self.spec))
        names = (*_names(entries[dim]), *as_axes(axis))
        entries[dim] = names[0] if len(names) == 1 else names
        parts = list(self.parts or (1,))
        parts[dim] *= size
        while entries and entries[-1] is None:
            entries.pop()
        stored = tuple(n * k for n, k in zip(shard, parts, strict=True))
        return Layout(self.shape, self.dtype, PartitionSpec(*entries), stored, tuple(parts), self.stack_dims)

    @property
    def shard(self) -> tuple[int, ...]:
        """The shape that one rank holds."""
        return tuple(n // k for n, k in zip(self.stored, self.parts, strict=True))

    def dim_of(self, axis: AxisNames) -> int | None:
        """The dim of the stored array that `axis` splits (of several the first: they split one dim together)."""
        first = as_axes(axis)[0]
        return next((dim for dim, entry in enumerate(self.spec) if first in _names(entry)), None)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that split one dim, outermost first."""
        return _names(self.spec[dim]) if dim < len(self.spec) else ()

    def stacked(self, axes: AxisNames, size: int) -> "Layout":
        """The layout of `size` such arrays stacked along a new dim 0, which these axes split."""
        spec = PartitionSpec(as_axes(axes), *self.spec)
        stored, parts = (size, *self.stored), (size, *self.parts)
        return Layout((size, *self.shape), self.dtype, spec, stored, parts, self.stack_dims + 1)

    def sliced(self, ndim: int) -> "Layout":
        """The layout of one entry along the first dims, which must not be split, so that `ndim` stored dims remain."""
        drop = len(self.stored) - ndim
        if not drop:
            return self
        assert all(parts == 1 for parts in self.parts[:drop])
        spec = PartitionSpec(*tuple(self.spec)[drop:])
        left = max(self.stack_dims - drop, 0)
        return Layout(self.shape[drop:], self.dtype, spec, self.stored[drop:], self.parts[drop:], left)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which the ranks hold different parts."""
        return tuple(name for entry in self.spec for name in _names(entry))

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return math.prod(self.shape)

    @property
    def padding(self) -> int:
        """Elements stored beyond the whole array's."""
        return math.prod(self.stored) - self.size


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def is_layout(x: Any) -> bool:
    """For `jax.tree.map(..., is_leaf=is_layout)`."""
    return isinstance(x, Layout)


def specs(layouts: PyTree) -> PyTree:
    """The PartitionSpec of every layout."""
    return jax.tree.map(lambda layout: layout.spec, layouts, is_leaf=is_layout)


def shardings(specs: PyTree, mesh: Mesh) -> PyTree:
    """A NamedSharding on `mesh` for every PartitionSpec of a tree."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
