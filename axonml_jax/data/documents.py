"""Documents: text to tokens, and tokens to rows that hold several documents."""

import contextlib
import functools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from axonml_jax.base import logger
from axonml_jax.data.sampler import MapDataset, named
from axonml_jax.data.sources import kept_fields
from axonml_jax.data.streams import Stream, StreamWalk, as_dataset

# --------------------------------------------------------------------------------------------------
# Which documents share a row: best fit, the longest first (Ding et al. 2024), as pure index arithmetic.
# --------------------------------------------------------------------------------------------------


class DocumentPieces(NamedTuple):
    """Parts of documents that each fit into a row, as int64 [p] arrays.

    A document of n tokens takes n - 1 places, each with the token after it as target; in a longer one than a row, pieces
    overlap by one token, so that every token but the first is predicted once.

    Attributes:
      document: which document.
      start: the first token of it.
      size: places taken.
    """

    document: np.ndarray
    start: np.ndarray
    size: np.ndarray


def cut(lengths: np.ndarray, row: int) -> DocumentPieces:
    """Cut documents, given by their numbers of tokens, into pieces that fit rows of `row` places.

    >>> cut(np.array([3, 1, 9]), 4)
    DocumentPieces(document=array([0, 2, 2]), start=array([0, 0, 4]), size=array([2, 4, 4]))
    """
    places = np.maximum(np.asarray(lengths, np.int64) - 1, 0)
    counts = -(-places // row)
    document = np.repeat(np.arange(len(places)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * row
    return DocumentPieces(document, start, np.minimum(places[document] - start, row))


def best_fit(sizes: np.ndarray, row: int) -> list[list[int]]:
    """Assign pieces to rows: the longest first, each to the row with the least room that still fits it.

    >>> best_fit(np.array([2, 5, 3, 4, 1]), 6)
    [[1, 4], [3, 0], [2]]
    """
    rows: list[list[int]] = []
    # waiting[room]: the rows with so much room left; the bits of `rooms` say which of them are not empty.
    waiting: list[list[int]] = [[] for _ in range(row + 1)]
    rooms = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = waiting[room].pop()
            if not waiting[room]:
                rooms ^= 1 << room
            rows[chosen].append(piece)
        else:
            room, chosen = row, len(rows)
            rows.append([piece])
        if room > size:
            waiting[room - size].append(chosen)
            rooms |= 1 << (room - size)
    return rows


def one_by_one(sizes: np.ndarray, row: int) -> list[list[int]]:
    """Assign every piece to its own row."""
    return [[piece] for piece in range(len(sizes))]


# --------------------------------------------------------------------------------------------------
# Tokenizers: bytes, or what a `tokenizer.json` of Hugging Face says.
# --------------------------------------------------------------------------------------------------

BYTES = "bytes"
"""The name of the tokenizer whose tokens are the bytes of UTF-8."""


_STORED = ("truncation", "padding")
_IDS = 2**31

Special = bool | Literal["before"]
"""Which special tokens of a tokenizer's rules are added to a text: all, none, or (more text follows) those before it."""


class Tokenizer(Protocol):
    """Protocol of tokenizers: text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: all ids are below it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Text that identifies the tokenizer."""
        ...

    def encode(self, texts: Sequence[str], *, special: Special = True) -> list[np.ndarray]:
        """Token ids of every text, int32 [n], with or without the special tokens that its rules add."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special ones left out."""
        ...

    def id_of(self, token: str) -> int:
        """The id of a token; a ValueError where there is none."""
        ...


class ByteTokenizer:
    """Tokens are the bytes of UTF-8; there are no special ones.

    >>> ids = ByteTokenizer().encode(["né"])[0]
    >>> ids.tolist(), ByteTokenizer().decode(ids)
    ([110, 195, 169], 'né')
    """

    vocab_size = 256
    fingerprint = BYTES

    def encode(self, texts: Sequence[str], *, special: Special = True) -> list[np.ndarray]:
        """Bytes of every text, int32 [n]."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode bytes to text; invalid UTF-8 becomes U+FFFD."""
        return bytes(np.asarray(ids).astype(np.uint8)).decode(errors="replace")

    def id_of(self, token: str) -> int:
        """The id of a character that is one byte."""
        if len(found := token.encode()) != 1:
            raise ValueError(f"bytes have no token {token!r}: give a tokenizer.json, or no special tokens")
        return found[0]


class FileTokenizer:
    """A tokenizer of Hugging Face's `tokenizers` library (Rust), by its `tokenizer.json`.

    Args:
      path: the file, or a folder that holds it.

    Raises:
      ValueError: there is no such file; when it is first used, if it is none of a tokenizer.
      ImportError: the library is not installed; when it is first used.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = tokenizer_file(path)

    @functools.cached_property
    def _rules(self) -> Any:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                f"{self.path} needs the library tokenizers: pip install 'axonml-jax[tokenizers]'"
            ) from error
        try:
            rules = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{self.path} is no tokenizer.json: {error}") from error
        if stored := [name for name in _STORED if getattr(rules, name) is not None]:
            _say_left_out(str(self.path), " and ".join(stored))
        rules.no_truncation()
        rules.no_padding()
        return rules

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included.

        Raises:
          ValueError: there are none, or some that no int32 holds.
        """
        return self._size

    @functools.cached_property
    def _size(self) -> int:
        words = self._rules.get_vocab(with_added_tokens=True)
        if not words:
            raise ValueError(f"{self.path} has no tokens: its vocabulary is empty")
        word = max(words, key=words.__getitem__)
        if words[word] >= _IDS:
            raise ValueError(
                f"{self.path}: the token {word!r} has the id {words[word]}, and token ids are int32, below {_IDS}: number its "
                "tokens from 0"
            )
        return words[word] + 1

    @property
    def fingerprint(self) -> str:
        """The CRC-32 of its rules."""
        return self._checksum

    @functools.cached_property
    def _checksum(self) -> str:
        said = json.loads(self.path.read_bytes())
        said |= dict.fromkeys(said.keys() & set(_STORED))  # they change no token
        return f"{zlib.crc32(json.dumps(said, sort_keys=True).encode()):08x}"

    def encode(self, texts: Sequence[str], *, special: Special = True) -> list[np.ndarray]:
        """Token ids of every text, int32 [n], ignoring the file's truncation and padding; on all cores.

        Raises:
          ValueError: a text has a word that the tokenizer does not know, and it has no token for unknown ones.
        """
        try:
            found = self._rules.encode_batch(list(texts), add_special_tokens=bool(special))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"{self.path} cannot encode {self._first_refused(texts)!r:.80}: {error}. Give it a token for unknown words "
                "(unk_token or unk_id of its model, with an id in the vocabulary), or texts of words that it knows"
            ) from error
        if special != "before":
            return [np.asarray(each.ids, np.int32) for each in found]
        ends = [_behind(each.special_tokens_mask) for each in found]
        return [
            np.asarray(each.ids[: self._before if end is None else end], np.int32)
            for each, end in zip(found, ends, strict=True)
        ]

    def _first_refused(self, texts: Sequence[str]) -> str:
        for text in texts:
            try:
                self._rules.encode(text)
            except Exception:
                return text
        return ""

    @functools.cached_property
    def _before(self) -> int:
        """The number of tokens that the rules add before a text, found by encoding one that is not empty."""
        for text in ("a", *self._rules.get_vocab(with_added_tokens=True)):
            with contextlib.suppress(Exception):  # the library raises bare Exception, of unknown words here
                return self._rules.encode(text).special_tokens_mask.index(0)
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special ones left out."""
        return self._rules.decode([int(i) for i in ids])

    def id_of(self, token: str) -> int:
        """The id of a token.

        Raises:
          ValueError: there is none.
        """
        if (found := self._rules.token_to_id(token)) is not None:
            return found
        near = get_close_matches(token, self._rules.get_vocab(with_added_tokens=True), n=1)
        raise ValueError(f"{self.path} has no token {token!r}" + (f": did you mean {near[0]!r}?" if near else ""))


def load_tokenizer(name: str | os.PathLike = BYTES) -> Tokenizer:
    """Load a tokenizer by name.

    Args:
      name: "bytes", or the path of a `tokenizer.json` of Hugging Face's `tokenizers`, or of a folder that holds it. Nothing is
        downloaded.

    Raises:
      ImportError: the library is not installed.
      ValueError: there is no such file, or it is none of a tokenizer.

    >>> load_tokenizer().vocab_size
    256
    """
    if name == BYTES:
        return ByteTokenizer()
    tokenizer = FileTokenizer(name)
    _ = tokenizer.vocab_size  # refuse now what would fail in the middle of a run
    return tokenizer


def vocabulary_offenders(tokenizer: Tokenizer, vocab_size: int, what: str = "vocab_size") -> list[str]:
    """The problem with a model's vocabulary size for a tokenizer, as a list for the caller's error message."""
    if vocab_size >= tokenizer.vocab_size:
        return []
    return [f"{what}={vocab_size}: the tokenizer has {tokenizer.vocab_size} token ids; set it to at least that"]


@functools.cache
def _say_left_out(path: str, stored: str) -> None:
    logger.warning(
        "%s stores %s, as it was last used for batches of equal length: left out, so that documents are whole and nothing is "
        "learned of padding",
        path,
        stored,
    )


def _behind(mask: Sequence[int]) -> int | None:
    """The position at which the tokens added behind a text begin; None if the text has no tokens of its own."""
    return max((i + 1 for i, added in enumerate(mask) if not added), default=None)


def tokenizer_file(path: str | os.PathLike) -> Path:
    """The `tokenizer.json` that a path names, itself or the folder that holds it.

    Raises:
      ValueError: there is none.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"no tokenizer at {str(path)!r}: give {BYTES!r}, the path of a tokenizer.json, or of a folder that holds one"
        )
    return file


# --------------------------------------------------------------------------------------------------
# Samples to documents: token ids, and how many of the first are a prompt that nothing is learned from.
# --------------------------------------------------------------------------------------------------


class Document(NamedTuple):
    """The tokens of one text.

    Attributes:
      ids: int32 [n].
      prompt: how many of the first are given, so that their prediction counts for nothing.
    """

    ids: np.ndarray
    prompt: int


@dataclass(frozen=True, kw_only=True)
class DocumentEncoder:
    """Turns samples into documents.

    Attributes:
      tokenizer: text to token ids.
      fields: the sample's fields that are the text, one after the other with an empty line between.
      prompt_field, completion_field: instead of `fields`, those of the prompt, which is given, and of what is learned.
      end: a token to add after every document, by name; None: none.
    """

    tokenizer: Tokenizer
    fields: Sequence[str] = ("text",)
    prompt_field: str | None = None
    completion_field: str | None = None
    end: str | None = None

    def __post_init__(self):
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ValueError(
                f"prompt_field={self.prompt_field!r}, completion_field={self.completion_field!r}: give both or none"
            )
        if isinstance(self.fields, str) or not self.fields:
            raise ValueError(f"fields={self.fields!r}: give names, such as [text]")
        if self.end is not None:
            self.tokenizer.id_of(self.end)

    @property
    def fingerprint(self) -> str:
        """Text that identifies the documents it makes."""
        return "/".join(map(str, (self.tokenizer.fingerprint, *self.names, self.end)))

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are read."""
        if self.prompt_field is not None and self.completion_field is not None:
            return (self.prompt_field, self.completion_field)
        return tuple(self.fields)

    def texts(self, sample: Any) -> list[str]:
        """The texts of a sample's fields; a string is its own text.

        Raises:
          ValueError: a field is missing.
          TypeError: a field is no text.
        """
        if isinstance(sample, str):
            sample = {self.names[0]: sample}
        kept = kept_fields(sample, self.names, "the sample")
        if wrong := [f"{name}: {type(value).__name__}" for name, value in kept.items() if not isinstance(value, str)]:
            raise TypeError(f"these fields of a sample are no text: {', '.join(wrong)}")
        return list(kept.values())

    def __call__(self, samples: Sequence[Any]) -> list[Document]:
        """Tokenize samples into documents; several at once use all cores."""
        texts = [self.texts(sample) for sample in samples]
        end = [] if self.end is None else [np.array([self.tokenizer.id_of(self.end)], np.int32)]
        if self.prompt_field is None:
            found = self.tokenizer.encode(["\n\n".join(each) for each in texts])
            return [Document(np.concatenate([ids, *end]), 0) for ids in found]
        prompts = self.tokenizer.encode([prompt for prompt, _ in texts], special="before")
        completions = self.tokenizer.encode([completion for _, completion in texts], special=False)
        return [
            Document(np.concatenate([prompt, completion, *end]), len(prompt))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]


# --------------------------------------------------------------------------------------------------
# Text of tokens as they come, piece by piece.
# --------------------------------------------------------------------------------------------------

_INCOMPLETE = "\ufffd"


class TextSoFar:
    """Returns the text that tokens add, decoding a few of the last; holds back bytes that may begin a character.

    >>> from axonml_jax.data.documents import ByteTokenizer
    >>> text = TextSoFar(ByteTokenizer())
    >>> [text.add([110]), text.add([195]), text.add([169]), text.add([], final=True)]
    ['n', '', 'é', '']

    Args:
      tokenizer: tokens to text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those of the piece before, which decoders may look at, and of this one
        self._before = 0  # how many are of the piece before
        self._given = 0

    def add(self, ids: Sequence[int], *, final: bool = False) -> str:
        """The text that these tokens add; with `final` also what was held back."""
        self._ids += [int(i) for i in ids]
        text = self._tokenizer.decode(self._ids)
        whole = text if final else text.rstrip(_INCOMPLETE)
        piece, self._given = whole[self._given :], max(self._given, len(whole))
        if piece and whole == text:  # no character is begun
            del self._ids[: self._before]
            self._before, self._given = len(self._ids), len(self._tokenizer.decode(self._ids))
        return piece


# --------------------------------------------------------------------------------------------------
# A row of tokens that holds several documents: what the model is given.
# --------------------------------------------------------------------------------------------------

IGNORED = -1
"""The target of places whose prediction counts for nothing."""


def row_of(pieces: Iterable[tuple[Document, int, int]], length: int) -> dict[str, np.ndarray]:
    """Put pieces of documents one after the other into a row.

    Args:
      pieces: (document, first token, places) of each.
      length: places of the row.

    Returns:
      int32 [length] each: "tokens"; "targets", the token after each in its document, -1 where that belongs to the prompt and in
      places that no document fills; "segment_ids", from 1, 0 in those places; "positions" in the piece.

    >>> one, two = Document(np.array([5, 6, 7, 8]), 2), Document(np.array([9, 9]), 0)
    >>> {name: x.tolist() for name, x in row_of([(one, 0, 3), (two, 0, 1)], 5).items()}
    {'tokens': [5, 6, 7, 9, 0], 'targets': [-1, 7, 8, 9, -1], 'segment_ids': [1, 1, 1, 2, 0], 'positions': [0, 1, 2, 0, 0]}
    """
    row = {name: np.zeros(length, np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    row["targets"][:] = IGNORED
    at = 0
    for number, (document, start, size) in enumerate(pieces, start=1):
        place = slice(at, at := at + size)
        ids = document.ids[start : start + size + 1]
        row["tokens"][place], row["targets"][place] = ids[:-1], ids[1:]
        row["segment_ids"][place], row["positions"][place] = number, np.arange(size)
        given = max(document.prompt - 1 - start, 0)  # targets from start + 1, tokens of the prompt below `prompt`
        row["targets"][place][:given] = IGNORED
    return row


# --------------------------------------------------------------------------------------------------
# Documents packed into rows: of a dataset, known as a whole, or of a stream, one row after the other.
# --------------------------------------------------------------------------------------------------

_ROWS_AT_ONCE = 256
_END = object()


def _require_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"length={length}: must be at least 1")


class PackedDocuments:
    """A dataset of rows, each of which holds whole documents that fill it well; longer ones are cut.

    Args:
      documents: all of them; those without a token to learn are left out.
      length: places of a row.
      share: whether documents share rows.
      fingerprint: text that identifies the documents; None: a checksum of their tokens.

    Raises:
      ValueError: no document has a token to learn, or the length is below 1.

    Attributes:
      num_tokens: places that documents take, of all rows together.
      num_targets: places whose prediction counts.
    """

    def __init__(
        self, documents: Sequence[Document], length: int, *, share: bool = True, fingerprint: str | None = None
    ):
        _require_length(length)
        kept = [each for each in documents if len(each.ids) > max(each.prompt, 1)]
        if not kept:
            raise ValueError(
                f"none of {len(documents)} documents has a token to predict: give documents of at least two tokens, with "
                "something after the prompt"
            )
        self.length, self.num_documents = length, len(kept)
        self._pieces = cut(np.array([len(each.ids) for each in kept]), length)
        learned = (
            self._pieces.start + self._pieces.size >= np.array([each.prompt for each in kept])[self._pieces.document]
        )
        self._pieces = self._pieces._make(column[learned] for column in self._pieces)
        self._rows = (best_fit if share else one_by_one)(self._pieces.size, length)
        self._starts = np.cumsum([0, *(len(each.ids) for each in kept)])
        self._ids = np.concatenate([each.ids for each in kept])
        self._prompts = np.array([each.prompt for each in kept])
        self.num_tokens = int(self._pieces.size.sum())
        given = np.clip(self._prompts[self._pieces.document] - 1 - self._pieces.start, 0, self._pieces.size)
        self.num_targets = self.num_tokens - int(given.sum())
        known = (
            fingerprint or f"{zlib.crc32(self._ids):08x}/{zlib.crc32(self._starts):08x}/{zlib.crc32(self._prompts):08x}"
        )
        self.fingerprint = f"{known} in {'shared' if share else 'own'} rows of {length}"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`: see `row_of`."""
        return row_of([self._piece(piece) for piece in self._rows[index]], self.length)

    def _piece(self, number: int) -> tuple[Document, int, int]:
        document, start, size = (int(column[number]) for column in self._pieces)
        ids = self._ids[self._starts[document] : self._starts[document + 1]]
        return Document(ids, int(self._prompts[document])), start, size


class PackedStream:
    """Rows of an iterable source's documents, in its order: a row ends when the next document does not fit.

    Its iterator has `state_dict` and `load_state_dict`.

    Args:
      stream: the source.
      encoder: makes documents of its samples.
      length: places of a row.
      share: whether documents share rows.

    Raises:
      ValueError: the length is below 1.
    """

    def __init__(self, stream: Stream, encoder: DocumentEncoder, length: int, *, share: bool = True):
        _require_length(length)
        self.stream, self.encoder, self.length, self.share = stream, encoder, length, share
        self._epoch = 0

    @property
    def fingerprint(self) -> str:
        """Text that identifies these rows, as far as the source identifies itself."""
        content = getattr(self.stream.source, "fingerprint", "unknown")
        return f"{content} by {self.encoder.fingerprint} in {'shared' if self.share else 'own'} rows of {self.length}"

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the source that comes next."""
        self._epoch = epoch

    def __iter__(self) -> "PackedRows":
        return PackedRows(self, self._epoch)


class PackedRows:
    """The rows of one epoch of a `PackedStream`."""

    def __init__(self, packed: PackedStream, epoch: int):
        self._packed, self._epoch = packed, epoch
        # Where the next piece is: the source's place before its document, and how many pieces of that document are used.
        self._place: dict[str, Any] | None = None
        self._used = 0
        self._walk: StreamWalk | None = None
        self._pieces: Iterator[tuple[Any, int, tuple[Document, int, int]]] = iter(())
        self._next: tuple[Any, int, tuple[Document, int, int]] | None = None

    def __iter__(self) -> "PackedRows":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._walk is None:
            self._walk = StreamWalk(self._packed.stream, self._epoch, self._place)
            self._pieces = self._found(self._walk)
            self._next = next(self._pieces, None)
        row, room = [], self._packed.length
        while self._next is not None and self._next[2][2] <= room and (self._packed.share or not row):
            row.append(self._next[2])
            room -= self._next[2][2]
            self._next = next(self._pieces, None)
        self._place, self._used = (self._walk.place(), 0) if self._next is None else self._next[:2]
        if not row:
            raise StopIteration
        return row_of(row, self._packed.length)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next row."""
        return {"place": self._place, "used": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        self._place, self._used, self._walk = state["place"], state["used"], None

    def _found(self, walk: StreamWalk) -> Iterator[tuple[Any, int, tuple[Document, int, int]]]:
        """Yield every piece, with the source's position before its document and its number in it."""
        used, encode, length = self._used, self._packed.encoder, self._packed.length
        while True:
            places, samples = [], []
            for _ in range(_ROWS_AT_ONCE):
                places.append(walk.place())
                if (sample := next(walk, _END)) is _END:
                    break
                samples.append(sample)
            if not samples:
                return
            for place, document in zip(places, encode(samples), strict=False):
                pieces = cut(np.array([len(document.ids)]), length)
                for number, (start, size) in enumerate(zip(pieces.start.tolist(), pieces.size.tolist(), strict=True)):
                    if number >= used and start + size >= document.prompt:
                        yield place, number, (document, start, size)
                used = 0


# --------------------------------------------------------------------------------------------------
# `pack`: samples with text to rows of tokens, of a dataset or of a stream.
# --------------------------------------------------------------------------------------------------

_DOCUMENTS_AT_ONCE = 1024


def pack(
    dataset: MapDataset | Mapping[str, Any] | Iterable | Callable[[], Iterable],
    length: int,
    tokenizer: str | os.PathLike | Tokenizer = "bytes",
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
      tokenizer: a tokenizer, or its name or path (see `load_tokenizer`).
      fields: the fields of a sample that are its text, joined by an empty line.
      prompt_field, completion_field: instead, the field that is given and the one that is learned: targets in prompts are -1.
      end: a token to add after every document, by name, such as "</s>".
      share: whether documents share rows; else each has its own, or several where it is longer.

    Raises:
      ImportError: the tokenizer's library is not installed.
      ValueError: a field or token is missing, there is no token to predict, the length is below 1, or the dataset has
        an order of its own, as a mixture has (mix packed sources instead).
      RuntimeError: a document that cannot be read, by number.
    """
    encoder = DocumentEncoder(
        tokenizer=load_tokenizer(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer,
        fields=fields,
        prompt_field=prompt_field,
        completion_field=completion_field,
        end=end,
    )
    samples = as_dataset(dataset)
    if isinstance(samples, Stream):
        return PackedStream(samples, encoder, length, share=share)
    if hasattr(samples, "order_of"):
        raise ValueError(
            f"pack takes every document of a {type(samples).__name__} once, and it has an order of its own, with shares or "
            "repetitions that would be lost: pack its sources, and mix the rows, ax.mix({name: ax.pack(source, ...)}, weights)"
        )
    content = getattr(samples, "fingerprint", None)
    known = None if content is None else f"{content} by {encoder.fingerprint}"
    return PackedDocuments(encoded(samples, encoder), length, share=share, fingerprint=known)


def encoded(dataset: MapDataset, encoder: DocumentEncoder, indices: Sequence[int] | None = None) -> list[Document]:
    """The documents of a dataset's samples, at some indices or all."""
    indices = range(len(dataset)) if indices is None else indices
    documents: list[Document] = []
    for at in range(0, len(indices), _DOCUMENTS_AT_ONCE):
        samples: list[Any] = []
        with named(lambda at=at, samples=samples: f"document {indices[at + len(samples)]}", None):
            for i in indices[at : at + _DOCUMENTS_AT_ONCE]:
                sample = dataset[i]
                encoder.texts(sample)
                samples.append(sample)
        documents += encoder(samples)
    return documents
