"""The language-model loss as a sum and a weight, so that it stays exact over ranks and microbatches of unequal size."""

import jax
import jax.numpy as jnp

from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.tensor.megatron.cross_entropy import vocab_parallel_cross_entropy


def cross_entropy(
    logits: jax.Array, targets: jax.Array, ignore: int = -1, *, axis: AxisNames = (), words: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Summed cross entropy in nats, and the number of targets it covers; their quotient is the mean.

    Args:
      logits: [..., v] (v vocabulary), or this rank's [..., v/n].
      targets: integer [...], token ids below v. Positions of negative ones count for nothing.
      ignore: one more target that counts for nothing.
      axis: the mesh axes that split the logits where they are bound (`VOCABULARY_AXES` for the transformer); none: whole.
      words: v where it leaves a remainder over `axis`, and the last ranks' logits end with padding; None: it leaves none.

    Returns:
      (total, weight): scalars in at least float32; the total is NaN where a target is v or more.

    Raises:
      ValueError: a target is v or more, where values are known.
    """
    losses = vocab_parallel_cross_entropy(logits, targets, axis, ignore_label=ignore, words=words)
    return jnp.sum(losses), jnp.sum(counted(targets, ignore), dtype=losses.dtype)


def counted(targets: jax.Array, ignore: int = -1) -> jax.Array:
    """Which targets count for something: neither negative nor `ignore`; booleans of their shape."""
    known = targets >= 0
    return known if ignore < 0 else known & (targets != ignore)
