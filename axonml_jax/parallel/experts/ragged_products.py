"""The experts' products on rows sorted by expert, by JAX's ragged product, which TPUs and GPUs have kernels for."""

import jax
import jax.numpy as jnp

from axonml_jax.parallel.experts.expert_weights import ExpertWeights, activated


def ragged_products(activation: str, rows: jax.Array, counts: jax.Array, weights: ExpertWeights) -> jax.Array:
    """What the experts make of their rows: see `block_products`."""

    def product(x, kernel, bias):
        y = jax.lax.ragged_dot(x, kernel, counts)
        if bias is None:
            return y
        expert = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(rows.shape[0]), side="right", method="compare_all")
        return y + jnp.take(bias, expert, axis=0, mode="fill", fill_value=0)

    gate = None if weights.gate is None else product(rows, weights.gate, weights.gate_bias)
    inner = activated(activation, gate, product(rows, weights.up, weights.up_bias))
    return product(inner, weights.down, weights.down_bias)


def equal_products(activation: str, rows: jax.Array, weights: ExpertWeights) -> jax.Array:
    """The same where every expert has as many rows: [E, n, h] -> [E, n, h]."""

    def product(x, kernel, bias):
        y = jnp.einsum("enh,ehf->enf", x, kernel)
        return y if bias is None else y + bias[:, None]

    gate = None if weights.gate is None else product(rows, weights.gate, weights.gate_bias)
    inner = activated(activation, gate, product(rows, weights.up, weights.up_bias))
    return product(inner, weights.down, weights.down_bias)
