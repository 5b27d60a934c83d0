"""Hugging Face's weights of every family, in and out, held against `transformers` where that is installed."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.layers.options import LatentConfig, RopeScaling
from axonml_jax.models.config import GEMMA, GPT2, ExpertsConfig, TransformerConfig, preset
from axonml_jax.models.families.known import config_of, family_of
from axonml_jax.models.transformer import Transformer
from axonml_jax.models.weights import check_pretrained, load_pretrained, pretrained, read_pretrained, write_pretrained

SIZES = {"vocab_size": 11, "num_layers": 2, "hidden_size": 8, "num_heads": 2, "max_length": 6}
CONFIGS = {
    "gpt2": TransformerConfig(**GPT2 | SIZES),
    "llama": TransformerConfig(**SIZES, num_kv_heads=1, mlp_hidden_size=12, rope_theta=500.0),
    "llama, tied": TransformerConfig(**SIZES, mlp_hidden_size=12, tie_embeddings=True),
    "mixtral": TransformerConfig(**SIZES, mlp_hidden_size=12, experts=ExpertsConfig(num_experts=4)),
    "llama 3, scaled": TransformerConfig(
        **SIZES, head_dim=6, rope_scaling=RopeScaling(kind="llama3", factor=4.0, original_length=4), mlp_hidden_size=12
    ),
    "mistral": TransformerConfig(**SIZES, mlp_hidden_size=12, window=3),
    "qwen2": TransformerConfig(**SIZES, mlp_hidden_size=12, qkv_bias=True, tie_embeddings=True),
    "qwen3": TransformerConfig(**SIZES, mlp_hidden_size=12, qk_norm=True, head_dim=6, window=2, full_every=2),
    "qwen3_moe, one loop": TransformerConfig(
        **SIZES,
        mlp_hidden_size=12,
        qk_norm=True,
        head_dim=128,
        scan_layers=True,
        experts=ExpertsConfig(num_experts=4, inner_size=6),
    ),
    "gpt_oss": TransformerConfig(
        **SIZES,
        mlp_hidden_size=12,
        head_dim=6,
        window=2,
        full_every=2,
        sinks=True,
        use_bias=True,
        experts=ExpertsConfig(num_experts=4, router_bias=True, activation="clamped_swiglu"),
    ),
    "gemma2": TransformerConfig(
        **SIZES, **GEMMA, mlp_hidden_size=12, head_dim=6, window=2, full_every=2, query_scalar=9, attention_softcap=2.0,
        logit_softcap=3.0,
    ),
    "gemma3_text": TransformerConfig(
        **SIZES, **GEMMA, mlp_hidden_size=12, head_dim=6, window=2, full_every=2, query_scalar=6, qk_norm=True,
        rope_theta=1e6, window_rope_theta=1e4, rope_scaling=RopeScaling(kind="linear", factor=8.0),
    ),
    "deepseek_v3": TransformerConfig(
        **SIZES, mlp_hidden_size=12,
        latent=LatentConfig(kv_rank=5, query_rank=4, plain_size=3, rotary_size=2, value_size=6, mscale=0.5),
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_length=4, attention_factor=1.0),
        experts=ExpertsConfig(
            num_experts=4, inner_size=6, first_dense=1, router="sigmoid", groups=2, top_groups=1, scale=2.5, shared_size=12,
            load_balance=0.0,
        ),
    ),
    "mixtral, one loop": TransformerConfig(
        **SIZES, mlp_hidden_size=12, experts=ExpertsConfig(num_experts=4), scan_layers=True
    ),
}  # fmt: skip


def description_of(config):
    return family_of(config).describe(config)


DEEPSEEK = description_of(CONFIGS["deepseek_v3"])
REFERENCE = Path(__file__).with_name("workers") / "hf_reference.py"
PYTHON = os.environ.get("AXONML_TRANSFORMERS_PYTHON") or (
    sys.executable if all(importlib.util.find_spec(name) for name in ("torch", "transformers")) else None
)


def values_of(model):
    return ax.DDP(model, ax.make_mesh(data=1, devices=jax.devices()[:1])).state_dict()


@pytest.fixture(params=[name for name in CONFIGS if name != "llama, tied"])
def model(request):
    pytest.importorskip("safetensors")
    return Transformer(CONFIGS[request.param], rngs=nnx.Rngs(3))


@pytest.mark.slow
def test_what_is_written_reads_back_the_same(model, tmp_path):
    values = values_of(model)
    write_pretrained(tmp_path, model.config, values)
    config, back = read_pretrained(tmp_path)
    assert config == dataclasses.replace(
        model.config,
        mlp_hidden_size=config.mlp_hidden_size,
        num_kv_heads=config.num_kv_heads,
        experts=config.experts,
        scan_layers=False,
    )
    if model.config.scan_layers:
        config, back = read_pretrained(tmp_path, scan_layers=True)
    assert config.kv_heads == model.config.kv_heads and back.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)
    tokens = np.arange(10).reshape(2, 5)
    loaded = pretrained(tmp_path, scan_layers=model.config.scan_layers)
    np.testing.assert_array_equal(loaded(tokens), model(tokens))
    fsdp = ax.FSDP(Transformer(config, rngs=nnx.Rngs(9)), ax.make_mesh(fsdp=3, devices=jax.devices()[:3]))
    fsdp.load_state_dict(back)
    name = next(name for name in values if "mlp/up" in name)
    np.testing.assert_array_equal(fsdp.state_dict()[name], values[name])


# What config.json says of published models, as it was written when they came out.
OLDER = {
    "gemma2-2b": {
        "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
        "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "ep_size": 1,
        "aux_loss_alpha": 0.001, "seq_aux": True, "rms_norm_eps": 1e-6, "rope_theta": 10_000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "max_position_embeddings": 163_840, "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
    },
    "gemma3-1b": {
        "model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "rope_local_base_freq": 10_000,
        "rope_scaling": None, "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_descriptions_of_older_versions_are_those_of_the_presets(name):
    assert config_of(OLDER[name]) == preset(name)
    scaled = OLDER[name] | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert config_of(scaled).rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert config_of(description_of(config_of(scaled))) == config_of(scaled)


@pytest.mark.slow
def test_the_names_are_those_of_the_published_files(tmp_path):
    pytest.importorskip("safetensors")
    for name, wanted in (
        ("gpt2", {"transformer.h.1.attn.c_attn.weight": (8, 24), "transformer.wte.weight": (11, 8)}),
        (
            "mixtral",
            {
                "model.layers.1.block_sparse_moe.experts.3.w2.weight": (8, 12),
                "model.layers.0.block_sparse_moe.gate.weight": (4, 8),
            },
        ),
        ("llama", {"model.layers.0.self_attn.k_proj.weight": (4, 8), "lm_head.weight": (11, 8)}),
        ("qwen3_moe, one loop", {"model.layers.1.mlp.experts.3.down_proj.weight": (8, 6)}),
        ("gemma2", {"model.layers.1.pre_feedforward_layernorm.weight": (8,), "model.norm.weight": (8,)}),
        ("gemma3_text", {"model.layers.0.self_attn.q_norm.weight": (6,), "model.embed_tokens.weight": (11, 8)}),
        (
            "deepseek_v3",
            {
                "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (7, 8),
                "model.layers.1.self_attn.q_b_proj.weight": (10, 4),
                "model.layers.1.mlp.gate.e_score_correction_bias": (4,),
                "model.layers.1.mlp.shared_experts.up_proj.weight": (12, 8),
            },
        ),
        ("gpt_oss", {"model.layers.0.mlp.experts.gate_up_proj": (4, 8, 24), "model.layers.0.self_attn.sinks": (2,)}),
    ):
        write_pretrained(tmp_path / name, CONFIGS[name], values_of(Transformer(CONFIGS[name], rngs=nnx.Rngs(0))))
        shapes = {key: value.shape for key, value in ax.load_safetensors(tmp_path / name).items()}
        assert wanted.items() <= shapes.items()


def test_arrays_that_lack_or_have_no_place_are_listed(tmp_path):
    pytest.importorskip("safetensors")
    write_pretrained(tmp_path, CONFIGS["gpt2"], values_of(Transformer(CONFIGS["gpt2"], rngs=nnx.Rngs(0))))
    file = tmp_path / "model.safetensors"
    ax.save_safetensors(file, ax.load_safetensors(file), rename={"transformer.ln_f.bias": "transformer.other"})
    with pytest.raises(ValueError, match=r"\n  ln_f\.bias: missing\n  other: has no place here"):
        read_pretrained(tmp_path)


@pytest.mark.parametrize("name, dtype", [("gpt2", np.float32), ("llama, tied", jax.numpy.bfloat16)])
def test_a_head_beside_a_tied_embedding_is_used_or_refused(name, dtype, tmp_path):
    pytest.importorskip("safetensors")
    model = Transformer(CONFIGS[name], rngs=nnx.Rngs(0))
    write_pretrained(tmp_path, CONFIGS[name], values_of(model))
    file, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    stored = {key: value.astype(dtype) for key, value in ax.load_safetensors(file).items()}
    ax.save_safetensors(file, stored)
    table = next(value for key, value in stored.items() if key.endswith(("wte.weight", "embed_tokens.weight")))
    plain, tokens = pretrained(tmp_path), np.arange(10).reshape(2, 5)
    ax.save_safetensors(file, stored | {"lm_head.weight": table.copy()})  # as older files have it
    np.testing.assert_array_equal(pretrained(tmp_path)(tokens), plain(tokens))
    check_pretrained(CONFIGS[name], tmp_path)

    other = rng.normal(size=table.shape).astype(dtype)
    last = table.copy()
    last[-1, -1] += 1
    for head in (last, other, other[:7]):
        ax.save_safetensors(file, stored | {"lm_head.weight": head})
        tied = ax.DDP(model, ax.make_mesh(data=1, devices=jax.devices()[:1]))
        for read in (
            lambda: pretrained(tmp_path),
            lambda: read_pretrained(tmp_path),
            lambda: check_pretrained(CONFIGS[name], tmp_path),
            lambda tied=tied: load_pretrained(tied, tmp_path),
        ):
            with pytest.raises(
                ValueError, match=r"has a head, lm_head\.weight .* that differs from .*tie_embeddings=False"
            ):
                read()

    ax.save_safetensors(file, stored | {"lm_head.weight": other})
    untied = dataclasses.replace(CONFIGS[name], tie_embeddings=False)
    check_pretrained(untied, tmp_path)
    own = pretrained(tmp_path, tie_embeddings=False)
    np.testing.assert_array_equal(own.head.kernel[...], other.T)
    np.testing.assert_array_equal(own.embed.embedding[...], table)
    parallel = ax.DDP(Transformer(untied, rngs=nnx.Rngs(5)), ax.make_mesh(data=1, devices=jax.devices()[:1]))
    load_pretrained(parallel, tmp_path)
    np.testing.assert_array_equal(parallel.state_dict()["head/kernel"], other.T.astype(np.float32))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model_type": "bert"}, "model_type='bert' is not known here: gpt2, llama, mistral, "),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 8}},
            "rope scaling {'rope_type': 'longrope'",
        ),
        ({"attention_bias": True, "hidden_act": "gelu"}, "hidden_act='gelu'; attention_bias=True"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            "all must slide, none, or all but",
        ),
        (
            {"model_type": "gpt_oss", "num_local_experts": 4, "attention_bias": True}
            | {"quantization_config": {"quant_method": "mxfp4"}},
            "weights quantized by mxfp4: save them in bfloat16",
        ),
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True, "hidden_activation": "gelu"},
            "hidden_activation='gelu'; use_bidirectional_attention=True",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}
            | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "attn_logit_softcapping=50.0; rope scaling .* in blocks with a window",
        ),
        (
            DEEPSEEK | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}, "rope_interleave": False},
            "rope_interleave=False; weights quantized by fp8: save them in bfloat16 first",
        ),
        (
            DEEPSEEK | {"num_key_value_heads": 1, "topk_method": "greedy", "first_k_dense_replace": 2},
            "topk_method='greedy'; num_key_value_heads=1: every one of 2 heads .*; first_k_dense_replace=2: no block",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]: only the first"),
    ],
)
def test_what_the_transformer_here_is_not_is_refused(change, said):
    with pytest.raises(ValueError, match="its experts are not theirs"):
        description_of(dataclasses.replace(CONFIGS["mixtral"], experts=ExpertsConfig(num_experts=4, shared_size=8)))
    dropping = dataclasses.replace(CONFIGS["mixtral"], experts=ExpertsConfig(num_experts=4, capacity_factor=1.0))
    assert description_of(dropping) == description_of(CONFIGS["mixtral"])  # only training drops
    described = description_of(CONFIGS["llama"]) | {"rope_parameters": None} | change
    with pytest.raises(ValueError, match=said):
        config_of(described)
    with pytest.raises(ValueError, match=r"norm=layernorm, .* is of none of the families GPT-2, Llama 2 and 3, "):
        description_of(dataclasses.replace(CONFIGS["llama"], norm="layernorm"))


@pytest.mark.skipif(
    PYTHON is None, reason="torch and transformers are not installed (AXONML_TRANSFORMERS_PYTHON names a Python)"
)
def test_logits_equal_those_of_transformers_and_files_go_back(tmp_path):
    pytest.importorskip("safetensors")
    subprocess.run([PYTHON, str(REFERENCE), str(tmp_path)], check=True, capture_output=True, timeout=300)
    kinds = sorted(path.name for path in tmp_path.iterdir())
    assert len(kinds) == 21
    for kind in kinds:
        reference = np.load(tmp_path / kind / "reference.npz")
        model = pretrained(tmp_path / kind, param_dtype="float64")
        # The reference computes its router, norms, softmax and frequencies in float32; with a router 5e-6 of 6 come of it,
        # with norms of each head, windows or scaled frequencies 2e-6.
        close = 1e-6 if kind in ("gpt2", "llama", "llama-tied") else 1e-5
        np.testing.assert_allclose(
            model(reference["tokens"]), reference["logits"], rtol=close, atol=close, err_msg=kind
        )
        config, values = read_pretrained(tmp_path / kind)
        write_pretrained(tmp_path / kind / "back", config, values, shard_bytes=10_000)
    subprocess.run([PYTHON, str(REFERENCE), str(tmp_path), "check"], check=True, capture_output=True, timeout=300)
