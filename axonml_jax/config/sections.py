"""Sections of a configuration, one class each: keys, defaults, and what each refuses."""

import argparse
import json
import math
import os
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from axonml_jax.base import bytes_meant, meant
from axonml_jax.checkpoint.object_store import ObjectStore
from axonml_jax.checkpoint.retention import Retention, seconds_of
from axonml_jax.data.sources import TEXT_SUFFIXES
from axonml_jax.mesh.axes import AXES
from axonml_jax.models.config import TransformerConfig

if TYPE_CHECKING:
    from axonml_jax.model.lora import Lora
    from axonml_jax.parallel.context import Context
    from axonml_jax.parallel.plan import Plan
    from axonml_jax.pipeline.schedules import Pipelined
    from axonml_jax.strategies.diloco import DiLoCo
    from axonml_jax.strategies.strategy import AbstractStrategy


# --------------------------------------------------------------------------------------------------
# The lowest values that settings may have.
# --------------------------------------------------------------------------------------------------


def at_least(section: str, config: object, problems: list[str] | None = None, **lowest: float) -> None:
    """Refuse settings below their minimum; null is allowed.

    Args:
      section: of the configuration.
      config: the section's values.
      problems: what else is wrong with them.
      lowest: the minimum of every setting, by name.

    Raises:
      ValueError: with everything that is wrong.
    """
    problems = list(problems or ())
    for name, low in lowest.items():
        if (value := getattr(config, name)) is not None and not value >= low:
            problems.append(f"{name}={value}: must be at least {low}")
    if problems:
        raise ValueError("; ".join(f"{section}.{problem}" for problem in problems))


# --------------------------------------------------------------------------------------------------
# The section `ema` of a configuration.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An exponential moving average of the parameters, kept beside them and validated too.

    Attributes:
      decay: of the average in every update, such as 0.999; null keeps none.
    """

    decay: float | None = None

    def __post_init__(self):
        if self.decay is not None and not 0 <= self.decay < 1:
            raise ValueError(f"ema.decay={self.decay}: must be at least 0 and below 1, such as 0.999")


# --------------------------------------------------------------------------------------------------
# The sections `mesh` and `context` of a configuration.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The degree of every mesh axis; their product is the number of devices.

    Attributes:
      data: groups of devices that hold whole copies of the parameters; -1 takes all devices.
      pipe: devices along which the model's layers lie as stages (see the section pipeline).
      fsdp: ways in which parameters, gradients and optimizer state are split; 1 splits nothing, -1 takes all devices.
      expert: ways in which the experts of mixture-of-experts layers, and the batch, are split.
      context: ways in which the positions of sequences are split (see the section context).
      tensor: ways in which heads, inner widths and the vocabulary are split (Megatron); wants model.split tensor.
      row: ways in which output features of every layer are split (AxoNN); wants model.split grid, as col and depth do.
      col: ways in which input features of every layer are split.
      depth: ways in which the batch, and every matrix once more, is split.
    """

    data: int = -1
    pipe: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    row: int = 1
    col: int = 1
    depth: int = 1

    @property
    def degrees(self) -> dict[str, int]:
        """The mesh axes and their sizes."""
        inner = {name: size for name in AXES[1:] if (size := getattr(self, name)) != 1}
        return {"data": self.data} | inner


def or_left_out(section: str, config: Any, names: Collection[str] | None = None) -> str:
    """A remedy for someone who cannot change the file: the flags that undo what a section sets.

    >>> or_left_out("pipeline", PipelineConfig(num_microbatches=2))
    ', or leave it out, as a flag --pipeline.num_microbatches 8'
    """
    given = {
        f.name: f.default
        for f in fields(config)
        if f.name in (names or [f.name]) and getattr(config, f.name) != f.default
    }
    flags = " ".join(f"--{section}.{name} " + json.dumps(default).strip('"') for name, default in given.items())
    return f", or leave it out, as {'a flag' if len(given) == 1 else 'flags'} {flags}"


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """How the positions of sequences are split along mesh.context (see `ax.Context`).

    Attributes:
      method: how attention reads keys and values of other ranks: auto, gather, ulysses, ring, or [2, ring] or [2, gather] for
        Ulysses among so many ranks and the other among the rest.
      order: in which order ranks hold positions: contiguous, zigzag or striped; auto is zigzag.
      shard: parameters rest sharded over mesh.fsdp and mesh.context together, as plan.sharding_strategy says.
      allow_communication: what the code of a model of your own that sees whole sequences may send across positions besides
        attention and sums: false, as much as its attention sends; true, anything; or bytes per rank and step.
    """

    method: tuple[int, str] | str = "auto"
    order: Literal["auto", "contiguous", "zigzag", "striped"] = "auto"
    shard: bool = False
    allow_communication: bool | int = False

    def __post_init__(self):
        if isinstance(self.method, list):
            object.__setattr__(self, "method", tuple(self.method))
        try:
            self.build()
        except ValueError as error:
            raise ValueError(f"context: {error}") from error

    def build(self) -> "Context":
        """The plan's `ax.Context`."""
        from axonml_jax.parallel.context import Context

        own: dict[str, Any] = {"shard": self.shard, "allow_communication": self.allow_communication}
        return Context(method=self.method, order=self.order, **own)  # pyright: ignore[reportArgumentType]

    def problems(self, mesh: MeshConfig, length: int | None) -> Iterator[str]:
        """Yield what does not fit the mesh, or the length of sequences, if that and their order are known."""
        if mesh.context == 1 and self != ContextConfig():
            yield f"the section context has no effect while mesh.context=1: set mesh.context{or_left_out('context', self)}"
        if mesh.context > 1:
            yield from self._against_degree(mesh, length)

    def _against_degree(self, mesh: MeshConfig, length: int | None) -> Iterator[str]:
        from axonml_jax.sharding.layout import order_parts

        strategy = self.build()
        parts = order_parts(strategy.position_order, mesh.context)
        if length is not None and length % parts:
            near = " or ".join(
                str(count) for count in (length // parts * parts, (length // parts + 1) * parts) if count
            )
            yield (
                f"data.length={length} does not divide into the {parts} parts of context.order={strategy.position_order} over "
                f"mesh.context={mesh.context}: use {near}"
            )
        if not isinstance(self.method, str) and mesh.context % self.method[0]:
            yield f"context.method={list(self.method)}: {self.method[0]} must divide mesh.context={mesh.context}"


# --------------------------------------------------------------------------------------------------
# A model and a loss of one's own in a configuration: what takes the place of the section `model`, and the section
# `loss`.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A model of the user's own, instead of the transformer's keys.

    Attributes:
      class_path: a Flax model of your own by the path of its class, in place of the transformer that the other keys describe.
      init_args: its arguments, without rngs.
    """

    class_path: str
    init_args: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss, if it is not the cross entropy of the next token.

    Attributes:
      class_path: a function (model, batch), or a class whose objects are called so; null takes the cross entropy of tokens.
      init_args: its other arguments by name, or those of the class.
    """

    class_path: str | None = None
    init_args: dict[str, Any] | None = None

    def __post_init__(self):
        if self.class_path is None and self.init_args is not None:
            raise ValueError("loss.init_args has no effect without loss.class_path")


NO_LOSS = LossConfig()
"""The section `loss` of a configuration that has none."""


# --------------------------------------------------------------------------------------------------
# Which numbers and names a configuration may hold, whatever they are for.
# --------------------------------------------------------------------------------------------------

_COUNTED = 2**31 - 1
_ANY_TEXT = ("sample.prompt", "init_args")
"""Keys whose text is never a path or a name."""
_WIDER = {"data.max_bytes": 2**63 - 1, "train.seed": 2**63 - 1}


def unusable(key: str, value: Any) -> list[str]:
    """Problems of a setting's value: numbers that are not finite or too large to count, text that no name or path can hold.

    >>> unusable("optim.learning_rate", float("inf")), unusable("train.steps", 1000)
    (['optim.learning_rate=inf: must be a finite number'], [])
    >>> unusable("name", "a\\0b")
    ["name='a\\\\x00b': holds '\\\\x00', which no name or path can"]

    Args:
      key: the whole key.
      value: of any kind.
    """
    if key.endswith(_ANY_TEXT):
        return []
    if isinstance(value, str):
        return [f"{key}={value!r}: holds {bad!r}, which no name or path can" for bad in _unnameable(value)[:1]]
    if isinstance(value, Mapping):
        inside = {f"{key}.{name}": each for name, each in value.items()}
        return unusable(f"{key}'s keys", [*value]) + [line for each in inside.items() for line in unusable(*each)]
    if isinstance(value, tuple | list):
        return [line for each in value for line in unusable(key, each)]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{key}={value}: must be a finite number"]
    most = _WIDER.get(key, _COUNTED)
    if isinstance(value, int) and abs(value) > most:
        bits = {_COUNTED: 32}.get(most, 64)
        return [f"{key}={value}: must be at most {most:,}, as it is counted in {bits} bits"]
    return []


def _unnameable(text: str) -> list[str]:
    """The characters of a text that cannot be in a file name: zeros, and lone surrogates."""
    return [each for each in dict.fromkeys(text) if each == "\0" or not _encodes(each)]


def _encodes(character: str) -> bool:
    try:
        os.fsencode(character)
    except UnicodeEncodeError:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# A setting with a fixed set of values, taken however its value is spelt and by the names that others have for it.
# --------------------------------------------------------------------------------------------------


class WrongChoice(argparse.ArgumentTypeError, ValueError):
    """Raised for a value that is not one of a setting's choices."""


class Choice:
    """A parser type for a setting with choices.

    Args:
      key: of the setting; its last part is the row of the table of synonyms.
      kind: the setting's type: a Literal, alone or in a union.
      words: the type as people write it, for messages.
      others: reads a value of the union's other types, and returns None for anything else; None: no other type is taken.
    """

    def __init__(self, key: str, kind: Any, words: str, others: Callable[[Any], Any] | None = None):
        self._others = others
        self._setting = key.rpartition(".")[2]
        self._values = values_of(kind)
        self._nullable = type(None) in typing.get_args(kind)
        self._words = words

    def __call__(self, value: Any) -> Any:
        """The choice that a value means, or what `others` reads of it.

        Raises:
          WrongChoice: for any other value.
        """
        if self._nullable and value in (None, "null"):
            return None
        found = meant(self._setting, value, self._values)
        if found not in self._values:
            if self._others is not None and (other := self._others(value)) is not None:
                return other
            raise WrongChoice(f"Given value: {value}")
        return found

    def __repr__(self) -> str:
        return self._words


def values_of(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, or of the first Literal in a union; empty for any other type."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    literals = [part for part in typing.get_args(kind) if typing.get_origin(part) is typing.Literal]
    return typing.get_args(literals[0]) if literals else ()


# --------------------------------------------------------------------------------------------------
# Sizes of memory as people write them on a command line.
# --------------------------------------------------------------------------------------------------


def memory_size(text: str) -> float:
    """Parse a size in bytes, as people write it.

    >>> memory_size("16GiB") == 16 * 2**30, memory_size("80GB"), memory_size("512")
    (True, 80000000000.0, 512.0)

    Raises:
      argparse.ArgumentTypeError: for anything else.
    """
    try:
        return bytes_meant(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# --------------------------------------------------------------------------------------------------
# The section `checkpoint` of a configuration.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a run saves, in the folder `checkpoints` of its own folder.

    Attributes:
      every: save every this many steps, after the last, and when SIGTERM asks the run to stop; null saves nothing.
      keep: how many of the newest checkpoints to keep; null keeps all.
      keep_every: keep those too whose step is a multiple of this, for ever; a multiple of every.
      keep_for: keep those too that are younger than this: seconds, or a text such as 90m, 12h, 7d or 2w.
      best: keep the one with the lowest validation loss too; every must then be a multiple of train.eval_every.
      verify: read every checkpoint again from its disk before it counts and an older one is deleted.
      max_failures: that many saves in a row that a full, read-only or failing disk spoils end the run; fewer are passed over
        with a warning, and the next step that is due is saved; 1 ends it at the first.
      mirror: an object store's URL for this run, s3://bucket/path or gs://bucket/path: checkpoints are copied there, and
        resume=auto goes on from there where the run's folder is gone; null copies nothing.
      url: where the checkpoints are instead of in the run's folder: an object store's URL for this run, as of mirror; null: in
        the run's folder.
      staging: with url, the folder in which a checkpoint is made before it is sent, which all processes see; null: one below
        ~/.cache/axonml_jax.
      asynchronous: write to disk while the training goes on.
      memory_every: copy the state every this many steps to memory that outlives the processes, from which restarted ones go on;
        needs axonml-jax launch --max-restarts. null: no copies.
    """

    every: int | None = 500
    keep: int | None = 3
    keep_every: int | None = None
    keep_for: float | str | None = None
    best: bool = False
    verify: bool = False
    max_failures: int = 1
    mirror: str | None = None
    url: str | None = None
    staging: str | None = None
    asynchronous: bool = True
    memory_every: int | None = None

    def __post_init__(self):
        at_least("checkpoint", self, self._problems(), every=1, max_failures=1, memory_every=1)

    def _problems(self) -> list[str]:
        problems = []
        if self.every and self.keep_every and self.keep_every % self.every:
            problems.append(f"keep_every={self.keep_every} is no multiple of checkpoint.every={self.every}")
        try:
            seconds = None if self.keep_for is None else seconds_of(self.keep_for)
            Retention(keep=self.keep, every=self.keep_every, seconds=seconds)
        except ValueError as error:
            problems.append(str(error))
        for name, url in (("mirror", self.mirror), ("url", self.url)):
            try:
                _ = url is None or ObjectStore(url)
            except ValueError as error:
                problems.append(f"{name}: {error}")
        if self.mirror is not None and self.url is not None:
            problems.append(
                f"mirror={self.mirror} copies the run's folder, and url={self.url} keeps none there: give one"
            )
        if self.staging is not None and self.url is None:
            problems.append(f"staging={self.staging} has no effect without checkpoint.url")
        return problems

    @property
    def store(self) -> str | None:
        """The URL that holds the run's checkpoints, or copies of them."""
        return self.url or self.mirror

    def without_saves(self, resume: str | None) -> list[str]:
        """Problems of settings without effect because nothing is saved; a mirror still has one for a resumed run."""
        if self.every is not None:
            return []
        copied = self.store if resume is not None else None
        given = {"best": self.best, "verify": self.verify, "max_failures": self.max_failures != 1}
        given |= {name: copied is None and getattr(self, name) for name in ("mirror", "url", "keep_every", "keep_for")}
        found = ", ".join(f"checkpoint.{name}={getattr(self, name)}" for name, there in given.items() if there)
        rule = "no effect while checkpoint.every=null saves nothing: set checkpoint.every, or leave out what has none"
        return [f"{found}: {rule}"] if found else []

    def against_validation(self, eval_every: int | None) -> list[str]:
        """Problems with `train.eval_every`."""
        if not self.best or self.every is None or (eval_every and self.every % eval_every == 0):
            return []
        return [
            f"checkpoint.best=True compares validation losses, but checkpoint.every={self.every} is no multiple of "
            f"train.eval_every={eval_every}"
        ]

    def against_replicas(self, compare_replicas: int | None, replicas_differ: str) -> list[str]:
        """Problems with `train.compare_replicas`."""
        every = self.memory_every
        if every is None or compare_replicas is None or replicas_differ == "warn" or every % compare_replicas == 0:
            return []
        return [
            f"checkpoint.memory_every={every} is no multiple of train.compare_replicas={compare_replicas}: a copy in memory "
            "may be of replicas that differ and were not compared, and a restart would go on from it; compare before every copy"
        ]


# --------------------------------------------------------------------------------------------------
# The section `data`: what is trained on, and how it becomes examples.
# --------------------------------------------------------------------------------------------------

BYTES = "bytes"
_OF_OWN = ("class_path", "init_args", "valid", "valid_fraction", "num_workers")
_DOCUMENT_FILES = (".jsonl", ".ndjson", ".parquet")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training data: text as one stream of bytes or tokens, or documents as tokens.

    Attributes:
      path: a folder, or a file; null takes the source of the standard library of the running Python.
      format: of documents: text (every file is one), jsonl or parquet; null goes by the files' names.
      fields: of documents: the fields of a sample that are its text.
      prompt_field: the field that is given and not learned; with completion_field, in place of fields.
      completion_field: the field that is learned.
      mixture: paths of documents and their shares of the examples, in place of path.
      tokenizer: bytes, or the path of a tokenizer.json.
      end: a token to add after every document, by name.
      pack: windows cuts text, as one stream of bytes or of a tokenizer's tokens; documents lets documents share examples, none
        of which sees another; alone gives each document its own; null is documents where a setting of documents is given, or a
        tokenizer and no single text file, else windows.
      length: tokens per training example.
      max_bytes: read no more than this; null reads everything.
      valid_fraction: share kept for validation, of the bytes or of the documents.
      num_workers: processes that load batches ahead; 0 loads in this one.
      class_path: data of your own, in place of text and documents: a dataset, a dict of arrays or something to iterate over,
        by the path of the class or function that makes it.
      init_args: its arguments.
      valid: what to validate on, a class_path with init_args; null takes valid_fraction of data with a length.
    """

    path: str | None = None
    format: Literal["text", "jsonl", "parquet"] | None = None
    fields: tuple[str, ...] = ("text",)
    prompt_field: str | None = None
    completion_field: str | None = None
    mixture: dict[str, float] | None = None
    tokenizer: str = BYTES
    end: str | None = None
    pack: Literal["windows", "documents", "alone"] | None = None
    length: int = 128
    max_bytes: int | None = 8_000_000
    valid_fraction: float = 0.1
    num_workers: int = 0
    class_path: str | None = None
    init_args: dict[str, Any] | None = None
    valid: dict[str, Any] | None = None

    def __post_init__(self):
        problems = list(self._problems() if self.class_path is None else self._problems_of_own())
        if not 0 < self.valid_fraction < 1:
            problems.append(f"valid_fraction={self.valid_fraction}: must be between 0 and 1")
        at_least("data", self, problems, length=1, num_workers=0, max_bytes=2)

    @property
    def documents(self) -> bool:
        """Whether examples are packed from documents, which attention keeps apart."""
        if self.class_path is not None:
            return False
        if self.pack:
            return self.pack != "windows"
        one_text = (self.path or "").endswith(TEXT_SUFFIXES)
        return bool(self._of_documents()) or (self.tokenizer != BYTES and not one_text)

    def _of_documents(self) -> list[str]:
        """The names of given settings that only documents have."""
        found = [
            name for name in ("format", "prompt_field", "completion_field", "mixture", "end") if getattr(self, name)
        ]
        found += ["fields"] * (self.fields != ("text",))
        return found + ["path"] * (self.path or "").endswith(_DOCUMENT_FILES)

    def _problems_of_own(self) -> Iterator[str]:
        defaults = {field.name: field.default for field in fields(self)}
        for name, default in defaults.items():
            if name not in _OF_OWN and getattr(self, name) != default:
                yield f"{name} has no effect beside class_path, whose data has its own examples: leave it out"
        if self.valid is not None and self.valid_fraction != defaults["valid_fraction"]:
            yield "valid_fraction has no effect beside valid: give one"

    def _problems(self) -> Iterator[str]:
        for name in ("init_args", "valid"):
            if getattr(self, name) is not None:
                yield f"{name} has no effect without class_path"
        if self.pack == "windows" and (found := self._of_documents()):
            yield f"pack=windows cuts text as one stream, without {', '.join(found)}: leave pack out, or those"
        if (self.prompt_field is None) != (self.completion_field is None):
            yield f"prompt_field={self.prompt_field} and completion_field={self.completion_field}: give both or none"
        if self.prompt_field and self.fields != ("text",):
            yield "fields has no effect beside prompt_field and completion_field: leave it out"
        if not self.fields:
            yield "fields is empty: name the fields of a sample that are its text"
        if self.mixture is not None and self.path is not None:
            yield "path and mixture both say what to read: give one"
        for path, share in (self.mixture or {}).items():
            if not 0 < share < math.inf:
                yield f"mixture: the share of {path} is {share}: must be positive and finite"
        if self.documents and self.path is None and not self.mixture:
            tokens = ["tokenizer"] * (self.tokenizer != BYTES and not self.pack)
            asks = ", ".join(self._of_documents() + tokens) or f"pack={self.pack}"
            yield (
                f"path: documents, which {asks} asks for, are read from a path or a mixture; without them only pack=windows "
                "has a text of its own"
            )


# --------------------------------------------------------------------------------------------------
# The part `plan.diloco` of a configuration: replicas along mesh.data that join once in so many steps.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig:
    """Local steps (see `ax.DiLoCo`).

    Attributes:
      every: steps that replicas along mesh.data make by themselves before they join; null joins their gradients in every
        step, without replicas.
      lr: the outer learning rate.
      momentum: the outer Nesterov momentum.
      wire: what parameters changed by travels as bf16 or int8; null sends float32.
    """

    every: int | None = None
    lr: float = 0.7
    momentum: float = 0.9
    wire: Literal["bf16", "int8"] | None = None

    def __post_init__(self):
        problems = []
        if self.every is None:
            others = {"lr": self.lr != 0.7, "momentum": self.momentum != 0.9, "wire": self.wire is not None}
            problems = [f"{name} has no effect without every" for name, given in others.items() if given]
        at_least("plan.diloco", self, problems, every=1)
        if self.every is not None:
            self.build()

    def build(self) -> "DiLoCo":
        """The strategy that the section describes; `every` must be set."""
        from axonml_jax.strategies.diloco import DiLoCo

        assert self.every is not None
        return DiLoCo(every=self.every, lr=self.lr, momentum=self.momentum, wire=self.wire)

    def problems(self, steps: int, decay: float | None, stages: int) -> Iterator[str]:
        """Yield what does not fit `train.steps`, `ema.decay` and `mesh.pipe`."""
        if self.every is None:
            return
        if steps % self.every:
            left = steps % self.every
            yield (
                f"train.steps={steps} is no multiple of plan.diloco.every={self.every}: replicas join at the end of a round, "
                f"and the model would be without the last {left} steps; use {steps - left or self.every}"
            )
        if decay is not None:
            yield f"ema.decay={decay} with plan.diloco would average each replica by itself: leave it out"
        if stages != 1:
            yield f"mesh.pipe={stages} with plan.diloco: a pipeline's buffers have no place for outer parameters: leave one out"


# --------------------------------------------------------------------------------------------------
# The section `finetune`: what of a model trains, where it is not all of it.
# --------------------------------------------------------------------------------------------------

MATRICES = ("attention/.*kernel$", "mlp/(shared/)?(gate|up|down)(/kernel)?$")
"""The transformer's matrices of attention, of feed-forward parts and of experts, shared ones too."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters; only they train.

    Attributes:
      rank: columns of each adapter; null trains the model itself.
      alpha: the adapters' product counts alpha / rank times; null counts it once.
      targets: regular expressions of the paths of the matrices that get adapters.
      stacked: regular expressions of targets whose last two dims are a matrix and whose other dims count matrices; the
        transformer's need none.
      dims: of targets of more than two dims, by regular expressions, what each dim is (stack, in, out), such as
        {query/kernel: in out out}; most layers say it themselves.
      base: int8: the matrices that have adapters rest as int8 with a scale for every column; null: as they are.
    """

    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] = MATRICES
    stacked: tuple[str, ...] = ()
    dims: dict[str, str] | None = None
    base: str | None = None

    def __post_init__(self):
        problems = []
        if self.rank is None:
            others = {"alpha": self.alpha is not None, "targets": self.targets != MATRICES}
            others |= {"stacked": bool(self.stacked), "dims": bool(self.dims), "base": self.base is not None}
            problems = [f"{name} has no effect without rank" for name, given in others.items() if given]
        elif self.alpha is not None and not 0 < self.alpha < math.inf:
            problems = [f"alpha={self.alpha}: must be positive"]
        at_least("finetune.lora", self, problems, rank=1)
        if self.rank is not None:
            self.build(0)

    def build(self, seed: int) -> "Lora":
        """The adapters that the section describes; `rank` must be set."""
        from axonml_jax.model.lora import Lora

        assert self.rank is not None
        alpha = self.alpha or self.rank
        own: dict[str, Any] = {"targets": self.targets, "stacked": self.stacked, "base": self.base}
        own["dims"] = tuple((self.dims or {}).items())
        return Lora(rank=self.rank, alpha=alpha, seed=seed, **own)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Which of the model's parameters train."""

    lora: LoraConfig = field(default_factory=LoraConfig)


# --------------------------------------------------------------------------------------------------
# The section `optim`: what changes parameters, and how fast.
# --------------------------------------------------------------------------------------------------

NAMED_ONLY = ("name", "betas", "weight_decay")
"""Keys of the optimizers that have a name here; others take their arguments under `init_args`."""

OTHERS = {
    "name": "; any other optimizer goes under optim.class_path, such as optax.adafactor",
    "schedule": "; any other goes under optim.learning_rate as a class_path, such as optax.linear_schedule, with init_args",
}
"""What a message about a wrong choice adds, by setting: where any other optimizer or schedule is given."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning rate over time.

    Attributes:
      name: adamw (Loshchilov and Hutter 2019) or lion (Chen et al. 2023).
      class_path: any other optimizer by the path of its factory, such as optax.adafactor; null takes the named one.
      init_args: its arguments, without the learning rate; a mask is {paths: [...]}, {not_paths: [...]} or {matrices: true}.
      chain: transformations one after the other, each a class_path with init_args; null takes a single optimizer.
      groups: parameters with keys of their own, each {paths: [expressions], learning_rate: ..., ...}; the first to fit counts.
      learning_rate: the highest learning rate, or a schedule by class_path and init_args.
      warmup_steps: steps over which the learning rate rises from 0.
      schedule: after the warmup, cosine falls to a tenth at the last step; constant stays.
      weight_decay: decoupled weight decay of matrices; vectors are not decayed.
      betas: decay rates of the first and second average.
      max_grad_norm: clip gradients to this global norm; null does not clip.
    """

    name: Literal["adamw", "lion"] = "adamw"
    class_path: str | None = None
    init_args: dict[str, Any] | None = None
    chain: list[dict[str, Any]] | None = None
    groups: list[dict[str, Any]] | None = None
    learning_rate: float | dict[str, Any] = 3e-4
    warmup_steps: int = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float | None = 1.0

    def __post_init__(self):
        betas = self.betas if isinstance(self.betas, tuple) else (self.betas,)  # a group's may be anything
        two = len(betas) == 2 and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas)
        problems = [] if two else [f"betas={list(betas)}: must be two numbers, each at least 0 and below 1"]
        for name, allowed in (("name", ("adamw", "lion")), ("schedule", ("cosine", "constant"))):
            if getattr(self, name) not in allowed:  # a group's; the section's own are checked as they are read
                problems.append(f"{name}={getattr(self, name)}: must be one of {', '.join(allowed)}{OTHERS[name]}")
        if not isinstance(self.learning_rate, int | float | Mapping):
            problems.append(f"learning_rate={self.learning_rate}: must be a number or a schedule")
        for name in ("learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not value > 0:
                problems.append(f"{name}={value}: must be positive")
        at_least("optim", self, [*problems, *self._without_effect()], warmup_steps=0, weight_decay=0)

    @property
    def links(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """(key, description) of the factories that are chained; empty if the optimizer has a name."""
        if self.class_path is not None:
            return (("", {"class_path": self.class_path, "init_args": self.init_args or {}}),)
        return [(f".chain[{number}]", link) for number, link in enumerate(self.chain or ())]

    def _without_effect(self) -> list[str]:
        problems = []
        if self.class_path is not None and self.chain is not None:
            problems.append("class_path beside chain: give one of them")
        if self.init_args is not None and self.class_path is None:
            problems.append("init_args without class_path have no effect")
        if self.class_path is not None or self.chain is not None:
            problems += [
                f"{name} has no effect beside class_path or chain: give it in init_args"
                for name in NAMED_ONLY
                if getattr(self, name) != DEFAULTS[name]
            ]
        if isinstance(self.learning_rate, Mapping):
            problems += [
                f"{name} has no effect beside a learning_rate that is a schedule: give {DEFAULTS[name]}, or leave it out"
                for name in ("warmup_steps", "schedule")
                if getattr(self, name) != DEFAULTS[name]
            ]
        return problems


DEFAULTS = {field.name: field.default for field in fields(OptimConfig)}
"""The default of every key of the section `optim`."""


# --------------------------------------------------------------------------------------------------
# The section `spikes` of a configuration.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SpikesConfig:
    """The handling of a sudden rise of the loss: the run goes back to a checkpoint, and skips the batches since.

    Attributes:
      factor: a loss above this many times the median of the last ones, or one that is not finite, is a spike; null looks for
        none.
      window: steps of which the median is taken; there is no spike before as many are made.
      skip: batches to leave out beyond the one that made the spike.
      limit: how often a run goes back; at the next spike it stops.
    """

    factor: float | None = None
    window: int = 50
    skip: int = 0
    limit: int = 3

    def __post_init__(self):
        problems = [f"factor={self.factor}: must be above 1"] if self.factor is not None and not self.factor > 1 else []
        if self.factor is None and (self.window, self.skip, self.limit) != (50, 0, 3):
            problems.append("window, skip and limit have no effect while spikes.factor is null")
        at_least("spikes", self, problems, window=2, skip=0, limit=1)

    def against_checkpoints(self, checkpoint: CheckpointConfig) -> Iterator[str]:
        """Yield problems with the section `checkpoint`."""
        if self.factor is None:
            return
        if checkpoint.every is None:
            yield f"spikes.factor={self.factor} goes back to a checkpoint, but checkpoint.every=null saves none"
        elif checkpoint.keep == 1:
            yield (
                f"spikes.factor={self.factor} goes back to the last checkpoint of checkpoint.every={checkpoint.every}, which "
                "checkpoint.keep=1 deletes when a run is stopped in between: keep 2 or more"
            )


# --------------------------------------------------------------------------------------------------
# The section `plan` of a configuration, and the `ax.Plan` that it means.
# --------------------------------------------------------------------------------------------------

REDUCING = {"sync_strategy": "overlapped", "bucket_size_mb": 25.0, "comm_dtype": None}
"""The defaults of how gradients are reduced along mesh.data."""


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
      wire: parameters travel as int8 or fp8 with a scale per block when they are gathered; null sends them as they are.
      reduce_wire: parts of gradients travel as bf16 or int8 to the device that sums them in float32; int8-feedback adds what
        rounding left out to the next ones (shard_optimizer); null reduces and scatters them in their own dtype.
      offload: what rests in host memory between its uses.
      precision: float32; bf16 or fp16 (compute in it, the rest in float32; bf16 sends gradients in bfloat16 too, fp16 scales
        the loss); bf16-reduce-float32 (gradients travel in float32); bf16-reduce (they accumulate in bfloat16 too); fp8 (bf16
        with products of operands rounded to 8 bits); null leaves the model's dtypes.
      products_kept: with fp8, regular expressions of parameters' path names whose products stay; null names none.
      accumulate: microbatches per update and rank.
      remat: what the backward recomputes: full, selective (all but weight multiplications), null for nothing; or all but what
        regular expressions of names and paths find; or by unit what is kept, as memory chose it.
      memory: bytes of a device for a step (76GiB), or a share of it (0.9): what is recomputed is found so that it fits; null
        leaves it to remat.
      check_vma: let JAX check which values vary over which axes.
      kernels: auto takes this library's kernels on GPUs; xla never; interpret on any platform, slowly, to try them.
      draws: shards gives every batch shard and microbatch dropout masks of its own; rows those of one device, row by row.
      diloco: replicas along mesh.data that join once in so many steps.
    """

    sync_strategy: Literal["overlapped", "synchronous", "no_sync"] = "overlapped"
    bucket_size_mb: float = 25.0
    gradient_as_bucket_view: bool | None = None
    comm_dtype: str | None = None
    sharding_strategy: Literal["full_shard", "shard_grad_op", "shard_optimizer", "no_shard", "hybrid_shard"] | None = (
        None
    )
    prefetch: int = 0
    wire: Literal["int8", "fp8"] | None = None
    reduce_wire: Literal["bf16", "int8", "int8-feedback"] | None = None
    offload: Literal["none", "params", "optimizer_states", "full"] = "none"
    precision: Literal["float32", "bf16", "bf16-reduce", "bf16-reduce-float32", "fp16", "fp8"] | None = None
    products_kept: tuple[str, ...] | None = None
    accumulate: int = 1
    remat: Literal["full", "selective"] | tuple[str, ...] | dict[str, tuple[str, ...] | str] | None = None
    memory: str | float | None = None
    check_vma: bool = False
    kernels: Literal["auto", "xla", "interpret"] = "auto"
    draws: Literal["shards", "rows"] = "shards"
    diloco: DiLoCoConfig = field(default_factory=DiLoCoConfig)

    def __post_init__(self):
        if self.diloco.every is not None and (idle := self._idle()):
            said = ", ".join(f"plan.{name}={value}" for name, value in idle.items())
            raise ValueError(f"{said}: no gradient is reduced beside plan.diloco: leave this out")
        try:
            self.build()
        except (TypeError, ValueError) as error:
            raise ValueError(f"plan: {error}") from error

    def _idle(self) -> dict[str, Any]:
        """Settings of the gradient reduction along mesh.data that differ from their defaults."""
        return {name: found for name, value in REDUCING.items() if (found := getattr(self, name)) != value}

    def build(self) -> "Plan":
        """The plan that the section describes, without stages.

        Raises:
          ValueError, TypeError: for values that do not go together.
        """
        from axonml_jax.collectives.gradients import GradSyncStrategy
        from axonml_jax.model.loss import Precision
        from axonml_jax.parallel.plan import CPUOffload, Plan
        from axonml_jax.strategies.replicate import Replicate

        data = (
            self.diloco.build()
            if self.diloco.every is not None
            else Replicate(
                sync_strategy=GradSyncStrategy(self.sync_strategy),
                bucket_size_mb=self.bucket_size_mb,
                gradient_as_bucket_view=self.gradient_as_bucket_view,
                comm_dtype=self.comm_dtype,
            )
        )
        return Plan(
            data=data,
            fsdp=self._sharding(),
            precision=replace(Precision.of(self.precision), products_kept=self.products_kept or ()),
            offload=CPUOffload(self.offload),
            accumulate=self.accumulate,
            remat=self.remat,
            memory=self.memory,
            check_vma=self.check_vma,
            kernels=self.kernels,
            draws=self.draws,
        )

    def _sharding(self) -> "AbstractStrategy":
        from axonml_jax.strategies.shard import ShardingStrategy

        view = self.gradient_as_bucket_view
        strategy = ShardingStrategy(self.sharding_strategy or "full_shard")
        if strategy is ShardingStrategy.NO_SHARD:
            return strategy.on_axis(prefetch=self.prefetch, wire=self.wire, reduce_wire=self.reduce_wire)
        return strategy.on_axis(
            prefetch=self.prefetch,
            wire=self.wire,
            reduce_wire=self.reduce_wire,
            flat=None if view is None else not view,
        )


# --------------------------------------------------------------------------------------------------
# The section `pipeline` of a configuration.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How microbatches pass through the stages along mesh.pipe (see `ax.Pipeline`).

    Attributes:
      schedule: gpipe, 1f1b, interleaved or zero-bubble.
      num_microbatches: into how many parts the rows of a batch shard are cut.
      chunks: stages per device; interleaved wants at least 2.
      gather: with mesh.fsdp, gather a device's stages once per step, when it turns to another (chunk), or whenever one is
        used (tick).
    """

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    num_microbatches: int = 8
    chunks: int = 1
    gather: Literal["step", "chunk", "tick"] = "step"

    def __post_init__(self):
        try:
            self.build()
        except ValueError as error:
            raise ValueError(f"pipeline: {error}") from error

    def build(self) -> "Pipelined":
        """The plan's `ax.Pipelined`."""
        from axonml_jax.pipeline.schedules import Pipelined

        return Pipelined(
            schedule=self.schedule,  # pyright: ignore[reportArgumentType]  # Pipelined converts names
            num_microbatches=self.num_microbatches,
            chunks=self.chunks,
            gather=self.gather,
        )

    def problems(self, mesh: MeshConfig, plan: PlanConfig, model: TransformerConfig | None) -> Iterator[str]:
        """Yield what does not fit the rest of a configuration; `model` is None for the user's own, which is not known."""
        ranks, stages = mesh.pipe, mesh.pipe * self.chunks
        if ranks == 1:
            if self != PipelineConfig():
                yield f"the section pipeline has no effect while mesh.pipe=1: set mesh.pipe{or_left_out('pipeline', self)}"
            return
        if ranks < 1:
            yield f"mesh.pipe={ranks}: must be a positive number of devices; -1 is for data and fsdp"
            return
        if model is not None and stages > model.num_layers:
            yield (
                f"mesh.pipe={ranks} x pipeline.chunks={self.chunks} are {stages} stages for model.num_layers="
                f"{model.num_layers} blocks: use fewer stages or more layers"
            )
        elif model is not None and model.scan_layers and model.num_layers % stages:
            yield (
                f"mesh.pipe={ranks} x pipeline.chunks={self.chunks} are {stages} stages, which do not divide the "
                f"model.num_layers={model.num_layers} blocks of one loop: set model.scan_layers=false"
            )
        if plan.sync_strategy == "no_sync":
            yield f"plan.sync_strategy=no_sync trains a model per rank, but mesh.pipe={ranks} splits one model"
        try:
            self.build().timetable(ranks, self.num_microbatches * plan.accumulate)
        except ValueError as error:
            yield f"pipeline: {error}"
