"""What a training run is made of, as frozen values: the sections and keys of a configuration file.

Nothing here imports JAX, so that help and wrong keys are answered at once.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from axonml_jax.launch.against_mesh import against_mesh
from axonml_jax.launch.checkpoint_config import CheckpointConfig
from axonml_jax.launch.lowest import at_least
from axonml_jax.launch.pipeline_config import PipelineConfig
from axonml_jax.models.config import TransformerConfig

if TYPE_CHECKING:
    from axonml_jax.parallel.plan import Plan

BYTES = 256
"""Token ids of byte-level text."""

_INNER_AXES = ("pipe", "fsdp", "depth", "row", "col", "tensor")
"""Mesh axes that are left out where their degree is 1."""


class ConfigError(ValueError):
    """A configuration that cannot be read or cannot run; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """The devices of this process.

    Attributes:
      simulated: number of simulated CPU devices; null uses the devices that JAX finds.
    """

    simulated: int | None = None

    def __post_init__(self):
        at_least("devices", self, simulated=1)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The degree of every mesh axis; their product is the number of devices.

    Attributes:
      data: groups of devices that hold whole copies of the parameters; -1 takes all devices.
      pipe: devices along which the model's layers lie as stages (see the section pipeline).
      fsdp: ways in which parameters, gradients and optimizer state are split; 1 splits nothing, -1 takes all devices.
      tensor: ways in which heads, inner widths and the vocabulary are split (Megatron); wants model.split tensor.
      row: ways in which output features of every layer are split (AxoNN); wants model.split grid, as col and depth do.
      col: ways in which input features of every layer are split.
      depth: ways in which the batch, and every matrix once more, is split.
    """

    data: int = -1
    pipe: int = 1
    fsdp: int = 1
    tensor: int = 1
    row: int = 1
    col: int = 1
    depth: int = 1

    @property
    def degrees(self) -> dict[str, int]:
        """The axes of the mesh."""
        inner = {name: size for name in _INNER_AXES if (size := getattr(self, name)) != 1}
        return {"data": self.data} | inner


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How the step runs on the mesh (see `ax.Plan`, `ax.DDP` and `ax.FSDP`).

    Attributes:
      sync_strategy: when gradients are averaged: inside the backward, after it, or never.
      bucket_size_mb: gradients are reduced in buckets of this many MiB.
      gradient_as_bucket_view: true reduces without a flat copy, false with one; null takes the faster on the backend.
      comm_dtype: dtype in which gradients travel, such as bfloat16; null sends them as they are.
      sharding_strategy: what is split along mesh.fsdp during a step; null is full_shard.
      prefetch: units whose parameters are gathered ahead (full_shard and hybrid_shard); each costs a unit of memory.
      offload: what rests in host memory between its uses.
      precision: float32; bf16 or fp16 (compute in it, the rest in float32; fp16 scales the loss); bf16-reduce (gradients
        are summed and sent in bfloat16 too); null leaves the model's dtypes.
      accumulate: microbatches per update and rank.
      remat: what the backward recomputes: full, selective (all but weight multiplications), or null for nothing.
      check_vma: let JAX check which values vary over which axes.
    """

    sync_strategy: Literal["overlapped", "synchronous", "no_sync"] = "overlapped"
    bucket_size_mb: float = 25.0
    gradient_as_bucket_view: bool | None = None
    comm_dtype: str | None = None
    sharding_strategy: Literal["full_shard", "shard_grad_op", "shard_optimizer", "no_shard", "hybrid_shard"] | None = (
        None
    )
    prefetch: int = 0
    offload: Literal["none", "params", "optimizer_states", "full"] = "none"
    precision: Literal["float32", "bf16", "bf16-reduce", "fp16"] | None = None
    accumulate: int = 1
    remat: Literal["full", "selective"] | None = None
    check_vma: bool = False

    def __post_init__(self):
        try:
            self.build()
        except (TypeError, ValueError) as error:
            raise ValueError(f"plan: {error}") from error

    def build(self) -> "Plan":
        """The plan."""
        from axonml_jax.launch.build_plan import build_plan

        return build_plan(self)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on, byte by byte.

    Attributes:
      path: a folder of text, or a file; null takes the source of the standard library of the running Python.
      length: bytes per training example.
      max_bytes: read no more than this; null reads everything.
      valid_fraction: share of the bytes kept for validation.
      num_workers: processes that load batches ahead; 0 loads in this one.
    """

    path: str | None = None
    length: int = 128
    max_bytes: int | None = 8_000_000
    valid_fraction: float = 0.1
    num_workers: int = 0

    def __post_init__(self):
        at_least("data", self, length=1, num_workers=0)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning rate over time.

    Attributes:
      name: adamw (Loshchilov and Hutter 2019) or lion (Chen et al. 2023).
      learning_rate: the highest learning rate.
      warmup_steps: steps over which the learning rate rises from 0.
      schedule: after the warmup, cosine falls to a tenth at the last step; constant stays.
      weight_decay: decoupled weight decay of matrices; vectors are not decayed.
      betas: decay rates of the first and second average.
      max_grad_norm: clip gradients to this global norm; null does not clip.
    """

    name: Literal["adamw", "lion"] = "adamw"
    learning_rate: float = 3e-4
    warmup_steps: int = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float | None = 1.0

    def __post_init__(self):
        problems = [f"betas={list(self.betas)}: each must be at least 0 and below 1"]
        problems *= not all(0 <= beta < 1 for beta in self.betas)
        for name in ("learning_rate", "max_grad_norm"):
            if (value := getattr(self, name)) is not None and not value > 0:
                problems.append(f"{name}={value}: must be positive")
        at_least("optim", self, problems, warmup_steps=0, weight_decay=0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, on how much at a time, and when to look.

    Attributes:
      steps: number of updates.
      global_batch_size: examples per update over all devices.
      eval_every: validate every this many steps, besides after the last; null only then.
      eval_batches: batches of a validation, always the same ones; null takes the whole validation part.
      log_every: record loss and speed every this many steps.
      seed: of initial weights, the order of examples, dropout and samples.
      max_nonfinite: skip updates whose loss or gradients are not finite; after this many in a row stop, and save the step
        for inspection; null skips none.
      stuck_timeout: seconds without progress after which one of several processes names those that are missing and ends the
        job; null waits for ever.
    """

    steps: int = 1000
    global_batch_size: int = 64
    eval_every: int | None = None
    eval_batches: int | None = None
    log_every: int = 10
    seed: int = 0
    max_nonfinite: int | None = None
    stuck_timeout: float | None = 1800.0

    def __post_init__(self):
        positive = ("steps", "global_batch_size", "eval_every", "eval_batches", "log_every", "max_nonfinite")
        at_least("train", self, seed=0, stuck_timeout=1, **dict.fromkeys(positive, 1))


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Text the trained model writes at the end.

    Attributes:
      count: number of texts; 0 writes none.
      length: bytes to write after the prompt.
      prompt: how each text begins.
      temperature: divides the logits; 0 takes the most likely byte.
    """

    count: int = 2
    length: int = 200
    prompt: str = "def "
    temperature: float = 0.7

    def __post_init__(self):
        at_least("sample", self, ["prompt is empty"] * (not self.prompt), count=0, length=1, temperature=0)


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What is left on disk.

    Attributes:
      dir: the folder in which every run gets a folder of its own, called by its name.
      tensorboard: write TensorBoard event files too.
      plot: draw the loss curve.
    """

    dir: str = "runs"
    tensorboard: bool = False
    plot: bool = True


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run.

    Attributes:
      name: of the run and its folder.
      profile: write a profiler trace of a few steps into the run's folder.
      resume: go on with an earlier run: auto (the newest of this name that has checkpoints, or else a new one) or the
        folder of one; null starts a new one.
      model: the transformer.
    """

    name: str = "run"
    profile: bool = False
    resume: str | None = None
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    model: TransformerConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self):
        problems = []
        if self.model.vocab_size < BYTES:
            problems.append(f"model.vocab_size={self.model.vocab_size}: bytes need at least {BYTES}")
        if self.model.max_length < self.data.length:
            problems.append(f"data.length={self.data.length} is above model.max_length={self.model.max_length}")
        problems += against_mesh(self)
        problems += self.pipeline.problems(self)
        problems += self.checkpoint.against_validation(self.train.eval_every)
        if not self.name or "/" in self.name or self.name.startswith("."):
            problems.append(f"name={self.name!r}: must be the name of a folder")
        if problems:
            raise ValueError("; ".join(problems))

    def build_plan(self) -> "Plan":
        """The plan of the run."""
        plan = self.plan.build()
        return plan if self.mesh.pipe == 1 else replace(plan, pipe=self.pipeline.build())
