"""The language-model loss as a sum and a weight, so that it stays exact over ranks and microbatches of unequal size."""

import jax
import jax.numpy as jnp

from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.tensor.megatron.cross_entropy import vocab_parallel_cross_entropy


def cross_entropy(
    logits: jax.Array, targets: jax.Array, ignore: int = -1, *, axis: AxisNames = ()
) -> tuple[jax.Array, jax.Array]:
    """Summed cross entropy in nats, and the number of targets it covers; their quotient is the mean.

    Args:
      logits: [..., v] (v vocabulary), or this rank's [..., v/n].
      targets: integer [...], token ids below v.
      ignore: positions whose target is this value count for nothing.
      axis: the mesh axes that split the logits where they are bound (`VOCABULARY_AXES` for the transformer); none: whole.

    Returns:
      (total, weight): scalars in at least float32.
    """
    counted = targets != ignore
    losses = vocab_parallel_cross_entropy(logits, targets, axis, ignore_label=ignore)
    return jnp.sum(losses), jnp.sum(counted, dtype=losses.dtype)
