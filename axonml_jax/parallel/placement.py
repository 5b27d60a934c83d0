"""A plan bound to a mesh and a model: where each parameter lives, and how a step reads and reduces it."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.collectives.gradients.buckets import assign_buckets
from axonml_jax.collectives.gradients.pairs import own_slice
from axonml_jax.collectives.joined_ranks import joined_over
from axonml_jax.collectives.primitives import axis_index, gather_whole
from axonml_jax.mesh.axes import AxisNames, as_axes, flat_axes
from axonml_jax.model.functional import Functional
from axonml_jax.model.precision import cast_floating
from axonml_jax.parallel.context.context_split import seen_whole
from axonml_jax.parallel.pipeline.resting.staging import Staging
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.parallel.units.wrap import Wrap
from axonml_jax.sharding.batch import BatchLayout
from axonml_jax.sharding.layout import Layout, is_layout
from axonml_jax.sharding.memory import to_device_memory
from axonml_jax.sharding.stored import from_stored, to_stored


@dataclass(frozen=True)
class Placement:
    """A plan on a mesh, for the parameters of one model. Its methods run inside `shard_map`.

    Attributes:
      plan: the plan, with every default decided.
      degrees: size of every mesh axis.
      params, frozen: a `Layout` for every leaf.
      stages: where leaves live along a pipeline; what rests is then what its stores say. None: there is no pipeline.
      left: the axes that a step leaves to XLA's partitioner.
      at_rest: with such axes, where leaves rest; here they look whole along them.
      agreed: of a step in which ranks train parameters of their own for a round (`in_round`): what they agree on.
    """

    plan: Plan
    degrees: Mapping[str, int]
    params: PyTree
    frozen: PyTree
    stages: Staging | None = None
    left: frozenset[str] = frozenset()
    at_rest: "Placement | None" = None
    agreed: "Placement | None" = None

    @cached_property
    def strategies(self) -> dict[AxisNames, AbstractStrategy]:
        """The strategies of the mesh's axes that a step binds, outermost first: gathering goes inwards, reducing outwards."""
        there, left = self.plan.on(self.degrees), self.left
        # XLA's partitioner refuses a sum over an axis of one rank of what it splits over an axis that is left to it.
        bound = lambda axis: not left or (self.ranks(axis) > 1 and not left.intersection(as_axes(axis)))
        return {axis: each for axis, each in there.items() if bound(axis)}

    @cached_property
    def batch_layout(self) -> BatchLayout:
        """How batches are split over the mesh."""
        return self.plan.batch_layout(self.degrees)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch: its rows, or its positions."""
        return self.batch_layout.axes

    @property
    def position_axes(self) -> tuple[str, ...]:
        """Those of them that split positions, over more than one rank."""
        return tuple(
            axis
            for axis in self.batch_layout.axes
            if axis in dict(self.batch_layout.positions) and self.degrees[axis] > 1
        )

    @cached_property
    def key_axes(self) -> tuple[str, ...]:
        """Those along which ranks draw with random keys of their own."""
        alike = (as_axes(axis) for axis, each in self.strategies.items() if each.role.keys == "alike")
        return tuple(axis for axis in self.batch_axes if axis in self.batch_layout.rows or axis not in flat_axes(alike))

    def key_number(self) -> int | jax.Array:
        """This rank's number among those whose random keys differ, inside `shard_map`."""
        return axis_index(self.key_axes) if self.key_axes else 0

    @contextmanager
    def inside(self, whole: Iterable[str] = ()) -> Iterator[None]:
        """What strategies say of the model's code while it is traced inside `shard_map`.

        Args:
          whole: axes along which it sees whole sequences all the same.
        """
        with ExitStack() as stack:
            stack.enter_context(joined_over(self.joined_axes))
            for axis, strategy in self.strategies.items():
                if self.ranks(axis) > 1:
                    stack.enter_context(strategy.inside(axis))
            for axis in whole:
                stack.enter_context(seen_whole(axis))
            yield

    def rewritten(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """What a step traces in the place of the model's code (see `AbstractStrategy.rewritten`)."""
        for axis, strategy in self.plan.on(self.degrees).items():
            left = self.left.intersection(as_axes(axis)) and self.ranks(axis) > 1
            fun = strategy.rewritten(fun, axis, self.plan.check_vma) if left else fun
        return fun

    def check_model(self, model: Functional) -> None:
        """Refuse what a strategy cannot run (see `AbstractStrategy.model_problems`)."""
        named = self.plan.on(self.degrees).items()
        there = [(axis, each) for axis, each in named if self.ranks(axis) > 1 or each.rounds is not None]
        if problems := [why for axis, each in there for why in each.model_problems(model, axis, self.degrees)]:
            raise ValueError("; ".join(problems))

    @property
    def batch_degree(self) -> int:
        """The number of batch shards."""
        return self.batch_layout.degree

    @cached_property
    def own_axes(self) -> tuple[str, ...]:
        """The mesh axes along which every rank trains a model of its own (NO_SYNC)."""
        return flat_axes(axis for axis, each in self.strategies.items() if each.role.reduces == "never")

    @cached_property
    def joined_axes(self) -> tuple[str, ...]:
        """The batch axes whose ranks train one model: losses, statistics and gradients are joined over them."""
        return tuple(axis for axis in self.batch_axes if axis not in self.own_axes)

    @property
    def joined_rows(self) -> int:
        """Into how many parts the rows of one model are split."""
        return self.ranks(axis for axis in self.joined_axes if axis not in self.position_axes)

    @cached_property
    def buffer_axes(self) -> tuple[str, ...] | None:
        """The axes along which ranks keep buffers of their own between steps, stacked along dim 0; None: buffers are equal."""
        if self.plan.batch_stats == "local" and not self.plan.broadcast_buffers:
            return self.batch_axes
        return self.own_axes or None

    @cached_property
    def layer_axes(self) -> tuple[str, ...]:
        """The mesh axes along which the model's layers split their parameters."""
        return flat_axes(axis for axis, each in self.strategies.items() if each.role.parameters == "layers")

    def ranks(self, axis: AxisNames | Iterable[str]) -> int:
        """The number of ranks of an axis, or of several together."""
        return math.prod(self.degrees[name] for name in ((axis,) if isinstance(axis, str) else axis))

    @property
    def resting(self) -> "Placement":
        """The placement by which arrays are created, and returned by a step."""
        return self.at_rest or self

    @property
    def manual_axes(self) -> frozenset[str]:
        """The mesh axes over which this library communicates."""
        return frozenset(self.degrees) - self.left

    @property
    def axes(self) -> tuple[AxisNames, ...]:
        """The mesh axes over which gradients are synchronized."""
        return tuple(self.strategies)

    @cached_property
    def reducer(self) -> AbstractStrategy:
        """The strategy whose buckets and overlap count (see `Plan.reducer`)."""
        return self.plan.reducer(self.degrees)

    @property
    def inner_axes(self) -> tuple[AxisNames, ...]:
        """Those over which they are synchronized after every microbatch."""
        return tuple(axis for axis, each in self.strategies.items() if each.role.reduces == "microbatch")

    @cached_property
    def sharded_axes(self) -> tuple[AxisNames, ...]:
        """Those over which parameters rest sharded, to be gathered."""
        sharded = (axis for axis, each in self.strategies.items() if each.role.parameters == "sharded")
        return tuple(axis for axis in sharded if self.ranks(axis) > 1)

    @property
    def gathers_when_used(self) -> bool:
        """Whether parameters are read unit by unit, forward and backward."""
        return self.stages is None and bool(self._at_use)

    @property
    def by_unit(self) -> AbstractStrategy:
        """The strategy that does."""
        return self._at_use[0]

    @property
    def wrap(self) -> Wrap:
        """Which parts of the model are units: as the first strategy says that says it."""
        return next((each.wrap for each in self.strategies.values() if each.wrap is not None), None)

    @property
    def _at_use(self) -> list[AbstractStrategy]:
        return [each for axis, each in self.strategies.items() if each.role.reads == "use" and self.ranks(axis) > 1]

    def read(self, shards: Sequence[jax.Array], layouts: Sequence[Layout]) -> list[jax.Array]:
        """What the model reads in the place of resting shards: cast first, then gathered."""
        shards = to_device_memory(list(shards), self.plan.offload.params)
        values = [cast_floating(shard, self.plan.precision.compute) for shard in shards]
        with jax.named_scope("axonml.parameters"):
            for axis, strategy in self.strategies.items():
                values = strategy.gather_bucket(values, layouts, axis)
        return values

    def read_tree(self, shards: PyTree, layouts: PyTree) -> PyTree:
        """`read` for a whole tree."""
        leaves, treedef = jax.tree.flatten(shards)
        return treedef.unflatten(self.read(leaves, jax.tree.leaves(layouts, is_leaf=is_layout)))

    def read_shape(self, layout: Layout) -> tuple[int, ...]:
        """The shape that the model reads on one rank: whole but for what its own layers split."""
        counts = [
            math.prod(self.degrees[a] for a in layout.axes_of(d) if a in self.layer_axes)
            for d in range(len(layout.shape))
        ]
        return tuple(-(-size // count) for size, count in zip(layout.shape, counts, strict=True))

    def to_accumulate(self, grad: jax.Array, layout: Layout) -> jax.Array:
        """A gradient in the dtype in which it accumulates."""
        return grad.astype(self.plan.precision.accumulate_dtype(layout.dtype))

    def reduced(self, grads: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """Gradients summed over one axis, as its strategy says, in the reduce dtype where they travel."""
        precision = self.plan.precision
        to = precision.reduce_dtype if self.ranks(axis) > 1 else precision.accumulate_dtype
        grads = [grad.astype(to(layout.dtype)) for grad, layout in zip(grads, layouts, strict=True)]
        return self.strategies[axis].sync_bucket(grads, layouts, axis)

    def wire_itemsize(self, layout: Layout) -> int:
        """Bytes per element of a parameter's gradient as the replicated axes reduce it."""
        return self.reducer.wire_dtype(self.plan.precision.reduce_dtype(layout.dtype)).itemsize

    def sync(
        self,
        grads: Sequence[jax.Array],
        layouts: Sequence[Layout],
        bucket: int,
        *,
        axes: Collection[AxisNames] | None = None,
        accumulated: Sequence[jax.Array] | None = None,
    ) -> list[jax.Array]:
        """Local gradients of what was read -> summed ones of the resting shards, in the dtype in which they accumulate.

        Args:
          grads: one per leaf of the bucket; they travel together, in the reduce dtype.
          layouts: theirs.
          bucket: only names the bucket in the program, so that the ledger can tell it from its neighbours.
          axes: synchronize over these only; None: all.
          accumulated: gradients synchronized over `inner_axes` already; they join before the rest.
        """
        values = list(grads)
        # From the innermost axis outwards, but what is scattered first: sums of shards send less than those of whole gradients.
        outwards = [axis for axis in list(self.strategies)[::-1] if axes is None or axis in axes]
        outwards.sort(key=lambda axis: axis not in self.sharded_axes)
        inner = [axis for axis in outwards if axis in self.inner_axes]
        with jax.named_scope("axonml.gradients"), jax.named_scope(f"bucket{bucket}"):
            for axis in inner:
                values = self.reduced(values, layouts, axis)
            if accumulated is not None:
                values = list(map(self.to_accumulate, values, layouts))
                values = [value + more for value, more in zip(values, accumulated, strict=True)]
            for axis in outwards:
                if axis not in inner:
                    values = self.reduced(values, layouts, axis)
        return list(map(self.to_accumulate, values, layouts))

    def sync_buckets(self, grads: Sequence[jax.Array], layouts: Sequence[Layout], axes=None) -> list[jax.Array]:
        """`sync` of all leaves after a backward pass: buckets fill from the last leaf to the first, as they get ready."""
        order = list(range(len(grads)))[::-1]
        sizes = [layouts[i].size * self.wire_itemsize(layouts[i]) for i in order]
        synced: dict[int, jax.Array] = {}
        for positions in assign_buckets(sizes, self.reducer.bucket_bytes):
            bucket = [order[k] for k in positions]
            own, theirs = [grads[i] for i in bucket], [layouts[i] for i in bucket]
            synced |= zip(bucket, self.sync(own, theirs, min(bucket), axes=axes), strict=True)
        return [synced[i] for i in range(len(grads))]

    def gather_stored(self, shard: jax.Array, layout: Layout) -> jax.Array:
        """The whole array of a resting shard, uncast and the same on every rank."""
        for axis in reversed(layout.axes):
            shard = gather_whole(shard, axis, layout.dim_of(axis) or 0, invarying=True)
        return from_stored(shard, layout)

    def own_part(self, whole: jax.Array, layout: Layout) -> jax.Array:
        """This rank's resting shard of a whole array. The inverse of `gather_stored`."""
        part = to_stored(whole, layout)
        for axis in layout.axes:
            part = own_slice(part, axis, layout.dim_of(axis) or 0)
        return part
