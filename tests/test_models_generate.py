"""Generation with a cache of keys and values, on one device and under plans, equals running the whole text again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.layers.options import LatentConfig, RopeScaling
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.generate import Sampling, generate
from axonml_jax.models.transformer import Transformer

LLAMA = TransformerConfig(
    vocab_size=16, num_layers=1, hidden_size=16, num_heads=4, num_kv_heads=2, max_length=16, param_dtype="float64"
)
GPT2 = dataclasses.replace(
    LLAMA, position="learned", tie_embeddings=True, norm="layernorm", activation="gelu", num_kv_heads=None
)
GPT_OSS = dataclasses.replace(
    LLAMA, num_layers=2, head_dim=6, qk_norm=True, window=3, full_every=2, sinks=True, use_bias=True,
    rope_scaling=RopeScaling(kind="llama3", factor=4.0, original_length=8),
)  # fmt: skip
GEMMA = dataclasses.replace(
    LLAMA, num_layers=2, head_dim=6, qk_norm=True, window=3, full_every=2, window_rope_theta=50.0, query_scalar=9,
    post_norms=True, zero_centered_norm=True, activation="geglu", tie_embeddings=True, scale_embeddings=True,
    attention_softcap=2.0, logit_softcap=9.0,
)  # fmt: skip
DEEPSEEK = dataclasses.replace(
    LLAMA, num_layers=2, num_kv_heads=None,
    latent=LatentConfig(kv_rank=6, query_rank=5, plain_size=4, rotary_size=2, value_size=3, mscale=1.0),
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_length=8, attention_factor=1.0),
    experts=ExpertsConfig(num_experts=4, first_dense=1, router="sigmoid", groups=2, top_groups=1, shared_size=8),
)  # fmt: skip
PROMPTS = [[1, 2, 3], [4, 5, 6]]


def make(config):
    """A transformer that is sure of what it says: its first values times 8."""
    model = Transformer(config, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: x * 8, nnx.state(model, nnx.Param)))
    return model


class Plain(nnx.Module):
    """The same model without a cache."""

    def __init__(self, model):
        self.model = model

    def __call__(self, tokens):
        return self.model(tokens)


@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, GPT_OSS, GEMMA, DEEPSEEK], ids=["llama", "gpt2", "gpt-oss", "gemma", "deepseek"]
)
def test_a_cache_changes_no_token(config):
    model, key = make(config), jax.random.key(1)
    np.testing.assert_array_equal(generate(model, PROMPTS, 8, key), generate(Plain(model), PROMPTS, 8, key))


def test_with_a_cache_a_token_costs_one_position():
    model = make(LLAMA)
    caches = model.empty_caches(2, 12)
    logits, caches = jax.eval_shape(model.extend, np.ones((2, 1), np.int32), caches)
    assert logits.shape == (2, 1, 16) and caches[0].key.shape == (2, 12, 2, 4)
    cache = make(DEEPSEEK).empty_caches(2, 12)[0]  # of latents, for all heads together
    assert (cache.latent.shape, cache.turned.shape) == ((2, 12, 6), (2, 12, 2))
    with pytest.raises(ValueError, match="17 tokens is longer than max_length=16"):
        model.empty_caches(2, 17)


# (model, its options, mesh): kv heads fewer than ranks, sequence parallelism, fsdp, 3-D.
ROWS = {
    "sequence": (LLAMA, {"sequence_parallel": True}, {"data": 2, "tensor": 4}),
    "fsdp": (GPT2, {}, {"fsdp": 2, "tensor": 2}),
    "grid": (LLAMA, {"split": "grid"}, {"data": 1, "row": 2, "col": 2, "depth": 2}),
    "data": (GPT2, {}, {"data": 3}),
    "windows and sinks": (GPT_OSS, {}, {"data": 1, "tensor": 4}),
    "latents": (DEEPSEEK, {"sequence_parallel": True}, {"data": 1, "expert": 2, "tensor": 2}),
    "caps and four norms": (GEMMA, {"sequence_parallel": True}, {"fsdp": 2, "tensor": 2}),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_plan_writes_the_tokens_of_one_device(name):
    config, options, degrees = ROWS[name]
    model, key = make(dataclasses.replace(config, **options)), jax.random.key(1)
    parallel = ax.parallelize(model, mesh_of(**degrees))
    np.testing.assert_array_equal(ax.generate(parallel, PROMPTS, 8, key), generate(model, PROMPTS, 8, key))
    if name not in ("sequence", "fsdp"):
        return
    # Longer than the window: the last of the text is seen anew for every token.
    slid = generate(model, PROMPTS, 6, key, temperature=0.0, window=5)
    np.testing.assert_array_equal(ax.generate(parallel, PROMPTS, 6, key, temperature=0.0, window=5), slid)


UNEQUAL = [[7], [1, 2, 3, 4, 5], [4, 5, 6]]


def padded(side, value=0):
    """(tokens, mask) as a tokenizer makes them."""
    rows = np.full((3, 5), value)
    mask = np.array([[(i < len(row)) if side == "right" else i >= 5 - len(row) for i in range(5)] for row in UNEQUAL])
    rows[mask] = np.concatenate(UNEQUAL)
    return rows, mask.astype(np.int64)


def alone(model, length, window=16):
    """What is new in each prompt that is continued by itself, by a model that sees the whole text anew for every token."""
    model.eval()
    logits_of, options = jax.jit(lambda tokens: model(tokens)), {"temperature": 0.0, "window": window}
    rows = [generate(logits_of, [row], length, jax.random.key(1), **options)[0, len(row) :] for row in UNEQUAL]
    return np.stack(rows)


@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, GPT_OSS, GEMMA, DEEPSEEK], ids=["llama", "gpt2", "gpt-oss", "gemma", "deepseek"]
)
def test_prompts_of_unequal_length_are_continued_as_each_alone(config):
    model, key = make(config), jax.random.key(1)
    wanted = alone(model, 6)
    for each in (model, Plain(model)):
        text = generate(each, UNEQUAL, 6, key, temperature=0.0)
        np.testing.assert_array_equal(text[:, 5:], wanted)
        np.testing.assert_array_equal(text[0, :5], [0, 0, 0, 0, 7])
    if config is GPT2:  # past the window, in which the longest slides first
        slid = generate(model, UNEQUAL, 6, key, temperature=0.0, window=6)
        np.testing.assert_array_equal(slid[:, 5:], alone(model, 6, window=6))


UNEQUAL_ROWS = {
    "tensor": (LLAMA, {"data": 2, "tensor": 4}),
    "data and fsdp": (GPT2, {"data": 3, "fsdp": 2}),
    "rows that divide": (GEMMA, {"data": 1, "fsdp": 3, "tensor": 2}),
    "latents": (DEEPSEEK, {"data": 1, "expert": 2, "tensor": 2}),
    "3-D": (dataclasses.replace(LLAMA, split="grid"), {"data": 1, "row": 2, "col": 2}),
    "context": (LLAMA, {"data": 1, "context": 2}),
    "pipeline": (dataclasses.replace(LLAMA, num_layers=2, param_dtype="float32"), {"pipe": 2}),
}


@pytest.mark.parametrize("name", UNEQUAL_ROWS)
def test_masks_of_padding_on_either_side_are_right_under_every_plan(name):
    config, degrees = UNEQUAL_ROWS[name]
    model, key = make(config), jax.random.key(1)
    pipelined = "pipe" in degrees
    mesh = mesh_of(**degrees)
    parallel = ax.Pipeline(model, mesh, num_microbatches=1) if pipelined else ax.parallelize(model, mesh)
    wanted = alone(model, 4)
    for side in ("left", "right"):
        tokens, mask = padded(side, value=-100)  # no word: nothing may read it
        text = ax.generate(parallel, tokens, 4, key, mask=mask, temperature=0.0)
        np.testing.assert_array_equal(text[:, 5:], wanted)
        np.testing.assert_array_equal(text[:, :5], padded("left", value=-100)[0])


@pytest.mark.parametrize("name", ["module", "wrapped", "pipeline"])
def test_prompts_that_are_none_are_refused_by_name(name):
    model = WRITERS[name](make(dataclasses.replace(LLAMA, num_layers=1 + (name == "pipeline"), param_dtype="float32")))
    for tokens, mask, said in (
        ([[1, 3], [16, 2]], None, r"tokens 16 \(prompt 1, place 0\) .*: the model has 16, 0 to 15"),
        ([[1, 3], [2, -1]], None, r"tokens -1 \(prompt 1, place 1\) are no words of the vocabulary"),
        (np.array([[1, 2**32 + 1]]), None, r"tokens 4294967297 \(prompt 0, place 1\) are no words of the vocabulary"),
        ([[1.5, 2.0]], None, "tokens are float64: give integers"),
        ([[True, False]], None, "tokens are bool: give integers"),
        ([[1], []], None, r"tokens have shape \[\(1,\), \(0,\)\]: give \[batch, prompt\]"),
        ([[1, 2]], [[0, 0]], r"mask of prompts \[0\] is no single stretch of ones"),
        ([[1, 2, 3]], [[1, 0, 1]], r"mask of prompts \[0\] is no single stretch of ones"),
        ([[1, 2]], [[1]], r"mask has shape \(1, 1\), tokens \(1, 2\)"),
        ([[1, 2], [3]], [[1, 1], [1, 0]], "mask is given for prompts of several lengths"),
    ):
        with pytest.raises(ValueError, match="generate: .*" + said):
            ax.generate(model, tokens, 2, jax.random.key(0), mask=mask)
    function = lambda tokens: jax.nn.one_hot(tokens, 4)
    with pytest.raises(ValueError, match=r"tokens 4 \(prompt 0, place 1\) .* the model has 4, 0 to 3"):
        ax.generate(function, [[1, 4]], 2, jax.random.key(0))


def test_other_models_are_called_on_a_window():
    parallel = ax.parallelize(Plain(make(GPT2)), mesh_of(data=3, tensor=2))
    one = generate(parallel.module, PROMPTS, 3, jax.random.key(0))
    np.testing.assert_array_equal(ax.generate(parallel, PROMPTS, 3, jax.random.key(0)), one)
    assert parallel.is_training
    with pytest.raises(ValueError, match="length=-1 is negative"):
        ax.generate(parallel, PROMPTS, -1, jax.random.key(0))


class Extending(Plain):
    """A cache of its own, under a name that the transformer has for its."""

    def extend(self, token, cache, position):
        return self(token), cache


class Pair(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens), {"aux": jnp.zeros(())}


HELD = {
    "module": lambda model: model,
    "ddp": lambda model: ax.DDP(model, mesh_of(data=2)),
    "zero3": lambda model: ax.FSDP(model, mesh_of(fsdp=2)),
}


@pytest.mark.parametrize("held", HELD)
def test_a_model_with_a_method_called_extend_is_no_transformer(held):
    wanted = generate(make(LLAMA), PROMPTS, 3, jax.random.key(0))
    np.testing.assert_array_equal(
        ax.generate(HELD[held](Extending(make(LLAMA))), PROMPTS, 3, jax.random.key(0)), wanted
    )


@pytest.mark.parametrize("prompts", [PROMPTS, [[1, 2, 3], [4]]], ids=["even", "ragged"])
@pytest.mark.parametrize("held", HELD)
def test_a_model_that_returns_more_than_logits_is_refused_and_the_remedy_works(held, prompts):
    model = HELD[held](Pair(make(LLAMA)))
    with pytest.raises(TypeError, match=r"returned a tuple.*lambda tokens: model\(tokens\)\[0\].*model\.eval\(\)"):
        ax.generate(model, prompts, 3, jax.random.key(0))
    model.eval()
    wanted = generate(make(LLAMA), prompts, 3, jax.random.key(0))
    got = ax.generate(lambda tokens: model(tokens)[0], prompts, 3, jax.random.key(0))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("held", HELD)
def test_a_model_that_returns_the_last_logits_alone_is_refused_with_their_shape(held):
    class Last(Plain):
        def __call__(self, tokens):
            return super().__call__(tokens)[:, -1]

    with pytest.raises(TypeError, match=r"returned an array of shape \(2, 16\).*\[b, w, v\]"):
        ax.generate(HELD[held](Last(make(LLAMA))), PROMPTS, 3, jax.random.key(0))


# What is generated from, by how it holds the model.
WRITERS = {
    "module": lambda model: model,
    "wrapped": lambda model: ax.DDP(Plain(model), mesh_of(data=2)),
    "tensor": lambda model: ax.parallelize(model, mesh_of(data=1, tensor=2)),
    "pipeline": lambda model: ax.Pipeline(model, mesh_of(pipe=2), num_microbatches=2),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_text_past_the_models_length_is_one_error_everywhere_and_its_remedies_work(name):
    config = dataclasses.replace(LLAMA, max_length=4, num_layers=1 + (name == "pipeline"), param_dtype="float32")
    model, key = WRITERS[name](make(config)), jax.random.key(0)
    with pytest.raises(
        ValueError, match=r"generate: prompts of 3 tokens and length=3 make 6, .* max_length=4: "
    ) as past:
        ax.generate(model, PROMPTS, 3, key)
    assert str(past.value).endswith("see the last 4 tokens of longer texts, length=1 stays within it")
    assert ax.generate(model, PROMPTS, 3, key, window=4).shape == (2, 6)
    assert ax.generate(model, PROMPTS, 1, key).shape == (2, 4)
    with pytest.raises(ValueError, match="generate: window=5 is longer than the model's max_length=4: window=4 makes"):
        ax.generate(model, PROMPTS, 1, key, window=5)
    with pytest.raises(ValueError, match=r"prompts of 4 tokens and length=1 .* of longer texts$"):
        ax.generate(model, [[1] * 4], 1, key)


LOGITS = np.log(np.array([[0.5, 0.2, 0.2, 0.1], [0.1, 0.1, 0.1, 0.7]]))


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, [{0, 1, 2, 3}, {0, 1, 2, 3}]),
        ({"temperature": 0.0}, [{0}, {3}]),
        ({"top_k": 1}, [{0}, {3}]),
        ({"top_k": 3}, [{0, 1, 2}, {0, 1, 2, 3}]),  # equally likely ones stay
        ({"top_p": 0.5}, [{0}, {3}]),
        ({"top_p": 0.6}, [{0, 1, 2}, {3}]),
        ({"top_p": 0.95}, [{0, 1, 2, 3}, {0, 1, 2, 3}]),
        ({"top_k": 3, "top_p": 0.5, "temperature": 2.0}, [{0, 1, 2}, {3, 0, 1, 2}]),
    ],
)
def test_tokens_are_drawn_among_the_most_likely(settings, allowed):
    sampling = Sampling(**settings)
    drawn = np.array([sampling.draw(LOGITS, jax.random.key(i)) for i in range(200)])
    assert [set(column.tolist()) for column in drawn.T] == allowed


def test_the_share_of_each_token_is_its_probability_among_those_allowed():
    sampling = Sampling(top_p=0.6)
    drawn = np.array(jax.vmap(lambda key: sampling.draw(LOGITS, key))(jax.random.split(jax.random.key(0), 3000)))
    shares = np.bincount(drawn[:, 0], minlength=4) / 3000
    np.testing.assert_allclose(shares, np.array([5, 2, 2, 0]) / 9, atol=0.04)


def test_a_text_ends_where_after_token_says_so():
    model, key, seen = make(LLAMA), jax.random.key(1), []

    def after_token(text):
        seen.append(text.shape)
        return text.shape[1] == 6

    whole, ended = generate(model, PROMPTS, 8, key), generate(model, PROMPTS, 8, key, after_token=after_token)
    np.testing.assert_array_equal(ended, whole[:, :6])
    assert seen == [(2, 4), (2, 5), (2, 6)]


def test_sampling_that_cannot_work_is_refused_with_all_that_is_wrong():
    with pytest.raises(
        ValueError, match=r"temperature=-1.0 is negative, or .*; top_k=0 is below 1; top_p=2.0 is not above 0"
    ):
        generate(make(LLAMA), PROMPTS, 1, jax.random.key(0), temperature=-1.0, top_k=0, top_p=2.0)
