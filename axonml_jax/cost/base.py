"""Flows: what a step sends, over which axes and how often; and where a plan lets weights rest."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.base import named_leaves
from axonml_jax.cost.decoder import (
    Many,
    Place,
    Weight,
    divided,
    either,
    exact,
    least,
    most,
    nothing,
    plain,
    several,
    varies,
    wire_elements,
)
from axonml_jax.mesh.axes import AxisNames, as_axes, flat_axes
from axonml_jax.model.loss import Precision
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.plan import Plan
from axonml_jax.pipeline.schedules import AXIS
from axonml_jax.pipeline.timetable import Timetable
from axonml_jax.sharding.layout import Layout
from axonml_jax.strategies.strategy import (
    AbstractStrategy,
    LocalRounds,
    Role,
    Transfer,
    feeds_back,
    reads_exactly,
    reducer_of,
)

# --------------------------------------------------------------------------------------------------
# `Flow`: collectives of a step that a prediction knows of, alike in kind, axes, dtype and place.
# --------------------------------------------------------------------------------------------------

GRADIENTS = "gradients"
PARAMETERS = "parameters"
ATTENTION = "attention"
"""What attention sends of sequences whose positions are split over ranks."""
EXPERTS = "experts"
"""What travels between tokens and experts on other ranks."""

ONCE = "once"
EACH_MICROBATCH = "each microbatch"
EACH_TICK = "each tick"
LATER = "a later round"
"""The place of a dispatch's rounds after the first, which even loads do not need; one such round stands for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Collectives of one label, kind, axes, dtype and place.

    Sizes and counts are numbers for one plan, or arrays for many candidates at once.

    Attributes:
      label: what they move, by the counted ledger's labels (parameters, gradients, activations, ...); "" for what layers send.
      kind: one of `cost.decoder.KINDS`.
      axes: mesh axes.
      group_size: ranks that take part.
      apart: distance along the axis between ranks of one group: 1 for neighbours; U where groups of U neighbours share heads.
      dtype: element type on the wire.
      itemsize: its bytes.
      elements: of the full arrays, in one execution.
      padding: how many of them are padding.
      launches: arrays that travel, in one execution.
      times: executions in one step.
      every: they happen in one of so many steps; bytes are the mean over these.
      where: once, each microbatch, each tick of a pipeline, every so many steps, or a later round (`LATER`).
      work: the pass in which it runs, behind which it may hide: "forward", "backward", or neither ("").
    """

    label: str
    kind: str
    axes: tuple[str, ...]
    group_size: Many
    dtype: str
    itemsize: int
    elements: Many
    padding: Many = 0
    apart: Many = 1
    launches: Many = 1
    times: Many = 1
    every: int = 1
    where: str = ONCE
    work: str = ""

    @property
    def wire_bytes(self) -> Many:
        """Bytes that one rank sends in one step on a ring, padding included; the mean over `every` steps."""
        return self._mean(self.times * self.itemsize * wire_elements(self.kind, self.elements, self.group_size))

    @property
    def padding_bytes(self) -> Many:
        """The bytes of padding in `wire_bytes`."""
        return self._mean(self.times * self.itemsize * wire_elements(self.kind, self.padding, self.group_size))

    def _mean(self, amount: Many) -> Many:
        return exact(amount if self.every == 1 else amount / Fraction(self.every))

    @property
    def count(self) -> Many:
        """Launches in one step, or in the one of `every` steps that has them."""
        return self.launches * self.times

    @property
    def sends(self) -> bool:
        """Whether anything is sent; True for arrays, of which some candidates may send."""
        alone = not varies(self.group_size) and self.group_size == 1
        return not (alone or nothing(self.times) or nothing(self.elements))


@lru_cache(maxsize=256)
def named(dtype: Any) -> tuple[str, int]:
    """Name and bytes of a dtype.

    >>> named("bfloat16")
    ('bfloat16', 2)
    """
    found = jnp.dtype(dtype)
    return found.name, found.itemsize


def every(steps: int) -> str:
    """The `where` of a flow that runs in one of so many steps.

    >>> every(10)
    'every 10 steps'
    """
    return f"every {steps} steps" if steps > 1 else ONCE


def where_of(times: Many) -> str:
    """The `where` of a flow that runs this many times per step: `EACH_MICROBATCH` if more than once."""
    return EACH_MICROBATCH if varies(times) or times > 1 else ONCE


def merged_flows(flows: Iterable[Flow]) -> list[Flow]:
    """Merges flows that differ in sizes and launches only, and drops those that send nothing."""
    found: dict[tuple, list[Flow]] = {}
    for flow in flows:
        if flow.sends:
            # Flows over the same axes, or of the same place, have the same array: it needs no comparison.
            sizes = ("many" if varies(size) else size for size in (flow.group_size, flow.times))
            key = (flow.label, flow.kind, flow.axes, flow.dtype, flow.where, flow.work, flow.every, *sizes)
            found.setdefault(key, []).append(flow)
    return [alike[0] if len(alike) == 1 else _joined_flows(alike) for alike in found.values()]


def merged(flows: Iterable[Flow]) -> tuple[Flow, ...]:
    """`merged_flows` of one plan, sorted by bytes, the most first."""
    return tuple(sorted(merged_flows(flows), key=lambda flow: -flow.wire_bytes))


def _joined_flows(alike: list[Flow]) -> Flow:
    first = alike[0]
    elements, padding, launches = first.elements, first.padding, first.launches
    for flow in alike[1:]:
        elements, padding, launches = elements + flow.elements, padding + flow.padding, launches + flow.launches
    return replace(first, elements=elements, padding=padding, launches=launches)


# --------------------------------------------------------------------------------------------------
# `Rounds` and `Run`: how often a step does what it does; `ShardCounts`: which parts of a model a rank has.
# --------------------------------------------------------------------------------------------------


class Rounds(NamedTuple):
    """How often one update gathers and reduces all parameters of a rank along a mesh axis; numbers, or arrays of them.

    Attributes:
      at_start: gathers at the start of a step, kept for the backward.
      at_use: gathers in forwards; backwards have as many again.
      at_end: reductions of gradients that all microbatches have accumulated.
      between: reductions of one microbatch's gradients, or of those that a pipeline's turn accumulates.
    """

    at_start: Many
    at_use: Many
    at_end: Many
    between: Many

    @property
    def gathers(self) -> Many:
        """Gathers in forwards and backwards together."""
        return self.at_start + 2 * self.at_use

    @property
    def reductions(self) -> Many:
        """Reductions of gradients."""
        return self.at_end + self.between


def rounds(role: Role, microbatches: Many) -> Rounds:
    """Returns how often an update moves the parameters along an axis of this role.

    >>> rounds(Role(parameters="sharded", reads="use", reduces="microbatch"), 4)
    Rounds(at_start=0, at_use=4, at_end=0, between=4)
    >>> rounds(Role(), 4)
    Rounds(at_start=1, at_use=0, at_end=1, between=0)
    """
    used, between = int(role.reads == "use"), int(role.reduces == "microbatch")
    return Rounds(1 - used, used * microbatches, 1 - between, between * microbatches)


def rounds_of_ticks(gathers: Many | None) -> Rounds:
    """Returns how often a pipeline's rank gathers and reduces its stages, from `Pipelined.gathers`; None: once per step."""
    return Rounds(1, 0, 1, 0) if gathers is None else Rounds(0, gathers, 0, gathers)


def splitting(roles: Mapping[AxisNames, Role], *what: str) -> tuple[str, ...]:
    """The mesh axes that split rows, or positions, of the batch.

    >>> splitting({("fsdp", "context"): Role(batch=("rows", "positions")), "tensor": Role(batch="rows")}, "rows")
    ('fsdp', 'tensor')
    """
    every = ((name, split) for axis, role in roles.items() for name, split in role.splits(as_axes(axis)).items())
    return tuple(name for name, split in every if split in what)


@dataclass(frozen=True, kw_only=True)
class Run:
    """How often a step does what. A `Many` may be an array with an entry for every candidate.

    Attributes:
      roles: of the mesh's axes, or of several that one strategy owns.
      microbatches: per update and rank.
      full, selective: 1 where the backward recomputes that much, else 0; between them where it does so in a part of the blocks.
      sends: most bytes of activations that blocks in a loop may send to the host's memory; the link may take fewer.
      pipelined: whether stages lie along `pipe`.
      gathers: how often a pipeline gathers its stages within a step; None: once at its start.
      rows: whether a pipeline's blocks rest as rows of stacks, in buffers of their own.
      kernels: whether kernels of this library's compute norms, activations and cross entropy where they apply.
      copies: with rounds (`ax.DiLoCo`), copies of trained parameters that rest beside the optimizer's state: a replica's own
        parameters and the outer momentum.
      joining: copies of the trained parameters that the end of a round holds beside what rests.
    """

    roles: Mapping[AxisNames, Role]
    microbatches: Many
    full: Many = 0
    selective: Many = 0
    sends: float = 0
    pipelined: bool = False
    gathers: Many | None = None
    rows: bool = False
    copies: Many = 0
    joining: Many = 0
    kernels: bool = True

    @classmethod
    def of(cls, plan: Plan, degrees: Mapping[str, int]) -> "Run":
        """The run of a plan on a mesh of these degrees."""
        pipelined = plan.pipe is not None and degrees.get(AXIS, 1) > 1
        gathers = plan.pipe.gathers(degrees[AXIS], plan.microbatches) if plan.pipe is not None and pipelined else None
        return cls(
            roles={axis: strategy.role for axis, strategy in plan.within_round().on(degrees).items()},
            microbatches=plan.microbatches,
            full=int(plan.remat == "full"),
            selective=int(plan.remat == "selective"),
            pipelined=pipelined,
            kernels=plan.kernels != "xla",
            gathers=gathers,
            copies=2 * len(plan.rounds),
            joining=max((rounds.round_copies for rounds in plan.rounds.values()), default=0),
        )

    def recomputing(self, parts: Mapping[str | None, Fraction] | None) -> "Run":
        """The same run with the parts of the blocks that recompute by each word of `remat`; None: unchanged."""
        return self if parts is None else replace(self, full=parts.get("full", 0), selective=parts.get("selective", 0))

    @property
    def recomputes(self) -> Many:
        """The share of the blocks, from 0 to 1, in which the backward recomputes anything."""
        return self.full + self.selective

    def rounds(self, axis: AxisNames | None, sharded: bool = True) -> Rounds:
        """How often leaves move along an axis, over which they rest sharded or not; None: leaves that no axis shards."""
        if sharded and self.pipelined and axis is not None:
            return rounds_of_ticks(self.gathers)
        return rounds(Role() if axis is None else self.roles[axis], self.microbatches)


@dataclass(frozen=True)
class ShardCounts:
    """The parts of a model that one pipeline rank has; without a pipeline the whole model.

    Attributes:
      blocks: number of repeated blocks.
      first, last: 1 if it has what comes before the blocks (the embedding), or after them (norm and head); else 0.
      total: blocks of the whole model.
      experts: number of its blocks that have experts.
    """

    blocks: Many
    first: Many
    last: Many
    total: int
    experts: Many = 0

    def number(self, place: str, count: int) -> Many:
        """How many of a place's `count` equal weights this rank reads."""
        if place == "block":
            return self.blocks if count == self.total else divided(self.blocks * count, self.total)
        if place.endswith(" block"):
            return self.experts if place == "expert block" else self.blocks - self.experts
        ends = {"first": self.first, "last": self.last, "both ends": either(self.first > 0, 1, self.last)}
        return ends[place]

    def instead(self, holds: Many, other: "ShardCounts") -> "ShardCounts":
        """Another rank's counts where a condition holds, else these; elementwise for arrays."""
        choose = lambda name: either(holds, getattr(other, name), getattr(self, name))
        return ShardCounts(choose("blocks"), choose("first"), choose("last"), self.total, choose("experts"))


# --------------------------------------------------------------------------------------------------
# `TickCounts`: what a pipeline's timetable says of memory and traffic, exactly or by formula; what passes between
# stages.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TickCounts:
    """Ticks and buffer slots of a pipeline's executed timetable.

    Attributes:
      number: ticks of a step.
      slots: microbatches of residuals that every rank has room for.
      arriving: slots for activations and cotangents that have arrived and are not yet read.
    """

    number: Many
    slots: Many
    arriving: Many

    @classmethod
    def of(cls, timetable: Timetable) -> "TickCounts":
        """The counts of a timetable."""
        return cls(
            timetable.num_ticks, timetable.residuals.size, timetable.activations.size + timetable.cotangents.size
        )

    @classmethod
    def foreseen(cls, gpipe: Many, ranks: Many, microbatches: Many, chunks: Many) -> "TickCounts":
        """The counts by formula (docs/guides/pipeline-schedules.md), without building a timetable.

        Slots are an upper bound with several chunks and more microbatches than ranks that are no multiple of them.

        Args:
          gpipe: whether the schedule is GPipe; else 1F1B, or interleaved with several chunks.
          ranks: S.
          microbatches: M.
          chunks: V, stages per rank.

        >>> TickCounts.foreseen(False, 4, 8, 1), TickCounts.foreseen(True, 4, 8, 1)
        (TickCounts(number=14, slots=7, arriving=2), TickCounts(number=21, slots=8, arriving=2))
        """
        turns = divided(microbatches - 1, ranks)
        rest = microbatches - 1 - turns * ranks
        first = chunks * ranks - 1  # the tick in which the last stage ends its first forward
        number = 2 * first + turns * ranks * chunks + rest + 1
        # In the order of 1F1B as executed, a rank's first stage waits for its last one's backward, there and back.
        slots = least(microbatches * chunks, 2 * (ranks - 1) + (chunks - 1) * ranks + 1)
        return cls(either(gpipe, 2 * microbatches + 2 * ranks - 3, number), either(gpipe, microbatches, slots), 2)


def passing(ticks: TickCounts, boundary: Iterable[Flow]) -> Iterator[Flow]:
    """Yields the flows between stages: in every tick one permute of activations and one of cotangents for each dtype.

    Args:
      ticks: the counts of the timetable.
      boundary: the permutes of one boundary, one for each dtype.
    """
    for label, work in (("activations", "forward"), ("cotangents", "backward")):
        for each in boundary:
            yield replace(each, label=label, times=ticks.number, where=EACH_TICK, work=work)


# --------------------------------------------------------------------------------------------------
# `Placed`: a weight where a plan lets it rest, from a configuration or from the layouts of a model that is there.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The parts of a plan that decide where weights rest, and what one gather and one reduction of them send.

    Attributes:
      strategies: the strategy of each mesh axis, or tuple of axes, outermost first.
      degrees: the size of each mesh axis; arrays where they stand for many meshes.
      precision: the dtypes of parameters, reads, sums and reductions.
      overlaps: whether gradients are reduced inside the backward.
      rounds: by axis the rounds (`ax.DiLoCo`) in which ranks train parameters of their own.
    """

    strategies: Mapping[AxisNames, AbstractStrategy]
    degrees: Mapping[str, Many]
    precision: Precision
    overlaps: bool
    rounds: Mapping[AxisNames, LocalRounds] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, degrees: Mapping[str, int]) -> "Setting":
        """The setting of a plan on a mesh of these degrees."""
        within = plan.within_round()
        return cls(
            within.on(degrees), degrees, plan.precision, reducer_of(within.reducer(degrees)).overlaps, plan.rounds
        )

    def ranks(self, axis: AxisNames) -> Many:
        """The number of ranks of an axis, or of several axes together."""
        return self.degrees[axis] if isinstance(axis, str) else plain(math.prod(self.degrees[name] for name in axis))

    @cached_property
    def roles(self) -> dict[AxisNames, Role]:
        """The role of each axis."""
        return {axis: strategy.role for axis, strategy in self.strategies.items()}

    @cached_property
    def by_unit(self) -> bool:
        """Whether parameters are read unit by unit, at their use."""
        return any(role.reads == "use" and several(self.ranks(axis)) for axis, role in self.roles.items())

    @cached_property
    def rounded(self) -> bool:
        """Whether gathers round parameters, as a compressed wire does."""
        return any(not reads_exactly(own) and own.role.parameters == "sharded" for own in self.strategies.values())

    @cached_property
    def layer_axes(self) -> frozenset[str]:
        """The mesh axes along which layers split parameters."""
        return frozenset(flat_axes(axis for axis, role in self.roles.items() if role.parameters == "layers"))


@dataclass(frozen=True)
class Placed:
    """A weight under a plan. Counts and bytes are of one of the weight's `count` equal arrays.

    Attributes:
      weight: the weight.
      layout: where each of them rests; its sizes are arrays where it stands for many meshes.
      setting: the plan's.
    """

    weight: Weight
    layout: Layout
    setting: Setting

    @cached_property
    def shard(self) -> Many:
        """Elements that a rank holds between steps, padding included."""
        return math.prod(self.layout.shard)

    @cached_property
    def read(self) -> Many:
        """Elements that the model reads on a rank: all of the array, or the part that its own layers split off."""
        within = self.setting.layer_axes
        over = [[name for name in self.layout.axes_of(dim) if name in within] for dim in range(len(self.layout.shape))]
        cuts = (math.prod(self.setting.degrees[name] for name in names) for names in over)
        return math.prod(-(-size // cut) for size, cut in zip(self.layout.shape, cuts, strict=True))

    @cached_property
    def sharded(self) -> dict[AxisNames, AbstractStrategy]:
        """The strategies of the axes over which it rests sharded and must be gathered."""
        split = lambda axis, role: role.parameters == "sharded" and self.layout.dim_of(axis) is not None
        return {axis: self.setting.strategies[axis] for axis, role in self.setting.roles.items() if split(axis, role)}

    @cached_property
    def gathered(self) -> Many:
        """Elements after its gathers, padding included."""
        return self.shard * math.prod(map(self.setting.ranks, self.sharded))

    @cached_property
    def slices(self) -> int:
        """The number of parts in which it is gathered: ZeRO-3 gathers one layer of a stack per trip of its scan."""
        if self.weight.layers == 1 or not (self.setting.by_unit and self.sharded):
            return 1
        return self.weight.layers if all(self.layout.dim_of(axis) != 0 for axis in self.sharded) else 1

    def reductions(self, axis: AxisNames) -> int:
        """The number of parts in which its gradient is reduced along an axis: inside the backward a stack layer by layer."""
        if self.setting.by_unit:
            return self.slices if axis in self.sharded else 1
        return self._in_scan

    @property
    def gathers_alone(self) -> int:
        """The number of parts in which a step of one microbatch gathers it without ZeRO-3.

        Where gradients are reduced inside the backward, `parallel/units.py` gathers at first use: a stack layer by layer, but
        whole where the gather rounds.
        """
        return 1 if self.setting.by_unit or not self.weight.trained else self._in_scan

    @property
    def _in_scan(self) -> int:
        """The layers of a stack whose gradients are reduced inside the backward's scan; else 1."""
        whole = bool(self.layout.parts) and several(self.layout.parts[0])
        return 1 if whole or self.setting.rounded or not self.setting.overlaps else self.weight.layers

    @property
    def padding(self) -> Many:
        """Elements of padding in a rank's shard, taken as the shard less an even share of the array."""
        ranks = math.prod(map(self.setting.ranks, self.sharded))
        return most(0, self.shard - -(-self.read // ranks))

    @cached_property
    def rest_dtype(self) -> Any:
        """The dtype between steps."""
        return jnp.dtype(self.layout.dtype)

    @cached_property
    def read_dtype(self) -> Any:
        """The dtype in which the model reads it."""
        return self.setting.precision.read_dtype(self.rest_dtype)

    @cached_property
    def sum_dtype(self) -> Any:
        """The dtype in which its gradient accumulates."""
        return self.setting.precision.accumulate_dtype(self.rest_dtype)

    @cached_property
    def reduce_dtype(self) -> Any:
        """The dtype in which its gradient is reduced over ranks."""
        return self.setting.precision.reduce_dtype(self.rest_dtype)

    @property
    def read_bytes(self) -> Many:
        """Bytes that the model reads on a rank."""
        return self.read * named(self.read_dtype)[1]

    @property
    def sum_bytes(self) -> Many:
        """Bytes of its unsharded gradient on a rank in the dtype of accumulation."""
        return self.read * named(self.sum_dtype)[1]

    @property
    def left_bytes(self) -> Many:
        """Bytes of its error-feedback residual on a rank; 0 if no strategy feeds rounding errors back."""
        return self.sum_bytes if any(feeds_back(each) for each in self.setting.strategies.values()) else 0

    @property
    def reduce_bytes(self) -> Many:
        """Bytes of its unsharded gradient on a rank in the dtype of reduction."""
        return self.read * named(self.reduce_dtype)[1]


def placed_leaves(placement: Placement, units: Mapping[int, str] | None = None) -> list[Placed]:
    """The parameters of a real model as a bound plan places them, trained ones first; rounds (`ax.DiLoCo`) are left out.

    Args:
      placement: the plan on its mesh.
      units: number of a leaf -> the unit that ZeRO-3 gathers it in; a leaf without one is a unit of its own.
    """
    plan = placement.plan
    setting = Setting(placement.strategies, placement.degrees, plan.precision, placement.reducer.overlaps)
    leaves = [(name, each, True) for name, each in named_leaves(placement.params).items()]
    leaves += [(name, each, False) for name, each in named_leaves(placement.frozen).items()]
    weight = lambda i, name, layout, trained: Weight(
        name=f"{name} {i}", shape=layout.shape, dtype=layout.dtype, trained=trained, unit=(units or {}).get(i, "")
    )
    return [Placed(weight(i, *each), each[1], setting) for i, each in enumerate(leaves)]


def rests_at(weight: Weight, setting: Setting) -> Layout:
    """The layout of one weight on one mesh, by the rules with which `bind_plan` places a real one."""
    layout = split_by_layers(weight, setting.precision.param, setting.degrees)
    for axis, strategy in setting.strategies.items():
        layout = strategy.spec(layout, axis, setting.ranks(axis))
    return layout


def split_by_layers(weight: Weight, dtype: str | None, degrees: Mapping[str, int]) -> Layout:
    """The layout of a weight as its layers split it, in a dtype or in the model's own."""
    layout = Layout.replicated(jax.ShapeDtypeStruct(weight.shape, jnp.dtype(dtype or weight.dtype)), weight.stack_dims)
    for axes, dim in weight.splits:
        for axis in axes:
            if degrees.get(axis, 1) > 1:
                layout = layout.on(axis, dim, degrees[axis])
    return layout


# --------------------------------------------------------------------------------------------------
# `Group`: weights that a step treats alike, joined; `Weights`: all of a model.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A collective by which the weights of a group move once.

    Attributes:
      axis: the mesh axis, or axes, along which they move.
      kind, dtype: as of a `Transfer`.
      itemsize: bytes of the dtype.
      sharded: whether they rest sharded over the axis.
      buffered: whether a pipeline's rank moves all weights that rest over the same axes as one array: along the outermost axis.
      elements, padding: of the full arrays.
      launches: number of arrays that travel.
      launches_alone: the same in a step of one microbatch.
      ranks: number of ranks that take part.
      every: it moves in one of so many steps.
    """

    axis: AxisNames
    kind: str
    dtype: str
    itemsize: int
    sharded: bool
    buffered: bool
    elements: Many
    padding: Many
    launches: Many
    launches_alone: Many
    ranks: Many
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class Group:
    """Weights that are alike in everything but size, summed. Sizes count one of each weight's `count` arrays.

    Attributes:
      place, again, rebuilds, trained, layers: as of a `Weight`.
      count: how many of each the model has.
      scanned: whether the backward of a scan redoes work that reads them.
      closes: whether they are the last product of a block.
      sums: on a grid, the axis over which products with them are summed.
      summed: the layers' axes over which layers sum their gradients.
      axes: over which ranks hold different parts.
      sharded: the outermost axis over which they rest sharded; None: none does.
      as_they_rest: whether they are read as they rest.
      rest_dtype, read_dtype, sum_dtype: names.
      gathers: the gathers of parameters, from the outermost axis inwards.
      syncs: the reductions of gradients, in the order of `Placement.sync`.
      joins: the sums of parameter changes at the end of a round.
      read: elements that the model reads on a rank.
      arrays: how many weights they are.
      rest_bytes, padding_bytes: between steps, padding apart.
      read_bytes, sum_bytes: as they are read, and of gradients of that.
      shard_sum_bytes: of gradients of what rests.
      left_bytes: of what sums leave out of a rank's gradients and feed back.
    """

    place: Place
    again: bool
    rebuilds: bool
    trained: bool
    layers: int
    count: int
    scanned: bool
    closes: bool
    sums: str
    summed: tuple[str, ...]
    axes: tuple[str, ...]
    sharded: AxisNames | None
    as_they_rest: bool
    rest_dtype: str
    read_dtype: str
    sum_dtype: str
    gathers: tuple[Sent, ...]
    syncs: tuple[Sent, ...]
    joins: tuple[Sent, ...]
    read: Many
    arrays: Many
    rest_bytes: Many
    padding_bytes: Many
    read_bytes: Many
    sum_bytes: Many
    shard_sum_bytes: Many
    left_bytes: Many


@dataclass(frozen=True)
class Weights:
    """All weights of a model under a plan.

    Attributes:
      groups: of weights that are alike.
      unit_bytes: under ZeRO-3 the bytes gathered at once: the units that are read and prefetched, and the largest unit's
        gradients.
      sliced: whether a scan gathers its layers one by one.
    """

    groups: tuple[Group, ...]
    unit_bytes: Many
    sliced: bool

    def sizes(self, change: Callable[[Many], Many]) -> "Weights":
        """The same weights with a function applied to every size."""
        new = lambda value, names: {name: change(getattr(value, name)) for name in names}
        sent = lambda moves: tuple(replace(each, **new(each, _SENT)) for each in moves)
        groups = (
            replace(each, **{name: sent(getattr(each, name)) for name in _MOVES}, **new(each, _SIZES))
            for each in self.groups
        )
        return Weights(tuple(groups), change(self.unit_bytes), self.sliced)


def grouped(placed: Sequence[Placed]) -> Weights:
    """Sums weights that are alike into groups, in the order of the first of each."""
    found: dict[tuple, list[Group]] = {}
    for each in placed:
        one = _group(each)
        found.setdefault(_kind(one), []).append(one)
    return Weights(
        tuple(map(_joined_groups, found.values())), _unit_bytes(placed), any(each.slices > 1 for each in placed)
    )


_SIZES = ("read", "arrays", "rest_bytes", "padding_bytes", "read_bytes", "sum_bytes", "shard_sum_bytes", "left_bytes")
_SENT = ("elements", "padding", "launches", "launches_alone", "ranks")
_MOVES = ("gathers", "syncs", "joins")
_KINDS = tuple(field.name for field in fields(Group) if field.name not in (*_SIZES, *_MOVES))


def _kind(one: Group) -> tuple:
    ranks = lambda sent: "many" if varies(sent.ranks) else sent.ranks
    each = [getattr(one, name) for name in _MOVES]
    moves = tuple((sent.axis, sent.kind, sent.dtype, ranks(sent)) for some in each for sent in some)
    return *(getattr(one, name) for name in _KINDS), *map(len, each), moves


def _joined_groups(alike: list[Group]) -> Group:
    if len(alike) == 1:
        return alike[0]
    total = lambda name: sum(getattr(one, name) for one in alike)
    return replace(
        alike[0],
        **{name: _added([getattr(one, name) for one in alike]) for name in _MOVES},
        **{name: total(name) for name in _SIZES},
    )


def _added(alike: list[tuple[Sent, ...]]) -> tuple[Sent, ...]:
    add = lambda same: replace(
        same[0], **{name: sum(getattr(one, name) for one in same) for name in _SENT if name != "ranks"}
    )
    return tuple(add(same) for same in zip(*alike, strict=True))


def _group(each: Placed) -> Group:
    weight, (rest, item) = each.weight, named(each.rest_dtype)
    read, (summed, sum_item) = named(each.read_dtype)[0], named(each.sum_dtype)
    return Group(
        place=weight.place, again=weight.again, rebuilds=weight.rebuilds, trained=weight.trained, layers=weight.layers,
        count=weight.count, scanned=weight.layers > 1 and weight.redone, closes=weight.name.endswith("down/kernel"),
        sums=next((axes[0] for axes, _ in weight.splits if "depth" in axes), ""),
        summed=weight.summed, axes=each.layout.axes, sharded=next(iter(each.sharded), None), rest_dtype=rest,
        read_dtype=read, sum_dtype=summed, as_they_rest=read == rest and not each.sharded,
        gathers=tuple(_gathers(each)), syncs=tuple(_syncs(each)) if weight.trained else (),
        joins=tuple(_joins(each)) if weight.trained else (), read=each.read, arrays=1,
        rest_bytes=(each.shard - each.padding) * item, padding_bytes=each.padding * item,
        read_bytes=each.read_bytes, sum_bytes=each.sum_bytes, shard_sum_bytes=each.shard * sum_item,
        left_bytes=each.left_bytes,
    )  # fmt: skip


def _gathers(each: Placed) -> Iterator[Sent]:
    slices = each.slices
    elements = each.shard // slices
    layout = each.layout if slices == 1 else each.layout.sliced(len(each.layout.stored) - 1)
    for axis, strategy in each.sharded.items():
        ranks = each.setting.ranks(axis)
        # The last trips of a scan that gathers ahead gather as many slices in vain (see `parallel/units.py`).
        trips = slices if slices == 1 else slices + min(strategy.prefetch, slices)
        for sent in strategy.gather_flows(elements, layout, axis, ranks, each.read_dtype):
            yield _sent(axis, sent, True, False, (trips, trips * each.gathers_alone), trips)
        elements = elements * ranks


def _syncs(each: Placed) -> Iterator[Sent]:
    """In the order of `Placement.sync`: every microbatch's first, then what is scattered, and from the inside outwards."""
    elements, outwards = each.gathered, list(each.setting.strategies.items())[::-1]
    roles = each.setting.roles
    later = lambda role: (role.reduces != "microbatch", role.parameters != "sharded")
    for axis, strategy in sorted(outwards, key=lambda own: later(roles[own[0]])):
        ranks, sharded = each.setting.ranks(axis), axis in each.sharded
        buffered = axis == outwards[-1][0] and roles[axis].parameters == "whole"
        often = each.reductions(axis)
        layout = each.layout if often == 1 else each.layout.sliced(len(each.layout.stored) - 1)
        part = elements // often
        for sent in strategy.sync_flows(part, layout, axis, ranks, each.reduce_dtype) if several(ranks) else ():
            yield _sent(axis, sent, sharded, buffered, (often, often), often)
        elements = elements // ranks if sharded else elements


def _joins(each: Placed) -> Iterator[Sent]:
    for axis, rounds in each.setting.rounds.items():
        ranks = each.setting.ranks(axis)
        for sent in rounds.round_flows(each.shard, each.layout, axis, ranks, each.rest_dtype):
            yield replace(_sent(axis, sent, False, False, (1, 1), 1), every=rounds.every)


def _sent(
    axis: AxisNames, sent: Transfer, sharded: bool, buffered: bool, launches: tuple[int, int], times: int
) -> Sent:
    """A transfer repeated `times` times.

    Args:
      launches: number of launches, and their number in a step of one microbatch.
    """
    dtype, itemsize = named(sent.dtype)
    return Sent(
        axis=axis, kind=sent.kind, dtype=dtype, itemsize=itemsize, sharded=sharded, buffered=buffered,
        elements=sent.elements * times, padding=sent.padding * times, launches=launches[0], launches_alone=launches[1],
        ranks=sent.ranks,
    )  # fmt: skip


def _unit_bytes(placed: Iterable[Placed]) -> Many:
    units: dict[str, tuple[Many, Many]] = {}
    ahead = 0
    for each in placed:
        ahead = max([ahead, *(strategy.prefetch for strategy in each.sharded.values())])
        read, summed = units.get(name := each.weight.unit or each.weight.name, (0, 0))
        number = 1 if each.weight.unit else each.weight.count
        grads = each.weight.trained * number * each.reduce_bytes // each.slices
        units[name] = read + number * each.read_bytes // each.slices, summed + grads
    return (1 + ahead) * most(*(read for read, _ in units.values())) + most(*(summed for _, summed in units.values()))


# --------------------------------------------------------------------------------------------------
# What a step sends beside weights and activations: the loss's sum, and the gradient norm's.
# --------------------------------------------------------------------------------------------------

LOSS_VALUES = 2
"""Values that the sum of a weighted mean sends: the total and its weight."""


def small_flows(
    weights: Weights, parts: ShardCounts, run: Run, degrees: Mapping[str, Many], metrics: int = 0
) -> Iterator[Flow]:
    """Yields the sums of loss and metrics over batch shards and `pipe`, and of the gradient norm over what splits gradients."""
    values = LOSS_VALUES * (1 + metrics)
    scalar = {"kind": "all_reduce", "dtype": "float32", "itemsize": 4}
    ranks = lambda axes: math.prod(degrees[axis] for axis in axes)
    roles = {axis: role for axis, role in run.roles.items() if role.reduces != "never"}
    if axes := splitting(roles, "rows", "positions"):
        yield Flow(label="metrics", axes=axes, group_size=ranks(axes), elements=values, **scalar)
    piped = (AXIS,) if run.pipelined else ()
    if piped:  # every stage but the last has none to add
        yield Flow(label="", axes=piped, group_size=ranks(piped), elements=values, launches=values, **scalar)
    groups: dict[tuple[str, ...], Many] = {}
    for group in weights.groups:
        if group.trained:  # by what splits them; along a pipeline in any order
            axes = tuple(axis for axis in degrees if axis in (*piped, *group.axes)) if piped else group.axes
            here = either(parts.number(group.place, group.count) > 0, 1, 0)
            groups[axes] = most(groups.get(axes, 0), here)
    for axes, here in groups.items():
        if axes:
            yield Flow(label="norm", axes=axes, group_size=ranks(axes), elements=here, **scalar)


# --------------------------------------------------------------------------------------------------
# What parameters and their gradients send: gathers, reductions, and what stages share.
# --------------------------------------------------------------------------------------------------


def weight_flows(weights: Weights, parts: ShardCounts, run: Run, degrees: Mapping[str, Many]) -> Iterator[Flow]:
    """Yields a rank's gathers of parameters and reductions of gradients along the strategies' axes.

    Args:
      weights: of the model, where they rest.
      parts: the parts of the model that the rank has.
      run: how often it moves them.
      degrees: of the mesh.
    """
    buffers: dict[tuple[bool, tuple[str, ...]], Many] = {}
    for group in weights.groups:
        number = parts.number(group.place, group.count)
        if nothing(number):
            continue
        if run.pipelined and group.place == "both ends":
            yield from _sent_along(group, number, degrees[AXIS], run.gathers is not None)
            number = number * parts.first  # elsewhere it is a copy
            if nothing(number):
                continue
        # A pipeline's rank keeps everything that lies over the same axes in one buffer, which is reduced as one array.
        before = buffers.get(key := (run.rows and group.place.endswith("block"), group.axes), 0)
        buffers[key] = most(before, either(number > 0, 1, 0))
        moving = _Moving(group, number, buffers[key] - before if run.pipelined else None, run)
        yield from moving.gathers()
        yield from moving.reductions()
        yield from moving.joins()


def _sent_along(group: Group, number: Many, ranks: Many, in_ticks: bool) -> Iterator[Flow]:
    """Yields the sums over `pipe` of a weight that several stages read and one holds: once per step, and of its gradient.

    Where ticks gather, what travels is a rank's part as it rests.
    """
    elements, dtypes = group.read, (group.read_dtype, group.sum_dtype)
    if in_ticks:
        elements = divided(group.rest_bytes + group.padding_bytes, jnp.dtype(group.rest_dtype).itemsize)
        dtypes = group.rest_dtype, group.sum_dtype
    for label, dtype, work in zip((PARAMETERS, ""), dtypes, ("forward", "backward"), strict=True):
        yield Flow(
            label=label, kind="all_reduce", axes=(AXIS,), group_size=ranks, dtype=dtype, itemsize=jnp.dtype(dtype).itemsize,
            elements=number * elements, launches=number * group.arrays, work=work,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Moving:
    """A group as one rank moves it.

    Attributes:
      number: how many of each of its weights the rank has.
      buffers: reduction buffers that the group adds on a pipeline's rank; None without a pipeline.
    """

    group: Group
    number: Many
    buffers: Many | None
    run: Run

    def gathers(self) -> Iterator[Flow]:
        """Yields the gathers before forwards, and before backwards that read the weights again."""
        group, run = self.group, self.run
        again = 1 if group.again or run.pipelined else group.rebuilds * most(run.recomputes, int(group.scanned))
        for sent in group.gathers:
            often = run.rounds(sent.axis)
            yield from self._flows(PARAMETERS, sent, often.at_start, often.at_use, "forward")
            yield from self._flows(PARAMETERS, sent, 0, often.at_use, "backward", group.trained * again)

    def reductions(self) -> Iterator[Flow]:
        """Yields the reductions of gradients."""
        for sent in self.group.syncs:
            often = self.run.rounds(sent.axis, sent.sharded)
            yield from self._flows(GRADIENTS, sent, often.at_end, often.between, "backward")

    def joins(self) -> Iterator[Flow]:
        """Yields the sums of parameter changes at the end of a round."""
        for sent in self.group.joins:
            for flow in self._flows(GRADIENTS, sent, 1, 0, ""):
                yield replace(flow, every=sent.every, where=every(sent.every))

    def _flows(
        self, label: str, sent: Sent, once: Many, often: Many, work: str, calls: Many = 1
    ) -> Iterator[Flow]:  # fmt: skip
        """Yields a transfer as a flow that runs `once` times at a step's start or end, and one that runs `often` times."""
        for times, where in ((once, ONCE), (often, where_of(often))):
            if not nothing(times) and not nothing(calls):
                yield Flow(
                    label=label,
                    kind=sent.kind,
                    axes=as_axes(sent.axis),
                    group_size=sent.ranks,
                    dtype=sent.dtype,
                    itemsize=sent.itemsize,
                    elements=calls * self.number * sent.elements,
                    padding=calls * self.number * sent.padding,
                    launches=calls * self._launches(sent),
                    times=times,
                    where=where,
                    work=work,
                )

    def _launches(self, sent: Sent) -> Many:
        buffered = self.buffers is not None and not sent.sharded and sent.buffered
        if self.run.pipelined:
            return self.buffers if buffered else self.number * sent.launches
        return self.number * either(self.run.microbatches == 1, sent.launches_alone, sent.launches)
