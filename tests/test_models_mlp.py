"""The perceptron, the loss and sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.generate import generate
from axonml_jax.models.transformer import MLP, Transformer, cross_entropy


def test_mlp_is_linear_layers_with_an_activation_between_them():
    model = MLP([3, 5, 4, 2], activation=jnp.tanh, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    expected = x
    for i, layer in enumerate(model.layers):
        expected = expected @ layer.kernel[...] + layer.bias[...]
        expected = np.tanh(expected) if i < 2 else expected
    np.testing.assert_allclose(model(x), expected, atol=1e-6)


@pytest.mark.parametrize("sizes", [[], [3], [3, 0]])
def test_mlp_refuses_sizes_that_make_no_network(sizes):
    with pytest.raises(ValueError, match="at least an input and an output width"):
        MLP(sizes, rngs=nnx.Rngs(0))


def test_cross_entropy_sums_the_counted_targets():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(2, 4, 5)), rng.integers(0, 5, (2, 4))
    targets[0, 1] = targets[1, 3] = -1
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -sum(log_probs[i][t] for i, t in np.ndenumerate(targets) if t != -1)
    total, weight = cross_entropy(jnp.asarray(logits), jnp.asarray(targets))
    np.testing.assert_allclose(total, expected, rtol=1e-12)
    assert weight == 6


def test_ignored_targets_have_no_gradient_and_ignore_can_be_chosen():
    logits, targets = jnp.ones((3, 4), jnp.float32), jnp.array([1, 0, 2])
    grads = jax.grad(lambda x: cross_entropy(x, targets, ignore=0)[0])(logits)
    np.testing.assert_array_equal(grads[1], np.zeros(4))
    assert np.abs(grads[0]).max() > 0
    assert cross_entropy(logits, targets, ignore=0)[1] == 2


def test_cross_entropy_of_bfloat16_logits_is_computed_in_float32():
    total, weight = cross_entropy(jnp.zeros((3000, 7), jnp.bfloat16), jnp.zeros(3000, jnp.int32))
    assert total.dtype == weight.dtype == jnp.float32
    np.testing.assert_allclose(total / weight, np.log(7), rtol=1e-5)


def successor(tokens):
    """A model that is sure the next token is the last one plus one, modulo 11."""
    return 50.0 * jax.nn.one_hot((jnp.asarray(tokens) + 1) % 11, 11)


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_continues_the_text_whatever_the_window(window, temperature):
    out = generate(successor, [[0, 1], [7, 8]], 5, jax.random.key(0), temperature=temperature, window=window)
    np.testing.assert_array_equal(out, [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 1, 2]])


def test_generate_draws_from_the_softmax_at_the_given_temperature():
    logits = jnp.log(jnp.array([0.1, 0.2, 0.7]))
    out = generate(
        lambda t: jnp.broadcast_to(logits, (*t.shape, 3)), np.zeros((4000, 1)), 1, jax.random.key(0), temperature=0.5
    )
    expected = np.array([0.01, 0.04, 0.49]) / 0.54
    np.testing.assert_allclose(np.bincount(out[:, 1], minlength=3) / 4000, expected, atol=0.03)


def test_generate_runs_a_module_in_eval_mode_and_slides_past_its_longest_sequence():
    config = TransformerConfig(vocab_size=11, num_layers=1, hidden_size=8, num_heads=2, max_length=4, dropout=0.5)
    model = Transformer(config, rngs=nnx.Rngs(0))
    out = generate(model, [[1, 2]], 6, jax.random.key(1), temperature=0.0, window=4)
    model.eval()
    forward = jax.jit(lambda tokens: model(tokens))
    text = [1, 2]
    for _ in range(6):
        text.append(int(jnp.argmax(forward(jnp.array([text[-4:]]))[0, -1])))
    assert out.tolist() == [text]


def test_generate_lists_everything_that_is_wrong():
    with pytest.raises(ValueError) as caught:
        generate(successor, np.zeros((1, 0)), -1, jax.random.key(0), temperature=-1.0, window=0)
    for named in ("shape (1, 0)", "length=-1", "temperature=-1.0", "window=0"):
        assert named in str(caught.value)
