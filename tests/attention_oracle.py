"""Attention in the plainest form, of whole sequences: the oracle of all others."""

import jax
import jax.numpy as jnp


def plain_attention(
    q, k, v, *, causal=False, window=None, segment_ids=None, bias=None, arrays=(), scale=None, dropped=None
):
    """q [b, s, n, d], k and v [b, t, g, d] -> [b, s, n, d]; `dropped(weights [b, n, s, t])` changes the weights."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bsnd,btnd->bnst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    queries, keys = jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
    if bias is not None:
        scores += bias(queries, keys, *arrays)
    ahead = keys[None, :] - queries[:, None]
    seen = jnp.ones(ahead.shape, bool)
    if causal:
        seen &= ahead <= 0
    if window is not None:
        seen &= (ahead >= -window[0]) & (ahead <= window[1])
    if segment_ids is not None:
        own, other = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        seen = seen & (own[:, :, None] == other[:, None, :])[:, None]
    weights = jnp.where(
        seen, jnp.exp(scores - jnp.where(seen, scores, -jnp.inf).max(-1, keepdims=True, initial=-1e30)), 0
    )
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("bnst,btnd->bsnd", weights if dropped is None else dropped(weights), v)


def with_gradients(attention):
    """A function of (q, k, v, more, cotangent) that gives the result and the gradients of q, k, v and more."""

    def run(q, k, v, more, cotangent):
        out, undo = jax.vjp(attention, q, k, v, more)
        return (out, *undo(cotangent))

    return run
