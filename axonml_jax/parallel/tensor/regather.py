"""Apply a function to a gathered array and gather it again in the backward, instead of keeping it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from axonml_jax.collectives.primitives import gather_whole, scatter_sum
from axonml_jax.parallel.tensor.axes import vary_alike


def regathered(fn: Callable[..., Any], shard: jax.Array, others: Any, axes: tuple[str, ...], dim: int) -> Any:
    """`fn(whole, others)`, where `whole` is every rank's `shard` concatenated along `dim`.

    Used for weights that are split over `depth` too (AxoNN) and for activations that are split along the sequence
    (Korthikanti et al. 2022): what one rank keeps for the backward is its shard.

    Args:
      fn: a function of the whole array and `others`; what it closes over gets no gradient.
      shard: [..., d/n, ...], this rank's part.
      others: a pytree of arrays.
      axes: bound mesh axes of total size n; none at all calls `fn` as it is.
      dim: the dim that is split, counted from either end.

    Communicates: one all-gather forward; an all-gather and a reduce-scatter backward.
    """
    if not axes:
        return fn(shard, others)
    shard, others = vary_alike((shard, others))
    return _regathered(fn, shard, others, axes, dim % shard.ndim)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _regathered(fn, shard, others, axes, dim):
    return fn(gather_whole(shard, axes, dim, invarying=False), others)


def _forward(fn, shard, others, axes, dim):
    return _regathered(fn, shard, others, axes, dim), (shard, others)


def _backward(fn, axes, dim, saved, ct):
    shard, others = saved
    # The barrier keeps XLA from finding the forward's gather, which would keep the whole array alive until here.
    shard, ct = jax.lax.optimization_barrier((shard, ct))
    # The vjp's own forward is dead code: of a product nothing but its operands is kept.
    _, pull = jax.vjp(fn, gather_whole(shard, axes, dim, invarying=False), others)
    whole_ct, others_ct = pull(ct)
    return scatter_sum(whole_ct, axes, dim), others_ct


_regathered.defvjp(_forward, _backward)
