"""`pack`: samples with text to rows of tokens, of a dataset or of a stream."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from axonml_jax.data.documents.encoder import Document, DocumentEncoder
from axonml_jax.data.documents.packed import PackedDocuments, PackedStream
from axonml_jax.data.documents.tokenizer import Tokenizer, load_tokenizer
from axonml_jax.data.fetch import MapDataset
from axonml_jax.data.loading_error import named
from axonml_jax.data.streams.kinds import as_dataset
from axonml_jax.data.streams.stream_walk import Stream

_AT_ONCE = 1024


def pack(
    dataset: MapDataset | Mapping[str, Any] | Iterable | Callable[[], Iterable],
    length: int,
    tokenizer: str | Tokenizer = "bytes",
    *,
    fields: Sequence[str] = ("text",),
    prompt_field: str | None = None,
    completion_field: str | None = None,
    end: str | None = None,
    share: bool = True,
) -> PackedDocuments | PackedStream:
    """Tokenize documents and pack them into rows of equal length, for `create_dataloader`.

    A row is a dict of int32 [length]: `tokens`; `targets`, the next tokens, -1 where nothing is learned; `segment_ids`, the
    number of the document in its row, 0 where there is none; `positions` in the document. `Transformer.loss(**row)` takes them:
    a document has the loss that it has alone. No target crosses a boundary. Documents longer than a row are cut.

    Of a dataset with random access all documents are tokenized here, and each row is filled by those that fit best (Ding et al.
    2024). Of an iterable source documents are read, tokenized and packed in their order, while rows are asked for.

    >>> rows = pack([{"text": "abc"}, {"text": "de"}, {"text": "fghij"}], 6)
    >>> len(rows), rows[0]["segment_ids"].tolist(), rows[0]["positions"].tolist()
    (2, [1, 1, 1, 1, 2, 2], [0, 1, 2, 3, 0, 1])

    Args:
      dataset: samples that are strings, or dicts with text in `fields`; whatever `create_dataloader` takes.
      length: places of a row.
      tokenizer: or its name (see `load_tokenizer`).
      fields: the fields of a sample that are its text, joined by an empty line.
      prompt_field, completion_field: instead, the field that is given and the one that is learned: targets in prompts are -1.
      end: a token to add after every document, by name, such as "</s>".
      share: whether documents share rows; else each has its own, or several where it is longer.

    Raises:
      ImportError: the tokenizer's library is not installed.
      ValueError: a field or token is missing, or there is no token to predict.
      RuntimeError: a document that cannot be read, by number.
    """
    encoder = DocumentEncoder(
        tokenizer=load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer,
        fields=fields,
        prompt_field=prompt_field,
        completion_field=completion_field,
        end=end,
    )
    samples = as_dataset(dataset)
    if isinstance(samples, Stream):
        return PackedStream(samples, encoder, length, share=share)
    content = getattr(samples, "fingerprint", None)
    known = None if content is None else f"{content} by {encoder.fingerprint}"
    return PackedDocuments(encoded(samples, encoder), length, share=share, fingerprint=known)


def encoded(dataset: MapDataset, encoder: DocumentEncoder, indices: Sequence[int] | None = None) -> list[Document]:
    """The documents of a dataset's samples, those of some indices or of all."""
    indices = range(len(dataset)) if indices is None else indices
    documents: list[Document] = []
    for at in range(0, len(indices), _AT_ONCE):
        samples: list[Any] = []
        with named(lambda at=at, samples=samples: f"document {indices[at + len(samples)]}", None):
            for i in indices[at : at + _AT_ONCE]:
                sample = dataset[i]
                encoder.texts(sample)
                samples.append(sample)
        documents += encoder(samples)
    return documents
