"""A canary about `random_bits.py`: the bits of an element depend on its index alone."""

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.random_bits import bernoulli_at


def _elements() -> None:
    key, shape = jax.random.key(1), (3, 4, 5)
    whole = np.asarray(jax.random.bernoulli(key, 0.3, shape)).ravel()
    index = jnp.asarray([59, 0, 17, 17, 31, 8], jnp.uint32)
    drawn = np.asarray(bernoulli_at(key, 0.3, jnp.zeros_like(index), index))
    expect(bool((drawn == whole[np.asarray(index)]).all()), f"single elements are drawn as {drawn}")


CANARIES = (
    Canary(
        "elements are drawn alone",
        "threefry's bits of an element of an array are a function of the key and the element's index in the flat array.",
        "Ranks that share the weights of one attention drop others than one device does.",
        _elements,
    ),
)
