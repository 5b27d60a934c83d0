"""Which documents share a row: best fit, the longest first (Ding et al. 2024), as pure index arithmetic."""

from typing import NamedTuple

import numpy as np


class DocumentPieces(NamedTuple):
    """Parts of documents that fit into a row, int64 [p] each.

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
    """The pieces of documents of so many tokens, for rows of so many places.

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
    """Which pieces share a row: each, the longest first, goes where the least room is left that takes it.

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
    """Every piece in a row of its own."""
    return [[piece] for piece in range(len(sizes))]
