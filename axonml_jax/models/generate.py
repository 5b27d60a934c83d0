"""Text from a causal model, token by token: caches, windows, sampling, prompts."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axonml_jax.sharding.layout import to_host

# --------------------------------------------------------------------------------------------------
# How the next token is drawn from logits: temperature, the most likely few (top-k), the nucleus (top-p).
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A rule for sampling tokens.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw among so many of the most likely tokens (Fan et al. 2018); None: among all.
      top_p: draw among the fewest most likely tokens with this probability together (Holtzman et al. 2020); None: among all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def problems(self) -> list[str]:
        """All problems with the rule."""
        found = {
            f"temperature={self.temperature} is negative, or no finite number": not 0 <= self.temperature < math.inf,
            f"top_k={self.top_k} is below 1": self.top_k is not None and self.top_k < 1,
            f"top_p={self.top_p} is not above 0 and at most 1": self.top_p is not None and not 0 < self.top_p <= 1,
        }
        return [problem for problem, present in found.items() if present]

    def draw(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Sample tokens int32 [b] from logits [b, v] (b batch, v vocabulary)."""
        if self.temperature == 0:
            return _most_likely(logits)
        return _drawn(logits, key, self.temperature, 1.0 if self.top_p is None else self.top_p, top_k=self.top_k)


@jax.jit
def _most_likely(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits.astype(jnp.float32), axis=-1).astype(jnp.int32)


@partial(jax.jit, static_argnames="top_k")
def _drawn(logits: jax.Array, key: jax.Array, temperature: float, top_p: float, *, top_k: int | None) -> jax.Array:
    wide = logits.astype(jnp.float32) / temperature
    if top_k is not None and top_k < wide.shape[-1]:
        least = jax.lax.top_k(wide, top_k)[0][..., -1:]
        wide = jnp.where(wide >= least, wide, -jnp.inf)
    falling = jnp.sort(wide, axis=-1, descending=True)
    chances = jax.nn.softmax(falling, axis=-1)
    inside = jnp.cumsum(chances, axis=-1) - chances < top_p  # the first token that reaches top_p is still inside
    least = jnp.min(jnp.where(inside, falling, jnp.inf), axis=-1, keepdims=True)
    return jax.random.categorical(key, jnp.where(wide >= least, wide, -jnp.inf)).astype(jnp.int32)


# --------------------------------------------------------------------------------------------------
# Prompts as `generate` takes them: a matrix of tokens, in which shorter prompts stand at the ends of their rows.
# --------------------------------------------------------------------------------------------------

_SHOWN = 8


class Prompts(NamedTuple):
    """Prompts side by side, which all end in the last column.

    Attributes:
      text: int32 [b, p]; what stands before a prompt is no part of it.
      starts: int32 [b], the column in which each begins; None: all begin in the first one.
    """

    text: np.ndarray
    starts: np.ndarray | None


def checked_prompts(
    tokens: Any, mask: Any, length: int, sampling: Sampling, window: int | None, model: Any = None
) -> Prompts:
    """Check prompts, and align them for a model that continues them.

    Args:
      tokens: integer [b, p], or a list of prompts of any lengths, before which zeros are put.
      mask: [b, p], true or 1 where a token is of its prompt, side by side in every row; None: all tokens are.
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
    """The maximal sequence length that an NNX model, or a module in it, declares (`max_length`); None if none does."""
    modules = (module for _, module in nnx.iter_graph(model)) if isinstance(model, nnx.Module) else ()
    limits = [getattr(module, "max_length", None) for module in modules if isinstance(module, nnx.Module)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def keeps_caches(model: Any) -> bool:
    """Whether a model can read on from caches as the transformer does; one of the names alone may be a user's own."""
    return all(hasattr(model, name) for name in ("extend", "empty_caches", "cache_specs"))


def vocabulary(model: Any) -> int | None:
    """The vocabulary size that an NNX model, or its `config`, declares (`vocab_size`); None if it does not."""
    if not isinstance(model, nnx.Module):
        return None
    said = (getattr(each, "vocab_size", None) for each in (model, getattr(model, "config", None)))
    return next((size for size in said if isinstance(size, int)), None)


def foreign_words(prompts: Iterable[Any], words: int | None) -> list[str]:
    """A line about tokens below 0, or not below `words` (None: not below 2**31); no line if there are none."""
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
    """The rows of prompts, and what is wrong with them."""
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
    """Whether a row holds whole numbers, which may be floats."""
    return row.dtype.kind in "iu" or (row.dtype.kind == "f" and bool(np.all(row == np.trunc(row))))


def _spans(rows: Sequence[np.ndarray], mask: np.ndarray) -> tuple[list[tuple[int, int]], list[str]]:
    """The start and end of each prompt in its row, and what is wrong with the mask."""
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


# --------------------------------------------------------------------------------------------------
# Sampling text token by token: with a cache of keys and values where the model has one, else on a fixed-size window.
# --------------------------------------------------------------------------------------------------

AfterToken = Callable[[np.ndarray], Any]
"""Called with the text so far [b, p + n] after every token; a true result ends the text."""
Extend = Callable[[np.ndarray, Any, Any], tuple[jax.Array, Any]]
"""(tokens [b, s], caches or None to begin, starts) -> (logits of the token after the last [b, v], caches).

`starts` is given where rows begin in several columns: [b], where each begins, and None once the caches know it.
"""


def generate(
    model: nnx.Module | Callable[[jax.Array], jax.Array],
    tokens,
    length: int,
    key: jax.Array,
    *,
    mask: Any = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    window: int | None = None,
    after_token: AfterToken | None = None,
) -> np.ndarray:
    """Continue `tokens` by `length` sampled tokens.

    The transformer keeps the keys and values of what it has seen, so that a token costs one position, until the text is
    longer than the window; from there on it reads the last `window` tokens anew for every token. Any other model always sees
    an array of the window's shape: a shorter prompt is padded on the right, which a causal model does not see.

    Args:
      model: a causal NNX module (run in eval mode, compiled here), or a function that is compiled already.
        Either maps integer [b, w] to logits [b, w, v] (b batch, w window, v vocabulary).
      tokens: integer [b, p], the prompts (p >= 1), or a list of prompts of any lengths, p that of the longest.
      length: number of new tokens.
      key: random key.
      mask: [b, p], true or 1 where a token is of its prompt, which may be padded on the left or on the right.
      temperature, top_k, top_p: how a token is drawn, see `Sampling`.
      window: positions the model sees at most; None: p + length. Give the model's `max_length` for longer texts.
      after_token: called with the text so far [b, p + n] after every token; a true result ends it.

    Returns:
      int32 [b, p + length], prompts included, all of which end in column p - 1: what is before a shorter one is its padding,
      zeros where a list was given. Fewer columns where `after_token` has ended it.

    Raises:
      ValueError: an empty prompt, tokens outside the vocabulary, a mask with holes, a negative length or temperature, a window
        below 1, or more positions at once than the model's `max_length`.
      TypeError: for a model that returns something else than logits.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    text, starts = checked_prompts(tokens, mask, length, sampling, window, model)
    width = window or text.shape[1] + length
    if not isinstance(model, nnx.Module):
        after = Windowed(model, width, starts)
    elif keeps_caches(model):
        after = Cached(_compiled_extend(model, width), width, starts)
    else:
        after = Windowed(_compiled(model), width, starts)
    return continued(after, text, length, key, sampling, after_token)


def continued(
    after: "Cached | Windowed",
    text: np.ndarray,
    length: int,
    key: jax.Array,
    sampling: Sampling,
    after_token: AfterToken | None = None,
) -> np.ndarray:
    """Continue `text` by tokens sampled from `after(text)`, the logits [b, v] of the next token.

    Raises:
      ValueError: for prompts with words beyond the logits'.
    """
    for step in range(length):
        logits = after(text)
        if step == 0 and (wrong := foreign_words(text * _own(text, after.starts), logits.shape[-1])):
            raise ValueError(f"generate: {wrong[0]}")
        chosen = sampling.draw(logits, jax.random.fold_in(key, step))
        text = np.concatenate([text, to_host(chosen)[:, None]], axis=1)
        if after_token is not None and after_token(text):
            break
    return text


class Cached:
    """Logits after a growing text from a model with caches for up to `room` positions.

    Args:
      extend: reads further tokens.
      room: positions.
      starts: [b], the column in which each row begins; None: all begin in the first one.
      in_pieces: read a prompt in pieces whose lengths are powers of two, so that prompts of any length are read by few
        programs; else at once, by a program for its length.
    """

    def __init__(self, extend: Extend, room: int, starts: np.ndarray | None = None, *, in_pieces: bool = False):
        self.extend, self.room, self.starts, self.in_pieces = extend, room, starts, in_pieces
        self.caches: Any = None

    def __call__(self, text: np.ndarray) -> jax.Array:
        """Logits [b, v] after text [b, s], which must be the last text and one more token."""
        text, starts = text * _own(text, self.starts), self.starts
        if (over := text.shape[1] - self.room) > 0:
            starts = None if starts is None else np.maximum(starts - over, 0)
            return self.extend(text[:, over:], None, starts)[0]
        new = text if self.caches is None else text[:, -1:]
        while self.in_pieces and new.shape[1] & (new.shape[1] - 1):  # more than one bit: no power of two
            first = 1 << (new.shape[1].bit_length() - 1)
            self._read(new[:, :first])
            new = new[:, first:]
        return self._read(new)

    def _read(self, new: np.ndarray) -> jax.Array:
        logits, self.caches = self.extend(new, self.caches, self.starts if self.caches is None else None)
        return logits


class Windowed:
    """Logits after a text from a model that is always given `width` positions.

    Every row begins in the array's first column, so that a causal model does not see what is behind it.

    Args:
      logits_of: the model.
      width: positions.
      starts: as of `Cached`.
    """

    def __init__(self, logits_of: Callable[..., jax.Array], width: int, starts: np.ndarray | None = None):
        self.logits_of, self.width, self.starts = logits_of, width, starts

    def __call__(self, text: np.ndarray) -> jax.Array:
        """Logits [b, v] after text [b, s]."""
        if self.starts is None:
            seen = text[:, -self.width :]
            padded = np.pad(seen, ((0, 0), (0, self.width - seen.shape[1])))
            return logits_in(self.logits_of(padded))[:, seen.shape[1] - 1]
        rows = [row[start:][-self.width :] for row, start in zip(text, self.starts, strict=True)]
        padded = np.stack([np.pad(row, (0, self.width - len(row))) for row in rows])
        last = np.array([len(row) - 1 for row in rows])
        return jnp.take_along_axis(logits_in(self.logits_of(padded)), last[:, None, None], axis=1)[:, 0]


def logits_in(returned: Any) -> jax.Array:
    """Check that a model returned logits [b, w, v], and return them.

    Raises:
      TypeError: where these are no logits alone, with the remedy.
    """
    if getattr(returned, "ndim", 0) != 3:
        found = f"an array of shape {returned.shape}" if hasattr(returned, "shape") else f"a {type(returned).__name__}"
        raise TypeError(
            f"generate: the model returned {found}, and must map tokens [b, w] to logits [b, w, v]. Give a function that takes "
            "them out of what it returns, such as lambda tokens: model(tokens)[0], after model.eval(); for a parallel model "
            "the number of prompts must then divide over its batch axes"
        )
    return returned


def _own(text: np.ndarray, starts: np.ndarray | None) -> Any:
    """1 for tokens of a row's text, 0 for padding before it."""
    return 1 if starts is None else np.arange(text.shape[1]) >= starts[:, None]


def extended(
    model: Any, tokens: jax.Array, caches: Any, room: int, starts: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    """Implements `Extend` for a transformer in eval mode; its logits are split as its layers leave them.

    Sequence parallelism is switched off in the model given: one more position cannot be split. It changes no result.
    """
    for _, module in nnx.iter_graph(model):
        for switch in ("sequence_parallel", "ring"):
            if isinstance(module, nnx.Module) and getattr(module, switch, False):
                setattr(module, switch, False)
    model.split_sequence = False
    if caches is None:
        caches = model.empty_caches(tokens.shape[0], room, *(() if starts is None else (starts,)))
    logits, caches = model.extend(tokens, caches)
    return logits[:, -1], caches


def _compiled_extend(model: nnx.Module, room: int) -> Extend:
    graphdef, state = nnx.split(model)

    @jax.jit
    def extend(state, tokens, caches, starts):
        copy = nnx.merge(graphdef, state, copy=True)
        copy.eval()
        return extended(copy, tokens, caches, room, starts)

    return partial(extend, state)


def _compiled(model: nnx.Module):
    graphdef, state = nnx.split(model)

    @jax.jit
    def apply(state, tokens):
        copy = nnx.merge(graphdef, state)
        copy.eval()
        return copy(tokens)

    return partial(apply, state)
