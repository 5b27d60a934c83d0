"""Documents packed into rows: of a dataset, known as a whole, or of a stream, one row after the other."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from axonml_jax.data.documents.best_fit import best_fit, cut, one_by_one
from axonml_jax.data.documents.encoder import Document, DocumentEncoder
from axonml_jax.data.documents.packed_row import row_of
from axonml_jax.data.streams.stream_walk import Stream, StreamWalk

_AT_ONCE = 256


class PackedDocuments:
    """A dataset of rows, each of which holds whole documents that fill it well; longer ones are cut.

    Args:
      documents: as many as there are; those from whose tokens nothing is learned are left out.
      length: places of a row.
      share: whether documents share rows.
      fingerprint: what tells these documents from others.

    Raises:
      ValueError: nothing is left.

    Attributes:
      num_tokens: places that documents take, of all rows together.
      num_targets: places whose prediction counts.
    """

    def __init__(
        self, documents: Sequence[Document], length: int, *, share: bool = True, fingerprint: str | None = None
    ):
        if length < 1:
            raise ValueError(f"length={length}: must be at least 1")
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
    """Rows of the documents of an iterable source, in its order: a row is closed when the next document does not fit.

    Its iterator has `state_dict` and `load_state_dict`.

    Args:
      stream: the source.
      encoder: makes documents of its samples.
      length: places of a row.
      share: whether documents share rows.
    """

    def __init__(self, stream: Stream, encoder: DocumentEncoder, length: int, *, share: bool = True):
        self.stream, self.encoder, self.length, self.share = stream, encoder, length, share
        self._epoch = 0

    @property
    def fingerprint(self) -> str:
        """What tells these rows from others, as far as the source says."""
        content = getattr(self.stream.source, "fingerprint", "unknown")
        return f"{content} by {self.encoder.fingerprint} in {'shared' if self.share else 'own'} rows of {self.length}"

    def set_epoch(self, epoch: int) -> None:
        """Which epoch of the source comes next."""
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
        """Where the next row begins."""
        return {"place": self._place, "used": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._place, self._used, self._walk = state["place"], state["used"], None

    def _found(self, walk: StreamWalk) -> Iterator[tuple[Any, int, tuple[Document, int, int]]]:
        """Every piece, with the source's place before its document and its number in it."""
        used, encode, length = self._used, self._packed.encoder, self._packed.length
        while True:
            places, samples = [], []
            for _ in range(_AT_ONCE):
                places.append(walk.place())
                if (sample := next(walk, None)) is None:
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
