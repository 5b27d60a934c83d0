"""A leaf of something that is saved: the array as it rests, and how that stores the whole one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.sharding.layout import Layout
from axonml_jax.sharding.stored import from_stored


@dataclass(frozen=True)
class Leaf:
    """One array under a name that does not depend on the plan.

    Attributes:
      array: as it rests: a `jax.Array`, a NumPy array, a Python number, or only the shape and dtype of one.
      layout: how it stores the whole array; None where it is the whole array.
      low_rank: where the model reads W + scale A B in the place of this array W: A, B and scale.
      column_scales: of int8 that stands for floats: what 1 stands for in every column.
      entries: what its first dim numbers, where that is no dim of the array that is meant; else empty.
    """

    array: Any
    layout: Layout | None = None
    low_rank: "tuple[Leaf, Leaf, float] | None" = None
    column_scales: "Leaf | None" = None
    entries: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole array's shape."""
        return tuple(self.layout.shape) if self.layout is not None else tuple(np.shape(self.array))

    @property
    def dtype(self) -> Any:
        """Its dtype; a typed key's own."""
        return self.array.dtype if hasattr(self.array, "dtype") else np.asarray(self.array).dtype

    @property
    def padded(self) -> bool:
        """Whether the array rests in another shape than the whole one's."""
        return self.shape != tuple(np.shape(self.array))

    def whole(self) -> Any:
        """The whole array, split over devices as far as its dims divide."""
        if not self.padded:
            return self.array
        assert self.layout is not None
        sharding = self.array.sharding
        spec = dividing(self.layout.shape, self.layout.axes, sharding.mesh)
        target = NamedSharding(sharding.mesh, spec)
        array = jax.device_put(self.array, NamedSharding(sharding.mesh, sharding.spec))  # out of host memory
        return jax.jit(from_stored, static_argnums=1, out_shardings=target)(array, self.layout)


@runtime_checkable
class Checkpointable(Protocol):
    """What checkpoints keep: an object that gives its arrays by name, and takes them back."""

    def checkpoint_leaves(self) -> dict[str, Leaf]:
        """Every array by a name that is the same under every plan."""
        ...

    def take_leaves(self, arrays: Mapping[str, Any]) -> None:
        """Go on from arrays by name, in the shapes and on the devices of `checkpoint_leaves`."""
        ...


def dividing(shape: Sequence[int], axes: Iterable[str], mesh: Mesh) -> PartitionSpec:
    """A spec that splits an array without padding over as many of some mesh axes as its dims divide by, in their order."""
    entries: list[tuple[str, ...]] = [()] * len(shape)
    left = list(shape)
    for axis in axes:
        size = mesh.shape[axis]
        dim = next((dim for dim, n in enumerate(left) if n and n % size == 0), None)
        if dim is not None:
            left[dim] //= size
            entries[dim] = (*entries[dim], axis)
    return PartitionSpec(*(entry or None for entry in entries))
