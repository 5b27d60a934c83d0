"""How the next token is drawn from logits: temperature, the most likely few (top-k), the nucleus (top-p)."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A rule for drawing tokens.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw among so many of the most likely tokens (Fan et al. 2018); None: among all.
      top_p: draw among the fewest most likely tokens with this probability together (Holtzman et al. 2020); None: among all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def problems(self) -> list[str]:
        """Everything that is wrong with it."""
        found = {
            f"temperature={self.temperature} is negative": self.temperature < 0,
            f"top_k={self.top_k} is below 1": self.top_k is not None and self.top_k < 1,
            f"top_p={self.top_p} is not above 0 and at most 1": self.top_p is not None and not 0 < self.top_p <= 1,
        }
        return [problem for problem, present in found.items() if present]

    def draw(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """int32 [b] from logits [b, v] (b batch, v vocabulary)."""
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
