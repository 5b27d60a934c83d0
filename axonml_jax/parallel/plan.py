"""Everything that decides how a step runs, as one frozen value."""

from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

from axonml_jax.collectives.buckets import GradSyncStrategy
from axonml_jax.mesh.axes import LAYER_AXES
from axonml_jax.mesh.shape import MeshShape
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.ddp import Replicate
from axonml_jax.parallel.fsdp import Shard
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.partition import Partition
from axonml_jax.parallel.pipeline.policy import Pipelined
from axonml_jax.parallel.strategy import AbstractStrategy
from axonml_jax.parallel.tensor.strategy import InLayers
from axonml_jax.parallel.units.remat import Remat, checked_remat
from axonml_jax.synonyms import is_choice


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is spread over a mesh and stepped. A plan changes where work happens, never what is computed.

    Attributes:
      mesh: degrees of the mesh; None when a mesh is given beside the plan.
      data: what happens to parameters on the `data` axis.
      fsdp: what happens to them on the `fsdp` axis.
      pipe: the pipeline along the `pipe` axis; None: the model is not cut.
      partition: rules by which the partitioner splits any model's parameters over `tensor`; None: only the model's own layers
        split over it.
      precision: dtypes of parameters, computation, reduction and outputs; the name of a common policy is accepted.
      accumulate: microbatches per update and rank; under a pipeline that many times its microbatches, in one pass.
      update: "shards": the optimizer sees what a rank holds (right for element-wise ones such as Adam, SGD and Lion, and for
        sums over all elements, such as clipping by the global norm; others are refused); "whole": gradients, parameters and
        state are gathered for the update.
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
    data: Replicate = field(default_factory=Replicate)
    fsdp: Shard | Replicate = field(default_factory=Shard)
    pipe: Pipelined | None = None
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
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, Integral) or self.accumulate < 1:
            problems.append(f"accumulate={self.accumulate!r} must be a positive whole number")
        if self.batch_stats not in ("global", "local"):
            problems.append(f"batch_stats={self.batch_stats!r} must be 'global' or 'local'")
        if self.update not in ("shards", "whole"):
            problems.append(f"update={self.update!r} must be 'shards' or 'whole'")
        for name in ("broadcast_buffers", "check_vma"):
            if getattr(self, name) not in (True, False):
                problems.append(f"{name}={getattr(self, name)!r} must be True or False")
        if self.mesh is not None and not isinstance(self.mesh, MeshShape):
            problems.append(f"mesh={self.mesh!r} must be an ax.MeshShape of degrees (give a Mesh beside the plan)")
        if not isinstance(self.data, Replicate):
            problems.append(f"data={self.data!r} must be a Replicate strategy")
        if not isinstance(self.fsdp, Shard | Replicate):
            problems.append(f"fsdp={self.fsdp!r} must be a Shard strategy, or a Replicate")
        if self.partition is not None and not isinstance(self.partition, Partition):
            problems.append(f"partition={self.partition!r} must be made by Partition.of(rules)")
        elif self.partition is not None and self.pipe is not None:
            problems.append("pipe: stages are split by the model's own layers only: leave partition out")
        problems += self._against_pipe() if not problems else []
        if problems:
            raise ValueError(f"Plan: {'; '.join(problems)}")

    def _against_pipe(self) -> list[str]:
        """What a pipeline cannot be combined with."""
        if self.pipe is None:
            return []
        if not isinstance(self.pipe, Pipelined):
            return [f"pipe={self.pipe!r} must be an ax.Pipelined(schedule=..., num_microbatches=...)"]
        rules = {
            "sync_strategy=NO_SYNC lets every rank train a model of its own, and the stages share one: use another": (
                self.independent
            ),
            "broadcast_buffers=False keeps buffers apart, and a pipeline's stages each hold some: leave it True": (
                self.local_buffers and not self.independent
            ),
        }
        return [f"pipe: {rule}" for rule, broken in rules.items() if broken]

    @property
    def strategies(self) -> dict[str, AbstractStrategy]:
        """The strategy of every axis that this plan knows."""
        in_layers = dict.fromkeys(LAYER_AXES, InLayers())
        return {"data": self.data, "fsdp": self.fsdp, **in_layers}

    @property
    def microbatches(self) -> int:
        """Microbatches per update and rank."""
        return self.accumulate * (1 if self.pipe is None else self.pipe.num_microbatches)

    @property
    def independent(self) -> bool:
        """Whether every rank trains a model of its own (NO_SYNC)."""
        return self.data.sync_strategy is GradSyncStrategy.NO_SYNC

    @property
    def overlapped(self) -> bool:
        """Whether gradients are reduced inside the backward."""
        return self.data.sync_strategy is GradSyncStrategy.OVERLAPPED

    @property
    def local_buffers(self) -> bool:
        """Whether every rank keeps buffers of its own between steps."""
        return self.independent or (self.batch_stats == "local" and not self.broadcast_buffers)
