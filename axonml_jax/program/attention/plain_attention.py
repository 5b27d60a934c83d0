"""`plain_attention`: a found attention computed as it is told, with all scores at once: the naive version beside the others."""

from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.program.attention.found_attention import Added, Cast, Change, FoundAttention, Masked, Scaled, Tanh
from axonml_jax.program.attention.masks.mask_terms import sees
from axonml_jax.program.attention.operand import Operand
from axonml_jax.program.attention.rewrite import Reads


def plain_attention(found: FoundAttention, q: Any, k: Any, v: Any, given: Reads) -> jax.Array:
    """softmax(changes(q · k)) · v.

    Args:
      found: what is done.
      q: [batch, query, heads, size].
      k: [batch, key, kv heads, size].
      v: [batch, key, kv heads, value].
      given: its other operands.

    Returns:
      [batch, query, heads, value].
    """
    sizes, (first, second) = found.sizes, found.precisions
    rows = (sizes["batch"], found.heads, sizes["query"], sizes["key"])
    grouped = q.reshape(*q.shape[:2], sizes["head"], sizes["member"], q.shape[3])
    scores = jnp.einsum("bigmd,bjgd->bgmij", grouped, k, precision=first, preferred_element_type=found.scores_dtype)
    scores = scores.reshape(rows)
    for change in found.changes:
        scores = _changed(scores, change, found, given)
    weights = jax.nn.softmax(scores, axis=-1)
    if found.zero:
        weights = jnp.where(_seen(found, found.zero, given), weights, 0)
    for gate in found.gates:
        is_array = isinstance(gate, Operand)
        weights = weights * given(gate) if is_array else jnp.where(_seen(found, (gate,), given), weights, 0)
    weights = weights.astype(found.weights_dtype)
    if found.dropout is not None:
        kept = jnp.asarray(found.dropout.scale, weights.dtype)
        weights = jnp.where(given(found.dropout.keep), weights * kept, 0)
    weights = weights.reshape(rows[0], sizes["head"], sizes["member"], *rows[2:])
    out = jnp.einsum("bgmij,bjgd->bigmd", weights, v, precision=second, preferred_element_type=found.out.dtype)
    return out.reshape(*q.shape[:3], v.shape[3])


def _changed(scores: Any, change: Change, found: FoundAttention, given: Reads) -> Any:
    match change:
        case Scaled(by, divides):
            return scores / _array(by, scores, given) if divides else scores * _array(by, scores, given)
        case Added(by, subtracts):
            return scores - _array(by, scores, given) if subtracts else scores + _array(by, scores, given)
        case Tanh():
            return jnp.tanh(scores)
        case Cast(dtype):
            return scores.astype(dtype)
        case Masked(terms, fill, adds):
            hidden = jnp.asarray(fill, scores.dtype)
            return jnp.where(_seen(found, terms, given), scores, scores + hidden if adds else hidden)


def _array(by: float | Operand, scores: Any, given: Reads) -> Any:
    return given(by) if isinstance(by, Operand) else jnp.asarray(by, scores.dtype)


def _seen(found: FoundAttention, terms: Any, given: Reads) -> Any:
    queries, keys = jnp.arange(found.sizes["query"]), jnp.arange(found.sizes["key"])
    seen = jnp.ones((1, 1, 1, 1), bool)
    for term in terms:
        seen = seen & sees(term, queries, keys, given)
    return seen
