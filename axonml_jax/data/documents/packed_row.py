"""A row of tokens that holds several documents: what the model is given."""

from collections.abc import Iterable

import numpy as np

from axonml_jax.data.documents.encoder import Document

IGNORED = -1
"""The target of places whose prediction counts for nothing."""


def row_of(pieces: Iterable[tuple[Document, int, int]], length: int) -> dict[str, np.ndarray]:
    """Pieces of documents, one after the other, in a row.

    Args:
      pieces: (document, first token, places) of each.
      length: places of the row.

    Returns:
      int32 [length] each: "tokens"; "targets", the token after each in its document, -1 where that is given in a prompt and in
      what no document fills; "segment_ids", from 1, 0 in what no document fills; "positions" in the piece.

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
