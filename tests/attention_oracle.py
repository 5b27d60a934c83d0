"""Attention of whole sequences in its plainest forms: the oracles of all others."""

import jax
import jax.numpy as jnp
import numpy as np


def plain_attention(q, k, v, *, causal=False):
    """q [b, s, n, d], k and v [b, t, g, d] -> [b, s, n, d]."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bsnd,btnd->bnst", q, k) * q.shape[-1] ** -0.5
    ahead = jnp.arange(k.shape[1])[None, :] - jnp.arange(q.shape[1])[:, None]
    return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(jnp.where(causal & (ahead > 0), -jnp.inf, scores), -1), v)


def with_gradients(attention):
    """A function of (q, k, v, more, cotangent) that gives the result and the gradients of q, k, v and more."""

    def run(q, k, v, more, cotangent):
        out, undo = jax.vjp(attention, q, k, v, more)
        return (out, *undo(cotangent))

    return run


def seen_by(s, t, *, causal=False, window=None, segment_ids=None):
    """Which of t keys each of s queries sees, [b or 1, 1, s, t]."""
    ahead = np.arange(t)[None, :] - np.arange(s)[:, None]
    seen = (ahead <= 0) | (not causal)
    if window is not None:
        seen &= (ahead >= -window[0]) & (ahead <= window[1])
    seen = seen[None, None]
    return seen if segment_ids is None else seen & (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def gradients_by_hand(q, k, v, cotangent, seen, *, bias=0.0, factors=1.0):
    """The result, the gradients of q, k and v, and that of the scores, [b, n, s, t]: derived on paper, in NumPy.

    Args:
      q, k, v, cotangent: [b, s, n, d], [b, t, g, d] twice, [b, s, n, d].
      seen: of what `seen_by` says; a query that sees no key gives zeros.
      bias: added to the scores.
      factors: what dropout multiplies the weights by.
    """
    scale, (rows, t, groups, size) = q.shape[-1] ** -0.5, k.shape
    every_k, every_v = (np.repeat(x, q.shape[2] // groups, axis=2) for x in (k, v))
    scores = np.where(seen, np.einsum("bsnd,btnd->bnst", q, every_k) * scale + bias, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
    total = powers.sum(-1, keepdims=True)
    weights = powers / np.where(total > 0, total, 1)
    out = np.einsum("bnst,btnd->bsnd", weights * factors, every_v)
    of_weights = np.einsum("bsnd,btnd->bnst", cotangent, every_v) * factors
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True))
    of_q = np.einsum("bnst,btnd->bsnd", of_scores, every_k) * scale
    of_k = np.einsum("bnst,bsnd->btnd", of_scores, q) * scale
    of_v = np.einsum("bnst,bsnd->btnd", weights * factors, cotangent)
    joined = lambda x: x.reshape(rows, t, groups, -1, size).sum(3)
    return out, of_q, joined(of_k), joined(of_v), of_scores
