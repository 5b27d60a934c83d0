"""`Placement`: a plan bound to a mesh and a model: each leaf's layout, how it is read, and how gradients are summed."""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from axonml_jax.base import PyTree, named_leaves, path_name
from axonml_jax.collectives.gradients import Partial, assign_buckets
from axonml_jax.collectives.primitives import axis_index, joined_over
from axonml_jax.compat.order import after, partitions_by_shardy, platform_around, users_meshes
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.mesh.axes import LAYER_AXES, PARTITIONED, STAGES, AxisNames, as_axes, flat_axes
from axonml_jax.model.loss import Precision, cast_floating
from axonml_jax.model.view import Functional, Variables, merge
from axonml_jax.parallel.plan import CPUOffload, Plan
from axonml_jax.sharding.batch import BatchLayout
from axonml_jax.sharding.layout import Layout, as_spec, is_layout, movable, to_device_memory
from axonml_jax.strategies.replicate import Replicate
from axonml_jax.strategies.strategy import (
    AbstractStrategy,
    Decides,
    Fabric,
    LeftToXLA,
    LocalRounds,
    Reducer,
    SplitsPositions,
    Stateful,
    feeds_back,
    gather_bucket,
    reducer_of,
    seen_whole,
    sync_bucket,
)

if TYPE_CHECKING:
    from axonml_jax.pipeline.assign import Assignment, Stack
    from axonml_jax.pipeline.store import Staging

# --------------------------------------------------------------------------------------------------
# Whether a plan fits a mesh: axes along which all ranks would do the same work, and options that do not go together.
# --------------------------------------------------------------------------------------------------


def check_axes(plan: Plan, degrees: Mapping[str, int], in_layers: Mapping[str, PartitionSpec]) -> None:
    """Refuses a plan that does not fit a mesh.

    Args:
      plan: the plan.
      degrees: size of every mesh axis.
      in_layers: how the model's own layers split parameters, by path.

    Raises:
      ValueError: for axes of several ranks without a strategy, along which all ranks would do the same work; a pipeline without
        an axis for its stages; strategies and options that do not go together on this mesh.
    """
    used = {axis for spec in in_layers.values() for entry in spec for axis in as_axes(entry or ())}
    known = [name for axis in plan.strategies for name in as_axes(axis) if name not in LAYER_AXES or name in used]
    known += [STAGES] * (plan.pipe is not None)
    if plan.pipe is not None and STAGES not in degrees:
        raise ValueError(
            f"the plan is pipelined, but the mesh {dict(degrees)} has no axis {STAGES!r} for the stages: use "
            "ax.make_mesh(pipe=..., data=...), or a plan with pipe=None"
        )
    if plan.pipe is None and degrees.get(STAGES, 1) > 1:
        raise ValueError(
            f"the mesh has {STAGES}={degrees[STAGES]}, but the plan has no pipe=: give it "
            "pipe=ax.Pipelined(num_microbatches=..., schedule=...), use ax.Pipeline, or a mesh without this axis"
        )
    automatic = _check_automatic(plan, degrees)
    _check_partitioner(plan, degrees)
    _check_rounds(plan, degrees, automatic=bool(automatic))
    _check_partition(plan, degrees)
    _check_strategies(plan, degrees)
    unknown = {axis: size for axis, size in degrees.items() if axis not in known and size > 1}
    if unknown:
        raise ValueError(
            f"mesh axes {unknown} have no strategy in the plan, which knows {known}: their devices would all do the "
            "same work. Give the mesh these devices on one of the plan's axes, or build the model with layers that split over "
            "them (ax.ColumnParallelLinear, ax.ParallelLinear, ...), or swap its own by ax.auto_parallelize, whose report says "
            "why each was left"
        )


def _check_automatic(plan: Plan, degrees: Mapping[str, int]) -> list[AxisNames]:
    """The axes that strategies leave to XLA's partitioner; refuse them beside check_vma=True."""
    leaving = [axis for axis, each in plan.on(degrees).items() if each.having(LeftToXLA)]
    automatic = [axis for axis in leaving if degrees[as_axes(axis)[0]] > 1]
    if automatic and plan.check_vma:
        raise ValueError(
            f"{', '.join(map(str, automatic))} is left to XLA's partitioner, because the model's code sees whole sequences, "
            "and there JAX cannot differentiate attention across ranks with check_vma=True: leave that out, "
            "or write the model for its rank's positions (ax.context_attention, ax.context_positions; splits_positions = True)"
        )
    return automatic


def _check_partitioner(plan: Plan, degrees: Mapping[str, int]) -> None:
    """Refuse GSPMD where it ends the process: it cannot gather parameters beside axes that are left to it, in most programs."""
    automatic = sorted(axis for axis in plan.left(degrees) if degrees.get(axis, 1) > 1)
    ranks = lambda axis: math.prod(degrees.get(name, 1) for name in as_axes(axis))
    shards = [axis for axis, each in plan.on(degrees).items() if each.role.parameters == "sharded" and ranks(axis) > 1]
    if automatic and shards and not partitions_by_shardy():
        raise ValueError(
            f"jax_use_shardy_partitioner is off: XLA's older partitioner, to which {', '.join(automatic)} would be left, ends "
            f"the process where parameters that rest sharded over {', '.join(map(str, shards))} are gathered. Leave JAX's "
            "default, jax.config.update('jax_use_shardy_partitioner', True), or give these devices to data"
        )


def _check_rounds(plan: Plan, degrees: Mapping[str, int], *, automatic: bool) -> None:
    """Refuse rounds of local steps on a mesh without their axis of replicas, and beside axes left to XLA's partitioner."""
    for axis, rounds in plan.rounds.items():
        name = type(rounds).__name__
        if missing := [each for each in as_axes(axis) if each not in degrees]:
            raise ValueError(
                f"{name} puts its replicas along {', '.join(missing)}, which the mesh {dict(degrees)} lacks: use "
                f"ax.make_mesh({missing[0]}=..., ...), or another strategy"
            )
        if automatic:
            raise ValueError(
                f"{name}: the model's code sees whole sequences, so XLA's partitioner splits the axis of positions, but the "
                "end of a round works on the shards that a rank holds: write the model for its rank's positions "
                "(ax.context_attention, splits_positions = True), or use a mesh without this axis"
            )


def _check_partition(plan: Plan, degrees: Mapping[str, int]) -> None:
    """Refuse options that do not work beside axes that path rules leave to XLA's partitioner."""
    if plan.partition is None:
        return
    layout = plan.batch_layout(degrees)
    if plan.check_vma and all(degrees[axis] == 1 for axis in layout.axes):
        raise ValueError(
            f"partition= leaves all axes of {dict(degrees)} with more than one rank to XLA's partitioner, which rejects the "
            "program that check_vma=True makes if no other axis splits the batch: leave out check_vma=True, or give data "
            "more ranks"
        )
    alone = [axis for axis in layout.axes if degrees[axis] == 1]
    if plan.check_vma and alone and degrees.get("fsdp", 1) > 1:
        raise ValueError(
            f"check_vma=True with partition= and fsdp: {', '.join(alone)} of {dict(degrees)} has one rank, over which "
            "check_vma=True adds a sum that XLA's partitioner rejects: leave out check_vma=True, or give the axis more ranks"
        )
    if along := [axis for axis, _ in layout.positions if degrees[axis] > 1]:
        raise ValueError(
            f"{', '.join(along)} splits positions, and partition= leaves an axis to XLA's partitioner, whose outputs may then "
            "be split over it too: use layers that split themselves (ax.ColumnParallelLinear, ax.auto_parallelize), or no "
            "axis that splits positions"
        )


def _check_strategies(plan: Plan, degrees: Mapping[str, int]) -> None:
    """Refuse strategies that do not go together, or whose options would have no effect."""
    sharded = {
        axis: strategy
        for axis, strategy in plan.on(degrees).items()
        if strategy.role.parameters == "sharded" and any(degrees[name] > 1 for name in as_axes(axis))
    }
    if len(sharded) > 1:
        together = tuple(name for axis in sharded for name in as_axes(axis))
        raise ValueError(
            f"the axes {', '.join(map(str, sharded))} each shard parameters at rest, by {list(sharded.values())}: one strategy "
            f"must own them together, ax.Plan(axes={{{together}: ...}}), or all but one replicate (ax.Replicate())"
        )
    reducer = plan.reducer(degrees)
    asked = lambda strategy: (reducer_of(strategy).bucket_bytes, reducer_of(strategy).overlaps)
    idle = {
        axis: strategy
        for axis, strategy in plan.on(degrees).items()
        if strategy.role.reduces == "step" and asked(strategy) not in (asked(reducer), asked(Replicate()))
    }
    if idle:
        raise ValueError(
            f"one strategy of a plan sets buckets and overlap, here {reducer!r}; these settings of other strategies have no "
            f"effect: {idle}. Set them in that strategy"
        )
    _check_feedback(plan, degrees)
    acting = [strategy for strategy in plan.on(degrees).values() if strategy.having(Stateful)]
    if acting and (plan.pipe is not None or plan.offload is not CPUOffload.NONE):
        raise ValueError(
            f"{', '.join(map(repr, acting))} acts on parameters between steps (init_state, after_update), which is not "
            "possible in a pipeline's buffers or host memory: use a plan without pipe and without offload, or another strategy"
        )


def _check_feedback(plan: Plan, degrees: Mapping[str, int]) -> None:
    """Refuse error feedback where a rank does not have a full gradient of its own, once a step and in one unit."""
    there = plan.on(degrees)
    if not (fed := {axis: each for axis, each in there.items() if feeds_back(each)}):
        return
    roles = {axis: each.role for axis, each in there.items() if any(degrees[name] > 1 for name in as_axes(axis))}
    reducing = [axis for axis in reversed(roles) if roles[axis].reduces in ("step", "microbatch")]
    reducing.sort(key=lambda axis: roles[axis].parameters != "sharded")
    wrong = {
        "a pipeline, whose stages' gradients lie in buffers": plan.pipe is not None,
        "what rests in host memory": plan.offload is not CPUOffload.NONE,
        "rounds, and ranks that train models of their own": bool(plan.rounds)
        or any(role.reduces == "never" for role in roles.values()),
        "axes that are left to XLA's partitioner": bool(plan.left(degrees)),
        "float16, whose loss scale changes": plan.precision.scales_loss,
        "an axis over which layers split parameters and the batch too": any(
            role.parameters == "layers" and role.batch is not None for role in roles.values()
        ),
        "a strategy that reduces after every microbatch": any(each.role.reduces != "step" for each in fed.values()),
        "another axis whose gradients are summed before": bool(reducing) and reducing[0] not in fed,
        "a second strategy that does the same": len(fed) > 1,
    }
    if why := [name for name, found in wrong.items() if found]:
        raise ValueError(
            f"{', '.join(map(repr, fed.values()))} uses error feedback: the rounding error of a step's gradient sums is added "
            f"to the next step's. That cannot be combined with {'; nor with '.join(why)}: leave that out, or use a strategy "
            "without feedback (reduce_wire='int8')"
        )


# --------------------------------------------------------------------------------------------------
# A plan bound to a mesh and a model: where each parameter lives, and how a step reads and reduces it.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh by their part in a step, outermost first, as their strategies' roles say.

    Attributes:
      batch: they split the batch: its rows, or its positions.
      positions: those of them that split positions, over more than one rank.
      keys: those of them along which ranks draw with random keys of their own.
      independent: along them every rank trains a model of its own (NO_SYNC, a round of DiLoCo).
      synced: the batch axes whose ranks train one model: losses, statistics and gradients are summed over them.
      rows: those of them that split rows.
      buffers: along them ranks keep buffers of their own between steps, stacked along dim 0; None: buffers are equal.
      layers: along them the model's layers split their parameters.
      sharded: over them, of more than one rank, parameters rest sharded, to be gathered.
      each_microbatch: over them gradients are summed after every microbatch.
      manual: over them this library communicates; the others are left to XLA's partitioner.
    """

    batch: tuple[str, ...]
    positions: tuple[str, ...]
    keys: tuple[str, ...]
    independent: tuple[str, ...]
    synced: tuple[str, ...]
    rows: tuple[str, ...]
    buffers: tuple[str, ...] | None
    layers: tuple[str, ...]
    sharded: tuple[AxisNames, ...]
    each_microbatch: tuple[AxisNames, ...]
    manual: frozenset[str]


@dataclass(frozen=True)
class Placement:
    """A plan on a mesh, for the parameters of one model. Its methods run inside `shard_map`.

    Attributes:
      plan: the plan, with every default decided.
      degrees: size of every mesh axis.
      params, frozen: a `Layout` for every leaf.
      stages: the stages of leaves along a pipeline, and the buffers in which they rest then. None: there is no pipeline.
      automatic: the axes that a step leaves to XLA's partitioner.
      at_rest: with such axes, the placement in which leaves rest; in this one they look whole along these axes.
      agreed: where ranks train their own parameters for a round (`in_round`), the placement of what they agree on.
      splits_rows: False gives every batch shard all rows.
    """

    plan: Plan
    degrees: Mapping[str, int]
    params: PyTree
    frozen: PyTree
    stages: "Staging | None" = None
    automatic: frozenset[str] = frozenset()
    at_rest: "Placement | None" = None
    agreed: "Placement | None" = None
    splits_rows: bool = True

    @cached_property
    def strategies(self) -> dict[AxisNames, AbstractStrategy]:
        """The strategies of the mesh's axes that a step binds, outermost first: gathering goes inwards, reducing outwards."""
        there, automatic = self.plan.on(self.degrees), self.automatic
        # XLA's partitioner refuses a sum over an axis of one rank of what it splits over an axis that is left to it.
        bound = lambda axis: not automatic or (self.ranks(axis) > 1 and not automatic.intersection(as_axes(axis)))
        return {axis: each for axis, each in there.items() if bound(axis)}

    @cached_property
    def batch_layout(self) -> BatchLayout:
        """The split of batches over the mesh."""
        layout = self.plan.batch_layout(self.degrees)
        return layout if self.splits_rows else replace(layout, rows=(), spread=())

    @cached_property
    def axes(self) -> "Axes":
        """The axes of the mesh by their part in a step."""
        layout, strategies = self.batch_layout, self.strategies
        does = lambda role, what: tuple(axis for axis, each in strategies.items() if getattr(each.role, role) == what)
        batch, own = layout.axes, flat_axes(does("reduces", "never"))
        along = tuple(axis for axis in batch if axis in dict(layout.positions) and self.degrees[axis] > 1)
        alike, together = flat_axes(does("keys", "alike")), tuple(axis for axis in batch if axis not in own)
        local = self.plan.batch_stats == "local" and not self.plan.broadcast_buffers
        return Axes(
            batch=batch,
            positions=along,
            keys=tuple(axis for axis in batch if axis in layout.rows or axis not in alike),
            independent=own,
            synced=together,
            rows=tuple(axis for axis in together if axis not in along),
            buffers=batch if local else own or None,
            layers=flat_axes(does("parameters", "layers")),
            sharded=tuple(axis for axis in does("parameters", "sharded") if self.ranks(axis) > 1),
            each_microbatch=does("reduces", "microbatch"),
            manual=frozenset(self.degrees) - self.automatic,
        )

    @contextmanager
    def inside(self, whole: Iterable[str] = ()) -> Iterator[None]:
        """Enters the contexts that strategies set around the model's code, while it is traced inside `shard_map`.

        Args:
          whole: axes along which it sees whole sequences all the same.
        """
        with ExitStack() as stack:
            stack.enter_context(joined_over(self.axes.synced))
            if self.plan.kernels != "auto":
                from axonml_jax.layers.fused import asking_for

                stack.enter_context(asking_for(self.plan.kernels))
            for axis, strategy in self.strategies.items():
                if self.ranks(axis) > 1 and (own := strategy.having(SplitsPositions)) is not None:
                    stack.enter_context(own.inside(axis))
            for axis in whole:
                stack.enter_context(seen_whole(axis))
            yield

    def ranks(self, axis: AxisNames | Iterable[str]) -> int:
        """The number of ranks of an axis, or of several together."""
        return math.prod(self.degrees[name] for name in ((axis,) if isinstance(axis, str) else axis))

    @property
    def resting(self) -> "Placement":
        """The placement in which arrays are created, and returned by a step."""
        return self.at_rest or self

    @cached_property
    def reducer(self) -> Reducer:
        """The strategy whose buckets and overlap are used (see `Plan.reducer`)."""
        return reducer_of(self.plan.reducer(self.degrees))

    @property
    def at_use(self) -> AbstractStrategy | None:
        """The strategy that gathers parameters unit by unit, in forward and backward; None: they are gathered at once."""
        if self.stages is not None:
            return None
        found = (each for axis, each in self.strategies.items() if each.role.reads == "use" and self.ranks(axis) > 1)
        return next(found, None)

    def read(self, shards: Sequence[jax.Array], layouts: Sequence[Layout]) -> list[jax.Array]:
        """Casts resting shards to the compute dtype, and gathers them as the model reads them."""
        shards = to_device_memory(list(shards), self.plan.offload.params)
        values = [cast_floating(shard, self.plan.precision.compute) for shard in shards]
        with jax.named_scope("axonml.parameters"):
            for axis, strategy in self.strategies.items():
                gather = partial(gather_bucket, strategy, axis=axis)
                values = on_parts(self, gather, values, layouts, axis)
        return values

    def reduced(self, grads: Sequence[Partial], layouts: Sequence[Layout], axis: AxisNames) -> list[Partial]:
        """Sums gradients over one axis, as its strategy says, in the reduce dtype where they travel."""
        precision = self.plan.precision
        to = precision.reduce_dtype if self.ranks(axis) > 1 else precision.accumulate_dtype
        values = [grad.value.astype(to(layout.dtype)) for grad, layout in zip(grads, layouts, strict=True)]
        sync = partial(sync_bucket, self.strategies[axis], axis=axis)
        totals = on_parts(self, sync, values, layouts, axis)
        return [grad.summed(axis, total) for grad, total in zip(grads, totals, strict=True)]

    def sync(
        self,
        grads: Sequence[Partial],
        layouts: Sequence[Layout],
        bucket: int,
        *,
        axes: Collection[AxisNames] | None = None,
        accumulated: Sequence[Partial] | None = None,
    ) -> list[Partial]:
        """Sums local gradients of read parameters into those of the resting shards, in the dtype in which they accumulate.

        Args:
          grads: one per leaf of the bucket; they travel together, in the reduce dtype.
          layouts: theirs.
          bucket: only names the bucket in the program, so that the ledger can tell it from its neighbours.
          axes: synchronize over these only; None: all.
          accumulated: gradients synchronized over `axes.each_microbatch` already; they join before the rest.
        """
        values = list(grads)
        # From the innermost axis outwards, but what is scattered first: sums of shards send less than those of whole gradients.
        outwards = [axis for axis in list(self.strategies)[::-1] if axes is None or axis in axes]
        outwards.sort(key=lambda axis: axis not in self.axes.sharded)
        inner = [axis for axis in outwards if axis in self.axes.each_microbatch]
        with jax.named_scope("axonml.gradients"), jax.named_scope(f"bucket{bucket}"):
            for axis in inner:
                values = self.reduced(values, layouts, axis)
            if accumulated is not None:
                values = [accumulating(self, value, layout) for value, layout in zip(values, layouts, strict=True)]
                values = [value + more for value, more in zip(values, accumulated, strict=True)]
            for axis in outwards:
                if axis not in inner:
                    values = self.reduced(values, layouts, axis)
        return [accumulating(self, value, layout) for value, layout in zip(values, layouts, strict=True)]

    def sync_buckets(self, grads: Sequence[Partial], layouts: Sequence[Layout], axes=None) -> list[Partial]:
        """Runs `sync` on all leaves after a backward pass; buckets fill from the last leaf to the first, as they get ready."""
        order = list(range(len(grads)))[::-1]
        sizes = [layouts[i].size * wire_itemsize(self, layouts[i]) for i in order]
        synced: dict[int, Partial] = {}
        for positions in assign_buckets(sizes, self.reducer.bucket_bytes):
            bucket = [order[k] for k in positions]
            own, theirs = [grads[i] for i in bucket], [layouts[i] for i in bucket]
            synced |= zip(bucket, self.sync(own, theirs, min(bucket), axes=axes), strict=True)
        return [synced[i] for i in range(len(grads))]


# --------------------------------------------------------------------------------------------------
# Questions about a placement that few callers have.
# --------------------------------------------------------------------------------------------------

G = TypeVar("G", jax.Array, Partial)


def check_model(placement: Placement, model: Functional) -> None:
    """Refuse a model that a strategy cannot run (see `Decides.model_problems`)."""
    named = placement.plan.on(placement.degrees).items()
    there = [(axis, each) for axis, each in named if placement.ranks(axis) > 1 or each.having(LocalRounds)]
    deciding = [(axis, own) for axis, each in there if (own := each.having(Decides)) is not None]
    if problems := [why for axis, own in deciding for why in own.model_problems(model, axis, placement.degrees)]:
        raise ValueError("; ".join(problems))


def on_parts(
    placement: Placement,
    send: Callable[[Sequence[jax.Array], Sequence[Layout]], list[jax.Array]],
    values: Sequence[jax.Array],
    layouts: Sequence[Layout],
    axis: AxisNames,
) -> list[jax.Array]:
    """Applies `send` to a bucket; where XLA's partitioner splits leaves that rest sharded, to each rank's own parts.

    Left to itself the partitioner would make such leaves whole before they are gathered or scattered along another axis, and
    send them so.
    """
    split = {name for layout in layouts for entry in layout.automatic for name in as_axes(entry or ())}
    if not split or not placement.axes.sharded or placement.ranks(axis) == 1:
        return send(values, layouts)
    parts, specs = [own_part(placement, layout) for layout in layouts], tuple(layout.automatic for layout in layouts)
    on_own = jax.shard_map(
        lambda *own: tuple(send(own, parts)),
        in_specs=specs,
        out_specs=specs,
        axis_names=split,
        check_vma=placement.plan.check_vma,
    )
    return list(on_own(*values))


def own_part(placement: Placement, layout: Layout) -> Layout:
    """The layout of a rank's part of a leaf that XLA's partitioner splits, where leaves rest sharded too."""
    if not placement.axes.sharded:
        return layout
    entries = [*layout.automatic, *[None] * (len(layout.stored) - len(layout.automatic))]
    return layout.divided([placement.ranks(entry or ()) for entry in entries])


def read_tree(placement: Placement, shards: PyTree, layouts: PyTree) -> PyTree:
    """Runs `Placement.read` on a tree."""
    leaves, treedef = jax.tree.flatten(shards)
    return treedef.unflatten(placement.read(leaves, jax.tree.leaves(layouts, is_leaf=is_layout)))


def read_shape(placement: Placement, layout: Layout) -> tuple[int, ...]:
    """The shape of a parameter as the model reads it on one rank: split by its own layers alone."""
    counts = [
        math.prod(placement.degrees[axis] for axis in layout.axes_of(dim) if axis in placement.axes.layers)
        for dim in range(len(layout.shape))
    ]
    return tuple(-(-size // count) for size, count in zip(layout.shape, counts, strict=True))


def read_shapes(placement: Placement, state: PyTree) -> Variables:
    """The shapes of a model's variables as it reads them."""

    def shape(layout: Layout) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(read_shape(placement, layout), placement.plan.precision.read_dtype(layout.dtype))

    read = lambda tree: jax.tree.map(shape, tree, is_leaf=is_layout)
    return Variables(read(placement.params), read(placement.frozen), state)


def key_number(placement: Placement) -> int | jax.Array:
    """This rank's number among those with different random keys, inside `shard_map`."""
    return axis_index(placement.axes.keys) if placement.axes.keys else 0


def accumulating(placement: Placement, grad: G, layout: Layout) -> G:
    """Casts a gradient to the dtype in which it accumulates."""
    return grad.astype(placement.plan.precision.accumulate_dtype(layout.dtype))


def wire_itemsize(placement: Placement, layout: Layout) -> int:
    """Bytes per element of a parameter's gradient as the replicated axes reduce it."""
    return placement.reducer.wire_dtype(placement.plan.precision.reduce_dtype(layout.dtype)).itemsize


# --------------------------------------------------------------------------------------------------
# Which sums a rank's gradients lack (`Partial`).
#
# Where code differentiates, gradients lack all sums (`parts_of`); `Placement.reduced` alone makes one of them. Where
# autodiff or buffers carry plain arrays, a `Partial`'s array is taken out before (`taken`), and made a `Partial` again after.
# --------------------------------------------------------------------------------------------------


def lacking(placement: Placement, reduced: Collection[AxisNames] | None) -> frozenset[AxisNames]:
    """The axes over which gradients are still to be summed, after these (None: all) have been."""
    return frozenset() if reduced is None else frozenset(axis for axis in placement.strategies if axis not in reduced)


def parts_of(
    placement: Placement, grads: Iterable[jax.Array], reduced: Collection[AxisNames] | None = ()
) -> list[Partial]:
    """A rank's gradients as `Partial`s, which are summed over these axes already (None: over all)."""
    known = lacking(placement, reduced)
    return [Partial(grad, known) for grad in grads]


# --------------------------------------------------------------------------------------------------
# What is traced on one rank in the place of the model's code: every rewriting there is, and their order.
# --------------------------------------------------------------------------------------------------


def reading(
    fun: Callable[..., Any],
    model: Functional,
    placement: Placement,
    precision: Precision,
    *,
    rewrites: bool = True,
    trains: bool = False,
) -> Callable[..., Any]:
    """Wraps the model's code in all rewritings that a plan and the model ask for, the innermost first.

    Nothing is imported nor called for what nobody asks for.

    Args:
      fun: the model's code: `fun(variables, *args)` of variables as one rank reads them.
      model: the model.
      placement: the plan on its mesh.
      precision: the precision of the model's mode.
      rewrites: whether strategies that leave axes to XLA's partitioner rewrite it (`LeftToXLA.rewritten`).
      trains: whether a loss that it returns is differentiated.
    """
    fun = reading_users(fun, model, placement)
    for axis, strategy in placement.plan.on(placement.degrees).items() if rewrites and placement.automatic else ():
        own = strategy.having(LeftToXLA)
        if own is not None and placement.automatic.intersection(as_axes(axis)) and placement.ranks(axis) > 1:
            fun = own.rewritten(fun, axis, placement.plan.check_vma)
    if placement.ranks(placement.axes.layers) > 1:
        from axonml_jax.layers.whole import reading_whole

        fun = partial(reading_whole, fun, model, trains)
    if model.adapters:
        from axonml_jax.layers.adapters import reading_adapted

        fun = partial(reading_adapted, fun, model)
    if precision.products is not None:
        from axonml_jax.layers.float8 import reading_float8

        fun = partial(reading_float8, fun, precision)
    kernels = placement.plan.kernels
    if kernels == "interpret" or (kernels == "auto" and platform_around() in ("gpu", "cuda")):
        from axonml_jax.layers.recognise import reading_kernels

        fun = partial(reading_kernels, fun, kernels)
    return fun


def reading_users(fun: Callable[..., Any], model: Functional, placement: Placement) -> Callable[..., Any]:
    """Wraps a function that traces the user's code, `fun(variables, *args)`, where JAX has refused its placements of arrays."""
    if (around := users_meshes()) is None:
        return fun
    from axonml_jax.parallel.users_mesh import reading_placed

    return partial(reading_placed, fun, model, around, placement.automatic, placement.plan.check_vma)


# --------------------------------------------------------------------------------------------------
# Loading what rests in host memory when it is needed, inside a compiled program.
#
# XLA:TPU copies arguments that rest in host memory to the device when the program starts, whatever barrier stands
# before the `device_put`. It cannot copy slices before it knows where they begin: so they begin at a zero that comes
# out of a barrier.
# --------------------------------------------------------------------------------------------------

TILE_ROWS: dict[int, int] = {1: 1024, 2: 8}
"""The multiple of rows at which one of XLA:TPU's tiles begins, by an array's number of dims."""


def moment(values: PyTree) -> jax.Array:
    """An int32 zero that depends on these values, wherever they rest: it is not computed before they are there."""
    waited = [x for x in jax.tree.leaves(values) if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)]
    return after(jnp.int32(0), waited)


def load(leaf: jax.Array, at: jax.Array) -> jax.Array:
    """Moves an array from host memory to device memory, not before the moment `at`.

    An array whose rows do not fill two of the chip's tiles is moved when XLA likes.
    """
    if not movable(leaf) or varying_axes(at) - varying_axes(leaf):
        return to_device_memory(leaf)
    rows, half = leaf.shape[0], leaf.shape[0] // 2
    if half == 0 or (half * 2 != rows and leaf.ndim < 3) or half % TILE_ROWS.get(leaf.ndim, 1):
        return to_device_memory(leaf)
    parts = [jax.lax.dynamic_slice_in_dim(leaf, at + i * half, size) for i, size in enumerate((half, rows - half))]
    return jnp.concatenate(to_device_memory(parts))


@functools.cache
def slices(shape: tuple[int, ...], itemsize: int, size: int) -> int:
    """The least number of equal slices along dim 0 that begin with a tile and are at most `size` bytes each.

    As many as there can be where all are over it.

    Args:
      shape: the shape of an array.
      itemsize: bytes of an element.
      size: bytes of a slice.
    """
    elements, tile = math.prod(shape), TILE_ROWS.get(len(shape), 1)
    if not shape or elements * itemsize <= size or shape[0] % tile:
        return 1
    tiles = shape[0] // tile
    small = [n for n in range(1, math.isqrt(tiles) + 1) if tiles % n == 0]
    counts = sorted({*small, *(tiles // n for n in small)})
    return next((n for n in counts if elements // n * itemsize <= size), counts[-1])


# --------------------------------------------------------------------------------------------------
# What a training step sees of a plan whose ranks train parameters of their own for rounds of steps.
# --------------------------------------------------------------------------------------------------


def in_round(placement: Placement) -> Placement:
    """The placement of a step within a round, in which nothing is reduced along the axis of the replicas.

    Its `agreed` is the one given, by which the outer parameters rest and the model is evaluated. Without rounds, or of a
    placement that is in one already: itself.
    """
    within = placement.plan.within_round()
    return placement if within is placement.plan else replace(placement, plan=within, agreed=placement)


# --------------------------------------------------------------------------------------------------
# A placement that leaves axes to XLA's partitioner: those that a plan's path rules name, or what splits positions.
# --------------------------------------------------------------------------------------------------


def by_rules(
    plan: Plan, variables: Variables, degrees: Mapping[str, int], in_layers: Mapping[str, Any]
) -> dict[str, PartitionSpec]:
    """The PartitionSpecs that a plan's path rules give, by path name.

    Raises:
      ValueError: for a mesh with other axes than data, fsdp and those of the rules, a model whose layers split themselves, and
        rules that do not fit.
    """
    partition = plan.partition
    assert partition is not None
    _check_named(plan, degrees)
    split = [name for name, spec in in_layers.items() if any(spec)]
    if split:
        raise ValueError(
            f"rules split models whose layers do not split themselves, but these do: {', '.join(split[:8])}"
        )
    there = {axis: size for axis, size in degrees.items() if size > 1 and axis not in ("data", "fsdp")}
    if unnamed := {axis: size for axis, size in there.items() if axis in PARTITIONED and axis not in partition.axes}:
        raise ValueError(
            f"the mesh has {unnamed}, and no rule names {' or '.join(unnamed)}: these devices would all do the same work. Give "
            "a rule that splits parameters over it, or a mesh without it"
        )
    if others := {axis: size for axis, size in there.items() if axis not in PARTITIONED}:
        raise ValueError(
            f"with path rules the mesh has data, fsdp, tensor and expert, but this one has {others} too: build the model with "
            "parallel layers, or swap its layers by ax.auto_parallelize"
        )
    return partition.specs(merge(variables.params, variables.frozen), degrees)


def _check_named(plan: Plan, degrees: Mapping[str, int]) -> None:
    """Refuse rules that name an axis over which nothing rests sharded."""
    assert plan.partition is not None
    shards = {
        name for axis, each in plan.on(degrees).items() if each.role.parameters == "sharded" for name in as_axes(axis)
    }
    named = plan.partition.named.difference(PARTITIONED)
    if idle := sorted(axis for axis in named - shards if degrees.get(axis, 1) > 1):
        raise ValueError(
            f"rules name {', '.join(idle)}, along which the plan replicates parameters: leave "
            f"{' and '.join(idle)} out of the rules, or shard over it, ax.Plan({idle[0]}=ax.Shard())"
        )


def left_to_partitioner(placement: Placement, axes: Collection[str]) -> Placement:
    """A placement that leaves axes to the partitioner: leaves look whole along them in a step, and rest split along them."""

    def whole(layout: Layout) -> Layout:
        entries = [tuple(axis for axis in as_axes(entry or ()) if axis not in axes) for entry in layout.spec]
        spec = as_spec(entries)
        parts = [math.prod(placement.degrees[axis] for axis in entry) for entry in entries]
        parts += [1] * (len(layout.stored) - len(parts))
        return replace(layout, spec=spec, parts=tuple(parts), automatic=_only(layout.spec, axes))

    seen = (jax.tree.map(whole, tree, is_leaf=is_layout) for tree in (placement.params, placement.frozen))
    params, frozen = seen
    resting = replace(placement, automatic=frozenset(axes))
    return replace(resting, params=params, frozen=frozen, at_rest=resting)


def _only(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """A spec with these axes only."""
    entries = [tuple(axis for axis in as_axes(entry or ()) if axis in axes) for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return as_spec(entries)


def beside_rules(
    layout: Layout, said: PartitionSpec, strategies: Mapping[AxisNames, AbstractStrategy], degrees: Mapping[str, int]
) -> Layout:
    """Refines a layout by the plan's strategies, none of which splits a dim that the partitioner splits.

    Split by both, a rank's part along one axis would not be what it gathers along the other. A leaf of which rules split every
    dim is kept by all ranks of the other axes.

    Args:
      layout: as the partitioner splits it.
      said: the leaf's rule, which may name the dim that a strategy splits.
      strategies: the strategies of the mesh's axes.
      degrees: the sizes of the mesh's axes.
    """
    ruled = {dim for dim, parts in enumerate(layout.parts) if parts > 1}
    for axis, strategy in strategies.items():
        named = {dim for dim, entry in enumerate(said) if set(as_axes(axis)).intersection(as_axes(entry or ()))}
        taken = ruled | ({*range(len(layout.shape))} - named if named else set())
        # What it may not split looks as if there were nothing to split.
        shape = tuple(1 if dim in taken else size for dim, size in enumerate(layout.shape))
        narrow = Layout.replicated(jax.ShapeDtypeStruct(shape, layout.dtype), layout.stack_dims)
        found = strategy.spec(narrow, axis, math.prod(degrees[name] for name in as_axes(axis)))
        if not layout.shape:
            layout = found
        elif found.axes and not any(found.parts[dim] > 1 for dim in taken):
            layout = _joined(layout, found)
    return layout


def _joined(layout: Layout, other: Layout) -> Layout:
    """Combines two layouts of a leaf that split different dims."""
    own = [other if parts > 1 else layout for parts in other.parts]
    entries = [each.axes_of(dim) for dim, each in enumerate(own)]
    while not entries[-1]:
        entries.pop()
    return replace(
        layout,
        spec=as_spec(entries),
        stored=tuple(each.stored[dim] for dim, each in enumerate(own)),
        parts=tuple(each.parts[dim] for dim, each in enumerate(own)),
    )


# --------------------------------------------------------------------------------------------------
# Binding a plan to a mesh and a model: every default decided, a layout for every parameter, what cannot run refused.
# --------------------------------------------------------------------------------------------------


def bind_plan(
    plan: Plan,
    variables: Variables,
    mesh: Mesh,
    split: PyTree | None = None,
    assign: "Callable[[Mapping[str, Any], int], Assignment] | None" = None,
    stacks: Mapping[str, int] = MappingProxyType({}),
) -> Placement:
    """Bind a plan to a mesh and a model's variables (shapes suffice).

    Args:
      plan: the plan.
      variables: the model's.
      mesh: where.
      split: how the model's own layers split its parameters: a nest of PartitionSpecs (`tensor_specs`); None: not at all.
      assign: for a pipelined plan, the stages of parameters, from their shapes by path and the number of stages; None: by
        their names.
      stacks: how many first dims of parameters number layers or experts, by path (`Functional.stacked_dims`).

    Raises:
      ValueError: when the plan's degrees are not the mesh's, or when the mesh has axes the plan gives no meaning to.
      CanaryError: when the JAX that is installed tells varying types in another way than the library reads them.
    """
    from axonml_jax.compat.canaries import require_types

    degrees = dict(mesh.shape)
    _check_degrees(plan, mesh.size, degrees)
    in_layers = named_leaves(split)
    if plan.partition is not None:
        in_layers = by_rules(plan, variables, degrees, in_layers)
    check_axes(plan, degrees, in_layers)
    alone = any(strategy.role.reduces == "never" for strategy in plan.on(degrees).values())
    if alone and plan.precision.scales_loss:
        raise ValueError(
            "sync_strategy=NO_SYNC with float16 would need a loss scale per rank: use bf16, or synchronize"
        )
    plan = plan.decided(Fabric.of(list(mesh.devices.flat)), degrees)
    require_types(plan.check_vma)
    assigned = None if plan.pipe is None else _assigned(plan, degrees, variables, assign)
    layouts = _Layouts(plan, degrees, in_layers, stacks, None if assigned is None else assigned.stack)

    def lay_out(tree: PyTree) -> PyTree:
        resting = jax.eval_shape(plan.precision.cast_param, tree)
        return jax.tree_util.tree_map_with_path(lambda path, like: layouts.of(path_name(path), like), resting)

    placement = Placement(plan, degrees, lay_out(variables.params), lay_out(variables.frozen))
    if automatic := _automatic(plan, degrees):
        placement = left_to_partitioner(placement, automatic)
    if plan.pipe is None:
        return placement
    from axonml_jax.pipeline.store import Staging

    assert assigned is not None
    staging = Staging.of(plan.pipe, assigned, placement.params, placement.frozen, degrees)
    return replace(placement, stages=staging)


@dataclass(frozen=True)
class _Layouts:
    """Lays out the parameters of one model.

    Attributes:
      plan: the plan, with every default decided.
      degrees: size of every mesh axis.
      in_layers: how the model's own layers split parameters, or rules do, by path.
      stacks: how many first dims number layers or experts, by path.
      stack: the blocks whose rows a pipeline divides; None: it divides none.
    """

    plan: Plan
    degrees: Mapping[str, int]
    in_layers: Mapping[str, PartitionSpec]
    stacks: Mapping[str, int]
    stack: "Stack | None"

    def of(self, name: str, like: jax.ShapeDtypeStruct) -> Layout:
        """The layout of one parameter; of a stack that of a row, and its rows over the pipeline."""
        said, depth = self.in_layers.get(name, PartitionSpec()), self.stacks.get(name, 0)
        if self.stack is None or not self.stack.holds(name, like.shape):
            return self._of_array(like, said, depth)
        if any(said[:1]):
            raise ValueError(
                f"{name} {list(like.shape)} is split along dim 0 as {said}, and a pipeline divides the rows of "
                f"{self.stack.path!r} over its stages: split other dims"
            )
        row, rest = jax.ShapeDtypeStruct(like.shape[1:], like.dtype), PartitionSpec(*tuple(said)[1:])
        ranks = self.degrees[STAGES]
        return self._of_array(row, rest, max(depth - 1, 0)).stacked(STAGES, ranks, self.stack.rows // ranks)

    def _of_array(self, like: jax.ShapeDtypeStruct, said: PartitionSpec, depth: int) -> Layout:
        plan, degrees, leaf = self.plan, self.degrees, Layout.replicated(like, depth)
        for dim, entry in enumerate(said if plan.partition is None else _only(said, PARTITIONED)):
            for axis in as_axes(entry or ()):
                leaf = leaf.on(axis, dim, degrees[axis]) if degrees[axis] > 1 else leaf
        strategies = plan.on(degrees)
        if plan.partition is not None:
            return beside_rules(leaf, said, strategies, degrees)
        for axis, strategy in strategies.items():
            leaf = strategy.spec(leaf, axis, math.prod(degrees[name] for name in as_axes(axis)))
        return leaf


def _check_degrees(plan: Plan, devices: int, degrees: Mapping[str, int]) -> None:
    """Refuse a mesh whose degrees are not those that a plan asks for."""
    if plan.mesh is not None and (wanted := plan.mesh.resolve(devices).degrees) != {
        **dict.fromkeys(wanted, 1),
        **{axis: size for axis, size in degrees.items() if size > 1 or axis in wanted},
    }:
        raise ValueError(f"the plan asks for degrees {dict(wanted)} but the mesh has {degrees}: give one or the other")


def _automatic(plan: Plan, degrees: Mapping[str, int]) -> frozenset[str]:
    """The axes left to XLA's partitioner; with a pipeline or rounds only those of several ranks."""
    axes = plan.left(degrees)
    return frozenset(axis for axis in axes if degrees[axis] > 1) if plan.pipe or plan.rounds else axes


def _assigned(plan: Plan, degrees: Mapping[str, int], variables: Variables, assign: Callable | None) -> "Assignment":
    """The stage of every parameter of a model, before any is laid out."""
    from axonml_jax.pipeline.assign import assign as by_names

    assert plan.pipe is not None
    plan.pipe.timetable(degrees[STAGES], plan.microbatches)  # refuses what the schedule does not take
    shapes = named_leaves(variables.params) | named_leaves(variables.frozen)
    count = plan.pipe.num_stages(degrees[STAGES])
    return by_names(shapes, count, split=plan.pipe.split) if assign is None else assign(shapes, count)
