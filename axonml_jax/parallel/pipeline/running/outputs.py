"""What the last stage returns, microbatch by microbatch, brought to every rank of the pipeline."""

import jax
import jax.numpy as jnp

from axonml_jax.collectives.primitives import sum_over
from axonml_jax.parallel.pipeline.resting.packing import Buffers, Packing


def outputs_of(packing: Packing, buffers: Buffers, axis: str) -> list[jax.Array]:
    """The last stage's leaves, [M, ...].

    Args:
      packing: how one microbatch's lie.
      buffers: [M + 1, n] (see `Buffers`), a row per microbatch and the trash; zeros in all but the trash where the last
        stage is not.
      axis: the pipeline's mesh axis.

    Communicates: one all-reduce over `axis` per group.
    """
    everywhere = {group: _summed(buffer[:-1], axis) for group, buffer in buffers.items()}
    leaves = []
    for slot in packing.slots:
        rows = everywhere[slot.group][..., slot.offset : slot.offset + slot.size]
        data = jax.vmap(slot.opened)(rows) if slot.group.parts else rows.reshape(rows.shape[0], *slot.shape)
        leaves.append(data if slot.key_impl is None else jax.random.wrap_key_data(data, impl=slot.key_impl))
    return leaves


def _summed(rows: jax.Array, axis: str) -> jax.Array:
    if rows.dtype == jnp.bool_:
        return sum_over(rows.astype(jnp.int8), axis).astype(jnp.bool_)
    return sum_over(rows, axis)
