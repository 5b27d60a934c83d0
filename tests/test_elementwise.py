"""What a backward keeps where elementwise work is done again: products and sums, and of each as little as is needed."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from axonml_jax.compat.order import SaveWhere
from axonml_jax.layers.attention import attend
from axonml_jax.program.cut import all_but_elementwise

redone = partial(jax.checkpoint, policy=SaveWhere(all_but_elementwise))


def kept(fun, *args):
    """Shapes of the residuals that are no arguments."""
    _, pull = jax.vjp(redone(fun), *args)
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


@jax.custom_vjp
def marked(x):
    return x


marked.defvjp(lambda x: (marked(x), None), lambda _, ct: (2 * marked(ct),))


@jax.custom_vjp
def multiplied(x, w):
    return x @ w


multiplied.defvjp(lambda x, w: (multiplied(x, w), (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))


def test_what_marks_a_value_is_not_kept_beside_it_and_a_product_with_gradients_of_its_own_is():
    # The rules call what they are rules of, so that a second derivative finds it: JAX asks of such a call as a whole.
    value = lambda x, w: jnp.sum(jnp.sin(marked(marked(jnp.sin(x)) @ w)))
    assert kept(value, jnp.ones((8, 5)), jnp.ones((5, 32))) == [(8, 32)]
    product = lambda x, w: jnp.sum(jnp.sin(marked(multiplied(jnp.sin(x), w))))
    assert kept(product, jnp.ones((8, 5)), jnp.ones((5, 32))) == [(8, 32)]


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"sinks": jnp.zeros(4)}, {"softcap": 5.0}])
def test_attention_keeps_its_weights_in_the_place_of_scores_and_computes_no_exponential_again(options):
    batch, length, heads = 2, 8, 4
    given = [jax.random.normal(key, (batch, length, heads, 16)) for key in jax.random.split(jax.random.key(0), 3)]
    fun = lambda *given: jnp.sum(jnp.sin(attend(*given, causal=True, **options)))
    square = batch * heads * length * (length + len(options.get("sinks", [])[:1]))
    assert [math.prod(shape) for shape in kept(fun, *given)].count(square) == 1
    _, pull = jax.vjp(redone(fun), *given)
    # Of a softcap's tanh the derivative needs the scores; then the exponentials are made of them again.
    assert (" exp " in str(jax.make_jaxpr(pull)(1.0))) == ("softcap" in options)
