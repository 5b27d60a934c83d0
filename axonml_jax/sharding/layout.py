"""Layouts: how one array is padded, split and ordered over a mesh, and how it is placed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.base import PyTree, from_every_process
from axonml_jax.mesh.axes import AxisNames, as_axes

# --------------------------------------------------------------------------------------------------
# Where one array lives between steps: its whole shape, the shape it is stored in, and the spec that splits that.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How one leaf is padded, split and ordered over a mesh.

    A bare PartitionSpec does not tell how a leaf is stored once it is padded to divide, so a strategy's `spec` refines a
    layout instead (docs/adr/0005).

    Attributes:
      shape: the whole array as the model knows it.
      dtype: its dtype between steps.
      spec: which mesh axes split which dims of the stored array.
      stored: the global shape in which it is stored; the same as `shape` unless a dim had to be padded to divide.
      parts: into how many parts each dim of the stored array is split.
      stack_dims: how many first dims number layers or experts, where the model says it (`Functional.stacked_dims`).
      automatic: how axes that a step leaves to XLA's partitioner split the array, which looks whole along them.

    >>> layout = Layout.replicated(jax.ShapeDtypeStruct((8, 3), "float32")).on("fsdp", dim=1, size=2)
    >>> layout.axes, layout.stored, layout.shard
    (('fsdp',), (8, 4), (8, 2))
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    stored: tuple[int, ...]
    parts: tuple[int, ...]
    stack_dims: int = 0
    automatic: PartitionSpec = PartitionSpec()

    @staticmethod
    def replicated(leaf: Any, stack_dims: int = 0) -> "Layout":
        """The layout of a leaf that every device holds in full."""
        shape = tuple(leaf.shape)
        return Layout(shape, leaf.dtype, PartitionSpec(), shape, (1,) * len(shape), stack_dims)

    def on(self, axis: AxisNames, dim: int, size: int) -> "Layout":
        """This layout with `dim` also split over another axis (or several) of `size` ranks, inside those that already split it.

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
        return replace(self, spec=PartitionSpec(*entries), stored=stored, parts=tuple(parts))

    def divided(self, counts: Sequence[int]) -> "Layout":
        """The layout of one of the equal parts into which each dim is divided."""
        # A scalar rests with a dim that its shape has not.
        parts = lambda sizes: tuple(size // count for size, count in zip(sizes, counts, strict=False))
        return replace(self, shape=parts(self.shape), stored=parts(self.stored), automatic=PartitionSpec())

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

    def stacked(self, axes: AxisNames, size: int, each: int = 1) -> "Layout":
        """The layout of `size * each` such arrays stacked along a new dim 0, which these axes split into `size` parts."""
        spec = PartitionSpec(as_axes(axes), *self.spec)
        stored, parts = (size * each, *self.stored), (size, *self.parts)
        automatic = PartitionSpec(None, *self.automatic) if any(self.automatic) else self.automatic
        return Layout((size * each, *self.shape), self.dtype, spec, stored, parts, self.stack_dims + 1, automatic)

    def row(self) -> "Layout":
        """The layout of one of the arrays that `stacked` stacks."""
        return self._behind(1)

    def sliced(self, ndim: int) -> "Layout":
        """The layout of one entry along the first dims, which must not be split; `ndim` stored dims remain."""
        drop = len(self.stored) - ndim
        if not drop:
            return self
        assert all(parts == 1 for parts in self.parts[:drop])
        return self._behind(drop)

    def _behind(self, drop: int) -> "Layout":
        """The layout along the dims behind the first ones."""
        spec = PartitionSpec(*tuple(self.spec)[drop:])
        stack, automatic = max(self.stack_dims - drop, 0), PartitionSpec(*tuple(self.automatic)[drop:])
        return Layout(self.shape[drop:], self.dtype, spec, self.stored[drop:], self.parts[drop:], stack, automatic)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which the ranks hold different parts."""
        return tuple(name for entry in self.spec for name in _names(entry))

    @property
    def size(self) -> int:
        """The number of elements of the array, without padding."""
        return math.prod(self.shape)

    @property
    def padding(self) -> int:
        """The number of elements stored as padding."""
        return math.prod(self.stored) - self.size


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def as_spec(entries: Iterable[Sequence[str]]) -> PartitionSpec:
    """The spec of the axes of every dim: of one axis its name, of none None.

    >>> tuple(as_spec([(), ("data",), ("fsdp", "tensor")]))
    (None, 'data', ('fsdp', 'tensor'))
    """
    return PartitionSpec(*(entry[0] if len(entry) == 1 else tuple(entry) or None for entry in entries))


def is_layout(x: Any) -> bool:
    """Whether a node is a `Layout`, for `jax.tree.map(..., is_leaf=is_layout)`."""
    return isinstance(x, Layout)


def specs(layouts: PyTree) -> PyTree:
    """The PartitionSpec of every layout."""
    return jax.tree.map(lambda layout: layout.spec, layouts, is_leaf=is_layout)


def shardings(specs: PyTree, mesh: Mesh) -> PyTree:
    """A NamedSharding on `mesh` for every PartitionSpec of a tree."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


# --------------------------------------------------------------------------------------------------
# Moving arrays between device and host memory, inside and outside compiled programs.
# --------------------------------------------------------------------------------------------------

HOST = "pinned_host"
"""The memory kind of what is offloaded."""


def movable(leaf: Any) -> bool:
    """Whether a leaf is worth moving to the host; a scalar that changed its memory kind would only force a recompile."""
    return leaf.ndim > 0 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host_memory(tree: PyTree, when: bool = True) -> PyTree:
    """Inside a compiled program: arrays moved to host memory, if `when`."""
    return _moved(tree, jax.memory.Space.Host) if when else tree


def to_device_memory(tree: PyTree, when: bool = True) -> PyTree:
    """Inside a compiled program: arrays moved to device memory, if `when`."""
    return _moved(tree, jax.memory.Space.Device) if when else tree


def offloaded(tree: PyTree, when: bool = True) -> PyTree:
    """Outside of a compiled program: arrays in host memory, each sharded as it is, if `when`."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not movable(leaf) or not isinstance(leaf.sharding, NamedSharding):
            return leaf
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST))

    return jax.tree.map(move, tree) if when else tree


def on_device(tree: PyTree) -> PyTree:
    """Outside of a compiled program: arrays in device memory, each sharded as it is. The inverse of `offloaded`."""

    def move(leaf: Any) -> Any:
        away = isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == HOST
        return jax.device_put(leaf, leaf.sharding.with_memory_kind("device")) if away else leaf

    return jax.tree.map(move, tree)


def _moved(tree: PyTree, space: Any) -> PyTree:
    return jax.tree.map(lambda leaf: jax.device_put(leaf, space) if movable(leaf) else leaf, tree)


# --------------------------------------------------------------------------------------------------
# Placing whole arrays on a mesh in their layout, and getting whole arrays back.
# --------------------------------------------------------------------------------------------------


def place(tree: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Copy full arrays (the same in every process) to a mesh, each device holding what `specs` says.

    The result never shares memory with `tree`, so that it may be donated.
    """
    # Moving alone may alias: the part that lands on the device where an array is already can be that array's buffer.
    return copies(jax.tree.map(move, tree, shardings(specs, mesh)))


def move(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Put a full array (the same in every process) on a sharding; the result may share its memory."""
    if isinstance(leaf, Tracer):  # under `jax.eval_shape`: there is nothing to move
        return leaf
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.jit(_copy, out_shardings=sharding)(leaf)
    if jax.process_count() == 1:
        return jax.device_put(_on_host(leaf, sharding), sharding)
    return from_every_process(leaf, sharding)


def _on_host(leaf: Any, sharding: NamedSharding) -> Any:
    """A CPU array as a NumPy view, if it is to be split: JAX would compile a program to slice it."""
    if not isinstance(leaf, jax.Array) or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.weak_type:
        return leaf  # NumPy has neither keys nor weak types
    (device, *others) = leaf.sharding.device_set
    splits = not sharding.is_fully_replicated
    return np.asarray(leaf) if splits and not others and device.platform == "cpu" else leaf


def copies(tree: PyTree) -> PyTree:
    """Copy arrays, each on its devices."""
    return jax.jit(_copy)(tree)


def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(jax.numpy.copy, tree)


def cast(leaf: Any, dtype: Any) -> Any:
    """Convert to `dtype`: NumPy arrays stay on the host, JAX arrays on their devices, typed keys unchanged."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return leaf
    return jax.numpy.astype(leaf, dtype) if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype)


def is_deleted(x: Any) -> bool:
    """Whether x is an array whose buffers were donated. Using one can end the process (jax 0.10 on several CPU devices)."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()


def replicated(tree: PyTree, mesh: Mesh) -> PyTree:
    """Copy arrays in full to every device of `mesh`."""
    return place(tree, jax.tree.map(lambda _: PartitionSpec(), tree), mesh)


def to_host(tree: PyTree) -> PyTree:
    """Gather arrays as NumPy arrays in this process's memory (typed keys as copies); every process must call it."""

    def fetch(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(fetch(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            leaf = jax.jit(_copy, out_shardings=NamedSharding(leaf.sharding.mesh, PartitionSpec()))(leaf)  # pyright: ignore
        return np.asarray(leaf) if leaf.is_fully_addressable else np.asarray(leaf.addressable_data(0))

    return jax.tree.map(fetch, tree)


# --------------------------------------------------------------------------------------------------
# In which order ranks hold the positions of a sequence.
# --------------------------------------------------------------------------------------------------

Order = Literal["contiguous", "zigzag", "striped"]

ORDERS: tuple[Order, ...] = get_args(Order)


def sequence_order(order: Order, length: int, ranks: int) -> np.ndarray:
    """The global positions of a sequence in rank-major order: rank r holds those from r * length / ranks on.

    "contiguous" gives every rank one part. Under causal attention the last rank then has the most work: 2 - 1/ranks times the
    mean. "zigzag" cuts the sequence into 2 * ranks chunks and gives rank r the chunks r and 2 * ranks - 1 - r, which balances
    causal attention exactly (the head-and-tail order of ring-flash-attention and of PyTorch's `context_parallel`). "striped"
    gives rank r the positions r, r + ranks, r + 2 * ranks, ... (Brandon et al. 2023).

    Args:
      order: one of these.
      length: positions of the whole sequence.
      ranks: how many ranks share it.

    Returns:
      int32 [length], a permutation: entry i is the position that stands at place i.

    Raises:
      ValueError: for an unknown order, or a length that does not divide into the order's parts.

    >>> sequence_order("zigzag", 8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    >>> sequence_order("striped", 6, 2)
    array([0, 2, 4, 1, 3, 5], dtype=int32)
    """
    parts = order_parts(order, ranks)
    if length % parts:
        raise ValueError(
            f"{length} positions do not divide into the {parts} parts of order={order!r} over {ranks} ranks: pad the sequence "
            f"to {-(-length // parts) * parts} with positions of weight 0"
        )
    positions = np.arange(length, dtype=np.int32)
    if order == "striped":
        return positions.reshape(-1, ranks).T.reshape(-1)
    if order == "zigzag":
        chunks = positions.reshape(2 * ranks, -1)
        return np.stack([chunks[:ranks], chunks[ranks:][::-1]], axis=1).reshape(-1)
    return positions


def causal_balance(order: Order, length: int, ranks: int) -> float:
    """The imbalance of causal attention: position pairs that the busiest rank computes, over the mean of all ranks.

    Contiguous it grows to 2 - 1/ranks, striped it is just above 1, and zigzag exactly 1.

    Args:
      order, length, ranks: as of `sequence_order`.

    >>> [round(causal_balance(order, 4096, 4), 3) for order in ORDERS]
    [1.75, 1.0, 1.001]
    """
    own = length / ranks
    if order == "contiguous":
        return (2 * length - own + 1) / (length + 1)
    return ranks * (own + 1) / (length + 1) if order == "striped" else 1.0


def order_parts(order: Order, ranks: int) -> int:
    """The number that must divide the length of a sequence in an order.

    Raises:
      ValueError: for an unknown order.
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r} must be one of {', '.join(ORDERS)}")
    return 2 * ranks if order == "zigzag" else ranks


def in_window(dim: int, ndim: int) -> bool:
    """Whether a dim may be one of the window of a convolution's kernel, all of whose dims but the last two are.

    Over one of two mesh axes such a dim is not split while another can be: XLA computes wrong convolutions where it partitions
    such a window itself, as in `model.module(x)`.
    """
    return ndim >= 4 and dim < ndim - 2


# --------------------------------------------------------------------------------------------------
# Between an array as the model knows it and the form in which its layout stores it: padding, invisible outside.
# --------------------------------------------------------------------------------------------------


def to_stored(x: Any, layout: Layout) -> Any:
    """Pad an array [*layout.shape] with zeros to [*layout.stored]."""
    if x.shape == layout.stored:
        return x
    x = x if len(layout.stored) == x.ndim else jnp.reshape(x, (*x.shape, 1))
    return jnp.pad(x, [(0, more - n) for n, more in zip(x.shape, layout.stored, strict=True)])


def from_stored(x: Any, layout: Layout) -> Any:
    """Remove the padding of a stored array. The inverse of `to_stored`."""
    if x.shape == layout.shape:
        return x
    kept = [slice(n) for n in layout.shape] + [slice(1)] * (x.ndim - len(layout.shape))
    return jnp.reshape(x[tuple(kept)], layout.shape)


def map_layouts(change, tree: PyTree, layouts: PyTree) -> PyTree:
    """Apply `change(leaf, layout)` to every leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(map(change, leaves, jax.tree.leaves(layouts, is_leaf=is_layout)))


def unpadded(tree: PyTree, layouts: PyTree, mesh: Mesh) -> PyTree:
    """Remove the padding of stored global arrays; a leaf without any is returned as it is, others copied to every device."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def change(leaf: Any, layout: Layout) -> Any:
        if layout.stored == layout.shape:
            return leaf
        return jax.jit(from_stored, static_argnums=1, out_shardings=everywhere)(leaf, layout)

    return map_layouts(change, tree, layouts)


def padded(tree: PyTree, layouts: PyTree) -> PyTree:
    """Pad arrays to the shapes in which they are stored. The inverse of `unpadded`, before placing."""
    return map_layouts(to_stored, tree, layouts)


# --------------------------------------------------------------------------------------------------
# Batches whose positions stand in the order in which ranks hold them.
# --------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InRankOrder:
    """A batch whose positions are in the order in which ranks hold them.

    Only `BatchLayout.place` makes one, and a step's program takes nothing else: no batch is reordered twice, or not at all.

    Attributes:
      batch: its leaves.
    """

    batch: PyTree


@dataclass(frozen=True)
class RankOrder:
    """Reorders the positions of one leaf, so that each rank's contiguous part holds the positions of that rank.

    Attributes:
      dim: the dim of positions.
      order: see `sequence_order`.
      ranks: the number of ranks that share them.

    >>> RankOrder(0, "zigzag", 2)(np.arange(8))
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """

    dim: int
    order: Order
    ranks: int

    def __call__(self, x: Any) -> Any:
        """Reorder a leaf; returns a NumPy array if one is given, else a JAX array."""
        xp = np if isinstance(x, np.ndarray) else jnp
        dim, before, after = self.dim, x.shape[: self.dim], x.shape[self.dim + 1 :]
        if self.order == "striped":
            stripes = x.reshape(*before, -1, self.ranks, *after)
            return xp.swapaxes(stripes, dim, dim + 1).reshape(x.shape)
        if self.order == "zigzag":
            halves = x.reshape(*before, 2, self.ranks, x.shape[dim] // (2 * self.ranks), *after)
            heads, tails = xp.take(halves, 0, axis=dim), xp.flip(xp.take(halves, 1, axis=dim), axis=dim)
            return xp.stack([heads, tails], axis=dim + 1).reshape(x.shape)
        return x


# --------------------------------------------------------------------------------------------------
# A leaf of something that is saved: the array as it rests, and how that stores the whole one.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """One array, by a name that does not depend on the plan.

    Attributes:
      array: as it rests: a `jax.Array`, a NumPy array, a Python number, or only the shape and dtype of one.
      layout: how it stores the whole array; None where it is the whole array.
      low_rank: where the model reads W + scale A B in the place of this array W: A, B and scale.
      column_scales: of an int8 array that stands for floats: the scale of every column (see `model/lora.py`).
      entries: what the entries of dim 0 are, in words, where ranks' or replicas' arrays are stacked there; else empty.
    """

    array: Any
    layout: Layout | None = None
    low_rank: "tuple[Leaf, Leaf, float] | None" = None
    column_scales: "Leaf | None" = None
    entries: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full array, without padding."""
        return tuple(self.layout.shape) if self.layout is not None else tuple(np.shape(self.array))

    @property
    def dtype(self) -> Any:
        """Its dtype; a typed key's own."""
        return self.array.dtype if hasattr(self.array, "dtype") else np.asarray(self.array).dtype

    @property
    def padded(self) -> bool:
        """Whether the array is stored in another shape than the full one."""
        return self.shape != tuple(np.shape(self.array))

    def whole(self) -> Any:
        """The full array, split over devices as far as its dims divide."""
        if not self.padded:
            return self.array
        assert self.layout is not None
        sharding = self.array.sharding
        spec = dividing(self.layout.shape, self.layout.axes, sharding.mesh)
        target = NamedSharding(sharding.mesh, spec)
        array = jax.device_put(self.array, NamedSharding(sharding.mesh, sharding.spec))  # out of host memory
        return jax.jit(from_stored, static_argnums=1, out_shardings=target)(array, self.layout)


MODEL = "model/"
"""What the names of a model's arrays in checkpoints start with; the rest is their name in its `state_dict`."""

AVERAGE = "ema/"
"""What the names of a trainer's moving averages in checkpoints start with; the rest is their parameter's name."""

LEFT_OUT = "left_out/"
"""What the names of error-feedback residuals in checkpoints start with; the rest is their parameter's name. They are one per
rank, so that another number of ranks starts from zeros."""


@runtime_checkable
class Checkpointable(Protocol):
    """Protocol of what checkpoints keep: an object that gives its arrays by name, and takes them back."""

    def checkpoint_leaves(self) -> dict[str, Leaf]:
        """Every array by a name that is the same under every plan."""
        ...

    def take_leaves(self, arrays: Mapping[str, Any]) -> None:
        """Replace the state by arrays, by name, in the shapes and on the devices of `checkpoint_leaves`."""
        ...


def dividing(shape: Sequence[int], axes: Iterable[str], mesh: Mesh) -> PartitionSpec:
    """A spec that splits an unpadded array over as many of the mesh axes as its dims divide by, in order."""
    entries: list[tuple[str, ...]] = [()] * len(shape)
    left = list(shape)
    for axis in axes:
        size = mesh.shape[axis]
        dim = next((dim for dim, n in enumerate(left) if n and n % size == 0), None)
        if dim is not None:
            left[dim] //= size
            entries[dim] = (*entries[dim], axis)
    return PartitionSpec(*(entry or None for entry in entries))
