"""The model, the loss and the data of a run on text."""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from axonml_jax._types import PyTree
from axonml_jax.data.collate import stack_samples
from axonml_jax.data.documents.tokenizer import Tokenizer, load_tokenizer
from axonml_jax.data.loader import DataLoader, create_dataloader
from axonml_jax.data.streams.stream_feed import NoBatch
from axonml_jax.data.text import ByteWindows, TextSplit, TokenWindows, bigram_nats, load_text
from axonml_jax.facade.parallel_generate import generate
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.launch.config.run_config import RunConfig, SampleConfig
from axonml_jax.launch.config.sections.data_config import BYTES, DataConfig
from axonml_jax.launch.job.document_task import DocumentSplit, FilledUp, read_documents
from axonml_jax.launch.own.own_data import OwnSplit, length_of
from axonml_jax.model.loss import WeightedMean
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.router_metrics import router_metrics
from axonml_jax.models.transformer import Transformer

_AT_ONCE = 1 << 20


def loss_fn(model: Any, batch: PyTree) -> WeightedMean | tuple[WeightedMean, dict[str, WeightedMean]]:
    """Mean cross entropy in nats per token; of a model with experts, in training, their losses too, and what routers did."""
    total, weight, routers = model.loss_and_routers(**batch)
    loss = WeightedMean(total, weight)
    return loss if routers is None else (loss, router_metrics(routers))


def build_model(config: TransformerConfig, seed: int) -> Transformer:
    """The transformer with its first weights."""
    return Transformer(config, rngs=nnx.Rngs(seed))


def read_data(config: DataConfig, runs: str | None = None) -> TextSplit | DocumentSplit | None:
    """The text or the documents that the section `data` names; see `read_text` and `read_documents`. None: it is one's own."""
    if config.class_path is not None:
        return None
    return read_documents(config) if config.documents else read_text(config, runs)


def read_text(config: DataConfig, runs: str | None = None) -> TextSplit:
    """The text that the section `data` names, as bytes or as tokens.

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
            "a shorter length or another valid_fraction"
        )
    return split


def tokens_of(text: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """A text's bytes as one stream of tokens, int32 [n], none of them added; tokenized by lines, a megabyte at a time."""
    words, pieces, at = text.tobytes().decode(errors="replace"), [], 0
    while at < len(words):
        end = words.find("\n", at + _AT_ONCE) + 1 or len(words)
        pieces.append(words[at:end])
        at = end
    return np.concatenate([np.zeros(0, np.int32), *tokenizer.encode(pieces, special=False)])


@dataclass(frozen=True)
class TextData:
    """Batches to train on, the batches of every validation, and of bytes the bigram model's loss on the same ones.

    Attributes:
      train: endless loader.
      valid: loader of one pass over the validation part, in order; None: there is no such part.
      valid_batches: how many of its batches a validation takes; None: all, and nobody knows how many these are.
      valid_targets: how many bytes or tokens that predicts, by batch; None: batches count alike.
      bigram: nats per byte on exactly those bytes, fitted on the training part; None: of tokens it is not known.
      sizes: bytes, tokens or samples of the training and the validation part, where they are known.
      unit: which of them: "byte", "token" or "sample".
    """

    train: DataLoader
    valid: DataLoader | None
    valid_batches: int | None
    valid_targets: list[int] | None
    bigram: float | None
    sizes: tuple[int | None, int | None]
    unit: str = "byte"

    @property
    def loss_unit(self) -> str:
        """What the loss is measured in, where that is known."""
        return "" if self.unit == "sample" else f" nats per {self.unit}"


def load_data(config: RunConfig, text: TextSplit | DocumentSplit | OwnSplit, mesh: Mesh) -> TextData:
    """Loaders over a text, over documents or over data of one's own.

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
            "or another valid_fraction"
        )
    train = create_dataloader(windows["train"], size, mesh, seed=config.train.seed, num_workers=workers)
    valid = create_dataloader(windows["valid"], size, mesh, shuffle=False, num_epochs=1)
    taken = min(config.train.eval_batches or len(valid), len(valid))
    predicted = taken * size * config.data.length
    bigram = bigram_nats(text.train, text.valid[: predicted + 1]) if kind is ByteWindows else None
    targets = [size * config.data.length] * taken
    return TextData(train, valid, taken, targets, bigram, (len(text.train), len(text.valid)), kind.unit)


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
    return TextData(train, valid, len(targets), targets, None, split.sizes, "token")


def _load_own(config: RunConfig, split: OwnSplit, mesh: Mesh) -> TextData:
    size, train, looks = config.train.global_batch_size, config.train, split.valid is not None
    if not looks and (train.eval_every or config.checkpoint.best):
        raise ValueError(
            f"train.eval_every={train.eval_every}, checkpoint.best={config.checkpoint.best}: there is nothing to validate on, "
            "as data of no known length is not divided; give data.valid, or leave them out"
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
    known = None if sizes[1] is None else min(train.eval_batches or sizes[1] // size, sizes[1] // size)
    return TextData(loader, valid, known or train.eval_batches, None, None, sizes, "sample")


@dataclass(frozen=True)
class Words:
    """`stack_samples` of token ids, where the model's vocabulary is known: what lies beyond it would make the loss NaN.

    Attributes:
      vocabulary: how many token ids the model has.
    """

    vocabulary: int

    def __call__(self, samples: Sequence) -> PyTree:
        """Samples as arrays.

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
    """The batches of one validation: the same at every call."""
    assert data.valid is not None
    from_start(data.valid)
    with closing(iter(data.valid)) as batches:  # pyright: ignore[reportArgumentType]
        yield from islice(batches, data.valid_batches)


def check_validation(config: RunConfig, data: TextData) -> None:
    """Draw a batch of a validation whose length nobody knows, while nothing is trained yet.

    Raises:
      ValueError: when it may have no end, or fills no batch.
    """
    if data.valid is None or data.sizes[1] is not None:
        return
    if config.train.eval_batches is None:
        raise ValueError(
            "data.valid can only be iterated over, and may have no end: give train.eval_batches; of fewer, all are taken"
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
    """Let a loader begin its first epoch again."""
    state = loader.state_dict()
    loader.load_state_dict({**state, "epoch": 0, "samples": 0, **({"place": None} if "place" in state else {})})


def write_samples(
    model: ParallelModel, config: SampleConfig, window: int, seed: int, tokenizer: str = BYTES, end: str | None = None
) -> list[str]:
    """Texts that a model writes, on the devices and under the plan that it was trained with; every process must call this.

    As in `axonml-jax generate`, nothing stands between the prompt and what follows, and a text ends with its document.

    Args:
      model: the trainer's.
      config: the section `sample`.
      window: tokens the model sees at most.
      seed: of the draws.
      tokenizer: by its name (see `load_tokenizer`).
      end: the token that ends a document, by name; None: there is none.
    """
    rules = load_tokenizer(tokenizer)
    prompts = np.tile(rules.encode([config.prompt], special="before")[0], (config.count, 1))
    key = jax.random.key(seed)
    writer = model.module if model.plan.independent else model  # of models that are not one, the first rank's
    texts = generate(writer, prompts, config.length, key, temperature=config.temperature, window=window)
    start, last = prompts.shape[1], None if end is None else rules.id_of(end)
    ends = [next((i for i in range(start, len(text)) if text[i] == last), len(text)) for text in texts]
    return [rules.decode(text[:at]) for text, at in zip(texts, ends, strict=True)]
