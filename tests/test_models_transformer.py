"""The transformer: published sizes, causality, grouped queries, every combination of options, and refusals."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axonml_jax.layers.attention import attend, rotate
from axonml_jax.models.config import ACTIVATIONS, NORMS, POSITIONS, PRESETS, TransformerConfig, preset
from axonml_jax.models.transformer import Transformer

TINY = TransformerConfig(vocab_size=17, num_layers=2, hidden_size=16, num_heads=4, max_length=8)
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "llama2-7b": 6_738_415_616,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "deepseek-v3": 671_026_404_352,
}
ACTIVE = {"deepseek-v3": 37_552_282_624, "qwen3-30b-a3b": 3_353_032_704, "gpt-oss-20b": 4_187_440_704}


def tokens_of(config, batch=2, length=8, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length)).astype(np.int32)


def jitted(config):
    """The model's forward pass, compiled once instead of operation by operation."""
    model = Transformer(config, rngs=nnx.Rngs(0))
    return jax.jit(lambda tokens: model(tokens))


def count_abstract(config):
    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract, nnx.Param)))


def test_every_preset_has_a_published_size():
    assert set(PRESETS) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_their_published_number_of_parameters(name):
    config = preset(name)
    assert config.num_params == PUBLISHED[name] and config.active_params == ACTIVE.get(name, config.active_params)
    if config.num_layers <= 32:
        assert count_abstract(config) == PUBLISHED[name]
    else:  # Blocks are alike, and tracing all of them takes 20 s on jax 0.10: two models tell the rest.
        first = 1 if config.experts is None else 1 + config.experts.first_dense
        one, two = (count_abstract(dataclasses.replace(config, num_layers=first + i, full_every=None)) for i in (0, 1))
        assert one + (config.num_layers - first) * (two - one) == PUBLISHED[name]


OPTIONS = list(itertools.product(NORMS, ACTIVATIONS, POSITIONS, (False, True), (False, True), (None, 2)))


@pytest.mark.parametrize("norm,activation,position,tied,bias,kv_heads", OPTIONS)
def test_num_params_is_exact_for_every_combination_of_options(norm, activation, position, tied, bias, kv_heads):
    config = dataclasses.replace(
        TINY, norm=norm, activation=activation, position=position, tie_embeddings=tied, use_bias=bias,
        num_kv_heads=kv_heads, num_layers=1,
    )  # fmt: skip
    assert count_abstract(config) == config.num_params


VARIANTS = {
    "llama": {"num_kv_heads": 2},
    "gpt2": {
        "norm": "layernorm",
        "activation": "gelu",
        "position": "learned",
        "tie_embeddings": True,
        "use_bias": True,
    },
    "gemma": {
        "num_kv_heads": 2, "head_dim": 6, "activation": "geglu", "zero_centered_norm": True, "post_norms": True,
        "qk_norm": True, "window": 3, "full_every": 2, "window_rope_theta": 50.0, "query_scalar": 5,
        "attention_softcap": 2.0, "scale_embeddings": True, "tie_embeddings": True, "logit_softcap": 3.0,
    },
    "bfloat16 compute": {"dtype": "bfloat16"},
    "float64": {"param_dtype": "float64"},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_no_position_sees_a_later_token_and_every_one_sees_the_earlier(name):
    config = dataclasses.replace(TINY, **VARIANTS[name])
    model = jitted(config)
    tokens = tokens_of(config, batch=1)
    changed = tokens.copy()
    changed[0, 4] = (changed[0, 4] + 1) % config.vocab_size
    before, after = (np.asarray(model(t), np.float64) for t in (tokens, changed))
    assert before.shape == (1, 8, 17)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert all(np.abs(before[:, i] - after[:, i]).max() > 0 for i in range(4, 8))


def test_dtypes_are_those_of_the_configuration():
    model = Transformer(dataclasses.replace(TINY, dtype=jnp.bfloat16, param_dtype=np.float64), rngs=nnx.Rngs(0))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"float64"}
    assert jax.eval_shape(model, tokens_of(TINY)).dtype == jnp.bfloat16
    assert (model.config.dtype, model.config.param_dtype) == ("bfloat16", "float64")


def test_a_batch_row_does_not_depend_on_the_other_rows():
    model = jitted(dataclasses.replace(TINY, param_dtype="float64"))
    tokens = tokens_of(TINY, batch=3)
    np.testing.assert_allclose(model(tokens)[1:2], model(tokens[1:2]), rtol=0, atol=1e-12)


def naive_attention(query, key, value, window=99, sinks=None, scale=None, softcap=None):
    """One head and one query at a time."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = np.zeros_like(query)
    group = query.shape[2] // key.shape[2]
    for b, q, n in itertools.product(*map(range, query.shape[:3])):
        seen = slice(max(0, q + 1 - window), q + 1)
        scores = key[b, seen, n // group] @ query[b, q, n] * scale
        weights = np.exp(scores if softcap is None else softcap * np.tanh(scores / softcap))
        out[b, q, n] = (
            weights @ value[b, seen, n // group] / (weights.sum() + (0 if sinks is None else np.exp(sinks[n])))
        )
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_the_naive_loop(kv_heads):
    draw = np.random.default_rng(0).normal
    query, key, value = draw(size=(2, 5, 4, 6)), draw(size=(2, 5, kv_heads, 6)), draw(size=(2, 5, kv_heads, 6))
    np.testing.assert_allclose(attend(query, key, value, causal=True), naive_attention(query, key, value), atol=1e-12)


@pytest.mark.parametrize("window", [1, 3, 99])
def test_windows_sinks_and_capped_scores_equal_the_naive_loop(window):
    draw = np.random.default_rng(0).normal
    query, key, value, sinks = (draw(size=size) for size in [(2, 5, 4, 6), (2, 5, 2, 6), (2, 5, 2, 6), (4,)])
    rules = {"window": window, "sinks": sinks, "scale": 0.7, "softcap": 1.5}
    own = attend(query, key, value, causal=True, **rules)
    np.testing.assert_allclose(own, naive_attention(query, key, value, **rules), atol=1e-12)
    # The last two queries alone, as with a cache.
    late = attend(query[:, 3:], key, value, causal=True, start=3, **rules)
    np.testing.assert_allclose(late, own[:, 3:], atol=1e-12)


@pytest.mark.parametrize("rules", [{}, {"window": 2, "sinks": True}], ids=["plain", "window and sinks"])
def test_attentions_gradients_are_those_of_a_plain_softmax(rules):
    """The library's softmax has a derivative of its own; here JAX differentiates the exponentials."""
    draw = np.random.default_rng(0).normal
    arrays = [jnp.asarray(draw(size=size)) for size in [(2, 5, 4, 6), (2, 5, 2, 6), (2, 5, 2, 6), (4,)]]
    ahead = np.arange(5) - np.arange(5)[:, None]
    seen = (ahead <= 0) & (ahead > -rules.get("window", 99))

    def plain(query, key, value, sinks):
        key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        chances = jnp.where(seen, jnp.exp(jnp.einsum("bqnd,bsnd->bnqs", query, key) * 6**-0.5), 0)
        total = chances.sum(-1, keepdims=True) + (jnp.exp(sinks)[:, None, None] if "sinks" in rules else 0)
        return jnp.einsum("bnqs,bsnd->bqnd", chances / total, value)

    def own(query, key, value, sinks):
        return attend(query, key, value, causal=True, **(rules | ({"sinks": sinks} if "sinks" in rules else {})))

    both = [jax.grad(lambda *x, way=way: jnp.sin(way(*x)).sum(), argnums=(0, 1, 2, 3)) for way in (own, plain)]
    for found, wanted in zip(*jax.jit(lambda *x: [grads(*x) for grads in both])(*arrays), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-12)


def reference(model, tokens):
    """The whole model from its parameters, in NumPy, by the papers' formulas."""
    config = model.config

    def linear(layer, x):
        return x @ np.asarray(layer.kernel[...]) + (0 if layer.bias is None else np.asarray(layer.bias[...]))

    def norm(layer, x):
        if config.norm == "rmsnorm":
            scale = np.asarray(layer.scale[...]) + (1 if config.zero_centered_norm else 0)
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale
        centred = x - x.mean(-1, keepdims=True)
        unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_eps)
        return unit * np.asarray(layer.scale[...]) + np.asarray(layer.bias[...])

    def turned(x, theta):
        if config.position == "learned":
            return x
        half = x.shape[-1] // 2
        turns = np.exp(1j * np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half))
        pairs = (x[..., :half] + 1j * x[..., half:]) * turns[:, None]
        return np.concatenate([pairs.real, pairs.imag], -1)

    def attention(layer, x, theta, window):
        query, key, value = (
            linear(part, x).reshape(*x.shape[:2], -1, config.head_size)
            for part in (layer.query, layer.key, layer.value)
        )
        if config.qk_norm:
            query, key = norm(layer.query_norm, query), norm(layer.key_norm, key)
        scale = (config.query_scalar or config.head_size) ** -0.5
        rules = {"window": window or 99, "scale": scale, "softcap": config.attention_softcap}
        mixed = naive_attention(turned(query, theta), turned(key, theta), value, **rules)
        return linear(layer.out, mixed.reshape(*x.shape[:2], -1))

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def feed_forward(layer, x):
        up = linear(layer.up, x)
        if config.activation == "gelu":
            return linear(layer.down, gelu(up))
        gate = linear(layer.gate, x)
        return linear(layer.down, (gelu(gate) if config.activation == "geglu" else gate / (1 + np.exp(-gate))) * up)

    after = norm if config.post_norms else lambda layer, x: x
    table = np.asarray(model.embed.embedding[...])
    x = table[tokens] * (config.hidden_size**0.5 if config.scale_embeddings else 1)
    if config.position == "learned":
        x = x + np.asarray(model.positions.embedding[...])[: tokens.shape[1]]
    for i, block in enumerate(model.blocks):
        own = config.rope_of(i)[0], config.window_of(i)
        x = x + after(block.post_attention_norm, attention(block.attention, norm(block.attention_norm, x), *own))
        x = x + after(block.post_mlp_norm, feed_forward(block.mlp, norm(block.mlp_norm, x)))
    x = norm(model.norm, x)
    logits, cap = x @ table.T if config.tie_embeddings else linear(model.head, x), config.logit_softcap
    return logits if cap is None else cap * np.tanh(logits / cap)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
def test_the_whole_model_equals_a_reference_in_numpy(name):
    config = dataclasses.replace(TINY, param_dtype="float64", **VARIANTS[name])
    model = Transformer(config, rngs=nnx.Rngs(0))
    # Larger than the initial values, biases and norms too, so that every part of the formula shows in the logits.
    noise = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(noise.normal(size=x.shape) * 0.3), nnx.state(model, nnx.Param))
    nnx.update(model, state)
    tokens = tokens_of(config)
    # Rotary angles are computed in float32.
    tolerance = 1e-11 if name == "gpt2" else 1e-5
    np.testing.assert_allclose(jax.jit(lambda t: model(t))(tokens), reference(model, tokens), rtol=0, atol=tolerance)


def test_attention_equals_jax_dot_product_attention():
    draw = np.random.default_rng(1).normal
    query, key, value = draw(size=(2, 5, 4, 6)), draw(size=(2, 5, 2, 6)), draw(size=(2, 5, 2, 6))
    theirs = jax.nn.dot_product_attention(*map(jnp.asarray, (query, key, value)), is_causal=True)
    np.testing.assert_allclose(attend(query, key, value, causal=True), theirs, atol=1e-6)


def test_rotary_scores_depend_on_the_distance_alone():
    draw = np.random.default_rng(0).normal
    query, key = (np.broadcast_to(draw(size=(1, 1, 1, 8)), (1, 6, 1, 8)) for _ in range(2))
    turn = lambda x: np.asarray(rotate(jnp.asarray(x), 100.0, jnp.arange(6)))[0, :, 0]
    turned_query, turned_key = turn(query), turn(key)
    scores = turned_query @ turned_key.T
    np.testing.assert_allclose(scores[2:, 2:], scores[:-2, :-2], atol=1e-6)
    assert abs(scores[0, 1] - scores[0, 2]) > 1e-3
    np.testing.assert_allclose(
        np.linalg.norm(turned_query, axis=-1), np.linalg.norm(query[0, :, 0], axis=-1), rtol=1e-6
    )
    angle = 1.0 / 100.0 ** (2 / 8)  # pair 1 (dims 1 and 5) at position 1
    expected = query[0, 1, 0, 1] * np.cos(angle) - query[0, 1, 0, 5] * np.sin(angle)
    np.testing.assert_allclose(turned_query[1, 1], expected, rtol=1e-6)


def test_dropout_acts_in_train_mode_only_and_without_it_no_random_state_is_kept():
    model = Transformer(dataclasses.replace(TINY, dropout=0.5, num_layers=1), rngs=nnx.Rngs(0))
    tokens = tokens_of(TINY, length=2)
    assert np.abs(model(tokens) - model(tokens)).max() > 0
    model.eval()
    np.testing.assert_array_equal(model(tokens), model(tokens))
    assert not jax.tree.leaves(nnx.state(Transformer(TINY, rngs=nnx.Rngs(0)), nnx.RngState))


def test_flops_per_token_follow_torchtitans_formula():
    gpt2, llama = preset("gpt2-small"), preset("llama3-8b")
    assert gpt2.flops_per_token(1024) == 6 * (124_439_808 - 1024 * 768) + 6 * 12 * 12 * (64 + 64) * 1024
    assert llama.flops_per_token(8192) == 6 * (8_030_261_248 - 128_256 * 4096) + 6 * 32 * 32 * (128 + 128) * 8192


def test_every_offending_option_is_listed_at_once():
    with pytest.raises(ValueError) as caught:
        TransformerConfig(
            vocab_size=0, num_layers=2, hidden_size=10, num_heads=4, max_length=8, num_kv_heads=3, norm="batch",
            activation="relu", position="alibi", dropout=1.0, norm_eps=0.0, dtype="int8", param_dtype="float33",
        )  # fmt: skip
    message = str(caught.value)
    given = """vocab_size=0 hidden_size=10 num_kv_heads=3 norm='batch' activation='relu' position='alibi' dropout=1.0
        norm_eps=0.0 dtype='int8' param_dtype='float33'"""
    assert [named for named in given.split() if named not in message] == []
    assert "swiglu" in message and "multiple of 4" in message


def test_an_odd_rotary_head_size_and_a_too_long_sequence_are_refused():
    with pytest.raises(ValueError, match="head size 3"):
        dataclasses.replace(TINY, hidden_size=12)
    with pytest.raises(ValueError, match="9 tokens is longer than max_length=8"):
        Transformer(TINY, rngs=nnx.Rngs(0))(tokens_of(TINY, length=9))
    with pytest.raises(ValueError, match=r"'gpt3'.*gpt2-small"):
        preset("gpt3")
