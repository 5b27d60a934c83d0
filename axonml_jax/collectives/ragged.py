"""An all-to-all of parts of different lengths: what TPUs and GPUs have a collective for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.varying import vary


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def exchange_ragged(x: jax.Array, axes: tuple[str, ...], sent: jax.Array, coming: jax.Array) -> jax.Array:
    """The tiled all-to-all of n equal parts along dim 0, of which only the first rows are filled, and only these travel.

    Args:
      x: [n * s, ...].
      axes: bound mesh axes of n ranks.
      sent: int32 [n], the filled rows of each part.
      coming: int32 [n], how many each rank sends here.

    Returns:
      [n * s, ...]; zeros in rows that are not filled. Its gradient is the exchange back.

    Communicates: one ragged all-to-all.
    """
    each = x.shape[0] // sent.size
    starts = jnp.arange(sent.size, dtype=jnp.int32) * each
    mine = jnp.full(sent.shape, jax.lax.axis_index(axes) * each, jnp.int32)
    empty = vary(jnp.zeros_like(x), axes)
    return jax.lax.ragged_all_to_all(x, empty, starts, sent, mine, coming, axis_name=axes)


def _forward(x, axes, sent, coming):
    return exchange_ragged(x, axes, sent, coming), (sent, coming)


def _backward(axes, sizes, grad):
    sent, coming = sizes
    none = np.zeros(sent.shape, jax.dtypes.float0)
    return exchange_ragged(grad, axes, coming, sent), none, none


exchange_ragged.defvjp(_forward, _backward)
