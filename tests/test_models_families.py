"""What newer families' attention has: sizes of its own, windows, sinks, scaled frequencies."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_models_transformer import TINY, count_abstract

import axonml_jax as ax
from axonml_jax.layers.options import RopeScaling
from axonml_jax.models.config import ExpertsConfig
from axonml_jax.models.families.known import config_of
from axonml_jax.models.transformer import Transformer


@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 6, "qk_norm": True, "num_kv_heads": 2},
        {"qkv_bias": True, "head_dim": 2},
        {"use_bias": True, "head_dim": 6, "sinks": True, "window": 3, "full_every": 2},
        {
            "qk_norm": True,
            "post_norms": True,
            "activation": "geglu",
            "window": 3,
            "full_every": 2,
            "window_rope_theta": 5.0,
        },
    ],
    ids=["qwen3", "qwen2", "gpt-oss", "gemma"],
)
def test_num_params_is_exact_for_the_attention_of_newer_families(options):
    config = dataclasses.replace(TINY, **options)
    assert count_abstract(config) == config.num_params
    model = Transformer(config, rngs=nnx.Rngs(0))
    assert [block.attention.window for block in model.blocks] == [config.window_of(0), config.window_of(1)]
    assert (config.window_of(0), config.window_of(1)) == (config.window, None)


def test_rotary_frequencies_follow_the_published_rules():
    """Llama 3.1's: a wavelength above 8192 is 8 times as long, one below 2048 stays; YaRN's ends do the same."""
    theta, size = 500_000.0, 128
    plain = theta ** (-np.arange(64) / 64)
    scaled = RopeScaling(kind="llama3", factor=8.0, original_length=8192).frequencies(theta, size)
    long, short = 2 * np.pi / plain > 8192, 2 * np.pi / plain < 2048
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-6)
    between = scaled[~long & ~short] / plain[~long & ~short]
    assert len(between) > 5 and (between > 1 / 8).all() and (between < 1).all() and (np.diff(between) < 0).all()
    yarn = RopeScaling(kind="yarn", factor=32.0, original_length=4096, truncate=False)
    scaled = yarn.frequencies(150_000.0, 64) / 150_000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose([scaled[0], scaled[-1]], [1, 1 / 32], rtol=1e-6)
    assert yarn.attention_scale == pytest.approx(0.1 * np.log(32) + 1)
    with pytest.raises(
        ValueError, match=r"(?s)fast=8: without effect for kind=llama3.*original_length=0: must be the long"
    ):
        RopeScaling(kind="llama3", factor=8.0, fast=8)


def test_attention_options_that_contradict_each_other_are_refused():
    for options, message in (
        ({"qkv_bias": True, "use_bias": True}, "qkv_bias=True is without effect"),
        ({"full_every": 2}, "full_every=2 is without effect where no block has a window"),
        ({"window": 2, "full_every": 3}, "full_every=3: must be at least 2, and at most num_layers=2"),
        ({"window": 2, "full_every": 2, "scan_layers": True}, "scan_layers=True runs blocks of one kind"),
        ({"window": 0}, "window=0: must be positive"),
        ({"head_dim": 5}, r"head size 5 \(head_dim\) must be even"),
        (
            {"window_rope_theta": 5.0},
            "window_rope_theta=5.0: turns positions in blocks with a window, and with window=None",
        ),
        (
            {"attention_softcap": 0.0, "logit_softcap": -1.0},
            r"(?s)attention_softcap=0.0: must be pos.*logit_softcap=-1.0",
        ),
        ({"zero_centered_norm": True, "norm": "layernorm"}, "zero_centered_norm=True belongs to norm='rmsnorm'"),
        ({"activation": "geglu", "experts": ExpertsConfig(num_experts=4)}, "set experts.activation to swiglu, "),
        ({"position": "learned", "rope_scaling": RopeScaling(kind="linear", factor=2.0)}, "set position='rotary'"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(TINY, **options)


def test_kinds_of_layers_that_are_not_known_are_refused_and_not_taken_for_full_attention():
    described = {
        "model_type": "qwen3",
        "vocab_size": 64,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "intermediate_size": 64,
        "use_sliding_window": True,
        "sliding_window": 8,
    }
    sliding, full = "sliding_attention", "full_attention"
    assert config_of(described | {"layer_types": [sliding, full]}).full_every == 2
    for kinds, said in (
        (["chunked_attention"] * 2, "layer_types: chunked_attention, where"),
        ([sliding, "chunked_attention"], "layer_types: chunked_attention, where"),
        ([sliding], "layer_types of 1 layers for num_hidden_layers=2"),
        ([full, sliding], "all but every so many-th"),
    ):
        with pytest.raises(ValueError, match=said):
            config_of(described | {"layer_types": kinds})


def test_a_small_zero_centered_scale_is_not_lost_in_bfloat16():
    """1 + 2**-9 is 1 in bfloat16: the sum is in float32, and what is rounded is the product."""
    norm = ax.ParallelRMSNorm(4096, centered=True, dtype="bfloat16", param_dtype="bfloat16", rngs=nnx.Rngs(0))
    assert not norm.scale[...].any()
    norm.scale[...] = jnp.full(4096, 2**-9, "bfloat16")
    x = np.random.default_rng(0).normal(size=4096).astype(jnp.bfloat16)
    wide = x.astype(np.float32)
    right = (wide / np.sqrt((wide**2).mean() + 1e-6) * (1 + 2**-9)).astype(jnp.bfloat16)
    assert np.mean(np.asarray(norm(x)) == right) > 0.99
