"""`Pipeline`: pipeline parallelism, named as in AxonML."""

from collections.abc import Sequence
from typing import Any, Literal

from flax import linen, nnx
from jax.sharding import Mesh

from axonml_jax._types import PyTree
from axonml_jax.facade.device_memory import FSDPMemoryStats, estimate
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.mesh.as_mesh import as_mesh
from axonml_jax.mesh.group import ProcessGroup
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.world import World
from axonml_jax.model.functional import Trainable
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.pipeline.cutting.chain import Chain, LinenChain, PipelineStage, join_variables
from axonml_jax.parallel.pipeline.estimates.memory_stats import PipelineMemoryStats
from axonml_jax.parallel.pipeline.policy import AXIS, Pipelined
from axonml_jax.parallel.pipeline.schedules.schedule import PipelineSchedule
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategies.shard import Shard
from axonml_jax.parallel.units.remat_policy import Remat


class Pipeline(ParallelModel):
    """Every device holds one part of the model's depth; microbatches pass from part to part (AxonML, AxoNN, Megatron).

    Args:
      stages_or_model: a model with repeated blocks, which is cut between them; or modules (or `ax.PipelineStage`s) that are
        applied in order, one per stage (see `from_modules`).
      mesh: a Mesh with a `pipe` axis, a World, a ProcessGroup, or None: then all devices are stages. Other axes combine:
        `data`, `fsdp` (parameters sharded inside a stage), and those of parallel layers.
      num_microbatches: into how many parts the rows of a batch shard are cut.
      schedule: an `ax.PipelineSchedule` or its name.
      chunks: stages per device; None: 2 for the interleaved schedule, else 1; of modules as many as there are.
      split: module paths at which the second and later stages begin; None: by balanced cost.
      gather: with `fsdp`, "step" gathers a device's stages once per step, "chunk" when a device turns to another of its
        stages, "tick" whenever one is used.
      params: a Linen module's variables; of Linen modules given one by one a list of them.
      precision, remat, trainable, check_vma, seed: see `ax.DDP`.
      update: see `ax.FSDP`.
      accumulate: that many times more microbatches per update, in one pass.
      cpu_offload: what rests in host memory (see `ax.CPUOffload`).

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """

    def __init__(
        self,
        stages_or_model: Any,
        mesh: Any = None,
        *,
        num_microbatches: int = 8,
        schedule: PipelineSchedule | str = PipelineSchedule.ONE_F_ONE_B,
        chunks: int | None = None,
        split: Sequence[str] | None = None,
        gather: Literal["step", "chunk", "tick"] = "step",
        params: PyTree | None = None,
        precision: Precision | str | None = None,
        remat: Remat = None,
        update: Literal["shards", "whole"] = "shards",
        accumulate: int = 1,
        cpu_offload: CPUOffload | str = CPUOffload.NONE,
        trainable: Trainable = None,
        check_vma: bool = False,
        seed: int = 0,
    ):
        mesh = _mesh(mesh)
        model, params = stages_or_model, params
        if isinstance(model, Sequence):
            model, params = _chain(model, params, mesh.shape[AXIS])
        interleaved = PipelineSchedule.of(schedule) is PipelineSchedule.INTERLEAVED_ONE_F_ONE_B
        if chunks is None and isinstance(model, (Chain, LinenChain)):
            chunks = max(1, len(model.groups) // mesh.shape[AXIS])
        policy = Pipelined(
            schedule=schedule,  # pyright: ignore[reportArgumentType]  # Pipelined checks and converts names
            num_microbatches=num_microbatches,
            chunks=(2 if interleaved else 1) if chunks is None else chunks,
            split=None if split is None else tuple(split),
            gather=gather,
        )
        plan = Plan(
            pipe=policy,
            fsdp=Shard(stage=1),
            precision=Precision.of(precision),
            remat=remat,
            update=update,
            accumulate=accumulate,
            offload=cpu_offload,  # pyright: ignore[reportArgumentType]  # Plan checks and converts names
            check_vma=check_vma,
        )
        super().__init__(model, mesh, plan, params=params, trainable=trainable, seed=seed)

    @classmethod
    def from_modules(cls, modules: Sequence[Any], mesh: Any = None, **options: Any) -> "Pipeline":
        """A pipeline of modules that are applied in order: each takes what the one before returns, of any structure.

        Args:
          modules: NNX modules, Linen modules (with `params=`, a list of their variables), or `ax.PipelineStage`s. Module i is
            stage i and lies on device i mod S of the `pipe` axis.
          mesh: see `Pipeline`.
          **options: those of `Pipeline`.
        """
        return cls(list(modules), mesh, **options)

    @property
    def policy(self) -> Pipelined:
        """The schedule and its options."""
        assert self.plan.pipe is not None
        return self.plan.pipe

    @property
    def num_stages(self) -> int:
        """Stages of the whole model: devices of the `pipe` axis times chunks."""
        return self.policy.num_stages(self.mesh.shape[AXIS])

    @property
    def schedule(self) -> PipelineSchedule:
        """In which order microbatches pass."""
        return self.policy.schedule

    @property
    def timetable(self) -> Timetable:
        """What a training step executes; it prints as a table of ticks."""
        return self.policy.timetable(self.mesh.shape[AXIS], self.plan.microbatches)

    @property
    def peak_activations(self) -> PipelineMemoryStats:
        """Activations that ranks keep in a training step: as papers count them, as executed, and as allocated."""
        shape = (self.mesh.shape[AXIS], self.plan.microbatches, self.policy.chunks)
        return PipelineMemoryStats.of(self.schedule, *shape)

    def memory_estimate(self, moments: int = 2) -> FSDPMemoryStats:
        """Bytes per device of model states, padding included, without activations (see `peak_activations`).

        Args:
          moments: arrays the optimizer keeps per parameter: 2 for Adam, 1 for momentum or Lion, 0 for SGD.
        """
        return estimate(self._placement, moments, self._functional)

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of every parameter, by its path."""
        staging = self._placement.stages
        assert staging is not None
        return dict(zip(staging.names, staging.stages, strict=True))


def _mesh(given: Any) -> Mesh:
    """The mesh with a `pipe` axis that the user means."""
    mesh = as_mesh(given)
    if given is None or isinstance(given, World | ProcessGroup):
        devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else None
        return make_mesh(pipe=-1, devices=devices)
    if AXIS not in mesh.axis_names:
        raise ValueError(
            f"Pipeline lays stages along the mesh axis {AXIS!r}, which {dict(mesh.shape)} lacks: use ax.make_mesh(pipe=-1), "
            "ax.make_mesh(data=..., pipe=...), or leave the mesh out"
        )
    return mesh  # pyright: ignore[reportReturnType]  # ParallelModel refuses meshes without devices


def _chain(given: Sequence[Any], params: Any, num_ranks: int) -> tuple[Any, Any]:
    """One model from modules given one by one, and its variables."""
    stages = [each if isinstance(each, PipelineStage) else None for each in given]
    if any(stages) and not all(stages):
        raise TypeError(
            "give either modules or ax.PipelineStages, not both: a PipelineStage says on which device it runs"
        )
    modules = [each.module if isinstance(each, PipelineStage) else each for each in given]
    groups = _groups([stage.device for stage in stages if stage], num_ranks) if any(stages) else [1] * len(modules)
    kinds = {next((kind for kind in (nnx.Module, linen.Module) if isinstance(m, kind)), None) for m in modules}
    if kinds not in ({nnx.Module}, {linen.Module}):
        found = [type(module).__name__ for module in modules]
        raise TypeError(
            f"a pipeline of modules takes NNX modules, or Linen modules, one or more, but {found} were given"
        )
    if kinds == {nnx.Module}:
        return Chain(modules, groups), params
    if not isinstance(params, Sequence) or len(params) != len(modules):
        raise ValueError(
            f"{len(modules)} Linen modules hold no arrays: give params=[...], the variables of each, in the same order"
        )
    return LinenChain(tuple(modules), tuple(groups)), join_variables(params)


def _groups(devices: Sequence[int], num_ranks: int) -> list[int]:
    """How many modules make each stage, from the device of every module."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and runs[-1][0] == device:
            runs[-1].append(device)
        else:
            runs.append([device])
    order = [run[0] for run in runs]
    if order != [i % num_ranks for i in range(len(order))] or len(order) % num_ranks:
        raise ValueError(
            f"PipelineStages on devices {list(devices)}: stages go round the {num_ranks} devices of the {AXIS!r} axis in order "
            f"(0 to {num_ranks - 1}, then from 0 again), each as often as the others; neighbours on one device are one stage"
        )
    return [len(run) for run in runs]
