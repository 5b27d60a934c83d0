"""The language-model loss as a sum and a weight, so that it stays exact over ranks and microbatches of unequal size."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, targets: jax.Array, ignore: int = -1) -> tuple[jax.Array, jax.Array]:
    """Summed cross entropy in nats, and the number of targets it covers; their quotient is the mean.

    Args:
      logits: [..., v] (v vocabulary).
      targets: integer [...], token ids below v.
      ignore: positions whose target is this value count for nothing.

    Returns:
      (total, weight): scalars in at least float32.
    """
    losses = token_losses(logits, jnp.where(targets == ignore, 0, targets))
    counted = targets != ignore
    return jnp.sum(jnp.where(counted, losses, 0)), jnp.sum(counted, dtype=losses.dtype)


def token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy of every position in nats: [..., v] and integer [...] -> [...], in at least float32."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # A masked sum instead of indexing: the transpose of indexing is a scatter, this is one fused pass.
    chosen = jnp.arange(logits.shape[-1], dtype=targets.dtype) == targets[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(chosen, logits, 0), axis=-1)
