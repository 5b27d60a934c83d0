"""An exponential moving average of the parameters, as a part of the optimizer's state: it rests and is saved as that does.

So it is split as the parameters are under every plan, and an update that is skipped leaves it as it was.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from axonml_jax._types import PyTree


class MovingAverage(NamedTuple):
    """The state of `with_ema`.

    Attributes:
      inner: the optimizer's own.
      ema: the average, a tree like the parameters, in float32 at least.
    """

    inner: Any
    ema: PyTree


def with_ema(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """An optimizer that keeps an average too: first the first parameters, then `decay * average + (1 - decay) * parameters`.

    >>> tx = with_ema(optax.sgd(1.0), 0.5)
    >>> state = tx.init({"w": jnp.ones(())})
    >>> _, state = tx.update({"w": jnp.ones(())}, state, {"w": jnp.ones(())})
    >>> float(state.ema["w"])
    0.5

    Args:
      tx: the optimizer.
      decay: at least 0 and below 1.

    Raises:
      ValueError: for another decay.
    """
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise ValueError(f"ema={decay!r}: the decay must be a number of at least 0 and below 1, such as 0.999")
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> MovingAverage:
        # Copies: a step gives up parameters and average alike.
        return MovingAverage(inner.init(params), jax.tree.map(lambda x: jnp.copy(jnp.asarray(x, _wide(x))), params))

    def update(updates: PyTree, state: Any, params: PyTree = None, **more: Any) -> tuple[PyTree, MovingAverage]:
        updates, own = inner.update(updates, state.inner, params, **more)
        new = optax.apply_updates(params, updates)
        mixed = lambda kept, value: decay * kept + (1 - decay) * value.astype(kept.dtype)
        return updates, MovingAverage(own, jax.tree.map(mixed, state.ema, new))

    return optax.GradientTransformationExtraArgs(init, update)


def _wide(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
