"""Sampling text token by token: with a cache of keys and values where the model has one, else on a fixed-size window."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axonml_jax.models.generation.prompts import checked_prompts, foreign_words
from axonml_jax.models.generation.sampling import Sampling
from axonml_jax.sharding.place import to_host

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
    longer than the window; from there on it sees the last of it anew for every token. Any other model always sees an array
    of the window's shape: a prompt shorter than that is padded on the right, which a causal model does not see.

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
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    text, starts = checked_prompts(tokens, mask, length, sampling, window, model)
    width = window or text.shape[1] + length
    if not isinstance(model, nnx.Module):
        after = Windowed(model, width, starts)
    elif hasattr(model, "extend"):
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
    """`text` continued by tokens drawn from `after(text)`, the logits [b, v] of the token after it.

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
    """Logits after a growing text from a model that keeps what it has seen, up to `room` positions.

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
        """[b, s] -> [b, v]; each text is the one before and one more token."""
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
    """Logits after a text from a model that sees an array of `width` positions every time.

    Every row begins in the array's first column, so that a causal model does not see what is behind it.

    Args:
      logits_of: the model.
      width: positions.
      starts: as of `Cached`.
    """

    def __init__(self, logits_of: Callable[..., jax.Array], width: int, starts: np.ndarray | None = None):
        self.logits_of, self.width, self.starts = logits_of, width, starts

    def __call__(self, text: np.ndarray) -> jax.Array:
        """[b, s] -> [b, v]."""
        if self.starts is None:
            seen = text[:, -self.width :]
            padded = np.pad(seen, ((0, 0), (0, self.width - seen.shape[1])))
            return self.logits_of(padded)[:, seen.shape[1] - 1]
        rows = [row[start:][-self.width :] for row, start in zip(text, self.starts, strict=True)]
        padded = np.stack([np.pad(row, (0, self.width - len(row))) for row in rows])
        last = np.array([len(row) - 1 for row in rows])
        return jnp.take_along_axis(self.logits_of(padded), last[:, None, None], axis=1)[:, 0]


def _own(text: np.ndarray, starts: np.ndarray | None) -> Any:
    """1 where a token is of its row's text, 0 before."""
    return 1 if starts is None else np.arange(text.shape[1]) >= starts[:, None]


def extended(
    model: Any, tokens: jax.Array, caches: Any, room: int, starts: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    """What `Extend` does with a transformer in eval mode; its logits are as its layers leave them.

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
