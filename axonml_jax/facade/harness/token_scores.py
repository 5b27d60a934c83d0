"""Log-likelihoods of tokens under a parallel model, many rows at a time, in few shapes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.facade.parallel_generate import evaluating, even_logits
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.models.generation.prompts import foreign_words
from axonml_jax.sharding.place import to_host

SHORTEST = 32
"""Rows are padded to this length, or the next power of two, so that few shapes are compiled."""


class Row(NamedTuple):
    """Tokens, of which the last `scored` are asked for: each given all before it."""

    tokens: Sequence[int]
    scored: int


class Score(NamedTuple):
    """The log-likelihood of a row's scored tokens together, and whether each was the most likely one."""

    loglikelihood: float
    greedy: bool


def score_rows(model: ParallelModel, rows: Sequence[Row], *, batch_size: int, longest: int) -> list[Score]:
    """The scores of rows, in their order; every process must call it with the same rows.

    Args:
      model: maps tokens [b, w] to logits [b, w, v].
      rows: of at least two tokens and at most `longest + 1`, of which at most all but the first are scored.
      batch_size: rows at a time.
      longest: positions that the model sees at most.

    Raises:
      ValueError: for tokens beyond the model's vocabulary.
    """
    scores: list[Score | None] = [None] * len(rows)
    with evaluating(model):
        logits_of = even_logits(model)
        for numbers in _batches(rows, batch_size):
            tokens, targets, counted = _arrays([rows[n] for n in numbers], batch_size, longest)
            logits = logits_of(tokens)
            if wrong := foreign_words((rows[n].tokens for n in numbers), logits.shape[-1]):
                raise ValueError(f"scores: {wrong[0]}")
            sums, greedy = to_host(_scores(logits, targets, counted))
            for n, total, best in zip(numbers, sums.tolist(), greedy.tolist(), strict=False):
                scores[n] = Score(total, best)
    return [score for score in scores if score is not None]


def windows(tokens: Sequence[int], prefix: int, longest: int) -> Iterator[Row]:
    """A text of any length as rows in which every token is scored once, given as many before it as fit.

    The first row begins with the prefix, and the last one is full where the text is long enough.

    >>> [(row.tokens, row.scored) for row in windows([1, 2, 3, 4, 5], 0, 3)]
    [([0, 1, 2, 3], 3), ([2, 3, 4, 5], 2)]
    """
    whole, done = [prefix, *tokens], 0
    while done < len(tokens):
        end = min(done + longest, len(tokens))
        yield Row(whole[max(end - longest, 0) : end + 1], end - done)
        done = end


def _batches(rows: Sequence[Row], size: int) -> list[list[int]]:
    """Numbers of rows, the longest first, so that memory runs out at once or never."""
    order = sorted(range(len(rows)), key=lambda n: -len(rows[n].tokens))
    return [order[start : start + size] for start in range(0, len(order), size)]


def _arrays(rows: Sequence[Row], size: int, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and which of these count, [size, w]; a causal model does not see what is padded on the right."""
    most = max(len(row.tokens) for row in rows) - 1
    width = max(min(longest, max(SHORTEST, 1 << (most - 1).bit_length())), most)
    tokens, targets = np.zeros((2, size, width), np.int32)
    counted = np.zeros((size, width), bool)
    for place, row in enumerate(rows):
        length = len(row.tokens) - 1
        tokens[place, :length], targets[place, :length] = row.tokens[:-1], row.tokens[1:]
        counted[place, length - row.scored : length] = True
    return tokens, targets, counted


@jax.jit
def _scores(logits: jax.Array, targets: jax.Array, counted: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(wide, axis=-1)
    best = (jnp.argmax(wide, axis=-1) == targets) | ~counted
    return jnp.sum(jnp.where(counted, chosen, 0), axis=-1), jnp.all(best, axis=-1)
