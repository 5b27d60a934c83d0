"""Sampling text token by token: with a cache of keys and values where the model has one, else on a fixed-size window."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from axonml_jax.models.generation.sampling import Sampling
from axonml_jax.sharding.place import to_host

AfterToken = Callable[[np.ndarray], Any]
"""Called with the text so far [b, p + n] after every token; a true result ends the text."""
Extend = Callable[[np.ndarray, Any], tuple[jax.Array, Any]]
"""(tokens [b, s], caches or None to begin) -> (logits of the token after the last [b, v], caches)."""


def generate(
    model: nnx.Module | Callable[[jax.Array], jax.Array],
    tokens,
    length: int,
    key: jax.Array,
    *,
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
      tokens: integer [b, p], the prompts (p >= 1).
      length: number of new tokens.
      key: random key.
      temperature, top_k, top_p: how a token is drawn, see `Sampling`.
      window: positions the model sees at most; None: p + length. Give the model's `max_length` for longer texts.
      after_token: called with the text so far [b, p + n] after every token; a true result ends it.

    Returns:
      int32 [b, p + length], prompts included; fewer where `after_token` has ended it.

    Raises:
      ValueError: an empty prompt, a negative length or temperature, a window below 1, or more positions at once than the
        model's `max_length`.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    text = checked_prompts(tokens, length, sampling, window, longest(model))
    width = window or text.shape[1] + length
    if not isinstance(model, nnx.Module):
        after = Windowed(model, width)
    elif hasattr(model, "extend"):
        after = Cached(_compiled_extend(model, width), width)
    else:
        after = Windowed(_compiled(model), width)
    return continued(after, text, length, key, sampling, after_token)


def continued(
    after: Callable[[np.ndarray], jax.Array],
    text: np.ndarray,
    length: int,
    key: jax.Array,
    sampling: Sampling,
    after_token: AfterToken | None = None,
) -> np.ndarray:
    """`text` continued by tokens drawn from `after(text)`, the logits [b, v] of the token after it."""
    for step in range(length):
        chosen = sampling.draw(after(text), jax.random.fold_in(key, step))
        text = np.concatenate([text, to_host(chosen)[:, None]], axis=1)
        if after_token is not None and after_token(text):
            break
    return text


class Cached:
    """Logits after a growing text from a model that keeps what it has seen, up to `room` positions.

    Args:
      extend: reads further tokens.
      room: positions.
      in_pieces: read a prompt in pieces whose lengths are powers of two, so that prompts of any length are read by few
        programs; else at once, by a program for its length.
    """

    def __init__(self, extend: Extend, room: int, *, in_pieces: bool = False):
        self.extend, self.room, self.in_pieces = extend, room, in_pieces
        self.caches: Any = None

    def __call__(self, text: np.ndarray) -> jax.Array:
        """[b, s] -> [b, v]; each text is the one before and one more token."""
        if text.shape[1] > self.room:
            return self.extend(text[:, -self.room :], None)[0]
        new = text if self.caches is None else text[:, -1:]
        while self.in_pieces and new.shape[1] & (new.shape[1] - 1):  # more than one bit: no power of two
            first = 1 << (new.shape[1].bit_length() - 1)
            _, self.caches = self.extend(new[:, :first], self.caches)
            new = new[:, first:]
        logits, self.caches = self.extend(new, self.caches)
        return logits


class Windowed:
    """Logits after a text from a model that sees an array of `width` positions every time."""

    def __init__(self, logits_of: Callable[..., jax.Array], width: int):
        self.logits_of, self.width = logits_of, width

    def __call__(self, text: np.ndarray) -> jax.Array:
        """[b, s] -> [b, v]."""
        seen = text[:, -self.width :]
        padded = np.pad(seen, ((0, 0), (0, self.width - seen.shape[1])))
        return self.logits_of(padded)[:, seen.shape[1] - 1]


def longest(model: Any) -> int | None:
    """The longest sequence that an NNX model takes, as it or a module in it says (`max_length`); None where none does."""
    modules = (module for _, module in nnx.iter_graph(model)) if isinstance(model, nnx.Module) else ()
    limits = [getattr(module, "max_length", None) for module in modules if isinstance(module, nnx.Module)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def checked_prompts(
    tokens: Any, length: int, sampling: Sampling, window: int | None, max_length: int | None
) -> np.ndarray:
    """The prompts as int32 [b, p].

    Raises:
      ValueError: listing everything that is wrong, before the model is called.
    """
    text = np.asarray(tokens, np.int32)
    problems = {
        f"tokens have shape {text.shape}: give [batch, prompt] with at least one token": text.ndim != 2
        or 0 in text.shape,
        f"length={length} is negative": length < 0,
        f"window={window} is below 1": window is not None and window < 1,
    }
    if offenders := [problem for problem, present in problems.items() if present] + sampling.problems():
        raise ValueError("generate: " + "; ".join(offenders))
    if max_length is not None and (window or text.shape[1] + length) > max_length:
        raise ValueError(f"generate: {_too_long(text.shape[1], length, window, max_length)}")
    return text


def _too_long(prompt: int, length: int, window: int | None, most: int) -> str:
    slides = f"window={most} makes the model see the last {most} tokens of longer texts"
    if window is not None:
        return f"window={window} is longer than the model's max_length={most}: {slides}"
    shorter = f", length={most - prompt} stays within it" if most > prompt else ""
    return (
        f"prompts of {prompt} tokens and length={length} make {prompt + length}, longer than the model's "
        f"max_length={most}: {slides}{shorter}"
    )


def extended(model: Any, tokens: jax.Array, caches: Any, room: int) -> tuple[jax.Array, Any]:
    """What `Extend` does with a transformer in eval mode; its logits are as its layers leave them.

    Sequence parallelism is switched off in the model given: one more position cannot be split. It changes no result.
    """
    for _, module in nnx.iter_graph(model):
        for switch in ("sequence_parallel", "ring"):
            if isinstance(module, nnx.Module) and getattr(module, switch, False):
                setattr(module, switch, False)
    model.split_sequence = False
    caches = model.empty_caches(tokens.shape[0], room) if caches is None else caches
    logits, caches = model.extend(tokens, caches)
    return logits[:, -1], caches


def _compiled_extend(model: nnx.Module, room: int) -> Extend:
    graphdef, state = nnx.split(model)

    @jax.jit
    def extend(state, tokens, caches):
        copy = nnx.merge(graphdef, state, copy=True)
        copy.eval()
        return extended(copy, tokens, caches, room)

    return partial(extend, state)


def _compiled(model: nnx.Module):
    graphdef, state = nnx.split(model)

    @jax.jit
    def apply(state, tokens):
        copy = nnx.merge(graphdef, state)
        copy.eval()
        return copy(tokens)

    return partial(apply, state)
