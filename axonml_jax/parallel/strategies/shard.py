"""Fully sharded data parallelism: ranks hold parts of every parameter and gather whole ones for computing."""

import enum
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.gradients.bucketed import gather_leaves, scatter_sum_leaves
from axonml_jax.collectives.primitives import axis_size
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.strategies.hops import best_hops, groups
from axonml_jax.parallel.strategies.replicate import Replicate
from axonml_jax.parallel.strategies.role import Role
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.parallel.strategies.transfer import Transfer
from axonml_jax.parallel.units.wrap import Wrap, checked_wrap
from axonml_jax.sharding.layout import Layout
from axonml_jax.synonyms import member


class ShardingStrategy(enum.Enum):
    """What a step of FSDP keeps sharded (ZeRO, Rajbhandari et al. 2020; names as in PyTorch).

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

        Raises:
          ValueError: for options that are wrong, or given where nothing is sharded.
        """
        if self.stage is not None:
            return Shard(stage=self.stage, **options)
        if idle := {name: value for name, value in options.items() if value}:
            raise ValueError(f"{idle} acts on sharded parameters and has no effect with sharding_strategy={self.value}")
        return Replicate()


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
    """

    stage: int = 3
    wrap: Wrap = None
    prefetch: int = 0
    flat: bool | None = None
    gather_hop: int | None = None
    scatter_hop: int | None = None

    def __post_init__(self):
        problems = []
        if self.stage not in (1, 2, 3) or isinstance(self.stage, bool):
            problems.append(f"stage={self.stage!r} must be 1, 2 or 3 (ZeRO)")
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            problems.append(f"prefetch={self.prefetch!r} must be a number of units, 0 or more")
        elif self.prefetch and self.stage in (1, 2):
            problems.append(
                f"prefetch={self.prefetch} acts with stage=3; with {self.stage} all is gathered at the start"
            )
        if self.flat not in (None, True, False):
            problems.append(f"flat={self.flat!r} must be True, False or None")
        for name in ("gather_hop", "scatter_hop"):
            hop = getattr(self, name)
            if hop is not None and (isinstance(hop, bool) or not isinstance(hop, int) or hop < 1):
                problems.append(f"{name}={hop!r} must be a number of ranks, 1 or more, or None")
        if problems:
            raise ValueError("; ".join(problems))
        object.__setattr__(self, "wrap", checked_wrap(self.wrap))

    def gather_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """One all-gather, or one across and one among neighbours."""
        return self._moved("all_gather", elements * ranks, layout, axis, ranks, dtype, self.gather_hop)

    def sync_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """One reduce-scatter, or one across and one among neighbours."""
        return self._moved("reduce_scatter", elements, layout, axis, ranks, dtype, self.scatter_hop)

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
        return f"ZeRO-{self.stage}"

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
        near, far = groups(axis_size(axis), self.gather_hop) or (None, None)
        if near:
            with jax.named_scope("axonml.parameters"):
                shards = gather_leaves(shards, axis, dims, flat=bool(self.flat), among=near)
        with _padding("axonml.parameters", layouts, dims, axis):
            wholes = gather_leaves(shards, axis, dims, flat=bool(self.flat), among=far)
        return [_cut(whole, layout, axis, dim) for whole, layout, dim in zip(wholes, layouts, dims, strict=True)]

    def sync_bucket(self, grads: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """One reduce-scatter for the whole bucket, or one across and one among neighbours."""
        dims = [layout.dim_of(axis) for layout in layouts]
        padded = [_pad(grad, layout, axis, dim) for grad, layout, dim in zip(grads, layouts, dims, strict=True)]
        near, far = groups(axis_size(axis), self.scatter_hop) or (None, None)
        with _padding("axonml.gradients", layouts, dims, axis):
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


def _cut(whole: jax.Array, layout: Layout, axis: AxisNames, dim: int | None) -> jax.Array:
    """What was gathered without its padding."""
    if dim is None:
        return whole
    if not layout.shape:
        return whole[0]
    size = layout.shape[dim] * axis_size(axis) // layout.parts[dim]
    return whole if whole.shape[dim] == size else jax.lax.slice_in_dim(whole, 0, size, axis=dim)


def _pad(grad: jax.Array, layout: Layout, axis: AxisNames, dim: int | None) -> jax.Array:
    """A gradient with zeros behind it, so that it divides."""
    if dim is None:
        return grad
    if not layout.shape:
        grad = grad[None]
    more = layout.shard[dim] * axis_size(axis) - grad.shape[dim]
    return jnp.pad(grad, [(0, more if d == dim else 0) for d in range(grad.ndim)]) if more else grad


def padding_of(layout: Layout, dim: int, ranks: int) -> int:
    """How many elements of a leaf gathered along a dim are padding."""
    shard = layout.shard
    size = layout.shape[dim] * ranks // layout.parts[dim] if layout.shape else 1
    return math.prod(shard[:dim] + shard[dim + 1 :]) * (shard[dim] * ranks - size)


def _padding(
    label: str, layouts: Sequence[Layout], dims: Sequence[int | None], axis: AxisNames
) -> AbstractContextManager:
    """A name scope that tells the ledger how many of a bucket's elements are padding."""
    count = axis_size(axis)
    more = sum(padding_of(layout, dim, count) for layout, dim in zip(layouts, dims, strict=True) if dim is not None)
    return jax.named_scope(f"{label}.pad{more}") if more else nullcontext()
