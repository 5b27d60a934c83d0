"""`Candidate`: one way to run a model on a number of devices, of which a planner makes many; `Question`: what it is asked."""

from dataclasses import dataclass, replace
from typing import Any

from axonml_jax.cost.decoder.activations import compute_dtype
from axonml_jax.mesh.axes import AXES
from axonml_jax.mesh.shape import MeshShape
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.context.method import Method
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.pipeline.policy import Pipelined
from axonml_jax.parallel.pipeline.schedules.schedule import PipelineSchedule
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategies.context import Context
from axonml_jax.parallel.strategies.replicate import Replicate
from axonml_jax.parallel.strategies.shard import Shard
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.planner.assumptions import Assumptions
from axonml_jax.planner.goodput.save_advice import SaveAssumptions
from axonml_jax.planner.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Everything that the planner decides.

    Attributes:
      degrees: of the mesh, every axis with more than one rank.
      stage: of ZeRO along `fsdp`; 0 without it. Of another strategy the stage that reads and reduces when it does.
      strategy: another one along `fsdp`; None: `ax.Shard` of the stage.
      method: how attention reads positions of other ranks; None without `context`.
      shared: whether parameters rest sharded over `context` too.
      dispatch: how tokens reach experts on other ranks; None: as the model says.
      microbatches: per update and rank.
      remat: what the backward recomputes.
      sequence_parallel: with `tensor`.
      schedule: of the pipeline; None without `pipe`.
      chunks: stages per rank.
      offload: what rests in host memory.
    """

    degrees: tuple[tuple[str, int], ...]
    stage: int = 0
    microbatches: int = 1
    remat: str | None = None
    sequence_parallel: bool = False
    schedule: PipelineSchedule | None = None
    chunks: int = 1
    offload: CPUOffload = CPUOffload.NONE
    strategy: AbstractStrategy | None = None
    method: Method | None = None
    shared: bool = False
    dispatch: str | None = None

    def degree(self, axis: str) -> int:
        """Ranks of a mesh axis."""
        return dict(self.degrees).get(axis, 1)

    @property
    def mesh(self) -> dict[str, int]:
        """The degrees, `data` always among them, and `fsdp` where parameters rest over it and `context`."""
        there = {"data": 1, **({"fsdp": 1} if self.shared else {}), **dict(self.degrees)}
        return {axis: there[axis] for axis in AXES if axis in there}

    def plan(self, precision: Any = None) -> Plan:
        """The plan to hand to `ax.parallelize`."""
        pipe = None
        if self.schedule is not None:
            pipe = Pipelined(schedule=self.schedule, num_microbatches=self.microbatches, chunks=self.chunks)
        return Plan(
            mesh=MeshShape(**self.mesh),
            fsdp=self.strategy or (Shard(stage=self.stage) if self.stage else Replicate()),
            context=Context() if self.method is None else Context(method=self.method, shard=self.shared),
            pipe=pipe,
            precision=precision,
            accumulate=1 if pipe else self.microbatches,
            remat=self.remat,  # pyright: ignore[reportArgumentType]
            offload=self.offload,
        )

    def model(self, config: TransformerConfig) -> TransformerConfig:
        """The model with its layers split as this candidate needs."""
        grid = any(axis in ("row", "col", "depth") for axis, _ in self.degrees)
        chosen: dict[str, Any] = {"split": "grid" if grid else "tensor", "sequence_parallel": self.sequence_parallel}
        if self.dispatch is not None and config.experts is not None:
            dispatch: Any = self.dispatch
            chosen["experts"] = replace(config.experts, dispatch=dispatch)
        # A pipeline cuts between blocks, and a scan has no place between them.
        return replace(config, scan_layers=config.scan_layers and self.schedule is None, **chosen)

    def __str__(self) -> str:
        words = [" x ".join(f"{axis} {ranks}" for axis, ranks in self.degrees) or "one device"]
        if self.stage:
            over = " over fsdp*context" if self.shared else ""
            words.append((self.strategy or Shard(stage=self.stage)).in_words("fsdp") + over)
        if self.method is not None:
            own = self.method if isinstance(self.method, str) else f"ulysses of {self.method[0]} x {self.method[1]}"
            words.append(f"attention by {own}")
        words += [f"tokens by {self.dispatch}"] if self.dispatch else []
        if self.schedule is not None:
            words.append(f"{self.schedule.value}{f' x {self.chunks} chunks' if self.chunks > 1 else ''}")
        words.append(f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}")
        words += ["sequence parallel"] if self.sequence_parallel else []
        words += [f"{self.remat} recomputation"] if self.remat else []
        words += [f"offload {self.offload.value}"] if self.offload.value != "none" else []
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
      model: the transformer.
      num_devices: how many.
      hardware: of which kind.
      global_batch: sequences per update.
      length: of a sequence.
      moments: optimizer values per parameter.
      precision: the policy's name, or a `Precision`.
      compute: the dtype that activations have.
      assumptions: of the cost model.
      memory: bytes that a plan may fill on a device.
      strategy: one of the user's own along `fsdp`; None: the stages of ZeRO.
      saves: what is assumed of failures, restarts and checkpoints.
      documents: whether rows hold several documents.
    """

    model: TransformerConfig
    num_devices: int
    hardware: Hardware
    global_batch: int
    length: int
    moments: int
    precision: Any
    compute: str | None
    assumptions: Assumptions
    memory: float
    strategy: AbstractStrategy | None = None
    saves: SaveAssumptions = SaveAssumptions()
    documents: bool = False

    @property
    def dtype(self) -> str:
        """The dtype that activations have."""
        model: Any = self.model
        return compute_dtype(model, self.compute)
