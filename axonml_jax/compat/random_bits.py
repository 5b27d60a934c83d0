"""Random bits of single elements: what `jax.random` draws for an element of an array, without drawing the array."""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32


def can_draw_elements(key: jax.Array) -> bool:
    """Whether `bernoulli_at` knows this key's generator: threefry, of which bits of an element depend on its index alone."""
    threefry = not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or "threefry" in str(jax.random.key_impl(key))
    return threefry and jax.config.jax_threefry_partitionable


def bernoulli_at(key: jax.Array, rate: float, high: jax.Array, low: jax.Array) -> jax.Array:
    """`jax.random.bernoulli(key, rate, shape).ravel()[index]` for elements of given indices.

    Args:
      key: one key, typed or of two uint32.
      rate: the probability of True.
      high, low: uint32 [...], the upper and the lower half of each index in the flat array.

    Returns:
      bool [...].
    """
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    counts = jnp.concatenate([high.reshape(-1), low.reshape(-1)])
    first, second = jnp.split(threefry_2x32(data, counts), 2)
    probability = jnp.asarray(rate, jnp.result_type(float))
    if probability.dtype.itemsize == 8:
        bits = (first.astype(jnp.uint64) << 32) | second.astype(jnp.uint64)
    else:
        bits = first ^ second
    return (_uniform(bits, probability.dtype) < probability).reshape(low.shape)


def _uniform(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Bits as numbers from 0 to 1, as `jax.random.uniform` makes them: their upper ones are a mantissa."""
    info = jnp.finfo(dtype)
    one = jax.lax.bitcast_convert_type(jnp.ones((), dtype), bits.dtype)
    mantissa = jax.lax.shift_right_logical(bits, jnp.asarray(info.bits - info.nmant, bits.dtype))
    return jax.lax.bitcast_convert_type(mantissa | one, dtype) - jnp.ones((), dtype)
