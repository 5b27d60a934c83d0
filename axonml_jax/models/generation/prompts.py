"""Prompts as `generate` takes them: a matrix of tokens, in which shorter prompts stand at the ends of their rows."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from axonml_jax.models.generation.sampling import Sampling

_SHOWN = 8


class Prompts(NamedTuple):
    """Prompts side by side, all of which end in the last column.

    Attributes:
      text: int32 [b, p]; what stands before a prompt is no part of it.
      starts: int32 [b], the column in which each begins; None: all begin in the first one.
    """

    text: np.ndarray
    starts: np.ndarray | None


def checked_prompts(
    tokens: Any, mask: Any, length: int, sampling: Sampling, window: int | None, model: Any = None
) -> Prompts:
    """Prompts that a model can continue.

    Args:
      tokens: integer [b, p], or a list of prompts of any lengths, before which zeros are put.
      mask: [b, p], true or 1 where a token is of its prompt, one stretch in every row; None: all tokens are.
      length: number of new tokens.
      sampling: how they will be drawn.
      window: positions the model sees at most; None: p + length.
      model: the module that may say how many positions and words it has; None: nothing says it.

    Raises:
      ValueError: listing everything that is wrong, before the model is called.
    """
    rows, problems = _rows(tokens)
    spans = [(0, len(row)) for row in rows]
    if mask is not None and not problems:
        spans, problems = _spans(rows, np.asarray(mask))
    given = {
        f"length={length} is negative": length < 0,
        f"window={window} is below 1": window is not None and window < 1,
    }
    problems += [problem for problem, present in given.items() if present] + sampling.problems()
    if not problems:
        prompts = [row[start:end] for row, (start, end) in zip(rows, spans, strict=True)]
        problems = foreign_words(prompts, vocabulary(model))
    most, width = longest(model), max(map(len, rows), default=0)
    if not problems and most is not None and (window or width + length) > most:
        problems = [_too_long(width, length, window, most)]
    if problems:
        raise ValueError("generate: " + "; ".join(problems))
    return _side_by_side(rows, spans, width)


def longest(model: Any) -> int | None:
    """The longest sequence that an NNX model takes, as it or a module in it says (`max_length`); None where none does."""
    modules = (module for _, module in nnx.iter_graph(model)) if isinstance(model, nnx.Module) else ()
    limits = [getattr(module, "max_length", None) for module in modules if isinstance(module, nnx.Module)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def vocabulary(model: Any) -> int | None:
    """How many words an NNX model says that it has (`vocab_size`, its own or its `config`'s); None where it says nothing."""
    if not isinstance(model, nnx.Module):
        return None
    said = (getattr(each, "vocab_size", None) for each in (model, getattr(model, "config", None)))
    return next((size for size in said if isinstance(size, int)), None)


def foreign_words(prompts: Iterable[Any], words: int | None) -> list[str]:
    """A line about the tokens that are no words of a vocabulary of that size, if there are any; None: the size is unknown."""
    most = 2**31 if words is None else words
    wrong = []
    for number, prompt in enumerate(prompts):
        row = np.asarray(prompt)
        wrong += [f"{row[at]} (prompt {number}, place {at})" for at in np.flatnonzero((row < 0) | (row >= most))]
    if not wrong:
        return []
    has = "a word is 0 or more" if words is None else f"the model has {words}, 0 to {words - 1}"
    shown = ", ".join(wrong[:_SHOWN]) + (f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
    return [
        f"tokens {shown} are no words of the vocabulary: {has}; encode prompts by the model's own tokenizer, and give `mask` "
        "where they are padding"
    ]


def _rows(tokens: Any) -> tuple[list[np.ndarray], list[str]]:
    """The rows as they are given, and what is wrong with them."""
    if isinstance(tokens, Sequence):
        rows = [np.asarray(row) for row in tokens]
    else:
        array = np.asarray(tokens)
        rows = list(array) if array.ndim == 2 else [array]
    shapes = [row.shape for row in rows]
    if not rows or any(len(shape) != 1 or 0 in shape for shape in shapes):
        shape = getattr(tokens, "shape", shapes)
        return [], [
            f"tokens have shape {shape}: give [batch, prompt], or a list of prompts, with at least one token each"
        ]
    if dtypes := {row.dtype.name for row in rows if not _whole(row)}:
        return [], [f"tokens are {', '.join(sorted(dtypes))}: give integers"]
    return rows, []


def _whole(row: np.ndarray) -> bool:
    """Whether a row holds whole numbers, floats among them."""
    return row.dtype.kind in "iu" or (row.dtype.kind == "f" and bool(np.all(row == np.trunc(row))))


def _spans(rows: Sequence[np.ndarray], mask: np.ndarray) -> tuple[list[tuple[int, int]], list[str]]:
    """From where to where the prompts go in their rows, and what is wrong with the mask."""
    shape = (len(rows), len(rows[0]))
    if any(len(row) != shape[1] for row in rows):
        return [], ["mask is given for prompts of several lengths: leave it out, or pad them to one length"]
    if mask.shape != shape:
        return [], [f"mask has shape {mask.shape}, tokens {shape}: give one value for every token"]
    wrong, spans = [], []
    for number, row in enumerate(mask != 0):
        places = np.flatnonzero(row)
        whole = len(places) and places[-1] - places[0] + 1 == len(places)
        spans.append((int(places[0]), int(places[-1]) + 1) if whole else (0, 0))
        wrong += [] if whole else [number]
    if wrong:
        return [], [
            f"mask of prompts {wrong} is no single stretch of ones: pad before a prompt or after it, not within"
        ]
    return spans, []


def _side_by_side(rows: Sequence[np.ndarray], spans: Sequence[tuple[int, int]], width: int) -> Prompts:
    text = np.zeros((len(rows), width), np.int32)
    for own, row, (_, end) in zip(text, rows, spans, strict=True):
        own[width - len(row) :] = np.roll(row, len(row) - end)
    starts = np.array([width - (end - start) for start, end in spans], np.int32)
    return Prompts(text, starts if starts.any() else None)


def _too_long(prompt: int, length: int, window: int | None, most: int) -> str:
    slides = f"window={most} makes the model see the last {most} tokens of longer texts"
    if window is not None:
        return f"window={window} is longer than the model's max_length={most}: {slides}"
    shorter = f", length={most - prompt} stays within it" if most > prompt else ""
    return (
        f"prompts of {prompt} tokens and length={length} make {prompt + length}, longer than the model's "
        f"max_length={most}: {slides}{shorter}"
    )
