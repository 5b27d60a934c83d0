"""One update by an optimizer."""

from typing import Any

import jax
import optax

from axonml_jax._types import PyTree


def apply(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: Any, params: PyTree, loss: jax.Array
) -> tuple[PyTree, Any]:
    """New parameters and state; transformations that ask for the loss as `value` get it."""
    updates, opt_state = optax.with_extra_args_support(tx).update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state
