"""What a training run is made of, as frozen values: the sections and keys of a configuration file.

Nothing here imports JAX, so that help and wrong keys are answered at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from axonml_jax.launch.config.against_mesh import against_mesh
from axonml_jax.launch.config.lowest import at_least
from axonml_jax.launch.config.sections.checkpoint_config import CheckpointConfig
from axonml_jax.launch.config.sections.data_config import BYTES, DataConfig
from axonml_jax.launch.config.sections.ema_config import EmaConfig
from axonml_jax.launch.config.sections.finetune_config import FinetuneConfig
from axonml_jax.launch.config.sections.mesh_config import ContextConfig, MeshConfig
from axonml_jax.launch.config.sections.optim_config import OptimConfig
from axonml_jax.launch.config.sections.own_config import NO_LOSS, LossConfig, OwnModel
from axonml_jax.launch.config.sections.pipeline_config import PipelineConfig
from axonml_jax.launch.config.sections.plan_config import PlanConfig
from axonml_jax.launch.config.sections.spikes_config import SpikesConfig
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.experts_config import ExpertsConfig
from axonml_jax.parallel.tensor.latent.latent_config import LatentConfig
from axonml_jax.parallel.tensor.megatron.rope_scaling import RopeScaling

if TYPE_CHECKING:
    from axonml_jax.parallel.plan import Plan

NUM_BYTES = 256
"""Token ids of byte-level text."""


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
class TrainConfig:
    """How long, on how much at a time, and when to look.

    Attributes:
      steps: number of updates.
      global_batch_size: examples per update over all devices.
      eval_every: validate every this many steps, besides after the last; null only then.
      eval_batches: batches of a validation, always the same ones; null takes the whole validation part.
      log_every: record loss and speed every this many steps.
      seed: of initial weights, the order of examples, dropout and samples.
      weights: folder of weights that Hugging Face's save_pretrained wrote, which a new run starts from; null: random ones.
      max_nonfinite: skip updates whose loss or gradients are not finite; after this many in a row stop, and save the step
        for inspection; null skips none.
      layer_norms: record the norms of gradients and parameters layer by layer.
      stuck_timeout: seconds without progress after which one of several processes names those that are missing and ends the
        job; null waits for ever.
      stuck_warning: seconds without progress after which one of several processes names those that are missing, and goes on
        waiting; null names nobody before the end.
      compare_replicas: compare the parameters and the optimizer's state of devices that should hold the same every this many
        steps, and at the last, bit for bit, before anything is saved; null never. checkpoint.memory_every is a multiple of it.
      replicas_differ: what happens when they differ: stop, naming devices and arrays, or warn of each device once.
      on_shrink: with launch --nnodes MIN:MAX the batch is that of MAX machines. On fewer, keep_batch keeps it and accumulates
        more; shrink_batch keeps the rows per device.
    """

    steps: int = 1000
    global_batch_size: int = 64
    eval_every: int | None = None
    eval_batches: int | None = None
    log_every: int = 10
    seed: int = 0
    weights: str | None = None
    max_nonfinite: int | None = None
    layer_norms: bool = False
    stuck_timeout: float | None = 1800.0
    stuck_warning: float | None = 20.0
    compare_replicas: int | None = None
    replicas_differ: Literal["stop", "warn"] = "stop"
    on_shrink: Literal["keep_batch", "shrink_batch"] = "keep_batch"

    def __post_init__(self):
        positive = (
            "steps",
            "global_batch_size",
            "eval_every",
            "eval_batches",
            "log_every",
            "max_nonfinite",
            "compare_replicas",
        )
        unused = self.replicas_differ == "warn" and self.compare_replicas is None
        problems = ["replicas_differ=warn has no effect while train.compare_replicas is null"] * unused
        at_least("train", self, problems, seed=0, stuck_timeout=1, stuck_warning=1, **dict.fromkeys(positive, 1))


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
      csv: write the records as a table too, metrics.csv.
      wandb: the project of Weights & Biases to log to; null logs to none. WANDB_MODE=offline keeps it on this machine.
      mlflow: the experiment of MLflow to log to; null logs to none. MLFLOW_TRACKING_URI says on which server.
      plot: draw the loss curve.
      compiled: the folder in which compiled programs are kept for later runs; auto: axonml_jax/compiled in the user's caches;
        null compiles anew.
    """

    dir: str = "runs"
    tensorboard: bool = False
    csv: bool = False
    wandb: str | None = None
    mlflow: str | None = None
    plot: bool = True
    compiled: str | None = "auto"

    def __post_init__(self):
        if "://" in self.dir:
            raise ValueError(
                f"output.dir={self.dir} is a URL, and records need a folder: give one, and checkpoint.url={self.dir} for the "
                "checkpoints"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run.

    Attributes:
      name: of the run and its folder.
      profile: write a profiler trace of a few steps into the run's folder.
      resume: go on with an earlier run: auto (the newest of this name that has checkpoints, or else a new one) or the
        folder of one; null starts a new one.
      callbacks: callbacks of one's own, each a class_path with init_args (see `ax.Callback`).
      model: the transformer, or a model of one's own.
    """

    name: str = "run"
    profile: bool = False
    resume: str | None = None
    callbacks: list[dict[str, Any]] | None = None
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    model: TransformerConfig | OwnModel
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    latent: LatentConfig = field(default_factory=LatentConfig)
    loss: LossConfig = NO_LOSS
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    spikes: SpikesConfig = field(default_factory=SpikesConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self):
        if isinstance(self.model, TransformerConfig):
            given = {"experts": self.experts.num_experts, "rope_scaling": self.rope_scaling.kind != "none"}
            given |= {"latent": self.latent.kv_rank}
            sections = {name: getattr(self, name) for name, there in given.items() if there}
            if sections:
                object.__setattr__(self, "model", replace(self.model, **sections))
        model = None if isinstance(self.model, OwnModel) else self.model
        problems = list(self._of_own_model() if model is None else self._of_transformer(model))
        length = None if self.data.class_path else self.data.length
        problems += against_mesh(self.mesh, self.plan, self.context.shard, model, length)
        # In which order ranks hold positions a model of one's own decides: `check_own` checks lengths with it.
        problems += self.context.problems(self.mesh, length if model is not None else None)
        problems += self.pipeline.problems(self.mesh, self.plan, model)
        problems += self.plan.diloco.problems(self.train.steps, self.ema.decay, self.mesh.pipe)
        problems += self.checkpoint.without_saves(self.resume)
        problems += self.checkpoint.against_validation(self.train.eval_every)
        problems += self.checkpoint.against_replicas(self.train.compare_replicas, self.train.replicas_differ)
        problems += self.spikes.against_checkpoints(self.checkpoint)
        if not self.name or "/" in self.name or self.name.startswith("."):
            problems.append(f"name={self.name!r}: must be the name of a folder")
        if problems:
            raise ValueError("; ".join(problems))

    def _of_transformer(self, model: TransformerConfig) -> Iterator[str]:
        if self.context.allow_communication is not False:
            yield "context.allow_communication has no effect on the transformer, whose code sees its rank's positions alone"
        if self.data.class_path is not None:
            return
        if self.data.tokenizer == BYTES and model.vocab_size < NUM_BYTES:
            yield f"model.vocab_size={model.vocab_size}: bytes need at least {NUM_BYTES}"
        if model.max_length < self.data.length:
            yield f"data.length={self.data.length} is above model.max_length={model.max_length}"

    def _of_own_model(self) -> Iterator[str]:
        only = {
            "experts": ExpertsConfig(),
            "rope_scaling": RopeScaling(),
            "latent": LatentConfig(),
            "sample": SampleConfig(),
        }
        for name, default in only.items():
            if getattr(self, name) != default:
                yield f"the section {name} has no effect beside model.class_path: it is the transformer's"
        if self.train.weights is not None:
            yield "train.weights are the transformer's, and model.class_path names a model of one's own"
        if self.loss.class_path is None and self.data.class_path is not None:
            yield "loss.class_path: a model of one's own on data of one's own wants a loss, a function (model, batch)"

    @property
    def own(self) -> bool:
        """Whether the model or the data are one's own, so that nothing is known of tokens."""
        return isinstance(self.model, OwnModel) or self.data.class_path is not None

    def transformer_for(self, command: str) -> TransformerConfig:
        """The transformer's configuration.

        Raises:
          ConfigError: for a model of one's own, which this cannot serve.
        """
        if isinstance(self.model, OwnModel):
            raise ConfigError(
                f"model.class_path={self.model.class_path}: {command} knows the library's transformer alone; a model of one's "
                "own is trained, explained (axonml-jax explain) and evaluated (axonml-jax eval)"
            )
        return self.model

    def require_whole(self, command: str) -> None:
        """Refuse adapters where what trains is taken for the whole model.

        Raises:
          ConfigError: when the run has some.
        """
        if self.finetune.lora.rank is not None:
            raise ConfigError(
                f"finetune.lora.rank={self.finetune.lora.rank}: {command} reckons with a model all of which trains, and "
                "what a step with adapters keeps for its backward is not predicted; axonml-jax explain without more flags says "
                "what such a step rests with and sends"
            )

    @property
    def degrees(self) -> dict[str, int]:
        """The axes of the mesh: `fsdp` among them where parameters rest sharded over it and `context` together."""
        return self.mesh.degrees | ({"fsdp": self.mesh.fsdp} if self.context.shard else {})

    def build_plan(self) -> "Plan":
        """The plan of the run."""
        plan = replace(self.plan.build(), context=self.context.build())
        return plan if self.mesh.pipe == 1 else replace(plan, pipe=self.pipeline.build())
