"""The configuration of a run: read, checked and merged, with the flags that change it."""

import argparse
import difflib
import inspect
import math
import os
import re
import stat
import textwrap
import typing
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import yaml
from jsonargparse import SUPPRESS, ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace, get_loader

from axonml_jax.base import AXIS_SYNONYMS, KEYS, NO_AXIS, SAME_KEYS, SECTIONS, meant, nearest
from axonml_jax.config.sections import (
    BYTES,
    NO_LOSS,
    OTHERS,
    CheckpointConfig,
    Choice,
    ContextConfig,
    DataConfig,
    DiLoCoConfig,
    EmaConfig,
    FinetuneConfig,
    LoraConfig,
    LossConfig,
    MeshConfig,
    OptimConfig,
    OwnModel,
    PipelineConfig,
    PlanConfig,
    SpikesConfig,
    at_least,
    memory_size,
    or_left_out,
    unusable,
    values_of,
)
from axonml_jax.data.sources import KINDS
from axonml_jax.layers.options import LatentConfig, RopeScaling
from axonml_jax.mesh.axes import BATCH_AXES
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.planner.hardware import HARDWARE, Hardware

if TYPE_CHECKING:
    from axonml_jax.parallel.plan import Plan


# --------------------------------------------------------------------------------------------------
# Settings of a configuration that do not fit the degrees of its mesh.
# --------------------------------------------------------------------------------------------------

_SPLIT_BY = {"tensor": ("tensor",), "grid": ("row", "col", "depth")}
"""The mesh axes over which a model's layers split, by `model.split`."""

_SIZES = {
    "query heads": "model.num_heads",
    "key and value heads": "model.num_kv_heads",
    "features": "model.hidden_size",
    "inner features": "model.mlp_hidden_size",
    "words": "model.vocab_size",
    "experts": "experts.num_experts",
    "positions": "data.length",
}
"""The settings of the sizes that must divide."""


def against_mesh(
    mesh: MeshConfig, plan: PlanConfig, over_context: bool, model: TransformerConfig | None, length: int | None
) -> Iterator[str]:
    """Yield a problem for every setting that has no effect on the mesh, or cannot run on it.

    Args:
      mesh, plan, model: the sections; no model: the user's own, of which nothing is known.
      over_context: whether parameters rest sharded over `context` too.
      length: of a training example; None: not known, for data of the user's own.
    """
    if over_context and mesh.context > 1 and plan.sharding_strategy == "no_shard":
        yield "context.shard=true shards as plan.sharding_strategy says, which is no_shard: use another, or context.shard=false"
    if mesh.fsdp == 1 and not (over_context and mesh.context != 1):
        unused = {"sharding_strategy": plan.sharding_strategy, "prefetch": plan.prefetch}
        unused |= {"wire": plan.wire, "reduce_wire": plan.reduce_wire}
        for name, value in unused.items():
            if value:
                remedy = f"set mesh.fsdp{or_left_out('plan', plan, [name])}"
                yield f"plan.{name}={value} has no effect while mesh.fsdp=1 splits nothing: {remedy}"
    if model is not None:
        yield from against_split(mesh, model, length)
    if plan.sync_strategy == "no_sync" and plan.precision == "fp16":
        yield "plan.precision=fp16 with sync_strategy=no_sync would need a loss scale per rank: use bf16"


def against_split(mesh: MeshConfig, model: TransformerConfig, length: int | None) -> Iterator[str]:
    """Yield a problem for every degree that splits nothing of the model, and every size that the degrees do not divide.

    Args:
      mesh, model: the sections; a degree of -1 is not looked at.
      length: of a training example; None: not known.
    """
    degrees, split = mesh.degrees, model.split
    for other, axes in _SPLIT_BY.items():
        for axis in axes:
            if other != split and degrees.get(axis, 1) > 1:
                yield f"mesh.{axis}={degrees[axis]} splits nothing while model.split={split}: set model.split={other}"
    if mesh.expert != 1 and model.experts is None:
        yield f"mesh.expert={mesh.expert} splits experts, and the model has none: set experts.num_experts"
    axes = (*_SPLIT_BY[split], "expert") if model.experts is not None else _SPLIT_BY[split]
    own = {axis: ranks for axis in axes if (ranks := degrees.get(axis, 1)) > 1}
    if own:
        yield from _indivisible(model, (length or model.max_length) // max(mesh.context, 1), own)


def _indivisible(model: Any, length: int, own: dict[str, int]) -> Iterator[str]:
    """Yield the model's sizes that its degrees do not divide, with degrees that would work."""
    from axonml_jax.cost.decoder import problems

    over = lambda degrees: problems(model, degrees, length)
    if not (found := over(own)):
        return
    legal = {
        axis: " or ".join(str(other) for other in range(1, 2 * ranks) if not over({**own, axis: other}))
        for axis, ranks in own.items()
    }
    remedies = [f"mesh.{axis} {degrees}, or" for axis, degrees in legal.items() if degrees]
    sizes = [setting for word, setting in _SIZES.items() if re.search(rf"\d {word} ", "; ".join(found))]
    given = ", ".join(f"mesh.{axis}={ranks}" for axis, ranks in own.items())
    yield f"{given}: {'; '.join(found)}: use {' '.join(remedies)} other values of {' and '.join(sizes)}"


# --------------------------------------------------------------------------------------------------
# Finding a configuration file: shipped configurations by their names, and the nearest file where there is none.
# --------------------------------------------------------------------------------------------------

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_configs() -> dict[str, Path]:
    """The configurations shipped with the package, by name, such as `quickstart` and `plans/llama3_8b_v5p_512`."""
    tree = _PACKAGE.parent
    folders = [*([tree / "configs"] if (tree / "pyproject.toml").is_file() else []), _PACKAGE / "configs"]
    files = ((folder, file) for folder in folders for file in sorted(folder.rglob("*.yaml")))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for folder, file in files}


def shipped_config(name: str) -> Path | None:
    """Find a shipped configuration by its name, or its path in the repository (`configs/quickstart.yaml`)."""
    return shipped_configs().get(_as_shipped(name))


def _as_shipped(name: str) -> str:
    return PurePosixPath(name).as_posix().removeprefix("configs/").removesuffix(".yaml")


def not_a_file(path: Path) -> str | None:
    """Describe what is at a path if it is not a regular file; None for a file, or nothing.

    Opening a FIFO would wait for a writer.
    """
    if not path.exists() or path.is_file():
        return None
    return "a folder" if path.is_dir() else KINDS.get(stat.S_IFMT(path.stat().st_mode), "no regular file")


def nearest_file(path: Path) -> Path | None:
    """The file in the same folder with the most similar name; None if none is similar."""
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return path.parent / near[0] if near else None


# --------------------------------------------------------------------------------------------------
# Flags of `train` and `explain` that are no keys of a configuration: they are parsed before it, and its help lists them.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits of a step's memory and traffic.

    Attributes:
      check: the file of a baseline, which memory and traffic may not exceed.
      tolerance: the share by which they may exceed it all the same; 0.1 is 10 %.
      max_memory: the bytes that a device may hold.
      write_baseline: the file to write as a baseline.
      force: train even what cannot fit.
    """

    check: Path | None = None
    tolerance: float = 0.0
    max_memory: float | None = None
    write_baseline: Path | None = None
    force: bool = False


def budget_parser(command: str) -> argparse.ArgumentParser:
    """The parser of the flags of `train` or `explain` that make a `Budget`."""
    parser = argparse.ArgumentParser(prog=f"axonml-jax {command}", add_help=False, allow_abbrev=False)
    of_device = "bytes that a device may hold, as in 16GiB"
    if command == "train":
        parser.add_argument(
            "--max-memory", type=memory_size, metavar="SIZE", help=f"{of_device}: refuse what needs more"
        )
        parser.add_argument("--force", action="store_true", help="train even what does not fit")
        return parser
    parser.add_argument("--max-memory", type=memory_size, metavar="SIZE", help=f"{of_device}: exit with 4 beyond it")
    parser.add_argument("--check", type=Path, metavar="FILE", help="a baseline: exit with 4 when a step costs more")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="by which share it may (default: 0)")
    parser.add_argument("--write-baseline", type=Path, metavar="FILE", help="write what a step costs as a baseline")
    return parser


def imports_parser(command: str) -> argparse.ArgumentParser:
    """The parser of `--allow-imports` alone."""
    parser = argparse.ArgumentParser(prog=f"axonml-jax {command}", add_help=False, allow_abbrev=False)
    add_imports(parser)
    return parser


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Add `--allow-imports`, the packages that a configuration may import, to a parser."""
    parser.add_argument(
        "--allow-imports",
        type=lambda words: words.split(","),
        action="extend",  # each refusal names a flag to add
        default=[],
        metavar="PACKAGES",
        help="packages, with commas, that the configuration's class_paths may import: their code is run",
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What `explain` prints or draws of a step beside its ledger.

    Attributes:
      hardware: the hardware that the step is priced on, a name of the planner's table.
      picture: the file in which memory and traffic are drawn, and with `hardware` the timeline.
    """

    hardware: str | None = None
    picture: Path | None = None

    @property
    def kind(self) -> Hardware | None:
        """The hardware to price the step on."""
        return None if self.hardware is None else HARDWARE[self.hardware]


def _hardware(name: str) -> str:
    return meant("hardware", name, HARDWARE)


def estimate_parser() -> argparse.ArgumentParser:
    """The parser of the flags of `explain` that make an `Estimate`."""
    parser = argparse.ArgumentParser(prog="axonml-jax explain", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--hardware",
        choices=list(HARDWARE),
        type=_hardware,
        help=f"price a step on one of {', '.join(HARDWARE)}, with its timeline",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw memory, traffic and, with hardware, the timeline"
    )
    return parser


def split_flags(
    parsers: Sequence[argparse.ArgumentParser], argv: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The values of every parser's flags, and the arguments that are left for the configuration."""
    found, rest = [], list(argv)
    for parser in parsers:
        values, rest = parser.parse_known_args(rest)
        found.append(vars(values))
    return found, rest


def help_of(parsers: Sequence[argparse.ArgumentParser]) -> str:
    """A sentence that lists the flags with their help."""
    actions = [action for parser in parsers for action in parser._actions]
    return f"Beside the keys there are {'; '.join(map(_told, actions))}."


def _told(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or 'NAME'}"
    return f"{action.option_strings[0]}{value}: {action.help}"


# --------------------------------------------------------------------------------------------------
# A setting that is a mapping or a list of mappings: taken as it is written, so that reading it imports and makes
# nothing.
# --------------------------------------------------------------------------------------------------


class NotPlain(argparse.ArgumentTypeError, ValueError):
    """Raised for a value that YAML could not hold, or that does not have the setting's type."""


class Structure:
    """A parser type for settings that may describe objects: the parser would import a `class_path` by itself.

    Args:
      kind: the type of the setting; `is_structure` is true of it.
      words: the type as people write it, for messages.
    """

    def __init__(self, kind: Any, words: str):
        self._kinds = typing.get_args(kind) if typing.get_origin(kind) not in (dict, list) else (kind,)
        self._words = words

    def __call__(self, value: Any) -> Any:
        """Convert a value to plain types; text from a command line is read as YAML.

        Raises:
          NotPlain: for a value of another type than the setting's.
        """
        found = as_yaml(value) if isinstance(value, str) else value
        if not any(_fits(found, kind) for kind in self._kinds):
            raise NotPlain(f"Given value: {value}")
        return plain(float(found) if isinstance(found, int) else found)

    def __repr__(self) -> str:
        return self._words


def is_structure(kind: Any) -> bool:
    """Whether a setting of this type may hold any value, and so descriptions of objects.

    >>> is_structure(list[dict[str, Any]] | None), is_structure(dict[str, float])
    (True, False)
    """
    return kind is Any or any(is_structure(part) for part in typing.get_args(kind))


def plain(value: Any) -> Any:
    """Copy a value into YAML's types: text, numbers, booleans, null, lists, and mappings with such keys.

    >>> plain({"boundaries": {10: 0.5}, "paths": ("a", "b")})
    {'boundaries': {10: 0.5}, 'paths': ['a', 'b']}

    Raises:
      NotPlain: for anything else.
    """
    if isinstance(value, Mapping):
        return {plain(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise NotPlain(f"Given value: {value!r}, a {type(value).__name__}")


def as_yaml(text: str) -> Any:
    """Parse a flag's text as YAML, with numbers as people write them; text that is not YAML stays text."""
    try:
        return get_loader("yaml")(text)
    except (yaml.YAMLError, ValueError):  # a tag whose text is none of its kind
        return text


def names_in(value: Any) -> tuple[str, ...] | dict[str, tuple[str, ...] | str] | None:
    """Read a list of names, or a mapping to names, from a value or a flag's text; None for anything else.

    >>> names_in("[attn_out]"), names_in({"blocks/0": ["host:input"], "head": "full"}), names_in("[1]"), names_in("text")
    (('attn_out',), {'blocks/0': ('host:input',), 'head': 'full'}, None, None)
    """
    found = as_yaml(value) if isinstance(value, str) else value
    if not isinstance(found, Mapping):
        return _names(found)
    inside = {name: each if isinstance(each, str) else _names(each) for name, each in found.items()}
    known = {name: each for name, each in inside.items() if each is not None}
    return known if len(known) == len(inside) else None


def _names(value: Any) -> tuple[str, ...] | None:
    are_names = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    return tuple(value) if are_names else None


def _fits(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(each, *typing.get_args(kind)) for each in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return value is None and kind is type(None)


# --------------------------------------------------------------------------------------------------
# Which packages a configuration may import: `optax`, and those that the user names. Nothing is imported here.
# --------------------------------------------------------------------------------------------------

ALWAYS = frozenset({"optax"})
"""Packages that a configuration may import without `--allow-imports`."""

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def is_named(value: Any) -> bool:
    """Whether a value of a configuration describes an object."""
    return isinstance(value, Mapping) and "class_path" in value


def named_paths(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, class_path) of every object that a value describes, including nested arguments.

    >>> [*named_paths({"class_path": "optax.sgd", "init_args": {"learning_rate": {"class_path": "a.b"}}}, "optim")]
    [('optim.class_path', 'optax.sgd'), ('optim.init_args.learning_rate.class_path', 'a.b')]
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            at = f"{key}.{name}" if key else str(name)
            if name == "class_path" and inner is not None:
                yield at, inner
            else:
                yield from named_paths(inner, at)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from named_paths(inner, f"{key}[{number}]")


def import_problems(value: Any, allowed: Collection[str]) -> list[str]:
    """A problem for every object whose package is not allowed, with the flag that allows it. Imports nothing.

    >>> import_problems({"model": {"class_path": "mine.Net"}}, {"optax"})
    ["model.class_path=mine.Net: imports the package 'mine', which runs its code; if you trust it, add --allow-imports mine"]
    """
    problems = []
    for key, path in named_paths(value):
        if not isinstance(path, str) or not _DOTTED.fullmatch(path):
            problems.append(f"{key}={path}: must be the dotted path of a class or function, such as optax.adafactor")
        elif (package := path.partition(".")[0]) not in ALWAYS | set(allowed):
            problems.append(
                f"{key}={path}: imports the package {package!r}, which runs its code; if you trust it, add "
                f"--allow-imports {package}"
            )
    return problems


# --------------------------------------------------------------------------------------------------
# What a training run is made of, as frozen values: the sections and keys of a configuration file.
#
# Nothing here imports JAX, so that help and wrong keys are answered at once.
# --------------------------------------------------------------------------------------------------

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
    """The length of training, its batch size, and when to evaluate and log.

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
      check: before the first step compare loss, metrics and gradients of its batch under the plan with those of one device,
        which must hold the model and the batch; where they differ the run ends with status 5, naming what does.
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
    check: bool = False
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
    """The text that the trained model writes at the end.

    Attributes:
      count: number of texts; 0 writes none.
      length: bytes to write after the prompt.
      prompt: how each text begins; null: with a few words of the validation text.
      temperature: divides the logits; 0 takes the most likely byte.
    """

    count: int = 2
    length: int = 200
    prompt: str | None = None
    temperature: float = 0.7

    def __post_init__(self):
        at_least("sample", self, ["prompt is empty"] * (self.prompt == ""), count=0, length=1, temperature=0)


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What a run writes to disk and to trackers.

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
    """The configuration of a training run.

    Attributes:
      name: of the run and its folder.
      profile: write a profiler trace of a few steps into the run's folder.
      resume: go on with an earlier run: auto (the newest of this name that has checkpoints, or else a new one) or the
        folder of one; null starts a new one.
      callbacks: callbacks of your own, each a class_path with init_args (see `ax.Callback`).
      model: the transformer, or a model of your own.
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
            yield "train.weights is for the library's transformer, but model.class_path names a model of your own"
        if self.loss.class_path is None and self.data.class_path is not None:
            yield "loss.class_path: a model of your own on data of your own needs a loss, a function (model, batch)"

    @property
    def own(self) -> bool:
        """Whether the model or the data is the user's own, so that nothing is known of tokens."""
        return isinstance(self.model, OwnModel) or self.data.class_path is not None

    def transformer_for(self, command: str) -> TransformerConfig:
        """The transformer's configuration, for a command that supports no other model.

        Raises:
          ConfigError: for a model of the user's own, which this command does not support.
        """
        if isinstance(self.model, OwnModel):
            raise ConfigError(
                f"model.class_path={self.model.class_path}: {command} supports only the library's transformer; a model of "
                "your own can be trained, explained (axonml-jax explain) and evaluated (axonml-jax eval)"
            )
        return self.model

    def require_whole(self, command: str) -> None:
        """Refuse adapters, for a command that assumes that all parameters train.

        Raises:
          ConfigError: when the run has some.
        """
        if self.finetune.lora.rank is not None:
            raise ConfigError(
                f"finetune.lora.rank={self.finetune.lora.rank}: {command} assumes that all parameters train, and "
                "cannot predict what a step with adapters keeps for its backward; axonml-jax explain without more flags shows "
                "what such a step holds at rest and sends"
            )

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of every mesh axis; with context.shard `fsdp` is one of them even at 1."""
        return self.mesh.degrees | ({"fsdp": self.mesh.fsdp} if self.context.shard else {})

    def build_plan(self) -> "Plan":
        """The plan of the run."""
        plan = replace(self.plan.build(), context=self.context.build())
        return plan if self.mesh.pipe == 1 else replace(plan, pipe=self.pipeline.build())


# --------------------------------------------------------------------------------------------------
# YAML text as plain values: what would unfold without end, or of which a parser would silently take half, is refused.
# --------------------------------------------------------------------------------------------------

MOST_BYTES = 2**18
"""The longest text that is parsed, in bytes; PyYAML reads about 200 kB a second."""

_MOST_VALUES = 20_000
_DEEPEST = 50
_LONGEST_NUMBER = 400
_TOO_LONG = f"it is longer than {MOST_BYTES:,} bytes"


class NotYaml(ValueError):
    """Raised for text that is not YAML, or not YAML that a configuration may be."""


def plain_yaml(text: str) -> Any:
    """Parse a YAML document.

    Args:
      text: the document.

    Raises:
      NotYaml: for text that is not YAML; for a key that stands twice in a mapping, an anchor that holds itself, too long a
        number, and for more values (counted as often as aliases repeat them) or a deeper nest than any configuration has.

    >>> plain_yaml("train: {steps: 10}")
    {'train': {'steps': 10}}
    """
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise NotYaml(_TOO_LONG)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _size(root, {}, ())
        return loader.construct_document(root)
    except RecursionError as error:
        raise NotYaml(f"it is nested deeper than {_DEEPEST} levels") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date or a number that is none
        raise NotYaml(" ".join(str(error).split())) from error


def yaml_in(path: Path) -> Any:
    """Parse a YAML file; larger files than a configuration may be are not read in full.

    Raises:
      NotYaml: as by `plain_yaml`; for a folder, a FIFO or anything else that is no regular file.
      UnicodeDecodeError: for a file that is not text in UTF-8.
      OSError: for a file that cannot be read.
    """
    if kind := not_a_file(path):
        raise NotYaml(f"it is {kind}, not a file")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise NotYaml(_TOO_LONG)
    return plain_yaml(content.decode("utf-8"))


def _size(node: yaml.Node, sizes: dict[int, int], above: tuple[int, ...]) -> int:
    """The number of values in a node, including those that aliases repeat."""
    line = f"line {node.start_mark.line + 1}"
    if id(node) in above:
        raise NotYaml(f"{line}: an anchor that holds itself")
    if len(above) >= _DEEPEST:
        raise NotYaml(f"{line}: it is nested deeper than {_DEEPEST} levels")
    if id(node) not in sizes:
        inside, inner = (*above, id(node)), node.value
        if isinstance(node, yaml.MappingNode):
            _refuse_twins(node)
            inner = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.ScalarNode):
            inner = ()
            if node.tag.endswith((":int", ":float")) and len(node.value) > _LONGEST_NUMBER:
                raise NotYaml(f"{line}: a number of {len(node.value)} digits")
        sizes[id(node)] = 1 + sum(_size(each, sizes, inside) for each in inner)
    if sizes[id(node)] > _MOST_VALUES:
        raise NotYaml(f"{line}: it holds more than {_MOST_VALUES:,} values, aliases unfolded")
    return sizes[id(node)]


def _refuse_twins(mapping: yaml.MappingNode) -> None:
    """Refuse a key that occurs twice: YAML forbids it, but PyYAML takes the last."""
    seen = set()
    for key, value in mapping.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in seen:
                said = f"line {key.start_mark.line + 1}: the key {key.value!r:.60} stands twice"
                sections = isinstance(value, yaml.MappingNode)
                raise NotYaml(said + f": join both under one `{key.value:.60}:`" * sections)
            seen.add((key.tag, key.value))


# --------------------------------------------------------------------------------------------------
# Machines that may come and go (`launch --nnodes MIN:MAX`): what a run needs for it, and its batch on fewer of them.
# --------------------------------------------------------------------------------------------------

MACHINES = "AXONML_JAX_MACHINES"
"""The variable by which the launcher says how many machines there may be."""


@dataclass(frozen=True)
class Machines:
    """The range of the number of machines of a job.

    Attributes:
      smallest, largest: the least and the most machines.
      unit: the number of machines that come and go together.
    """

    smallest: int
    largest: int
    unit: int = 1

    def text(self) -> str:
        """The range as the environment variable has it.

        >>> Machines(2, 6, 2).text(), Machines.parse("2:6:2") == Machines(2, 6, 2)
        ('2:6:2', True)
        """
        return f"{self.smallest}:{self.largest}:{self.unit}"

    @staticmethod
    def parse(text: str) -> "Machines":
        """The inverse of `text`."""
        return Machines(*map(int, text.split(":")))

    @property
    def counts(self) -> range:
        """Every number of machines in the range."""
        return range(self.smallest, self.largest + 1, self.unit)


def machines_of(environ: Mapping[str, str]) -> tuple[Machines, int] | None:
    """The range of machines of this process's job and their current number; None if the number is fixed."""
    text = environ.get(MACHINES)
    return None if text is None else (Machines.parse(text), int(environ["GROUP_WORLD_SIZE"]))


def for_world(config: RunConfig, machines: Machines, now: int, devices: int) -> RunConfig:
    """Adapt the run's configuration, written for the largest number of machines, to the current number.

    With `train.on_shrink` keep_batch the global batch stays and is cut into more microbatches, so that none is larger than on
    the largest number of machines; with shrink_batch a device keeps its number of rows. Nothing but the current number of
    machines decides.

    Args:
      config: as it is for the largest number of machines.
      machines: the range of the number of machines.
      now: the current number of machines.
      devices: the number of devices of all current machines.

    Raises:
      ConfigError: with everything that keeps the run from going on with another number of machines of the range.
    """
    per_machine = devices // now
    if problems := list(_problems(config, machines, per_machine)):
        raise ConfigError("\n".join(f"--nnodes {machines.smallest}:{machines.largest}: {each}" for each in problems))
    size, accumulate = config.train.global_batch_size, config.plan.accumulate
    if config.train.on_shrink == "shrink_batch":
        return replace(config, train=replace(config.train, global_batch_size=size * now // machines.largest))
    shards, most = (_shards(config, per_machine * count) for count in (now, machines.largest))
    more = microbatches(size // shards, math.ceil(accumulate * most / shards))
    return replace(config, plan=replace(config.plan, accumulate=more))


def microbatches(rows: int, least: int) -> int:
    """The smallest number of equal parts, at least `least`, into which a rank's rows can be cut.

    >>> microbatches(6, 2), microbatches(8, 3), microbatches(5, 2)
    (2, 4, 5)
    """
    return next(parts for parts in range(least, rows + 1) if rows % parts == 0)


def _problems(config: RunConfig, machines: Machines, per_machine: int) -> Iterator[str]:
    degrees, kept = config.degrees, config.checkpoint
    free = next((axis for axis, degree in degrees.items() if degree == -1), None)
    if free is None:
        yield "the mesh has a fixed number of devices: give one degree as -1, such as mesh.data=-1"
        return
    if config.plan.diloco.every is not None or config.plan.sync_strategy == "no_sync":
        name = "plan.sync_strategy=no_sync" if config.plan.diloco.every is None else "plan.diloco.every"
        yield f"with {name} every replica has parameters of its own, and those of machines that go would be lost: leave it out"
    if kept.every is None and kept.memory_every is None:
        yield "nothing is kept that the others could go on from: set checkpoint.memory_every, or checkpoint.every"
    elif kept.every is None and free != "data":
        yield (
            f"mesh.{free}=-1: with another number of machines every device has other parts of the state, and copies in memory "
            "do not fit: set checkpoint.every, to go on from the disk, or fix this degree and give mesh.data=-1"
        )
    together = math.prod(degree for axis, degree in degrees.items() if axis != free)
    if (machines.unit * per_machine) % together:
        yield (
            f"{together} devices belong together (all degrees but mesh.{free}=-1), and machines of {per_machine} come and go "
            f"by {machines.unit}: give --node-unit {math.lcm(together, per_machine) // per_machine}, and multiples of it"
        )
        return
    yield from _of_sizes(config, machines, free, per_machine, together)
    if free not in BATCH_AXES and config.train.on_shrink == "shrink_batch":
        yield f"train.on_shrink=shrink_batch: with mesh.{free}=-1 devices have as many rows on fewer machines: leave it out"
        return
    yield from _of_batch(config, machines, per_machine)


def _of_sizes(config: RunConfig, machines: Machines, free: str, per_machine: int, together: int) -> Iterator[str]:
    """Yield the model's sizes that do not divide over the open axis, for every number of machines."""
    if isinstance(config.model, OwnModel):
        return  # of which nothing is known
    length = None if config.data.class_path else config.data.length
    for count in machines.counts:
        mesh = replace(config.mesh, **{free: per_machine * count // together})
        found = list(against_split(mesh, config.model, length))
        found += config.context.problems(mesh, length) if mesh.context > 1 else []
        yield from (f"on {count} machine(s) {each}" for each in found)


def _of_batch(config: RunConfig, machines: Machines, per_machine: int) -> Iterator[str]:
    """Yield how the batch does not divide."""
    size, keeps, cut = config.train.global_batch_size, config.train.on_shrink == "keep_batch", config.plan.accumulate
    shards = {count: _shards(config, per_machine * count) for count in machines.counts}
    must = shards if keeps else {machines.largest: shards[machines.largest]}
    if wrong := {count: parts for count, parts in must.items() if size % parts}:
        said = ", ".join(f"{parts} parts on {count} machines" for count, parts in wrong.items())
        other = f"a multiple of {math.lcm(*must.values())}" + ", or train.on_shrink=shrink_batch" * keeps
        yield f"train.global_batch_size={size} does not divide into {said}: give {other}"
    elif (rows := size // shards[machines.largest]) % cut:
        yield f"plan.accumulate={cut} does not divide the {rows} row(s) of a device on {machines.largest} machines"


def _shards(config: RunConfig, devices: int) -> int:
    """The number of equal parts into which a batch is cut over so many devices, including a pipeline's microbatches."""
    fixed = math.prod(degree for degree in config.degrees.values() if degree != -1)
    degrees = {axis: devices // fixed if degree == -1 else degree for axis, degree in config.degrees.items()}
    parts = math.prod(degree for axis, degree in degrees.items() if axis in BATCH_AXES)
    return parts * (config.pipeline.num_microbatches if config.mesh.pipe > 1 else 1)


# --------------------------------------------------------------------------------------------------
# From a YAML file and the command line to a `RunConfig`: every wrong key is named with the nearest known one.
# --------------------------------------------------------------------------------------------------

_SHOWN = 20
_NOT_SETTINGS = ("help", "print_config", "config")


def read_config(command: str, argv: Sequence[str], more: str = "", imports: Collection[str] = ()) -> RunConfig:
    """Read the configuration of `axonml-jax COMMAND CONFIG [--section.key value ...]`; flags override the file.

    Args:
      command: the subcommand, for its usage text.
      argv: what follows it: the path of a file, or the name of a configuration that comes with the package, and flags.
      more: text below the help, of flags that are not keys of a configuration.
      imports: packages that the configuration may import besides optax.

    Raises:
      ConfigError: for a missing or broken file, unknown keys (each with the nearest known one), wrong types and values, and
        objects of packages that it may not import.
      SystemExit: after `--help`.
    """
    if not argv or argv[0].startswith("-"):
        if {"-h", "--help"} & set(argv):
            config_parser(command, more).parse_args(["--help"])
        raise ConfigError(f"give a configuration file first: axonml-jax {command} configs/quickstart.yaml")
    path, flags = argv[0], _with_bare_switches(argv[1:])
    if not Path(path).is_file():
        path = str(shipped_config(path) or path)
    in_file, flags = _keys_of(path), [_by_our_name(flag) for flag in flags]
    in_flags = _flags_of(flags)
    keys, named = list(in_file), list(in_flags)
    _refuse_unknown(keys, named, path)
    _refuse_imports(_nested(in_file | in_flags), imports)  # before a parser sees a value
    if own := _OWN_MODEL in {*keys, *named}:
        _refuse_of_transformer(keys, named, path)
    try:
        values = config_parser(command, more, own).parse_args(["--config", _by_our_names(path), *flags])
    except (ArgumentError, TypeError, ValueError) as error:
        raise ConfigError(_explained(str(error))) from error
    config = _build(RunConfig, values)
    _refuse_imports(as_dict(config), imports)
    return config


def as_dict(config: RunConfig) -> dict[str, Any]:
    """A configuration as the plain values of a YAML file."""
    values = plain(asdict(config))
    for section, kind in _SECTIONS.items():
        for each in fields(kind) if section else ():
            if "section" in each.metadata:  # a section of its own already
                values[section].pop(each.name, None)
    return values


class _Help(DefaultHelpFormatter):
    """A help formatter that breaks no flag at its hyphens, so that flags can be copied from the help."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent("\n".join(self._split_lines(text, width - len(indent))), indent)


def config_parser(command: str, more: str = "", own: bool = False) -> ArgumentParser:
    """The parser with a flag for every configuration key, whose help is the docstrings'.

    Args:
      command: for its usage text.
      more: text below the help.
      own: the model is the user's own: the transformer's keys are left out.
    """
    parser = ArgumentParser(
        prog=f"axonml-jax {command}",
        usage=f"axonml-jax {command} CONFIG [--section.key value ...]",
        description="CONFIG is a YAML file, or the name of one that comes with the package, such as quickstart; every key of "
        "it can be given as a flag, which wins over the file.",
        epilog=more,
        formatter_class=_Help,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help=SUPPRESS)
    groups: dict[str, Any] = {}
    for key, kind, default, text in settings():
        section, _, name = key.rpartition(".")
        if section not in groups:
            title = _SECTIONS[section].__doc__ or ""
            groups[section] = parser.add_argument_group(section or "run", title.split("\n")[0])
        if own and section == "model" and key not in _OF_OWN_MODEL:
            continue
        needed = default is MISSING and key not in _OF_OWN_MODEL
        required: dict[str, Any] = (
            {"required": True} if needed else {"default": None if default is MISSING else default}
        )
        taken = Structure(kind, _in_words(kind)) if is_structure(kind) else kind
        others = names_in if any(typing.get_origin(part) is tuple for part in typing.get_args(kind)) else None
        taken = Choice(key, kind, _in_words(kind), others) if values_of(kind) else taken
        groups[section].add_argument(f"--{key}", type=taken, help=text, metavar=name.upper(), **required)
    return parser


def settings() -> Iterator[tuple[str, Any, Any, str]]:
    """Yield every configuration key with its type, default (or `MISSING`) and help."""
    for section, cls in _SECTIONS.items():
        kinds, texts = typing.get_type_hints(cls), attribute_docs(cls)
        for each in fields(cls):
            key = f"{section}.{each.name}" if section else each.name
            if key not in _SECTIONS and "section" not in each.metadata:
                yield key, kinds[each.name], each.default, texts[each.name]
        if section == "model":
            kinds, texts = typing.get_type_hints(OwnModel), attribute_docs(OwnModel)
            yield from ((f"model.{name}", kinds[name], MISSING, texts[name]) for name in kinds)


def attribute_docs(cls: type) -> dict[str, str]:
    """The `Attributes:` of a class docstring, by name, each on one line."""
    _, _, block = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^ {2}(\w+): (.*(?:\n {4}.*)*)", block, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


_SECTIONS: dict[str, Any] = {"": RunConfig} | {
    name: TransformerConfig if name == "model" else kind
    for name, kind in typing.get_type_hints(RunConfig).items()
    if name == "model" or is_dataclass(kind)
}
_SECTIONS["finetune.lora"] = LoraConfig
_SECTIONS["plan.diloco"] = DiLoCoConfig
_OF_OWN_MODEL = ("model.class_path", "model.init_args")
_OWN_MODEL = _OF_OWN_MODEL[0]


def _keys_of(path: str) -> dict[str, Any]:
    """The keys and values that a file gives."""
    if kind := not_a_file(Path(path)):
        raise ConfigError(
            f"{path} is {kind}: give a configuration file, or the name of one that comes with the package"
        )
    if not Path(path).is_file():
        near = nearest_file(Path(path)) or nearest(_as_shipped(path), shipped_configs())
        raise ConfigError(f"no such configuration file: {path}" + (f"; did you mean {near}?" if near else ""))
    try:
        content = yaml_in(Path(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} holds no keys: give a YAML file with sections such as model and train")
    given = list(_flat(content))
    counts = Counter(key for key, _ in given)
    if twice := [key for key, count in counts.items() if count > 1]:
        raise ConfigError(f"{path} gives {', '.join(twice)} in its section and with a dot: give it once")
    return _renamed(dict(given), path)


def _renamed(given: dict[str, Any], path: str) -> dict[str, Any]:
    """Replace other names of keys by ours.

    Raises:
      ConfigError: one is given by two names.
    """
    if twice := [f"{other} and {ours}" for other, ours in SAME_KEYS.items() if other in given and ours in given]:
        raise ConfigError(f"{path} gives {', '.join(twice)}, which are one: give one of them")
    return {SAME_KEYS.get(key, key): value for key, value in given.items()}


def _by_our_names(path: str) -> str:
    """What the parser reads: the path of the file, or its text with keys by our names where it has others."""
    content = yaml_in(Path(path))
    others = {other: ours for other, ours in SAME_KEYS.items() if other in dict(_flat(content))}
    for other, ours in others.items():
        section, name = other.split(".")
        if other in content:  # as one key with a dot
            content[ours] = content.pop(other)
        else:
            content[section][ours.partition(".")[2]] = content[section].pop(name)
    return yaml.safe_dump(content) if others else path


def _by_our_name(flag: str) -> str:
    key, equals, value = flag[2:].partition("=")
    return f"--{SAME_KEYS[key]}{equals}{value}" if flag.startswith("--") and key in SAME_KEYS else flag


def _flat(content: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in _SECTIONS:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _flags_of(flags: Sequence[str]) -> dict[str, Any]:
    """The keys and values that `--key value` and `--key=value` give."""
    pairs = ((*flag[2:].partition("="), after) for flag, after in pairwise([*flags, ""]) if flag.startswith("--"))
    return {key: as_yaml(text if equals else after) for key, equals, text, after in pairs}


def keys_given(flags: Sequence[str]) -> list[str]:
    """The keys of a configuration that flags give, by our names."""
    return list(_flags_of([_by_our_name(flag) for flag in flags]))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest values by key into sections, as in a file."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (found.setdefault(section, {}) if section else found)[name] = value
    return found


def _refuse_imports(values: Any, allowed: Collection[str]) -> None:
    if problems := import_problems(values, allowed):
        raise ConfigError("\n".join(problems))


def _with_bare_switches(flags: Sequence[str]) -> list[str]:
    """Complete bare boolean flags: `--profile` becomes `--profile=true`."""
    switches = {f"--{key}" for key, kind, _, _ in settings() if kind is bool}
    pairs = pairwise([*flags, "--"])
    return [f"{flag}=true" if flag in switches and after.startswith("--") else flag for flag, after in pairs]


def _refuse_unknown(keys: Sequence[str], flags: Sequence[str], path: str) -> None:
    known = [key for key, *_ in settings()]
    strange = [key for key in keys if key not in known]
    problems = [f"unknown key {key!r} in {path}{_nearest(key, known)}" for key in strange[:_SHOWN]]
    problems += [f"and {len(strange) - _SHOWN} more"] * (len(strange) > _SHOWN)
    unknown = [flag for flag in flags if flag not in known and flag not in _NOT_SETTINGS]
    problems += [f"unknown flag --{flag}{_nearest(flag, known, '--')}" for flag in unknown]
    if problems:
        raise ConfigError("\n".join(problems))


def _refuse_of_transformer(keys: Sequence[str], flags: Sequence[str], path: str) -> None:
    """Refuse the transformer's keys beside a model of the user's own."""
    beside = dict.fromkeys(key for key in (*keys, *flags) if key.startswith("model.") and key not in _OF_OWN_MODEL)
    if beside:
        raise ConfigError(
            f"{', '.join(beside)}: the transformer's, without effect beside {_OWN_MODEL} in {path}; give your model's own "
            "arguments under model.init_args"
        )


def _nearest(key: str, known: Sequence[str], dashes: str = "") -> str:
    """A hint at the nearest known key: of the same full name, or of the same last part if the section is missing."""
    if key in _SECTIONS:
        first = next(name for name in known if name.startswith(f"{key}."))
        what = "; over which devices a model is split stands in mesh, such as mesh.fsdp" * (key == "plan")
        return f": {key} is a section, give its keys, such as {first}{what}"
    if not dashes and key in SECTIONS:
        return f": did you mean the section {SECTIONS[key]}?"
    whole, _, part = key.rpartition(".")
    if "mapping" in next((_in_words(kind) for name, kind, *_ in settings() if name == whole), ""):
        return f": give {dashes}{whole} as a mapping, '{{{part}: ...}}'"
    lasts, named = {name.rpartition(".")[2]: name for name in reversed(known)}, key.rpartition(".")[2].lower()
    if why := NO_AXIS.get(named):
        return f": {why}"
    if other := lasts.get(AXIS_SYNONYMS.get(named) or KEYS.get(named, "")):
        return f": did you mean {dashes}{other}?"
    last = difflib.get_close_matches(key.rpartition(".")[2], lasts, n=1, cutoff=0.75)
    whole = difflib.get_close_matches(key, [*known, *_SECTIONS], n=1, cutoff=0.6)
    near = lasts[last[0]] if last and "." not in key else whole[0] if whole else lasts[last[0]] if last else None
    return f": did you mean {dashes}{near}?" if near else "; --help lists all"


def _explained(message: str) -> str:
    """Rewrite jsonargparse's message on one line, with a type as people write it."""
    message = " ".join(message.split())
    found = re.match(r'(?:Parser key "|argument --)([\w.]+)"?: .*(?:Got|Given) value: (.*)', message)
    kinds = {key: kind for key, kind, *_ in settings()}
    if found is None or found[1] not in kinds:
        return message.replace('Key "', 'key "').replace("unrecognized arguments", "not understood")
    section, _, name = found[1].rpartition(".")
    return f"{found[1]}={found[2]}: must be {_in_words(kinds[found[1]])}{OTHERS.get(name, '') if section == 'optim' else ''}"


def _in_words(kind: Any) -> str:
    """A type as people write it: `one of float32, bf16, or null`."""
    parts = typing.get_args(kind)
    if kind in _WORDS:
        return _WORDS[kind]
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, parts))}"
    if typing.get_origin(kind) is tuple:
        return f"a list such as [{', '.join(_EXAMPLES[part] for part in parts)}]"
    return ", or ".join(_in_words(part) for part in parts)


_EXAMPLES = {int: "2", float: "0.9", str: "ring"}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    dict[str, Any]: "a mapping such as {key: value}",
    dict[str, float]: "a mapping such as {path: 0.5}",
    dict[str, str]: "a mapping such as {query/kernel: in out out}",
    tuple[str, ...]: "a list such as [text]",
    dict[str, tuple[str, ...] | str]: "a mapping such as {blocks: [text]}",
    list[dict[str, Any]]: "a list of mappings",
}


def _build(cls: type, values: Namespace, section: str = "") -> Any:
    """Make the dataclass from parsed values; the problems of all its sections are reported together."""
    kinds, arguments, problems = typing.get_type_hints(cls), {}, []
    if cls is RunConfig:
        own = values["model"]["class_path"] is not None
        kinds["model"] = OwnModel if own else TransformerConfig
        if not own and values["model"]["init_args"] is not None:
            problems.append("model.init_args has no effect without model.class_path")
    for each in fields(cls):
        if "section" in each.metadata:
            continue
        value, key = values[each.name], f"{section}{each.name}"
        problems += unusable(key, value)
        try:
            inside = is_dataclass(kinds[each.name])
            arguments[each.name] = _build(kinds[each.name], value, f"{key}.") if inside else value
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from error


# --------------------------------------------------------------------------------------------------
# The configurations of a run, which may change when it is resumed: which one trained what, and what differs.
#
# `config.yaml` is that of the steps made last; `config.until_00000400.yaml` another one, by which the steps up to 400
# were made.
# --------------------------------------------------------------------------------------------------

NEWEST = "config.yaml"
_EARLIER = re.compile(r"config\.until_(\d{8,})\.yaml")
_TRAINS_NOTHING = ("name", "profile", "resume", "callbacks", "output", "sample")
_NONE = "not set"


def settings_at(folder: Path, step: int) -> dict[str, Any] | None:
    """The configuration that made a step; None if the folder lacks it, or it cannot be read."""
    until = [number for number in _earlier(folder) if number >= step]
    path = _earlier(folder)[min(until)] if until else folder / NEWEST
    try:
        content = yaml_in(path)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def examples_until(folder: Path, step: int) -> int | None:
    """The number of examples that the steps up to one have drawn, batch sizes as they were; None if unknown."""
    total, before = 0, 0
    for until in [*sorted(each for each in _earlier(folder) if each < step), step]:
        try:
            total += (until - before) * int((settings_at(folder, until) or {})["train"]["global_batch_size"])
        except (KeyError, TypeError, ValueError):
            return None
        before = until
    return total


def keep_settings(folder: Path, config: RunConfig, step: int) -> None:
    """Record the configuration that makes the steps after this one; a different earlier one is kept."""
    before, now = settings_at(folder, step) if step else None, as_dict(config)
    for until, path in _earlier(folder).items():
        if until >= step:
            path.unlink()
    if before is not None and list(_different(before, now)):
        _write(folder / f"config.until_{step:08d}.yaml", before)
    _write(folder / NEWEST, now)


def changed_settings(before: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Lines that say what differs from another configuration in what matters to training, without the mesh."""
    lines = [
        f"{key}: {was}, now {value}"
        for key, was, value in _different(before, as_dict(config))
        if not key.startswith(("mesh.", "devices."))  # -1 there means whatever devices there are
    ]
    if config.optim.schedule == "cosine" and any(line.startswith("train.steps:") for line in lines):
        lines.append(f"the learning rate falls to its lowest at step {config.train.steps} now")
    return lines


def _different(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    old, new = dict(_flat_training(before)), dict(_flat_training(now))
    for key in dict.fromkeys((*new, *old)):
        if old.get(key, _NONE) != new.get(key, _NONE):
            yield key, old.get(key, _NONE), new.get(key, _NONE)


def _flat_training(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, values in settings.items():
        if section not in _TRAINS_NOTHING:
            named = ((f"{section}.{name}", value) for name, value in (values or {}).items())
            yield from ((SAME_KEYS.get(key, key), value) for key, value in named)


def _earlier(folder: Path) -> dict[int, Path]:
    found = ((_EARLIER.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _write(path: Path, settings: Mapping[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(yaml.safe_dump(dict(settings), sort_keys=False), encoding="utf-8")
    new.replace(path)
