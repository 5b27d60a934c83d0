"""Which kernel computes attention across ranks, if one does: splash its pieces, cuDNN whole sequences of some heads."""

from collections.abc import Iterator
from typing import Any

import jax

from axonml_jax.parallel.context.across_ranks import Ring
from axonml_jax.parallel.context.in_sequence import by_rank, in_sequence
from axonml_jax.parallel.context.kernels.block_visits import BLOCK, block_sizes
from axonml_jax.parallel.context.kernels.splash_pieces import even_runs
from axonml_jax.parallel.context.pieces.attention_pieces import Attention
from axonml_jax.parallel.tensor.megatron.fused_attention import (
    PLATFORMS,
    fused_attention,
    kernel_of,
    obstacles,
    target_platform,
)
from axonml_jax.parallel.tensor.megatron.softcap import Softcap

FORMS = ("auto", "blocks", *PLATFORMS)
"""What `context_attention` may be asked to compute with."""


def kernel_for(
    asked: str,
    how: Attention,
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    block_size: int | None,
) -> str | None:
    """The kernel that computes it; None: tiles.

    Args:
      asked: one of `FORMS`.
      how: what is computed.
      ring: how ranks work together.
      q: [b, s, n, d], heads split already.
      k: [b, t, g, d].
      v: [b, t, g, e].
      sinks: scores of heads that stand for no key.
      block_size: positions of a block, where the user wants such blocks.

    Raises:
      ValueError: for a kernel that was asked for by name and does not apply, with every reason.
    """
    name = asked if asked in PLATFORMS else kernel_of(target_platform())
    if name is None or asked == "blocks":
        return None
    rules = {"segmented": how.segmented, "window": how.visible.window is not None}
    rules |= {"drops": how.dropout is not None, "softcap": isinstance(how.modify, Softcap)}
    reasons = [] if block_size is None else [f"block_size={block_size} is of blocks"]
    if how.modify is not None and not isinstance(how.modify, Softcap):
        reasons.append("it changes no scores (bias and score_mod must be None)")
    if name == "splash":  # sinks are merged with what it reads
        reasons += _splash_reasons(how, ring)
    else:
        reasons += _cudnn_reasons(how, ring, q, k)
    sinks_too = sinks is not None and name != "splash"
    reasons += obstacles(name, q, k, v, sinks=sinks_too, positions=how.keys.places, **rules)
    if reasons and asked == name:
        raise ValueError(f"context_attention: kernel={asked!r} does not apply here: {'; '.join(reasons)}")
    return None if reasons else name


def _splash_reasons(how: Attention, ring: Ring) -> Iterator[str]:
    queries, keys = how.queries.places, how.keys.places
    if how.visible.window is not None and len(even_runs(ring, keys)[0]) > 1:
        yield (
            f"in a ring its windows are of positions that follow each other evenly (order={ring.order!r} must be 'contiguous', "
            "or method 'gather' or 'ulysses')"
        )
    if queries % BLOCK == 0 and keys % BLOCK == 0 and block_sizes(queries, keys) is None:
        yield f"its table of blocks of {queries} queries and {keys} keys at once is too large (use a ring, or more ranks)"


def _cudnn_reasons(how: Attention, ring: Ring, q: jax.Array, k: jax.Array) -> Iterator[str]:
    if ring.groups > 1:
        yield f"a rank has the positions of one of {ring.groups} groups (method='ulysses' gives it all, of some heads)"
    if how.visible.causal and q.shape[1] != k.shape[1]:
        yield f"its causal attention is of as many queries as keys, and there are {q.shape[1]} and {k.shape[1]}"


def attend_by_cudnn(how: Attention, ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Whole sequences of this rank's heads, [b, s, n, d], where `kernel_for` has named the kernel.

    Args:
      how: what is computed.
      ring: says in which order positions lie.
      q: [b, s, n, d].
      k: [b, t, g, d].
      v: [b, t, g, d].
    """
    sees: dict[str, Any] = {"causal": how.visible.causal, "scale": how.scale}
    if not how.visible.causal:  # whatever the order
        return fused_attention("cudnn", q, k, v, **sees)
    q, k, v = (in_sequence(x, ring.order, ring.ranks, 1) for x in (q, k, v))
    return by_rank(fused_attention("cudnn", q, k, v, **sees), ring.order, ring.ranks, 1)
