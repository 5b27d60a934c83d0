"""What a router says of its choices, the same on every rank: values to be added to a loss, and counts to look at."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.collectives.joined_ranks import joined_ranks
from axonml_jax.collectives.primitives import sum_over
from axonml_jax.parallel.experts.routers import Chosen

MOST_LOADS = 64
"""Experts up to which each one's load is a metric of a step."""


class RouterValues(NamedTuple):
    """Of one microbatch, over all ranks that have a part of it; padding counts nowhere.

    T unmasked tokens chose k of E experts each; n_e of these choices are expert e, and P_e is the mean of its probability.

    Attributes:
      load_balance: E / (k * T) * sum_e(n_e * P_e), 1 where all experts get as many tokens (Fedus et al. 2022). Its
        gradient is one device's.
      z: the mean of logsumexp(scores) squared (Zoph et al. 2022), with a gradient likewise.
      counts: [E], n_e before any was dropped, as floats.
      dropped: the share of choices that found no slot, from 0 to 1.
      rounds: in how many rounds tokens travelled, the mean of all ranks.
      entropy: the mean entropy of the probabilities of a token, in nats.
    """

    load_balance: jax.Array
    z: jax.Array
    counts: jax.Array
    dropped: jax.Array
    rounds: jax.Array
    entropy: jax.Array


def router_values(
    choice: Chosen, scores: jax.Array, mask: jax.Array, kept: jax.Array, rounds: jax.Array
) -> RouterValues:
    """The values of this rank's tokens together with all others'.

    Args:
      choice: of this rank's T tokens.
      scores: [T, E], that it was made of.
      mask: [T], True for a token that counts.
      kept: [T, k], whether a choice found a slot.
      rounds: int32 (), of this rank.

    Communicates: one all-reduce of 2E + 6 elements over the ranks that have a part of the microbatch.
    """
    count, top_k = scores.shape[1], choice.experts.shape[1]
    some = mask[:, None].astype(scores.dtype)
    probabilities = choice.probabilities
    chosen = jnp.zeros(count, scores.dtype).at[choice.experts].add(jnp.broadcast_to(some, choice.experts.shape))
    logs = jnp.log(jnp.maximum(probabilities, jnp.finfo(scores.dtype).tiny))
    others = (
        jnp.square(jax.nn.logsumexp(scores, axis=1, keepdims=True)),
        jnp.ones_like(some),
        kept.sum(1, keepdims=True, dtype=scores.dtype),
        -jax.lax.stop_gradient((probabilities * logs).sum(1, keepdims=True)),
    )
    of_rank = jnp.stack([rounds.astype(scores.dtype), jnp.ones((), scores.dtype)])
    sums = [(probabilities * some).sum(0), chosen, (jnp.concatenate(others, 1) * some).sum(0), of_rank]
    sums = jnp.concatenate(sums)
    if axes := joined_ranks():
        with jax.named_scope("axonml.router"):
            sums = sum_over(sums, axes)
    means, chosen, rest = sums[:count], jax.lax.stop_gradient(sums[count : 2 * count]), sums[2 * count :]
    tokens = jnp.maximum(rest[1], 1)
    dropped = 1 - jax.lax.stop_gradient(rest[2]) / (tokens * top_k)
    return RouterValues(
        load_balance=count / top_k * (chosen * means).sum() / jnp.square(tokens),
        z=rest[0] / tokens,
        counts=chosen,
        dropped=jnp.where(rest[1] > 0, dropped, 0),
        rounds=jax.lax.stop_gradient(rest[4] / rest[5]),
        entropy=jax.lax.stop_gradient(rest[3]) / tokens,
    )
