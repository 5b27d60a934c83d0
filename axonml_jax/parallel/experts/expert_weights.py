"""What the experts of a rank compute, and their weights as one value."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Activation = Literal["swiglu", "clamped_swiglu", "gelu"]
ACTIVATIONS: tuple[str, ...] = ("swiglu", "clamped_swiglu", "gelu")
CLAMP, SHARPNESS = 7.0, 1.702


class ExpertWeights(NamedTuple):
    """The weights of E experts of width h and inner width f, in the dtype in which they multiply.

    Attributes:
      gate: [E, h, f]; None where experts are not gated.
      up: [E, h, f].
      down: [E, f, h].
      gate_bias, up_bias: [E, f], or None.
      down_bias: [E, h], or None.
    """

    gate: jax.Array | None
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


def activated(activation: str, gate: jax.Array | None, up: jax.Array) -> jax.Array:
    """The inner features: of "swiglu" silu(gate) * up; of "gelu" its tanh approximation of up.

    "clamped_swiglu" is gpt-oss's: the gate is at most 7, up lies in [-7, 7], and gate * sigmoid(1.702 * gate) * (up + 1).
    """
    if gate is None:
        return jax.nn.gelu(up, approximate=True)
    if activation == "swiglu":
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return gate * jax.nn.sigmoid(SHARPNESS * gate) * (up + 1)
