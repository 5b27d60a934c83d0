"""Attention of a rank that has all positions of its heads: by the platform's kernel where that applies, in place of tiles."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.parallel.context.across_ranks import Ring
from axonml_jax.parallel.context.attention_pieces import Attention
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
    segment_ids: tuple[jax.Array, jax.Array] | None,
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
      segment_ids: of the queries, and of the keys; the same array where one was given for both.
      block_size: positions of a block, where the user wants such blocks.

    Raises:
      ValueError: for a kernel that was asked for by name and does not apply, with every reason.
    """
    name = asked if asked in PLATFORMS else kernel_of(target_platform())
    if name is None or asked == "blocks":
        return None
    rules = {"segmented": how.segmented, "window": how.visible.window is not None, "sinks": sinks is not None}
    rules |= {"drops": how.dropout is not None, "softcap": isinstance(how.modify, Softcap)}
    apart = segment_ids is not None and segment_ids[0] is not segment_ids[1]
    reasons = [*_reasons(how, ring, q, k, apart, block_size), *obstacles(name, q, k, v, **rules)]
    if reasons and asked == name:
        raise ValueError(f"context_attention: kernel={asked!r} does not apply here: {'; '.join(reasons)}")
    return None if reasons else name


def _reasons(
    how: Attention, ring: Ring, q: jax.Array, k: jax.Array, apart: bool, block_size: int | None
) -> Iterator[str]:
    """Why no kernel computes it on any platform."""
    if ring.groups > 1:
        yield f"a rank has the positions of one of {ring.groups} groups (method='ulysses' gives it all, of some heads)"
    if block_size is not None:
        yield f"block_size={block_size} is of blocks"
    if how.modify is not None and not isinstance(how.modify, Softcap):
        yield "it changes no scores (bias and score_mod must be None)"
    if apart:
        yield "it knows one array of segment_ids"
    if how.visible.window is not None and not how.visible.causal:
        yield "its windows are causal"
    if how.visible.causal and q.shape[1] != k.shape[1]:
        yield f"its causal attention is of as many queries as keys, and there are {q.shape[1]} and {k.shape[1]}"


def attend_by_kernel(
    kernel: str,
    how: Attention,
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
) -> jax.Array:
    """Whole sequences of this rank's heads, [b, s, n, d], by a kernel that `kernel_for` has named.

    Args:
      kernel: its name.
      how: what is computed.
      ring: says in which order positions lie.
      q: [b, s, n, d].
      k: [b, t, g, d].
      v: [b, t, g, d].
      segment_ids: int [b, s], or None.
    """
    sees: dict[str, Any] = {"causal": how.visible.causal, "scale": how.scale}
    if how.visible.window is not None:
        sees["window"] = how.visible.window[0] + 1
    if isinstance(how.modify, Softcap):
        sees["softcap"] = how.modify.cap
    if not how.visible.causal:  # whatever the order
        return fused_attention(kernel, q, k, v, segment_ids=segment_ids, **sees)
    ids = None if segment_ids is None else _in_sequence(segment_ids, ring)
    q, k, v = (_in_sequence(x, ring) for x in (q, k, v))
    return _by_rank(fused_attention(kernel, q, k, v, segment_ids=ids, **sees), ring)


def _in_sequence(x: jax.Array, ring: Ring) -> jax.Array:
    """[b, s, ...] as ranks hold the positions -> in the sequence's order."""
    b, _, *rest = x.shape
    if ring.order == "striped":
        return x.reshape(b, ring.ranks, -1, *rest).swapaxes(1, 2).reshape(x.shape)
    if ring.order == "zigzag":  # a rank has one chunk of the first half, and its mirror image of the second
        chunks = x.reshape(b, ring.ranks, 2, -1, *rest)
        return jnp.concatenate([chunks[:, :, 0], jnp.flip(chunks[:, :, 1], 1)], 1).reshape(x.shape)
    return x


def _by_rank(x: jax.Array, ring: Ring) -> jax.Array:
    """The inverse."""
    b, _, *rest = x.shape
    if ring.order == "striped":
        return x.reshape(b, -1, ring.ranks, *rest).swapaxes(1, 2).reshape(x.shape)
    if ring.order == "zigzag":
        first, second = jnp.split(x.reshape(b, 2 * ring.ranks, -1, *rest), 2, axis=1)
        return jnp.stack([first, jnp.flip(second, 1)], 2).reshape(x.shape)
    return x
