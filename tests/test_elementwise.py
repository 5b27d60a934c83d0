"""What a backward keeps where elementwise work is done again: products and sums, and of each as little as is needed."""

import jax
import jax.numpy as jnp

from axonml_jax.compat.checkpoint_policy import SaveWhere
from axonml_jax.program.recomputed import all_but_elementwise


def kept(fun, *args):
    """Shapes of the residuals that are no arguments."""
    _, pull = jax.vjp(jax.checkpoint(fun, policy=SaveWhere(all_but_elementwise)), *args)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.ndim]
    for arg in args:
        if arg.shape in shapes:
            shapes.remove(arg.shape)
    return sorted(shapes)


def test_a_product_is_kept_and_not_what_is_turned_of_it():
    def rotated(x, w):
        first, second = jnp.split(x @ w, 2, axis=-1)
        return jnp.sum(jnp.sin(jnp.concatenate([-second, first], axis=-1).astype(jnp.float32)))

    assert kept(rotated, jnp.ones((8, 5)), jnp.ones((5, 32))) == [(8, 32)]


def test_little_of_a_large_result_is_kept_in_its_place():
    column = lambda x, w: jnp.sum(jnp.sin((x @ w)[:, :1]))
    assert kept(column, jnp.ones((8, 5)), jnp.ones((5, 32))) == [(8, 1)]
    half = lambda x, w: jnp.sum(jnp.sin((x @ w)[:, :16]))
    assert kept(half, jnp.ones((8, 5)), jnp.ones((5, 32))) == [(8, 32)]
