"""What a run trains: text, documents, or a model, loss and data of the user's own."""

import functools
import inspect
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import Mesh

from axonml_jax.base import LossFn, PyTree, named_leaves
from axonml_jax.config.config import NEWEST, RunConfig, SampleConfig, is_named
from axonml_jax.config.objects import find, made_by, make, takes
from axonml_jax.config.sections import BYTES, DataConfig, LossConfig, OwnModel
from axonml_jax.data.documents import (
    DocumentEncoder,
    PackedDocuments,
    Tokenizer,
    load_tokenizer,
    row_of,
    vocabulary_offenders,
)
from axonml_jax.data.loader import DataLoader, create_dataloader
from axonml_jax.data.sampler import LoadingError, named, stack_samples
from axonml_jax.data.sources import (
    ByteWindows,
    TextSplit,
    TokenWindows,
    bigram_nats,
    load_text,
    open_dataset,
    records_beside_text,
)
from axonml_jax.data.streams import NoBatch, Stream, as_dataset, mix
from axonml_jax.facade.generate import generate
from axonml_jax.facade.trainer import ParallelModel
from axonml_jax.model.lora import LoraModel
from axonml_jax.model.loss import WeightedMean
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer, cross_entropy, router_metrics
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.plan import Plan
from axonml_jax.training.callbacks import Callback, checked

# --------------------------------------------------------------------------------------------------
# The documents of a run: read, split, tokenized and packed as the section `data` says.
# --------------------------------------------------------------------------------------------------

_DOCUMENTS_AT_ONCE = 1024


@dataclass(frozen=True)
class DocumentSplit:
    """Packed rows to train on and to validate on, from different documents.

    Attributes:
      train: the rows to train on; several sources are mixed by their shares.
      valid: the rows to validate on, by source.
      sizes: tokens to train on, and to validate on.
    """

    train: Any
    valid: tuple[PackedDocuments, ...]
    sizes: tuple[int, int]

    def checksums(self) -> dict[str, str]:
        """Fingerprints that identify the data."""
        return {"train": self.train.fingerprint, "valid": ", ".join(each.fingerprint for each in self.valid)}


def check_tokenizer(config: RunConfig) -> None:
    """Refuse a model whose vocabulary is too small, before anything is read or allocated.

    Raises:
      ImportError: the tokenizer's library is not installed.
      ValueError: there is no such tokenizer, or the model has fewer token ids.
    """
    if config.data.class_path is not None:
        return
    tokenizer = load_tokenizer(config.data.tokenizer)
    if isinstance(config.model, OwnModel):  # its vocabulary is not known
        return
    found = vocabulary_offenders(tokenizer, config.model.vocab_size, "model.vocab_size")
    if found:
        raise ValueError(f"{found[0]} (data.tokenizer={config.data.tokenizer})")


def read_documents(config: DataConfig) -> DocumentSplit:
    """Read the documents that the section `data` names, as rows.

    Raises:
      ImportError: a library for them is not installed.
      ValueError: for what cannot be read, or nothing to train or validate on.
    """
    shares = config.mixture or {str(config.path): 1.0}
    try:
        found = {path: _packed(config, path) for path in shares}
    except (ValueError, LoadingError) as error:
        raise ValueError(f"data: {error}") from error
    train, valid = [each[0] for each in found.values()], tuple(each[1] for each in found.values())
    # Named by number: each machine may keep its files elsewhere.
    numbers = [f"source {number}" for number in range(len(shares))]
    mixed = mix(dict(zip(numbers, train, strict=True)), dict(zip(numbers, shares.values(), strict=True)))
    sizes = (sum(each.num_tokens for each in train), sum(each.num_tokens for each in valid))
    return DocumentSplit(train[0] if len(train) == 1 else mixed, valid, sizes)


class FilledUp:
    """Concatenated datasets of rows, padded with empty rows to full batches, so that a validation leaves no row out.

    Args:
      parts: the rows, of documents or of windows.
      batch_size: rows of a batch.
    """

    def __init__(self, parts: Sequence[PackedDocuments | ByteWindows], batch_size: int):
        self.fingerprint = ", ".join(part.fingerprint for part in parts)
        self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-int(self._ends[-1]) // self._batch_size) * self._batch_size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`."""
        if index >= self._ends[-1]:
            first = self._parts[0]
            empty = row_of([], first.length)
            return {name: empty[name] for name in first[0]}
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - (int(self._ends[part - 1]) if part else 0)]

    def targets(self, num_batches: int) -> list[int]:
        """The number of counted targets in each of the first batches."""
        counts = [int((self[i]["targets"] >= 0).sum()) for i in range(num_batches * self._batch_size)]
        return np.reshape(counts, (num_batches, -1)).sum(axis=1).tolist()


def _packed(config: DataConfig, path: str) -> tuple[PackedDocuments, PackedDocuments]:
    """Training and validation rows of one source, whose documents are split in a fixed random order."""
    encoder = DocumentEncoder(
        tokenizer=load_tokenizer(config.tokenizer),
        fields=config.fields,
        prompt_field=config.prompt_field,
        completion_field=config.completion_field,
        end=config.end,
    )
    texts = _texts(open_dataset(path, config.format, fields=encoder.names), encoder, config.max_bytes)
    count = max(1, int(len(texts) * config.valid_fraction))
    if len(texts) <= count:
        raise ValueError(
            f"{path} holds {len(texts)} documents, too few to train and to validate on. Give more, or pack=windows, which "
            "takes text as one stream"
        )
    encode = functools.partial(_encoded, encoder)
    options = {"length": config.length, "share": config.pack != "alone"}
    return PackedDocuments(encode(texts[count:]), **options), PackedDocuments(encode(texts[:count]), **options)


def _texts(dataset: Any, encoder: DocumentEncoder, max_bytes: int | None) -> list[dict[str, str]]:
    """Samples in a fixed random order, up to the limit."""
    samples, size = [], 0
    order = np.argsort(np.random.Philox(key=np.array([0, 0], np.uint64)).random_raw(len(dataset)), kind="stable")
    for index, sample in _samples(dataset, order.tolist()):
        with named(lambda index=index: f"document {index}", None):
            texts = encoder.texts(sample)
        size += sum(len(text.encode(errors="replace")) for text in texts)
        if max_bytes is not None and size > max_bytes and samples:
            break
        samples.append(dict(zip(encoder.names, texts, strict=True)))
    return samples


def _samples(dataset: Any, order: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield samples by index, in groups if the dataset can read several at once."""
    many = getattr(dataset, "__getitems__", None)
    step = 1 if many is None else _DOCUMENTS_AT_ONCE
    for at in range(0, len(order), step):
        indices = order[at : at + step]
        others = f" and {len(indices) - 1} others" if len(indices) > 1 else ""
        with named(lambda indices=indices, others=others: f"document {indices[0]}{others}", None):
            found = [dataset[indices[0]]] if many is None else many(indices)
        yield from zip(indices, found, strict=True)


def _encoded(encoder: DocumentEncoder, samples: list[dict[str, str]]) -> list[Any]:
    return [
        each
        for at in range(0, len(samples), _DOCUMENTS_AT_ONCE)
        for each in encoder(samples[at : at + _DOCUMENTS_AT_ONCE])
    ]


# --------------------------------------------------------------------------------------------------
# Data of one's own, as a configuration names it: to train on, to validate on, and the shapes of a batch of it.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnSplit:
    """The user's own data to train and to validate on.

    Attributes:
      train: a dataset or a `Stream`.
      valid: another; None: there is nothing to validate on.
      batch: shapes of a global batch.
    """

    train: Any
    valid: Any
    batch: PyTree

    def checksums(self) -> dict[str, str]:
        """Returns what identifies each part: its fingerprint if it has one, its length if known, and the batch's shapes."""
        parts = {"train": self.train, "valid": self.valid}
        return {name: f"{_said(part)} {batch_words(self.batch)}" for name, part in parts.items()}


class SomeSamples:
    """A subset of a dataset's samples.

    Args:
      dataset: with `__len__` and `__getitem__`.
      indices: which.
    """

    def __init__(self, dataset: Any, indices: np.ndarray):
        self._dataset, self._indices = dataset, indices
        if (content := getattr(dataset, "fingerprint", None)) is not None:
            self.fingerprint = f"{content} {len(indices)} of {len(dataset)}"

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._indices[index])]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read several samples at once, if the dataset can."""
        own = self._indices[np.asarray(indices)].tolist()
        many = getattr(self._dataset, "__getitems__", None)
        return [self._dataset[i] for i in own] if many is None else many(own)


def read_own(config: DataConfig, batch_size: int) -> OwnSplit:
    """Make the data that the section `data` names; reads one sample for the shapes of a batch.

    Raises:
      ValueError: for a path or arguments that do not fit, an object that is no dataset, too few samples, an order of
        its own without `data.valid`, or a sample that is not made of numbers.
    """
    described = {"class_path": config.class_path, "init_args": config.init_args or {}}
    train = _source(described, "data")
    valid = None if config.valid is None else _source(config.valid, "data.valid")
    if valid is None and not isinstance(train, Stream):
        if hasattr(train, "order_of"):
            raise ValueError(
                f"data.class_path={config.class_path}: makes a {type(train).__name__}, whose own order of samples, with shares "
                "or repetitions, a split into training and validation samples would lose: give data.valid, a class_path and "
                "its init_args"
            )
        train, valid = _divided(train, config.valid_fraction)
    return OwnSplit(train, valid, _batch(train, batch_size, config))


def batch_words(batch: PyTree) -> str:
    """Describe the leaves of a batch with their shapes: `x [64, 28] float32, y [64] int32`."""
    leaves = {name or "batch": leaf for name, leaf in named_leaves(batch).items()}
    return ", ".join(f"{name} {list(leaf.shape)} {leaf.dtype}" for name, leaf in leaves.items())


def length_of(source: Any) -> int | None:
    """The number of samples; None if it is not known."""
    return None if source is None or isinstance(source, Stream) else len(source)


def _source(described: Mapping[str, Any], key: str) -> Any:
    """Make a described dataset or stream; a generator function is kept, to be called in every epoch."""
    if "class_path" not in described:
        raise ValueError(f"{key}={dict(described)}: must be a class_path and its init_args")
    make = made_by(described, key)
    found = make if inspect.isgeneratorfunction(find(described["class_path"], key)) else make()
    try:
        source = as_dataset(found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}.class_path={described['class_path']}: {error}") from error
    if isinstance(source, Stream) and source.once:
        raise ValueError(
            f"{key}.class_path={described['class_path']}: makes an iterator, which gives its samples once; name a generator "
            "function, or what can be iterated over again"
        )
    return source


def _divided(dataset: Any, fraction: float) -> tuple[Any, Any]:
    """Training and validation samples, split in a fixed random order."""
    count = max(1, int(len(dataset) * fraction))
    if len(dataset) <= count:
        raise ValueError(f"data: {len(dataset)} samples are too few to train and to validate on")
    order = np.argsort(np.random.Philox(key=np.array([0, 0], np.uint64)).random_raw(len(dataset)), kind="stable")
    return SomeSamples(dataset, np.sort(order[count:])), SomeSamples(dataset, np.sort(order[:count]))


def _batch(source: Any, batch_size: int, config: DataConfig) -> PyTree:
    with named(lambda: f"the first sample of data.class_path={config.class_path}", None):
        first = list(islice(_first(source), 1))
    if not first:
        raise ValueError(f"data.class_path={config.class_path}: gives no samples")
    try:
        one = stack_samples(first)
    except (TypeError, ValueError) as error:
        raise ValueError(f"data.class_path={config.class_path}: {error}") from error
    if strange := [name or "the sample" for name, leaf in named_leaves(one).items() if leaf.dtype.kind not in "biufcV"]:
        raise ValueError(
            f"data.class_path={config.class_path}: a sample must be made of numbers and arrays of numbers, but "
            f"{', '.join(strange)} is not"
        )
    kind = jax.dtypes.canonicalize_dtype
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((batch_size, *leaf.shape[1:]), kind(leaf.dtype)), one)


def _first(source: Any) -> Iterator[Any]:
    yield from source.open() if isinstance(source, Stream) else [source[0]]


def _said(source: Any) -> str:
    content = getattr(source.source if isinstance(source, Stream) else source, "fingerprint", None)
    return f"{content} {length_of(source)}"


# --------------------------------------------------------------------------------------------------
# Callbacks of one's own, as a configuration names them.
# --------------------------------------------------------------------------------------------------


def own_callbacks(described: Sequence[Mapping[str, Any]] | None, more: Sequence[Callback] = ()) -> tuple[Callback, ...]:
    """Make the callbacks that the key `callbacks` names, and append more.

    Raises:
      ValueError, TypeError: for a callback that cannot be made, or an object that is none.
    """
    if strange := [each for each in described or () if not is_named(each)]:
        raise ValueError(f"callbacks: {strange[0]}: each must be a class_path and its init_args")
    return checked([*(make(each, f"callbacks[{number}]") for number, each in enumerate(described or ())), *more])


# --------------------------------------------------------------------------------------------------
# The loss of a run: the user's own, the transformer's, or the cross entropy of a model's logits.
# --------------------------------------------------------------------------------------------------


def logits_loss(model: Any, batch: PyTree) -> WeightedMean:
    """Mean cross entropy in nats of the next token, of a model that is called with tokens and returns logits [..., vocabulary].

    Further fields of the batch (`segment_ids`, `positions`) are passed to the model as keyword arguments.
    """
    more = {name: value for name, value in batch.items() if name not in ("tokens", "targets")}
    logits = model(batch["tokens"], **more)
    return WeightedMean(*cross_entropy(logits.astype(jnp.float32), batch["targets"]))


def own_loss(config: LossConfig) -> Callable[[Any, PyTree], Any]:
    """The function (model, batch) that a configuration names.

    Raises:
      ValueError: for a path or arguments that do not fit (see `named_object`).
      TypeError: when it cannot be called with a model and a batch.
    """
    path = config.class_path
    assert path is not None
    value = {"class_path": path, "init_args": config.init_args or {}}
    found = find(path, "loss.class_path")
    loss = made_by(value, "loss")() if inspect.isclass(found) else made_by(value, "loss", leaving=2)
    try:
        inspect.signature(loss).bind(object(), object())
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"loss.class_path={path}: must be a function (model, batch), or a class whose objects are called so, but {error}"
        ) from None
    return loss


# --------------------------------------------------------------------------------------------------
# A Flax model of one's own, as a configuration names it: checked from shapes, its parameters made where they will rest.
# --------------------------------------------------------------------------------------------------

_KEY = "model"


@dataclass(frozen=True)
class Buildable:
    """What `ax.parallelize` accepts: a model or a function that makes one, and for Linen one that makes its variables."""

    model: Any
    params: Callable[[], PyTree] | None = None


def own_model(config: OwnModel, loss_fn: LossFn, batch: PyTree, seed: int) -> Buildable:
    """Make the model that a configuration names, without allocating its arrays.

    An NNX class is called with `rngs` beside its arguments, if it takes them. A Linen module is initialized by calling the loss
    on one example, so that all submodules the loss calls get their variables.

    Args:
      config: its path and arguments.
      loss_fn: `loss_fn(model, batch)`.
      batch: shapes of a global batch.
      seed: of the first weights.

    Raises:
      ValueError: for a path or arguments that do not fit (see `named_object`).
      TypeError: when it makes no Flax model.
    """
    make = made_by({"class_path": config.class_path, "init_args": config.init_args or {}}, _KEY)
    own_rngs = "rngs" in (config.init_args or {}) or not takes(make.func, "rngs")
    build = make if own_rngs else lambda: make(rngs=nnx.Rngs(seed))
    found: list[Any] = []
    jax.eval_shape(lambda: found.append(build()))
    if isinstance(found[0], nnx.Module):
        return Buildable(build)
    if isinstance(found[0], linen.Module):
        return Buildable(module := build(), partial(_variables, module, loss_fn, batch, seed))
    raise TypeError(
        f"{_KEY}.class_path={config.class_path}: makes a {type(found[0]).__name__}, which is no Flax model: give a "
        "flax.nnx.Module, a flax.linen.Module, or a function that makes one"
    )


class Initializing:
    """A Linen module inside `init`, which a loss calls like a step's bound model.

    Attributes:
      is_training: as in a step.
    """

    is_training = True

    def __init__(self, module: linen.Module):
        self._module = module

    def __call__(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """Call the module, or one of its methods."""
        if method is None:
            return self._module(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        if isinstance(method, str):
            return getattr(self._module, method)(*args, **kwargs)
        return method(self._module, *args, **kwargs)


def _variables(module: linen.Module, loss_fn: LossFn, batch: PyTree, seed: int) -> PyTree:
    """Initialize a Linen module's variables by calling the loss on one example of zeros."""
    example = jax.tree.map(lambda x: jnp.zeros(x.shape[:0] if not x.shape else (1, *x.shape[1:]), x.dtype), batch)

    def call(inner: linen.Module, batch: PyTree) -> None:
        loss_fn(Initializing(inner), batch)

    params, dropout = jax.random.split(jax.random.key(seed))
    return linen.init(call, module)({"params": params, "dropout": dropout}, example)


# --------------------------------------------------------------------------------------------------
# The model, the loss and the data of a run on text.
# --------------------------------------------------------------------------------------------------

_WINDOW_BYTES = 1 << 20


def loss_fn(model: Any, batch: PyTree) -> WeightedMean | tuple[WeightedMean, dict[str, WeightedMean]]:
    """Mean cross entropy in nats per token; with experts, in training, also the routers' losses and metrics."""
    total, weight, routers = model.loss_and_routers(**batch)
    loss = WeightedMean(total, weight)
    return loss if routers is None else (loss, router_metrics(routers))


def build_model(config: TransformerConfig, seed: int) -> Transformer:
    """Make the transformer with its initial weights."""
    return Transformer(config, rngs=nnx.Rngs(seed))


def read_data(config: DataConfig, runs: str | None = None) -> TextSplit | DocumentSplit | None:
    """Read the text or documents that the section `data` names; None for the user's own data."""
    if config.class_path is not None:
        return None
    return read_documents(config) if config.documents else read_text(config, runs)


_WHOLE_FILES = (
    "several files are split as whole files: valid gets those of that share of the bytes at most, or the smallest"
)


def read_text(config: DataConfig, runs: str | None = None) -> TextSplit:
    """Read the text that the section `data` names, as bytes or as tokens.

    Args:
      config: the section.
      runs: the folder that runs are written to; it is no part of the text, which every run would change for the next.

    Raises:
      ValueError: for a missing or empty folder, one that runs are written to, or too little text for one example on either
        side.
    """
    if config.path and runs and Path(config.path).resolve() == Path(runs).resolve():
        raise ValueError(
            f"data.path={config.path} is output.dir, the folder that runs are written to: every run would change the text "
            "for the next. Give output.dir another folder; one inside data.path is left out of the text"
        )
    unit = "byte" if config.tokenizer == BYTES else "token"
    try:
        if config.path and config.pack is None:
            _require_text_alone(config.path, runs)
        split = load_text(config.path, max_bytes=config.max_bytes, valid_fraction=config.valid_fraction, without=runs)
    except ValueError as error:
        raise ValueError(f"data: {error}") from error
    if unit == "token":
        rules = load_tokenizer(config.tokenizer)
        split = TextSplit(*(tokens_of(part, rules) for part in split))
    short = {name: len(part) for name, part in split._asdict().items() if len(part) <= config.length}
    if short:
        sizes = " and ".join(f"{size} {unit}s to {name}" for name, size in short.items())
        raise ValueError(
            f"data: the text leaves {sizes}, too few for one example of data.length={config.length}: give more text, "
            f"a shorter length or another valid_fraction; {_WHOLE_FILES}"
        )
    return split


def _require_text_alone(path: str, runs: str | None) -> None:
    """Refuse a path that also holds files of records, those of a run aside."""
    of_a_run = lambda file: file.name == "metrics.jsonl" and file.with_name(NEWEST).is_file()
    if found := [each for each in records_beside_text(path, runs) if not of_a_run(Path(path, each))]:
        named = ", ".join(found[:3]) + f" and {len(found) - 3} more" * (len(found) > 3)
        raise ValueError(
            f"{path} holds JSON lines or Parquet files, {named}: train on those by data.format=jsonl or parquet, or "
            "on the files of text alone by data.pack=windows"
        )


def tokens_of(text: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Tokenize a text's bytes to one stream, int32 [n], without special tokens; by lines, a megabyte at a time."""
    words, pieces, at = text.tobytes().decode(errors="replace"), [], 0
    while at < len(words):
        end = words.find("\n", at + _WINDOW_BYTES) + 1 or len(words)
        pieces.append(words[at:end])
        at = end
    return np.concatenate([np.zeros(0, np.int32), *tokenizer.encode(pieces, special=False)])


@dataclass(frozen=True)
class TextData:
    """The loaders to train and validate with, and for bytes the bigram model's loss on the same batches.

    Attributes:
      train: endless loader.
      valid: loader of one pass over the validation part, in order; None: there is no such part.
      valid_batches: how many of its batches a validation takes, `rest` counted as one; None: all of a number that is unknown.
      valid_targets: bytes or tokens that each of these batches predicts; None: for the user's own data.
      bigram: the bigram model's nats per byte on exactly those bytes, fitted on the training part; None: not bytes.
      sizes: bytes, tokens or samples of the training and the validation part; None where the number is unknown.
      unit: what `sizes` counts: "byte", "token" or "sample".
      rest: makes the samples that follow the last full batch of `valid`, in parts (see `rest_of`).
      valid_used: how many samples or windows a validation takes, where their number is known.
      opening: a few words of the validation text, the default prompt of samples (see `opening_of`).
    """

    train: DataLoader
    valid: DataLoader | None
    valid_batches: int | None
    valid_targets: list[int] | None
    bigram: float | None
    sizes: tuple[int | None, int | None]
    unit: str = "byte"
    rest: "Rest" = ()
    valid_used: int | None = None
    opening: str = ""

    @property
    def loss_unit(self) -> str:
        """The loss's unit with a space before it; empty for the user's own data, whose unit is not known."""
        return "" if self.unit == "sample" else f" nats per {self.unit}"


def load_data(config: RunConfig, text: TextSplit | DocumentSplit | OwnSplit, mesh: Mesh) -> TextData:
    """Make loaders over a text, documents, or the user's own data.

    Raises:
      ValueError: when either part of the text, or the documents to train on, fill no batch.
    """
    if isinstance(text, OwnSplit):
        return _load_own(config, text, mesh)
    if isinstance(text, DocumentSplit):
        return _load_documents(config, text, mesh)
    size, workers = config.train.global_batch_size, config.data.num_workers
    parts, content = text._asdict(), text.fingerprint
    kind = ByteWindows if text.train.dtype == ByteWindows.dtype else TokenWindows
    windows = {name: kind(part, config.data.length, content) for name, part in parts.items()}
    few = {name: len(part) for name, part in windows.items() if len(part) < size}
    if few:
        counts = " and ".join(f"{count} examples to {name}" for name, count in few.items())
        raise ValueError(
            f"data: the text leaves {counts}, fewer than train.global_batch_size={size}: give more text, a smaller batch "
            f"or another valid_fraction; {_WHOLE_FILES}"
        )
    train = create_dataloader(windows["train"], size, mesh, seed=config.train.seed, num_workers=workers)
    # Only the library's own loss leaves out the targets of empty rows, and experts would route the tokens of these rows.
    fills = config.loss.class_path is None and getattr(config.model, "experts", None) is None
    rows = FilledUp([windows["valid"]], size) if fills else windows["valid"]
    valid = create_dataloader(rows, size, mesh, shuffle=False, num_epochs=1)
    rest = () if fills else rest_of(rows, size, config.build_plan(), mesh)
    taken, used = _taken(len(valid), rest, size, config.train.eval_batches)
    used = min(used, len(windows["valid"]))
    bigram = bigram_nats(text.train, text.valid[: used * config.data.length + 1]) if kind is ByteWindows else None
    targets = [min(size, used - start) * config.data.length for start in range(0, used, size)]
    sizes, opening = (len(text.train), len(text.valid)), opening_of(text, config.data)
    return TextData(train, valid, taken, targets, bigram, sizes, kind.unit, rest, used, opening)


def _load_documents(config: RunConfig, split: DocumentSplit, mesh: Mesh) -> TextData:
    size = config.train.global_batch_size
    if len(split.train) < size:
        raise ValueError(
            f"data: the documents leave {len(split.train)} examples to train on, fewer than train.global_batch_size={size}: "
            "give more of them, a smaller batch or a shorter length"
        )
    rows = FilledUp(split.valid, size)
    train = create_dataloader(split.train, size, mesh, seed=config.train.seed, num_workers=config.data.num_workers)
    valid = create_dataloader(rows, size, mesh, shuffle=False, num_epochs=1)
    targets = rows.targets(min(config.train.eval_batches or len(valid), len(valid)))
    opening = opening_of(split, config.data)
    return TextData(train, valid, len(targets), targets, None, split.sizes, "token", opening=opening)


def _load_own(config: RunConfig, split: OwnSplit, mesh: Mesh) -> TextData:
    size, train, looks = config.train.global_batch_size, config.train, split.valid is not None
    if not looks and (train.eval_every or config.checkpoint.best):
        raise ValueError(
            f"train.eval_every={train.eval_every}, checkpoint.best={config.checkpoint.best}: there is no validation data, "
            "because data of unknown length is not split; give data.valid, or leave them out"
        )
    options: Any = {"plan": config.build_plan()}
    if isinstance(config.model, TransformerConfig) and config.loss.class_path is None:
        options["collate"] = Words(config.model.vocab_size)
    try:
        loader = create_dataloader(
            split.train, size, mesh, seed=train.seed, num_workers=config.data.num_workers, **options
        )
        valid = create_dataloader(split.valid, size, mesh, shuffle=False, num_epochs=1, **options) if looks else None
    except ValueError as error:
        raise ValueError(
            f"data.class_path={config.data.class_path}, train.global_batch_size={size}: {error}"
        ) from error
    sizes = length_of(split.train), length_of(split.valid)
    if valid is None or sizes[1] is None:
        return TextData(loader, valid, train.eval_batches, None, None, sizes, "sample")
    rest = rest_of(split.valid, size, config.build_plan(), mesh, options.get("collate", stack_samples))
    taken, used = _taken(len(valid), rest, size, train.eval_batches)
    return TextData(loader, valid, taken, None, None, sizes, "sample", rest, used)


Rest = tuple[tuple[int, Callable[[], PyTree]], ...]
"""Parts of a dataset: each has its number of samples, and a function that makes its batch."""


def rest_of(
    dataset: Any, size: int, plan: Plan, mesh: Mesh, collate: Callable[[Sequence], PyTree] = stack_samples
) -> Rest:
    """Returns the samples beyond the last full batch, in parts that need no more memory than a batch.

    Every process makes all rows of each part. If ranks train independent models, or have buffers of their own, samples that
    do not divide over the ranks are left out.
    """
    placement, count = Placement(plan, dict(mesh.shape), {}, {}), len(dataset)
    ranks, first = placement.batch_layout.row_degree, count // size * size
    ends = [first, first + (count - first) // ranks * ranks]
    if not placement.axes.independent and placement.axes.buffers is None:
        each = max(1, size // ranks // plan.microbatches)  # every rank takes all of these
        ends += [*range(ends[-1] + each, count, each), count]
    made = lambda start, end: collate([dataset[i] for i in range(start, end)])
    return tuple((end - start, partial(made, start, end)) for start, end in pairwise(ends) if start < end)


def _taken(batches: int, rest: Rest, size: int, most: int | None) -> tuple[int, int]:
    """The number of batches that a validation takes, the rest counted as one, and their number of samples."""
    taken = min(most or batches + 1, batches + bool(rest))
    return taken, min(taken, batches) * size + (sum(number for number, _ in rest) if taken > batches else 0)


@dataclass(frozen=True)
class Words:
    """Collates token ids, and refuses ids beyond the model's vocabulary, which would make the loss NaN.

    Attributes:
      vocabulary: how many token ids the model has.
    """

    vocabulary: int

    def __call__(self, samples: Sequence) -> PyTree:
        """Stack samples into arrays.

        Raises:
          ValueError: tokens or targets lie beyond the vocabulary.
        """
        batch = stack_samples(samples)
        ids = {name: batch[name] for name in ("tokens", "targets") if isinstance(batch, dict) and name in batch}
        beyond = [
            f"{name}: up to {most}" for name, each in ids.items() if (most := each.max(initial=-1)) >= self.vocabulary
        ]
        if beyond:
            raise ValueError(
                f"data: {', '.join(beyond)}, but model.vocab_size={self.vocabulary}: ids must be below it (negative targets "
                "are ignored). Set model.vocab_size to the tokenizer's size, or mend the data"
            )
        return batch


def valid_batches(data: TextData) -> Generator[PyTree, None, None]:
    """Yield the batches of one validation, the same in every call."""
    assert data.valid is not None
    from_start(data.valid)
    with closing(iter(data.valid)) as batches:  # pyright: ignore[reportArgumentType]
        yield from islice(batches, data.valid_batches)
    if data.rest and data.valid_batches is not None and data.valid_batches > len(data.valid):
        yield from (make() for _, make in data.rest)


def check_validation(config: RunConfig, data: TextData) -> None:
    """Draw a validation batch before training, if the length of the validation data is unknown.

    Raises:
      ValueError: when `train.eval_batches` is null, as the data may be endless, or when the data fills no batch.
    """
    if data.valid is None or data.sizes[1] is not None:
        return
    if config.train.eval_batches is None:
        raise ValueError(
            "data.valid can only be iterated over, and may be endless: give train.eval_batches; if it has fewer, all are used"
        )
    try:
        with closing(valid_batches(data)) as batches:
            next(batches)
    except NoBatch as error:
        raise ValueError(
            f"data.valid: its {error.num_samples} samples fill no batch of train.global_batch_size="
            f"{config.train.global_batch_size}: give more of them, or a smaller batch"
        ) from error


def from_start(loader: DataLoader) -> None:
    """Reset a loader to the start of its first epoch."""
    state = loader.state_dict()
    loader.load_state_dict({**state, "epoch": 0, "samples": 0, **({"place": None} if "place" in state else {})})


def opening_of(split: TextSplit | DocumentSplit, config: DataConfig) -> str:
    """Returns the prompt of a run's samples if none is given, from the validation data.

    Of documents it is the first one's prompt field, if there is such a field, or else its first four words; of a text the
    first four words after its first line, which may be cut.
    """
    rules = load_tokenizer(config.tokenizer)
    if isinstance(split, TextSplit):
        text = rules.decode(split.valid[:_OPENING].tolist())
        text = text.partition("\n")[2].strip("\n") or text
    else:
        row = split.valid[0][0]
        given = int((row["targets"] >= 0).argmax()) + 1 if config.prompt_field else _OPENING
        text = rules.decode(row["tokens"][row["segment_ids"] == 1][:given].tolist())
    words = None if config.prompt_field else re.match(r"\s*\S+(?:[^\S\n]+\S+){0,3}", text)
    return text if config.prompt_field and text else words.group()[:80] if words else "\n"


_OPENING = 256  # tokens in which four words are looked for


def write_samples(
    model: ParallelModel, config: SampleConfig, window: int, seed: int, tokenizer: str = BYTES, end: str | None = None
) -> list[str]:
    """Generate texts, on the devices and under the plan of training; every process must call this.

    As in `axonml-jax generate`, no special token stands between the prompt and what follows, and a text ends at the token
    `end`. Returned texts begin with the prompt.

    Args:
      model: the trainer's.
      config: the section `sample`, with a prompt.
      window: the most tokens that the model sees at once.
      seed: of the draws.
      tokenizer: by its name (see `load_tokenizer`).
      end: the token that ends a document, by name; None: there is none.
    """
    assert config.prompt is not None
    rules = load_tokenizer(tokenizer)
    prompts = np.tile(rules.encode([config.prompt], special="before")[0], (config.count, 1))
    key = jax.random.key(seed)
    writer = model.module if model.plan.independent else model  # of independent models the first rank's
    texts = generate(writer, prompts, config.length, key, temperature=config.temperature, window=window)
    start, last = prompts.shape[1], None if end is None else rules.id_of(end)
    ends = [next((i for i in range(start, len(text)) if text[i] == last), len(text)) for text in texts]
    return [rules.decode(text[:at]) for text, at in zip(texts, ends, strict=True)]


# --------------------------------------------------------------------------------------------------
# What a run trains, and by which loss: the library's transformer, or what its configuration names.
# --------------------------------------------------------------------------------------------------


def loss_of(config: RunConfig) -> LossFn:
    """The run's loss: the configured one, else cross entropy of the next token.

    Raises:
      ValueError, TypeError: for a loss that cannot be made.
    """
    if config.loss.class_path is not None:
        return own_loss(config.loss)
    return logits_loss if isinstance(config.model, OwnModel) else loss_fn


def model_of(config: RunConfig, batch: PyTree) -> Buildable:
    """Returns the run's model, whose arrays are made later, where they will be stored.

    Args:
      config: the run's.
      batch: shapes of a global batch.

    Raises:
      ValueError, TypeError: for a model that cannot be made.
    """
    if isinstance(config.model, OwnModel):
        made = own_model(config.model, loss_of(config), batch, config.train.seed)
    else:
        made = Buildable(partial(build_model, config.model, config.train.seed))
    return replace(made, model=adapted(config, made.model))


def shapes_of(config: RunConfig, batch: PyTree = None) -> Buildable:
    """The run's model as shapes, to inspect or load; the user's own model is made where it will be stored.

    Args:
      config: the run's.
      batch: shapes of a global batch; only a model of the user's own needs them.

    Raises:
      ValueError, TypeError: for a model that cannot be made.
    """
    if isinstance(config.model, OwnModel):
        return model_of(config, batch)
    return Buildable(adapted(config, _transformer_shapes(config.model, config.train.seed)))


@lru_cache(maxsize=4)
def _transformer_shapes(config: TransformerConfig, seed: int) -> Transformer:
    return nnx.eval_shape(lambda: build_model(config, seed))


def adapted(config: RunConfig, model: Any) -> Any:
    """Returns a model, or what makes one, with the run's adapters if it has any."""
    lora = config.finetune.lora
    return model if lora.rank is None else LoraModel(model, lora.build(config.train.seed))
