"""Fully sharded data parallelism: ranks hold parts of every parameter and gather whole ones for computing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax._types import is_one_of
from axonml_jax.collectives.gradients.bucketed import gather_leaves, scatter_sum_leaves
from axonml_jax.collectives.primitives import axis_size
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.strategies.hops import best_hops, groups
from axonml_jax.parallel.strategies.packed_shards import (
    WIRES,
    Wire,
    packed,
    packed_sizes,
    round_trip,
    travels_packed,
    unpacked,
    wire_dtype,
)
from axonml_jax.parallel.strategies.packed_sums import (
    REDUCE_WIRES,
    ReduceWire,
    filled_of,
    scatter_sum_packed,
    sum_round_trip,
    sum_transfers,
    sums_packed,
)
from axonml_jax.parallel.strategies.padding import cut, pad, padding_of, padding_scope
from axonml_jax.parallel.strategies.role import Role
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.parallel.strategies.transfer import Transfer
from axonml_jax.parallel.units.wrap import Wrap, checked_wrap
from axonml_jax.sharding.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Shard(AbstractStrategy):
    """Every rank of the axis holds a part of each parameter.

    Communicates, with A microbatches and P parameters on N ranks, (N-1)/N times: 2P (stage 1: one all-gather, one
    reduce-scatter), (1+A)P (stage 2: a reduce-scatter per microbatch), 3AP (stage 3: two all-gathers and a
    reduce-scatter per microbatch).

    Attributes:
      stage: 1, 2 or 3: what is whole during a step (see `ShardingStrategy`).
      wrap: which parts of the model are units, gathered together (stage 3): None finds repeated blocks; or module types,
        path patterns, or a predicate of module paths (see `units/wrap.py`).
      prefetch: how many units ahead weights are gathered (stage 3). Each costs one more unit of memory.
      flat: whether leaves that travel together are copied into one flat buffer; None takes what is fastest on the backend.
      gather_hop: gathers go in two hops, among so many neighbouring ranks first and then across; 1: in one. The bytes are
        the same. None takes what the compiler of the mesh's devices keeps a gather (see `hops.py`).
      scatter_hop: the same of reduce-scatters, which go across first.
      wire: weights are gathered as "int8", or as "fp8" (e4m3), with a float32 scale per block of 256 elements or fewer; they
        rest, and gradients travel, as before. Leaves of one dim are gathered as they are. None: all are.
      reduce_wire: parts of gradients travel to the ranks that sum them, in float32, as "bf16", or as "int8" with a float32
        scale per block (leaves of two dims or more), "int8-feedback" with what rounding left out of a rank's gradients added
        to its next ones (stage 1). None: a reduce-scatter in the dtype in which gradients are reduced.
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
        if not is_one_of(self.stage, (1, 2, 3)) or isinstance(self.stage, bool):
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
        """One all-gather, or one across and one among neighbours; of packed leaves as many of the scales."""
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
        """One reduce-scatter, or one across and one among neighbours; all-to-alls of packed parts in their place."""
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
        """Hops for the devices' torus (see `hops.py`); flat buffers on gloo.

        Raises:
          ValueError: when the ranks of the axis do not divide into hops.
        """
        gather, scatter = best_hops(fabric.torus, ranks, fabric.devices)
        chosen = {"gather_hop": self.gather_hop or gather, "scatter_hop": self.scatter_hop or scatter}
        if wrong := {name: hop for name, hop in chosen.items() if ranks % hop}:
            raise ValueError(
                f"{wrong}: the {ranks} ranks of the axis do not divide into hops of so many; use a divisor"
            )
        return replace(self, flat=fabric.gloo if self.flat is None else self.flat, **chosen)

    def in_words(self, axis: AxisNames) -> str:
        """As tables print it."""
        gathered = f", gathered as {self.wire}" if self.wire else ""
        return f"ZeRO-{self.stage}{gathered}" + (f", reduced as {self.reduce_wire}" if self.reduce_wire else "")

    @property
    def exact(self) -> bool:
        """Unless what is gathered or reduced is packed."""
        return self.wire is None and self.reduce_wire is None

    @property
    def feeds_back(self) -> bool:
        """As "int8-feedback"."""
        return self.reduce_wire == "int8-feedback"

    @property
    def reads_exactly(self) -> bool:
        """Unless what is gathered is packed."""
        return self.wire is None

    def round_trip(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """What ranks read of a shard."""
        packs = self._packs(shard, layout, axis)
        return round_trip(shard, packs) if packs is not None else shard

    def sum_round_trip(self, part: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """What the sum takes of a part of a rank's gradient."""
        if self.reduce_wire is None or not self._packed_sum(layout, axis, part.dtype):
            return part
        return sum_round_trip(part, self.reduce_wire)

    def _packed_sum(self, layout: Layout, axis: AxisNames, dtype: Any) -> bool:
        """Whether a gradient travels packed."""
        return layout.dim_of(axis) is not None and sums_packed(self.reduce_wire, layout, dtype)

    def _packs(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> Wire | None:
        """How a shard is packed; None: it travels as it is."""
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
        """One dim split over the axis: the one that needs the least padding.

        Among equals the first; of a leaf with three dims or more rather not dim 0, which may be a stack of layers whose
        slices are read one at a time. A leaf all of whose dims other axes split into parts that do not divide stays as it is:
        padded, they would no longer join.
        """
        if axis_size == 1:
            return layout
        sizes = layout.shard or (1,)

        def cost(dim: int) -> tuple:
            padded = math.prod(sizes) // max(sizes[dim], 1) * -(-sizes[dim] // axis_size) * axis_size
            # A dim that another axis splits may be split further, but not padded: its parts would no longer join.
            clumsy = bool(layout.parts) and layout.parts[dim] > 1 and sizes[dim] % axis_size > 0
            return clumsy, padded, len(sizes) >= 3 and dim == 0, dim

        clumsy, *_, dim = min(cost(dim) for dim in range(len(sizes)))
        return layout if clumsy else layout.on(axis, dim, axis_size)

    def gather(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The whole leaf (its part on the other axes), padding cut off."""
        return self.gather_bucket([shard], [layout], axis)[0]

    def sync(self, grad: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The rank's part of the sum of the ranks' gradients."""
        return self.sync_bucket([grad], [layout], axis)[0]

    def gather_bucket(self, shards: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """One all-gather for the whole bucket, or one among neighbours and one across."""
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
        """One reduce-scatter for the whole bucket, or one across and one among neighbours; one all-to-all of packed parts."""
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
