"""The documents of a run: read, split, tokenized and packed as the section `data` says."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from axonml_jax.data.documents.encoder import DocumentEncoder
from axonml_jax.data.documents.packed import PackedDocuments
from axonml_jax.data.documents.packed_row import row_of
from axonml_jax.data.documents.tokenizer import load_tokenizer, vocabulary_offenders
from axonml_jax.data.loading_error import LoadingError, named
from axonml_jax.data.sources.open_dataset import open_dataset
from axonml_jax.data.streams.stream_mixture import mix
from axonml_jax.launch.config.run_config import RunConfig
from axonml_jax.launch.config.sections.data_config import DataConfig
from axonml_jax.launch.config.sections.own_config import OwnModel

_AT_ONCE = 1024


@dataclass(frozen=True)
class DocumentSplit:
    """Rows of documents to train on and to validate on, from different documents.

    Attributes:
      train: the rows, those of several sources in their shares.
      valid: the rows of every source.
      sizes: tokens of both.
    """

    train: Any
    valid: tuple[PackedDocuments, ...]
    sizes: tuple[int, int]

    def checksums(self) -> dict[str, str]:
        """What tells this text from another."""
        return {"train": self.train.fingerprint, "valid": ", ".join(each.fingerprint for each in self.valid)}


def check_tokenizer(config: RunConfig) -> None:
    """Refuse a model whose vocabulary lacks tokens, before anything is read or allocated.

    Raises:
      ImportError: the tokenizer's library is not installed.
      ValueError: there is no such tokenizer, or the model has fewer token ids.
    """
    if config.data.class_path is not None:
        return
    tokenizer = load_tokenizer(config.data.tokenizer)
    if isinstance(config.model, OwnModel):  # of which nothing is known
        return
    found = vocabulary_offenders(tokenizer, config.model.vocab_size, "model.vocab_size")
    if found:
        raise ValueError(f"{found[0]} (data.tokenizer={config.data.tokenizer})")


def read_documents(config: DataConfig) -> DocumentSplit:
    """The documents that the section `data` names, as rows.

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
    """Datasets of rows one after the other, and then empty rows up to a whole batch: a validation leaves no row out.

    Args:
      parts: the rows.
      batch_size: rows of a batch.
    """

    def __init__(self, parts: Sequence[PackedDocuments], batch_size: int):
        self.fingerprint = ", ".join(part.fingerprint for part in parts)
        self._rows = [(part, i) for part in parts for i in range(len(part))]
        self._length, self._batch_size = parts[0].length, batch_size

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size) * self._batch_size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`."""
        if index >= len(self._rows):
            return row_of([], self._length)
        part, own = self._rows[index]
        return part[own]

    def targets(self, num_batches: int) -> list[int]:
        """How many predictions count in each of the first batches."""
        counts = [int((self[i]["targets"] >= 0).sum()) for i in range(num_batches * self._batch_size)]
        return np.reshape(counts, (num_batches, -1)).sum(axis=1).tolist()


def _packed(config: DataConfig, path: str) -> tuple[PackedDocuments, PackedDocuments]:
    """Rows to train on and to validate on of one source, whose documents are drawn in an order of their own."""
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
    """Samples in an order that is the same everywhere, as many as the limit allows."""
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
    """Samples by number, many at once where the dataset can: those of a row group come together, whatever their order."""
    many = getattr(dataset, "__getitems__", None)
    step = 1 if many is None else _AT_ONCE
    for at in range(0, len(order), step):
        indices = order[at : at + step]
        others = f" and {len(indices) - 1} others" if len(indices) > 1 else ""
        with named(lambda indices=indices, others=others: f"document {indices[0]}{others}", None):
            found = [dataset[indices[0]]] if many is None else many(indices)
        yield from zip(indices, found, strict=True)


def _encoded(encoder: DocumentEncoder, samples: list[dict[str, str]]) -> list[Any]:
    return [each for at in range(0, len(samples), _AT_ONCE) for each in encoder(samples[at : at + _AT_ONCE])]
