"""Everything that decides how a step runs, as one frozen value."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Literal

from axonml_jax._types import is_one_of, named_leaves
from axonml_jax.mesh.axes import BATCH_AXES, LAYER_AXES, AxisNames, as_axes
from axonml_jax.mesh.shape import MeshShape
from axonml_jax.model.functional import Functional
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.partition import Partition
from axonml_jax.parallel.pipeline.policy import Pipelined
from axonml_jax.parallel.plan_axes import PlanAxes, axes_problems, inwards
from axonml_jax.parallel.plan_html import plan_html
from axonml_jax.parallel.strategies.context import Context
from axonml_jax.parallel.strategies.in_layers import InLayers
from axonml_jax.parallel.strategies.local_rounds import LocalRounds
from axonml_jax.parallel.strategies.replicate import Replicate
from axonml_jax.parallel.strategies.shard import Shard
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.parallel.units.remat_policy import Remat, checked_remat
from axonml_jax.sharding.batch import BatchLayout, second_dim
from axonml_jax.sharding.sequence_order import Order
from axonml_jax.synonyms import is_choice


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is spread over a mesh and stepped.

    A plan changes where work happens, not what is computed, but for what rounds (`precision`, `comm_dtype`, `ax.Shard(wire=,
    reduce_wire=)`) and where replicas train by themselves (NO_SYNC, `ax.DiLoCo`).

    Attributes:
      mesh: degrees of the mesh; None when a mesh is given beside the plan.
      data: what happens to parameters on the `data` axis.
      fsdp: what happens to them on the `fsdp` axis.
      context: what happens to them on the `context` axis, which splits the positions of sequences.
      axes: the same for axes of your own, by name, or by the tuple of names of axes that one strategy owns together; the
        mesh, which you make, says where they stand. `data`, `fsdp`, `context` and `pipe` may be given here too.
      pipe: the pipeline along the `pipe` axis; None: the model is not cut.
      partition: rules by which the partitioner splits any model's parameters over `tensor`; None: only the model's own layers
        split over it.
      precision: dtypes of parameters, computation, reduction and outputs, and of products' operands; the name of a common
        policy is accepted.
      accumulate: microbatches per update and rank; under a pipeline that many times its microbatches, in one pass.
      update: "shards": the optimizer sees what a rank holds. Work on whole matrices (Muon, Adafactor) is done by one rank for
        each, which gathers what it needs; what cannot be done so is refused. "whole": gradients, parameters and state are
        gathered for the update.
      offload: what rests in host memory.
      remat: what the backward recomputes, unit by unit: None, "full", or "selective" (all but weight multiplications).
      batch_stats: "global" joins BatchNorm statistics over all ranks and keeps buffers equal; "local" leaves every rank
        its own statistics, as PyTorch does.
      broadcast_buffers: with `batch_stats="local"`: True gives every rank the first rank's buffers after each step, False
        leaves each rank its own.
      check_vma: let JAX type which values vary over which axes (a safety net; models whose scans start from plain zeros
        do not pass it).
    """

    mesh: MeshShape | None = None
    data: AbstractStrategy = field(default_factory=Replicate)
    fsdp: AbstractStrategy = field(default_factory=Shard)
    context: AbstractStrategy = field(default_factory=Context)
    pipe: Pipelined | None = None
    axes: Mapping[AxisNames, AbstractStrategy] = field(default_factory=lambda: PlanAxes({}))
    partition: Partition | None = None
    precision: Precision = field(default_factory=Precision)
    accumulate: int = 1
    update: Literal["shards", "whole"] = "shards"
    offload: CPUOffload = CPUOffload.NONE
    remat: Remat = None
    batch_stats: Literal["global", "local"] = "global"
    broadcast_buffers: bool = True
    check_vma: bool = False

    def __post_init__(self):
        object.__setattr__(self, "precision", Precision.of(self.precision))
        problems = []
        offloads = [each.value for each in CPUOffload]
        if not is_choice(CPUOffload, self.offload):
            problems.append(f"offload={self.offload!r} must be an ax.CPUOffload or one of {offloads}")
        else:
            object.__setattr__(self, "offload", CPUOffload(self.offload))
        if problem := checked_remat(self.remat):
            problems.append(problem)
        whole = isinstance(self.accumulate, Integral) and not isinstance(self.accumulate, bool)
        if not whole or not 1 <= self.accumulate < 2**31:
            problems.append(f"accumulate={self.accumulate!r} must be a positive whole number below 2**31")
        if not is_one_of(self.batch_stats, ("global", "local")):
            problems.append(f"batch_stats={self.batch_stats!r} must be 'global' or 'local'")
        if not is_one_of(self.update, ("shards", "whole")):
            problems.append(f"update={self.update!r} must be 'shards' or 'whole'")
        for name in ("broadcast_buffers", "check_vma"):
            if not is_one_of(getattr(self, name), (True, False)):
                problems.append(f"{name}={getattr(self, name)!r} must be True or False")
        problems += axes_problems(self.axes) or self._take_axes()
        problems += [
            f"{name}={value!r} must be a strategy such as ax.Replicate() or ax.Shard()"
            for name in _USUAL
            if not isinstance(value := getattr(self, name), AbstractStrategy)
        ]
        problems += [
            f"{name}={value!r} must be {words}"
            for name, (kind, words) in _OF_KIND.items()
            if (value := getattr(self, name)) is not None and not isinstance(value, kind)
        ]
        problems += self._join_context() if not problems else []
        problems += self._against_pipe() if not problems else []
        problems += self._against_rounds() if not problems else []
        if problems:
            raise ValueError(f"Plan: {'; '.join(problems)}")

    def _against_pipe(self) -> list[str]:
        """What a pipeline cannot be combined with."""
        if self.pipe is None:
            return []
        rules = {
            "stages are split by the model's own layers only: leave partition out": self.partition is not None,
            "sync_strategy=NO_SYNC lets every rank train a model of its own, and the stages share one: use another": (
                self.independent
            ),
            "broadcast_buffers=False keeps buffers apart, and a pipeline's stages each hold some: leave it True": (
                self.batch_stats == "local" and not self.broadcast_buffers and not self.independent
            ),
        }
        return [f"pipe: {rule}" for rule, broken in rules.items() if broken]

    def _against_rounds(self) -> list[str]:
        """What rounds, in which ranks train parameters of their own, cannot be combined with."""
        if not (rounds := self.rounds):
            return []
        axes, name = ", ".join(map(str, rounds)), type(next(iter(rounds.values()))).__name__
        rules = {
            f"{axes} have rounds each, and a model has outer parameters once: give one axis {name}": len(rounds) > 1,
            "a pipeline's stages rest in buffers, which have no place for outer parameters: leave pipe out": (
                self.pipe is not None
            ),
            "partition leaves an axis to XLA's partitioner, and the end of a round runs on what a rank holds: use layers that "
            "split themselves (ax.ColumnParallelLinear, ax.auto_parallelize)": self.partition is not None,
            f"offload={self.offload.value!r} brings parameters to the device in pieces, and the end of a round needs all: "
            "leave it out": self.offload is not CPUOffload.NONE,
            "float16 would need a loss scale for each replica: use bf16": self.precision.scales_loss,
            "NO_SYNC on another axis leaves no one model to agree on: synchronize it": self.independent,
            'batch_stats="local" is about models with buffers, which rounds refuse: leave it out': (
                self.batch_stats == "local"
            ),
        }
        return [f"{name}: {rule}" for rule, broken in rules.items() if broken]

    def _take_axes(self) -> list[str]:
        """Moves what `axes` says of the usual axes to their own names."""
        given, problems = dict(self.axes), []
        for key, strategy in self.axes.items():
            for name in {*_USUAL, "pipe"} & set(as_axes(key)):
                if (own := getattr(self, name)) not in (_DEFAULTS[name], strategy):
                    problems.append(f"{name}={own!r} and axes={{{key!r}: {strategy!r}}} are two strategies of one axis")
                object.__setattr__(self, name, strategy)
                if key == name:
                    given.pop(key)
        object.__setattr__(self, "axes", PlanAxes(given))
        return problems

    def _join_context(self) -> list[str]:
        """One strategy for `fsdp` and `context`, where the latter's says so."""
        if (joint := self.context.with_fsdp(self.fsdp)) is None:
            return []
        if owners := [key for key in self.axes if {"fsdp", "context"} & set(as_axes(key))]:
            return [
                f"context={self.context!r} shards over fsdp and context, which axes= gives to the strategy of {owners}"
            ]
        for name in ("fsdp", "context"):
            object.__setattr__(self, name, joint)
        object.__setattr__(self, "axes", PlanAxes({**self.axes, ("fsdp", "context"): joint}))
        return []

    def _repr_html_(self, title: str = "ax.Plan", degrees: Mapping[str, int] | None = None) -> str:
        return plan_html(self, title, degrees)

    @property
    def strategies(self) -> dict[AxisNames, AbstractStrategy]:
        """The strategy of every axis that this plan knows, by axis or by the axes that one strategy owns."""
        together = {name for key in self.axes for name in as_axes(key)}
        usual = {name: getattr(self, name) for name in _USUAL}
        layers = {axis: InLayers("rows" if axis in BATCH_AXES else None) for axis in LAYER_AXES}
        return {name: each for name, each in usual.items() if name not in together} | dict(self.axes) | layers

    def on(self, mesh_axes: Iterable[str]) -> dict[AxisNames, AbstractStrategy]:
        """The strategies whose axes a mesh has, from the outermost axis inwards (see `inwards`)."""
        return inwards(self.strategies, tuple(mesh_axes))

    def left(self, degrees: Mapping[str, int]) -> frozenset[str]:
        """The mesh axes that a step leaves to XLA's partitioner: what `partition` splits, and what strategies leave to it."""
        own = {name for axis, each in self.on(degrees).items() if each.left_to_partitioner for name in as_axes(axis)}
        return frozenset(own | (self.partition.axes if self.partition is not None else set()))

    def batch_layout(self, degrees: Mapping[str, int]) -> BatchLayout:
        """How batches are split over a mesh of these degrees: as the roles of its axes say."""
        splits = {
            name: (split, each)
            for axis, each in self.on(degrees).items()
            for name, split in each.role.splits(as_axes(axis)).items()
        }
        rows = (name for name, (split, _) in splits.items() if split == "rows")
        own = lambda each: type(each).position_dim is not AbstractStrategy.position_dim
        rules = {name: each for name, (split, each) in splits.items() if split == "positions"}
        positions = {name: each.position_dim if own(each) else second_dim for name, each in rules.items()}
        orders: dict[str, Order] = {name: each.position_order for name, each in rules.items()}
        return BatchLayout.of(degrees, rows, positions, orders, self.left(degrees))

    @property
    def rounds(self) -> dict[AxisNames, LocalRounds]:
        """By axis the rounds in which ranks train parameters of their own; a plan has those of one axis at most."""
        return {axis: each.rounds for axis, each in self.strategies.items() if each.rounds is not None}

    def within_round(self) -> "Plan":
        """The plan of a step of such a round; itself without rounds."""
        return self._changed(lambda axis, strategy: strategy.within_round()) if self.rounds else self

    def reducing(self) -> "Plan":
        """The plan, but with strategies that all reduce gradients (see `AbstractStrategy.reducing`)."""
        return self._changed(lambda axis, strategy: strategy.reducing())

    def for_model(self, model: Functional) -> "Plan":
        """The plan with everything decided that depends on the model: defaults of strategies, what rules split.

        Raises:
          ValueError: for patterns of path names that match nothing of it.
        """
        self.precision.check_parameters(
            named_leaves(model.shapes.params).keys() | named_leaves(model.shapes.frozen).keys()
        )
        plan = self._changed(lambda axis, strategy: strategy.for_model(model))
        return plan if plan.partition is None else replace(plan, partition=plan.partition.for_model(model))

    def decided(self, fabric: Fabric, degrees: Mapping[str, int]) -> "Plan":
        """The plan with every default of its strategies decided that depends on the devices."""
        ranks = lambda axis: math.prod(degrees.get(name, 1) for name in as_axes(axis))
        return self._changed(lambda axis, strategy: strategy.decided(fabric, ranks(axis)))

    def _changed(self, change: Callable[[AxisNames, AbstractStrategy], AbstractStrategy]) -> "Plan":
        own = {axis: change(axis, strategy) for axis, strategy in self.axes.items()}
        together = {name: strategy for axis, strategy in own.items() for name in as_axes(axis)}
        usual = {name: together.get(name) or change(name, getattr(self, name)) for name in _USUAL}
        return replace(self, axes=own, **usual)

    @property
    def microbatches(self) -> int:
        """Microbatches per update and rank."""
        return self.accumulate * (1 if self.pipe is None else self.pipe.num_microbatches)

    @property
    def independent(self) -> bool:
        """Whether every rank trains a model of its own (NO_SYNC)."""
        return any(strategy.role.reduces == "never" for strategy in self.strategies.values())

    def reducer(self, mesh_axes: Iterable[str]) -> AbstractStrategy:
        """The strategy whose buckets and overlap count on a mesh: that of `data`, or of the mesh's outermost axis."""
        there = self.on(mesh_axes)
        return there.get("data") or next(iter(there.values()), self.data)


_USUAL = ("data", "fsdp", "context")
_DEFAULTS = {"data": Replicate(), "fsdp": Shard(), "context": Context(), "pipe": None}
_OF_KIND = {
    "mesh": (MeshShape, "an ax.MeshShape of degrees (give a Mesh beside the plan)"),
    "partition": (Partition, "made by Partition.of(rules)"),
    "pipe": (Pipelined, "an ax.Pipelined(schedule=..., num_microbatches=...)"),
}
