"""Canaries about `waiting.py`: without it collectives of simulated devices mix up, or never end."""

from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.canaries.on_two import floats
from axonml_jax.compat.waiting import waiting


def _compiled() -> None:
    def both(x: Any, y: Any) -> Any:
        return waiting(jnp.sin(x), [jnp.cos(y)])

    text = str(jax.jit(both).lower(floats(64), floats(32)).compile().as_text())
    expect("cosine(" in text, "a value that waits for a cosine is made without it in the compiled program")


CANARIES = (
    Canary(
        "waiting is compiled",
        "XLA does not see that a value which waits for others is the same without them.",
        "Collectives of simulated devices overlap with those of a loop: wrong numbers, a hang or an abort.",
        _compiled,
    ),
)
