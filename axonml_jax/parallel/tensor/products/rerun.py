"""Functions that communicate are run again in the backward, so that what they gathered is not kept."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from axonml_jax.compat.barrier import together
from axonml_jax.parallel.tensor.bound_axes import vary_alike


def rerun(fn: Callable[..., Any], shard: jax.Array, others: Any) -> Any:
    """`fn(shard, others)`, of which nothing but the arguments is kept for the backward.

    Of a product this recomputes nothing: the gradients read its operands only, and its result is dead code.

    Args:
      fn: a function of both; what it closes over gets no gradient. Its collectives are each other's transposes.
      shard: what this rank holds of the array that `fn` gathers.
      others: a pytree of arrays.
    """
    return _rerun(fn, *vary_alike((shard, others)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rerun(fn, shard, others):
    return fn(shard, others)


def _backward(fn, saved, ct):
    shard, others = saved
    # The barrier keeps XLA from finding the forward's gather, which would keep the whole array alive until here.
    shard, ct = together((shard, ct))
    _, pull = jax.vjp(fn, shard, others)
    return pull(ct)


_rerun.defvjp(lambda fn, shard, others: (fn(shard, others), (shard, others)), _backward)
