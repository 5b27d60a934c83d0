"""`Shard`: parameters in shards over an axis, gathered to be read, gradients reduce-scattered (ZeRO, FSDP)."""

import enum
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.base import is_one_of, member
from axonml_jax.collectives.gradients import exchange_leaves, gather_leaves, parts_along, scatter_sum_leaves
from axonml_jax.collectives.primitives import axis_size
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.model.loss import Precision
from axonml_jax.sharding.layout import Layout, in_window
from axonml_jax.strategies.replicate import Replicate
from axonml_jax.strategies.strategy import (
    AbstractStrategy,
    Bucketed,
    Decides,
    Fabric,
    Lossy,
    Role,
    Transfer,
    Wrap,
    checked_wrap,
)

# --------------------------------------------------------------------------------------------------
# Zeros behind parameters that do not divide: put there, cut off, counted, and told to the ledger.
# --------------------------------------------------------------------------------------------------


def cut(whole: jax.Array, layout: Layout, axis: AxisNames, dim: int | None) -> jax.Array:
    """Cuts the padding off a gathered leaf."""
    if dim is None:
        return whole
    if not layout.shape:
        return whole[0]
    size = _read_size(layout, dim, axis_size(axis))
    return whole if whole.shape[dim] == size else jax.lax.slice_in_dim(whole, 0, size, axis=dim)


def _read_size(layout: Layout, dim: int, ranks: int) -> int:
    """The size of a dim gathered over so many ranks; where layers split it too, that of their part, with its padding.

    Sizes are arrays where a layout stands for many meshes.
    """
    size, gathered = layout.shape[dim], layout.stored[dim] * ranks // layout.parts[dim]
    return min(size, gathered) if isinstance(gathered, int) else np.minimum(size, gathered)


def pad(grad: jax.Array, layout: Layout, axis: AxisNames, dim: int | None) -> jax.Array:
    """Pads a gradient with zeros so that its dim divides over the axis."""
    if dim is None:
        return grad
    if not layout.shape:
        grad = grad[None]
    more = layout.shard[dim] * axis_size(axis) - grad.shape[dim]
    return jnp.pad(grad, [(0, more if d == dim else 0) for d in range(grad.ndim)]) if more else grad


def padding_of(layout: Layout, dim: int, ranks: int) -> int:
    """Counts the elements of a leaf gathered along a dim that are padding."""
    shard = layout.shard
    size = _read_size(layout, dim, ranks) if layout.shape else 1
    return math.prod(shard[:dim] + shard[dim + 1 :]) * (shard[dim] * ranks - size)


def padding_scope(
    label: str, layouts: Sequence[Layout], dims: Sequence[int | None], axis: AxisNames, filled: int = 0
) -> AbstractContextManager:
    """A name scope that tells the ledger how many of a bucket's elements are padding, `filled` of each rank's among them."""
    count = axis_size(axis)
    more = sum(padding_of(layout, dim, count) for layout, dim in zip(layouts, dims, strict=True) if dim is not None)
    more += filled * count
    return jax.named_scope(f"{label}.pad{more}") if more else nullcontext()


# --------------------------------------------------------------------------------------------------
# Gathers and reduce-scatters in two hops, neighbours and then across: what keeps XLA:TPU from all-reducing
# (docs/adr/0010).
# --------------------------------------------------------------------------------------------------

Groups = list[list[int]]
"""Positions along an axis, by group."""

NEIGHBOURS, ACROSS = 8, 128
"""Ranks of the near hop at least, and of the far hop at most: over 256 of 2,048 chips some shapes became all-reduces again."""


def groups(ranks: int, hop: int | None) -> tuple[Groups, Groups] | None:
    """Groups of `hop` neighbours, and groups of the ranks at the same place in those; None: one hop, over all ranks.

    >>> groups(4, 2)
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    if hop is None or hop in (1, ranks):
        return None
    near = [list(range(start, start + hop)) for start in range(0, ranks, hop)]
    return near, [list(group) for group in zip(*near, strict=True)]


def best_hops(torus: int, ranks: int, devices: int) -> tuple[int, int]:
    """Ranks of the near hop of a gather and of a reduce-scatter along an axis; 1: in one hop.

    XLA:TPU makes an all-reduce, of twice the bytes, of every reduce-scatter over all chips of a slice of more than eight,
    and where the torus has three dims of every gather too. Over a part of the chips it does not
    (docs/maintainers/jax-facts.md).

    Args:
      torus: dims of the torus that the chips form; 0 for other devices.
      ranks: the size of the axis.
      devices: the number of the mesh's devices.

    >>> best_hops(3, 512, 512), best_hops(3, 2048, 2048), best_hops(2, 256, 256), best_hops(3, 256, 512), best_hops(0, 64, 64)
    ((8, 8), (16, 16), (1, 8), (1, 1), (1, 1))
    """
    if torus < 2 or ranks < devices or ranks <= NEIGHBOURS or ranks % NEIGHBOURS:
        return 1, 1
    near = NEIGHBOURS
    while ranks // near > ACROSS and ranks % (2 * near) == 0:
        near *= 2
    return (near if torus > 2 else 1), near


# --------------------------------------------------------------------------------------------------
# Parts of parameters as they travel in few bits: integers or small floats, with a scale for every block of elements.
#
# As in ZeRO++'s quantized weights (Wang et al. 2023): the scale follows the largest element of a block of at most 256,
# so that an outlier costs its neighbours precision, not the whole leaf.
# --------------------------------------------------------------------------------------------------

Wire = Literal["int8", "fp8"]

WIRES: tuple[Wire, ...] = get_args(Wire)

BLOCK = 256
"""Elements that share a scale, at most."""

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_SENT = {"int8": jnp.dtype("int8"), "fp8": jnp.dtype("uint8")}


def wire_dtype(wire: Wire) -> Any:
    """The dtype of packed values on the wire: fp8 (e4m3) travels as its bits."""
    return _SENT[wire]


def travels_packed(layout: Layout, dtype: Any) -> bool:
    """Whether a leaf is packed: a floating one with two dims or more of its own. Scales of norms, and biases, are not."""
    return len(layout.shape) - layout.stack_dims > 1 and bool(jnp.issubdtype(dtype, jnp.floating))


def packed_sizes(elements: Any) -> tuple[Any, Any]:
    """The number of elements, and of scales, that are sent for `elements` (a number or an array)."""
    blocks = -(-elements // BLOCK) + (elements == 0)
    return -(-elements // blocks) * blocks, blocks


def packed(shard: jax.Array, wire: Wire) -> tuple[jax.Array, jax.Array]:
    """Packs a shard into values of few bits and a scale for each block.

    Args:
      shard: [*dims], floating, of n elements.
      wire: "int8", or "fp8" (e4m3).

    Returns:
      Values [s], n of them and zeros to fill the last block, and float32 scales [blocks]. A block with an element that is
      not finite is NaN throughout where it is read.
    """
    sent, blocks = packed_sizes(shard.size)
    flat = jnp.pad(shard.astype(jnp.float32).ravel(), (0, sent - shard.size)).reshape(blocks, -1)
    most = jnp.max(jnp.abs(flat), axis=1, initial=0)
    # A division by a constant would round as the compiler likes. A scale must be a normal number, or it is flushed to zero.
    scales = jnp.maximum(most * (1 / _LARGEST[wire]), jnp.finfo(jnp.float32).tiny)
    values = flat / scales[:, None]
    if wire == "int8":
        made = jnp.round(values).astype(jnp.int8)
    else:
        made = jax.lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)
    return made.ravel(), scales


def unpacked(values: jax.Array, scales: jax.Array, shape: tuple[int, ...], dtype: Any, wire: Wire) -> jax.Array:
    """Unpacks what several ranks sent: values [k * s] and scales [k * blocks] -> [k, *shape]."""
    _, blocks = packed_sizes(size := math.prod(shape))
    grid = values.reshape(scales.size // blocks, blocks, values.size // scales.size)
    if wire == "fp8":
        grid = jax.lax.bitcast_convert_type(grid, jnp.float8_e4m3fn)
    found = grid.astype(jnp.float32) * scales.reshape(-1, blocks, 1)
    return found.reshape(len(found), grid[0].size)[:, :size].reshape(len(found), *shape).astype(dtype)


def round_trip(shard: jax.Array, wire: Wire) -> jax.Array:
    """Packs and unpacks a shard: the values that other ranks read of it."""
    return unpacked(*packed(shard, wire), shard.shape, shard.dtype, wire)[0]


# --------------------------------------------------------------------------------------------------
# What sums of a lossy strategy leave out of a rank's gradients, to be added to the next ones (error feedback).
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feedback:
    """The strategy of a plan whose sums' rounding error is fed back.

    Attributes:
      axis: the mesh axes that the strategy owns.
      strategy: the strategy.
      precision: the plan's.
    """

    axis: AxisNames
    strategy: Lossy
    precision: Precision

    @classmethod
    def of(cls, strategies: Mapping[AxisNames, AbstractStrategy], precision: Precision) -> Self | None:
        """Finds the strategy that feeds back among those of a plan; None: none does."""
        lossy = {axis: own for axis, each in strategies.items() if (own := each.having(Lossy)) is not None}
        return next((cls(axis, own, precision) for axis, own in lossy.items() if own.feeds_back), None)

    def left_out(self, grads: Sequence[jax.Array], layouts: Sequence[Layout]) -> list[jax.Array]:
        """Returns the rounding error: what the sum over ranks lacks of this rank's unreduced gradients; inside `shard_map`.

        Args:
          grads: this rank's gradients just before they are summed, with the rounding error of earlier steps added.
          layouts: the layouts of these leaves.

        Returns:
          Arrays of the gradients' shapes and dtypes.
        """
        return [self._of_leaf(grad, layout) for grad, layout in zip(grads, layouts, strict=True)]

    def _of_leaf(self, grad: jax.Array, layout: Layout) -> jax.Array:
        trip = lambda part: self.strategy.sum_round_trip(part, layout, self.axis)
        dim, sent = layout.dim_of(self.axis), grad.astype(self.precision.reduce_dtype(layout.dtype))
        if dim is None:
            return grad - trip(sent).astype(grad.dtype)
        parts = parts_along(pad(sent, layout, self.axis, dim), dim, axis_size(self.axis))
        there = jax.lax.collapse(jnp.moveaxis(jax.vmap(trip)(parts), 0, dim), dim, dim + 2)
        return grad - cut(there, layout, self.axis, dim).astype(grad.dtype)


# --------------------------------------------------------------------------------------------------
# Sums of gradients that travel in few bits: ranks swap parts, and each rank adds up its own.
#
# A reduce-scatter in a small dtype rounds every partial sum. Here each part is rounded once, where it is sent, and
# summed in float32, as in ZeRO++'s quantized gradients (Wang et al. 2023). The bytes are those of a reduce-scatter in
# the small dtype.
# --------------------------------------------------------------------------------------------------

ReduceWire = Literal["bf16", "int8", "int8-feedback"]

REDUCE_WIRES: tuple[ReduceWire, ...] = get_args(ReduceWire)
_INT8 = ("int8", "int8-feedback")


def sums_packed(wire: ReduceWire | None, layout: Layout, dtype: Any) -> bool:
    """Whether parts of a gradient are packed.

    Args:
      wire: "bf16" packs floating gradients wider than 16 bits, and bfloat16 ones, so that these are summed in float32 and not
        by a collective in bfloat16. The int8 wires pack the leaves that `travels_packed` names. None packs none.
      layout: the leaf's.
      dtype: the dtype in which gradients are reduced.
    """
    if wire in _INT8:
        return travels_packed(layout, dtype)
    wider = bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize > 2
    return wire == "bf16" and (wider or jnp.dtype(dtype) == jnp.bfloat16)


def sum_transfers(wire: ReduceWire, elements: Any, ranks: int, padding: Any) -> tuple[Transfer, ...]:
    """The transfers of one packed sum.

    Args:
      wire: the gradient's.
      elements: the number of elements of the whole gradient with its padding (a number, or an array of them).
      ranks: the size of the axis.
      padding: how many of the elements are padding.
    """
    if wire == "bf16":
        return (Transfer(kind="all_to_all", elements=elements, ranks=ranks, dtype="bfloat16", padding=padding),)
    sent, scales = packed_sizes(elements // ranks)
    padding = padding + sent * ranks - elements
    return (
        Transfer(kind="all_to_all", elements=sent * ranks, ranks=ranks, dtype="int8", padding=padding),
        Transfer(kind="all_to_all", elements=scales * ranks, ranks=ranks, dtype="float32"),
    )


def filled_of(wire: ReduceWire, elements: int) -> int:
    """Counts the zeros that fill the last int8 block of a part of so many elements; 0 for "bf16"."""
    return packed_sizes(elements)[0] - elements if wire in _INT8 else 0


def scatter_sum_packed(
    leaves: Sequence[jax.Array], axis: AxisNames, dims: Sequence[int], wire: ReduceWire, *, flat: bool
) -> list[jax.Array]:
    """Sums each leaf over the ranks of `axis`, and returns this rank's part along its dim.

    Args:
      leaves: whole gradients, each [..., n*d, ...], inside `shard_map`.
      axis: the mesh axes to sum over, of n ranks.
      dims: the dim of each leaf that is split.
      wire: the form in which parts travel.
      flat: whether what travels together is copied into one array.

    Returns:
      [..., d, ...] each, in the dtype in which it was summed (`wide`).

    Communicates: one all-to-all of all leaves; as int8 another of their scales.
    """
    count = axis_size(axis)
    parts = [parts_along(leaf, dim, count) for leaf, dim in zip(leaves, dims, strict=True)]
    if wire == "bf16":
        sent = [part.astype(jnp.bfloat16).reshape(count, -1) for part in parts]
    else:
        sent = [each for part in parts for each in jax.vmap(lambda own: packed(own, "int8"))(part)]
    found = iter(exchange_leaves(sent, axis, flat=flat))
    sums = []
    for part in parts:
        if wire == "bf16":
            rounded = next(found).reshape(part.shape)
        else:
            values, scales = next(found), next(found)
            rounded = unpacked(values.ravel(), scales.ravel(), part.shape[1:], wide(part.dtype), "int8")
        sums.append(rounded.astype(wide(part.dtype)).sum(0))
    return sums


def sum_round_trip(part: jax.Array, wire: ReduceWire) -> jax.Array:
    """Rounds a part of a gradient as the wire does: the values that the sum adds."""
    return round_trip(part, "int8") if wire in _INT8 else part.astype(jnp.bfloat16).astype(part.dtype)


def wide(dtype: Any) -> Any:
    """The dtype in which values of a dtype are added up: float32, or their own where that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


# --------------------------------------------------------------------------------------------------
# Fully sharded data parallelism: ranks hold parts of every parameter and gather whole ones for computing.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shard(AbstractStrategy, Bucketed, Lossy, Decides):
    """Every rank of the axis holds a part of each parameter.

    Communicates, with A microbatches and P parameters on N ranks, (N-1)/N times: 2P (stage 1: one all-gather, one
    reduce-scatter), (1+A)P (stage 2: a reduce-scatter per microbatch), 3AP (stage 3: two all-gathers and a
    reduce-scatter per microbatch).

    Attributes:
      stage: 1, 2 or 3: what is whole during a step (see `ShardingStrategy`).
      wrap: which parts of the model are units, gathered together (stage 3): None finds repeated blocks; or module types,
        path patterns, or a predicate of module paths (see `Wrap`).
      prefetch: how many units ahead weights are gathered (stage 3). Each costs one more unit of memory.
      flat: whether leaves that travel together are copied into one flat buffer; None takes what is fastest on the backend.
      gather_hop: gathers go in two hops, among so many neighbouring ranks first and then across; 1: in one. The bytes are
        the same. None takes what XLA keeps as a gather on the mesh's devices (see `best_hops`).
      scatter_hop: the same of reduce-scatters, which go across first.
      wire: weights are gathered as "int8", or as "fp8" (e4m3), with a float32 scale per block of 256 elements or fewer; they
        rest, and gradients travel, as before. Leaves of one dim are gathered as they are. None: all are.
      reduce_wire: parts of gradients travel as "bf16", or as "int8" with a float32 scale per block (leaves of two dims or
        more), to the ranks that sum them in float32; "int8-feedback" also adds the rounding error of a rank's gradients to
        its next ones (stage 1). None: a reduce-scatter in the dtype in which gradients are reduced.
    """

    stage: int = 3
    wrap: Wrap = None
    prefetch: int = 0
    flat: bool | None = None
    gather_hop: int | None = None
    scatter_hop: int | None = None
    wire: Wire | None = None
    reduce_wire: ReduceWire | None = None

    def __post_init__(self):
        problems = []
        if not is_one_of(self.stage, (1, 2, 3)) or isinstance(self.stage, bool) or not isinstance(self.stage, Integral):
            problems.append(f"stage={self.stage!r} must be 1, 2 or 3 (ZeRO)")
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            problems.append(f"prefetch={self.prefetch!r} must be a number of units, 0 or more")
        elif self.prefetch and is_one_of(self.stage, (1, 2)):
            problems.append(
                f"prefetch={self.prefetch} acts with stage=3; with {self.stage} all is gathered at the start"
            )
        if not is_one_of(self.flat, (None, True, False)):
            problems.append(f"flat={self.flat!r} must be True, False or None")
        for name in ("gather_hop", "scatter_hop"):
            hop = getattr(self, name)
            if hop is not None and (isinstance(hop, bool) or not isinstance(hop, int) or hop < 1):
                problems.append(f"{name}={hop!r} must be a number of ranks, 1 or more, or None")
        if self.wire is not None and not is_one_of(self.wire, WIRES):
            problems.append(f"wire={self.wire!r} must be one of {', '.join(WIRES)}, or None")
        if self.reduce_wire is not None and not is_one_of(self.reduce_wire, REDUCE_WIRES):
            problems.append(f"reduce_wire={self.reduce_wire!r} must be one of {', '.join(REDUCE_WIRES)}, or None")
        elif self.feeds_back and is_one_of(self.stage, (2, 3)):
            problems.append(
                "reduce_wire='int8-feedback' keeps an array of the whole gradient's size on every rank, which "
                f"stage={self.stage} is there to avoid: use stage=1 (shard_optimizer), or reduce_wire='int8'"
            )
        if problems:
            raise ValueError("; ".join(problems))
        object.__setattr__(self, "wrap", checked_wrap(self.wrap))

    def gather_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """One all-gather, or two in hops; for packed leaves as many of the scales."""
        if self.wire is None or not travels_packed(layout, dtype) or (dim := layout.dim_of(axis)) is None:
            return self._moved("all_gather", elements * ranks, layout, axis, ranks, dtype, self.gather_hop)
        sent, scales = packed_sizes(elements)
        padding = padding_of(layout, dim, ranks) + (sent - elements) * ranks
        values = Transfer(
            kind="all_gather", elements=sent * ranks, ranks=ranks, dtype=wire_dtype(self.wire), padding=padding
        )
        beside = Transfer(kind="all_gather", elements=scales * ranks, ranks=ranks, dtype=jnp.dtype("float32"))
        return *values.in_hops(self.gather_hop), *beside.in_hops(self.gather_hop)

    def sync_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """One reduce-scatter, or two in hops; for packed parts all-to-alls in their place."""
        if not self._packed_sum(layout, axis, dtype):
            return self._moved("reduce_scatter", elements, layout, axis, ranks, dtype, self.scatter_hop)
        assert self.reduce_wire is not None
        return sum_transfers(self.reduce_wire, elements, ranks, padding_of(layout, layout.dim_of(axis) or 0, ranks))

    def _moved(
        self, kind: str, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any, hop: int | None
    ) -> tuple[Transfer, ...]:
        if (dim := layout.dim_of(axis)) is None:
            return ()
        padding = padding_of(layout, dim, ranks)
        return Transfer(kind=kind, elements=elements, ranks=ranks, dtype=dtype, padding=padding).in_hops(hop)

    def decided(self, fabric: Fabric, ranks: int) -> "Shard":
        """Chooses hops by the devices' torus (see `best_hops`), and flat buffers on gloo.

        Raises:
          ValueError: when the ranks of the axis do not divide into hops.
        """
        gather, scatter = best_hops(fabric.torus, ranks, fabric.devices)
        chosen = {"gather_hop": self.gather_hop or gather, "scatter_hop": self.scatter_hop or scatter}
        if wrong := {name: hop for name, hop in chosen.items() if ranks % hop}:
            raise ValueError(f"{wrong}: the number of ranks of a hop must divide the {ranks} ranks of the axis")
        return replace(self, flat=fabric.gloo if self.flat is None else self.flat, **chosen)

    def in_words(self, axis: AxisNames) -> str:
        """A description for tables."""
        gathered = f", gathered as {self.wire}" if self.wire else ""
        return f"ZeRO-{self.stage}{gathered}" + (f", reduced as {self.reduce_wire}" if self.reduce_wire else "")

    @property
    def exact(self) -> bool:
        """Whether nothing that is gathered or reduced is packed."""
        return self.wire is None and self.reduce_wire is None

    @property
    def feeds_back(self) -> bool:
        """Whether `reduce_wire` is "int8-feedback"."""
        return self.reduce_wire == "int8-feedback"

    @property
    def reads_exactly(self) -> bool:
        """Whether nothing that is gathered is packed."""
        return self.wire is None

    def round_trip(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The values that ranks read of a shard."""
        packs = self._packs(shard, layout, axis)
        return round_trip(shard, packs) if packs is not None else shard

    def sum_round_trip(self, part: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The values that the sum adds of a part of a rank's gradient."""
        if self.reduce_wire is None or not self._packed_sum(layout, axis, part.dtype):
            return part
        return sum_round_trip(part, self.reduce_wire)

    def _packed_sum(self, layout: Layout, axis: AxisNames, dtype: Any) -> bool:
        """Whether a gradient travels packed."""
        return layout.dim_of(axis) is not None and sums_packed(self.reduce_wire, layout, dtype)

    def _packs(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> Wire | None:
        """The form in which a shard is packed; None: it is not."""
        travels = layout.dim_of(axis) is not None and travels_packed(layout, shard.dtype)
        return self.wire if travels else None

    @property
    def role(self) -> Role:
        """Splits rows, shards parameters.

        Stage 3 gathers a unit's parameters at their use. From stage 2 on gradients are reduced after every microbatch: only
        shards accumulate.
        """
        reduces = "microbatch" if self.stage >= 2 else "step"
        return Role(parameters="sharded", reads="use" if self.stage == 3 else "start", reduces=reduces)

    def spec(self, layout: Layout, axis: AxisNames, axis_size: int) -> Layout:
        """Splits the dim that needs the least padding over the axis.

        Among equals the first; of a leaf with three dims or more rather not dim 0, which may be a stack of layers whose
        slices are read one at a time. Of four dims or more one of the last two (`in_window`), unless padding then more than
        doubles the leaf. A leaf all of whose dims other axes split into parts that do not divide stays as it is:
        padded, they would no longer join.
        """
        if axis_size == 1:
            return layout
        sizes = layout.shard or (1,)

        def cost(dim: int) -> tuple:
            padded = math.prod(sizes) // max(sizes[dim], 1) * -(-sizes[dim] // axis_size) * axis_size
            # A dim that another axis splits may be split further, but not padded: its parts would no longer join.
            clumsy = bool(layout.parts) and layout.parts[dim] > 1 and sizes[dim] % axis_size > 0
            wasteful, stack = padded > 2 * math.prod(sizes), len(sizes) >= 3 and dim == 0
            return clumsy, wasteful, in_window(dim, len(sizes)), padded, stack, dim

        clumsy, *_, dim = min(cost(dim) for dim in range(len(sizes)))
        return layout if clumsy else layout.on(axis, dim, axis_size)

    def gather(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """Gathers the leaf along the axis, and cuts its padding off."""
        return self.gather_bucket([shard], [layout], axis)[0]

    def sync(self, grad: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """Sums the ranks' gradients, and keeps this rank's part."""
        return self.sync_bucket([grad], [layout], axis)[0]

    def gather_bucket(self, shards: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """Gathers the bucket by one all-gather, or by two in hops."""
        dims = [layout.dim_of(axis) for layout in layouts]
        wires: list[Wire | None] = [
            self._packs(shard, layout, axis) for shard, layout in zip(shards, layouts, strict=True)
        ]
        sent: list[jax.Array] = []
        for shard, wire in zip(shards, wires, strict=True):
            sent += [shard] if wire is None else packed(shard, wire)
        along = [d for dim, wire in zip(dims, wires, strict=True) for d in ([dim] if wire is None else [0, 0])]
        filled = sum(
            packed_sizes(x.size)[0] - x.size for x, wire in zip(shards, wires, strict=True) if wire is not None
        )
        near, far = groups(axis_size(axis), self.gather_hop) or (None, None)
        if near:
            with jax.named_scope("axonml.parameters"):
                sent = gather_leaves(sent, axis, along, flat=bool(self.flat), among=near)
        with padding_scope("axonml.parameters", layouts, dims, axis, filled):
            found = iter(gather_leaves(sent, axis, along, flat=bool(self.flat), among=far))
        wholes = []
        for shard, layout, dim, wire in zip(shards, layouts, dims, wires, strict=True):
            whole = next(found)
            if wire is not None and dim is not None:
                parts = unpacked(whole, next(found), shard.shape, shard.dtype, wire)
                whole = jax.lax.collapse(jnp.moveaxis(parts, 0, dim), dim, dim + 2)
            wholes.append(cut(whole, layout, axis, dim))
        return wholes

    def sync_bucket(self, grads: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """Sums the bucket by one reduce-scatter, or two in hops; packed parts by one all-to-all."""
        packs = [self._packed_sum(layout, axis, grad.dtype) for grad, layout in zip(grads, layouts, strict=True)]
        sums: list[Any] = [None] * len(grads)
        for pack, reduce in ((True, self._packed_sums), (False, self._sums)):
            chosen = [i for i, own in enumerate(packs) if own == pack]
            if not chosen:
                continue
            found = reduce([grads[i] for i in chosen], [layouts[i] for i in chosen], axis)
            for i, total in zip(chosen, found, strict=True):
                sums[i] = total
        return sums

    def _packed_sums(self, grads: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        assert self.reduce_wire is not None
        dims = [layout.dim_of(axis) or 0 for layout in layouts]
        padded = [pad(grad, layout, axis, dim) for grad, layout, dim in zip(grads, layouts, dims, strict=True)]
        filled = sum(filled_of(self.reduce_wire, math.prod(layout.shard)) for layout in layouts)
        with padding_scope("axonml.gradients", layouts, dims, axis, filled):
            return scatter_sum_packed(padded, axis, dims, self.reduce_wire, flat=bool(self.flat))

    def _sums(self, grads: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        dims = [layout.dim_of(axis) for layout in layouts]
        padded = [pad(grad, layout, axis, dim) for grad, layout, dim in zip(grads, layouts, dims, strict=True)]
        near, far = groups(axis_size(axis), self.scatter_hop) or (None, None)
        with padding_scope("axonml.gradients", layouts, dims, axis):
            sums = scatter_sum_leaves(padded, axis, dims, flat=bool(self.flat), among=far)
        split = {i: dim for i, dim in enumerate(dims) if dim is not None}
        if near and split:
            with jax.named_scope("axonml.gradients"):
                own = scatter_sum_leaves(
                    [sums[i] for i in split], axis, list(split.values()), flat=bool(self.flat), among=near
                )
            for i, shard in zip(split, own, strict=True):
                sums[i] = shard
        return sums


# --------------------------------------------------------------------------------------------------
# Names of what fully sharded data parallelism keeps sharded, and the strategy that each means.
# --------------------------------------------------------------------------------------------------


class ShardingStrategy(enum.Enum):
    """Names of what FSDP keeps sharded in a step (ZeRO, Rajbhandari et al. 2020; names as in PyTorch).

    FULL_SHARD: parameters, gradients and optimizer state (ZeRO-3). SHARD_GRAD_OP: parameters are whole during the step
    (ZeRO-2). SHARD_OPTIMIZER: gradients too (ZeRO-1). NO_SHARD: everything whole (DDP). HYBRID_SHARD: FULL_SHARD along
    `fsdp`, replicated along `data`. Between steps parameters and optimizer state rest sharded in all but NO_SHARD.
    """

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    SHARD_OPTIMIZER = "shard_optimizer"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"

    @classmethod
    def _missing_(cls, value: object) -> "ShardingStrategy | None":
        return member(cls, "sharding_strategy", value)

    @property
    def stage(self) -> int | None:
        """ZeRO's stage; None when nothing is sharded."""
        if self is ShardingStrategy.NO_SHARD:
            return None
        return {ShardingStrategy.SHARD_OPTIMIZER: 1, ShardingStrategy.SHARD_GRAD_OP: 2}.get(self, 3)

    def on_axis(self, **options: Any) -> "Shard | Replicate":
        """The strategy of the `fsdp` axis that this name means: `Shard` with these options, or `Replicate`.

        Args:
          options: options of `Shard`, but its stage.

        Raises:
          ValueError: for options that are wrong, or given where nothing is sharded.
        """
        if self.stage is not None:
            return Shard(stage=self.stage, **options)
        if idle := {name: value for name, value in options.items() if value}:
            raise ValueError(f"{idle} acts on sharded parameters and has no effect with sharding_strategy={self.value}")
        return Replicate()
