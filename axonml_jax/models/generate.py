"""Sampling text by running the model on a fixed-size window again for every token; no cache."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def generate(
    model: nnx.Module | Callable[[jax.Array], jax.Array],
    tokens,
    length: int,
    key: jax.Array,
    *,
    temperature: float = 1.0,
    window: int | None = None,
) -> np.ndarray:
    """Continue `tokens` by `length` sampled tokens.

    The model always sees an array of the same shape, so it is compiled once: a prompt shorter than the window is padded
    on the right, which a causal model does not see, and a longer text slides out on the left.

    Args:
      model: a causal NNX module (run in eval mode, compiled here), or a function that is compiled already.
        Either maps integer [b, w] to logits [b, w, v] (b batch, w window, v vocabulary).
      tokens: integer [b, p], the prompts (p >= 1).
      length: number of new tokens.
      key: random key.
      temperature: divides the logits; 0 takes the most likely token.
      window: positions the model sees at most; None: p + length. Give the model's `max_length` for longer texts.

    Returns:
      int32 [b, p + length], prompts included.

    Raises:
      ValueError: an empty prompt, or a negative length or temperature, or a window below 1.
    """
    text = np.asarray(tokens, np.int32)
    offenders = _offenders(text, length, temperature, window)
    if offenders:
        raise ValueError("generate: " + "; ".join(offenders))
    width = window or text.shape[1] + length
    logits_of = _compiled(model) if isinstance(model, nnx.Module) else model
    for step in range(length):
        seen = text[:, -width:]
        padded = np.pad(seen, ((0, 0), (0, width - seen.shape[1])))
        draw = jax.random.fold_in(key, step)
        chosen = _sample(logits_of(padded), seen.shape[1] - 1, draw, temperature, greedy=temperature == 0)  # pyright: ignore[reportArgumentType]
        text = np.concatenate([text, np.asarray(chosen)[:, None]], axis=1)
    return text


def _offenders(text, length, temperature, window) -> list[str]:
    problems = {
        f"tokens have shape {text.shape}: give [batch, prompt] with at least one token": text.ndim != 2
        or 0 in text.shape,
        f"length={length} is negative": length < 0,
        f"temperature={temperature} is negative": temperature < 0,
        f"window={window} is below 1": window is not None and window < 1,
    }
    return [problem for problem, present in problems.items() if present]


def _compiled(model: nnx.Module):
    graphdef, state = nnx.split(model)

    @jax.jit
    def apply(state, tokens):
        copy = nnx.merge(graphdef, state)
        copy.eval()
        return copy(tokens)

    return partial(apply, state)


@partial(jax.jit, static_argnames="greedy")
def _sample(logits, position, key, temperature, *, greedy):
    last = jax.lax.dynamic_index_in_dim(logits, position, axis=1, keepdims=False).astype(jnp.float32)
    chosen = jnp.argmax(last, axis=-1) if greedy else jax.random.categorical(key, last / temperature)
    return chosen.astype(jnp.int32)
