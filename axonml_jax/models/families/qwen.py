"""Qwen2 and Qwen2.5, Qwen3 and Qwen3-MoE: Llama with biases of queries, keys and values, or with norms of them."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.families import llama
from axonml_jax.models.families.family import (
    Described,
    Family,
    Place,
    Places,
    other_than,
    plain_softmax,
    rope_problems,
    window_description,
    window_problems,
    window_settings,
)

# --------------------------------------------------------------------------------------------------
# Qwen2 and Qwen2.5 (Yang et al. 2024): biases of queries, keys and values.
# --------------------------------------------------------------------------------------------------


def _qwen2_problems(described: Described) -> Iterator[str]:
    yield from other_than(described, {"hidden_act": ("silu",)})
    yield from rope_problems(described)
    yield from window_problems(qwen_windows(described))


def qwen_windows(described: Described) -> Described:
    """The description with Qwen's default windows filled in."""
    return {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28} | dict(described)


def _qwen2_settings(described: Described) -> dict[str, Any]:
    return llama.settings(described) | window_settings(qwen_windows(described)) | {"qkv_bias": True}


def _qwen2_describe(config: TransformerConfig) -> dict[str, Any]:
    own = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    return llama.describe(config) | window_description(config) | own


def _qwen2_is_this(config: TransformerConfig) -> bool:
    own = {"qkv_bias": True, "window": config.window, "full_every": config.full_every}
    return llama.is_shaped(config, **own) and config.experts is None and config.head_dim is None


QWEN2 = Family("qwen2", "model.", _qwen2_problems, _qwen2_settings, _qwen2_describe, _qwen2_is_this, llama.dense_places)

# --------------------------------------------------------------------------------------------------
# Qwen3 (Yang et al. 2025): norms of each head's queries and keys.
# --------------------------------------------------------------------------------------------------


def qwen3_problems(described: Described) -> Iterator[str]:
    """Yield the settings that the transformer here lacks."""
    yield from other_than(described, {"hidden_act": ("silu",), "attention_bias": (False,)})
    yield from rope_problems(described)


def _qwen3_problems(described: Described) -> Iterator[str]:
    yield from qwen3_problems(described)
    yield from window_problems(qwen_windows(described))


def qwen3_settings(described: Described) -> dict[str, Any]:
    """The arguments of `TransformerConfig` without windows and experts; the default head size is 128."""
    return llama.settings({"head_dim": 128} | dict(described)) | {"qk_norm": True}


def _qwen3_settings(described: Described) -> dict[str, Any]:
    return qwen3_settings(described) | window_settings(qwen_windows(described))


def _qwen3_describe(config: TransformerConfig) -> dict[str, Any]:
    own = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False}
    return llama.describe(config) | window_description(config) | own


def _qwen3_is_this(config: TransformerConfig) -> bool:
    own = {"qk_norm": True, "window": config.window, "full_every": config.full_every}
    return llama.is_shaped(config, **own) and config.experts is None


QWEN3 = Family("qwen3", "model.", _qwen3_problems, _qwen3_settings, _qwen3_describe, _qwen3_is_this, llama.dense_places)

# --------------------------------------------------------------------------------------------------
# Qwen3-MoE (Yang et al. 2025): Qwen3 with mixtures of experts.
# --------------------------------------------------------------------------------------------------


def _moe_problems(described: Described) -> Iterator[str]:
    yield from qwen3_problems(described)
    yield from other_than(described, {"use_sliding_window": (False,)})
    dense = described.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        yield f"mlp_only_layers={dense}: only the first so many blocks can be without experts"


def _moe_settings(described: Described) -> dict[str, Any]:
    top_k = described["num_experts_per_tok"]
    experts = ExpertsConfig(
        num_experts=described["num_experts"] if "num_experts" in described else described["num_local_experts"],
        top_k=top_k,
        inner_size=described["moe_intermediate_size"],
        every=described.get("decoder_sparse_step", 1),
        first_dense=len(described.get("mlp_only_layers") or []),
        renormalize=described.get("norm_topk_prob", False),
        load_balance=described.get("router_aux_loss_coef", 0.001) * top_k,  # theirs is top_k if balanced, ours 1
    )
    return qwen3_settings(described) | {"experts": experts}


def _moe_describe(config: TransformerConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {
        **llama.describe(config),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.inner_size or config.mlp_size,
        "decoder_sparse_step": experts.every,
        "mlp_only_layers": list(range(experts.first_dense)),
        "norm_topk_prob": experts.renormalize,
        "router_aux_loss_coef": experts.load_balance / experts.top_k,
        "use_sliding_window": False,
    }


def _moe_is_this(config: TransformerConfig) -> bool:
    return config.experts is not None and llama.is_shaped(config, qk_norm=True) and plain_softmax(config.experts)


def _moe_places(config: TransformerConfig) -> Places:
    places, experts = llama.around_mlp(config), config.experts
    assert experts is not None
    for i in range(config.num_layers):
        if not config.has_experts(i):
            places |= llama.dense_mlp(i)
            continue
        there = f"layers.{i}.mlp"
        places[f"blocks/{i}/mlp/router/kernel"] = Place(name=f"{there}.gate.weight", turned=True)
        for e in range(experts.num_experts):
            for name in ("gate", "up", "down"):
                own = Place(name=f"{there}.experts.{e}.{name}_proj.weight", turned=True)
                places[f"blocks/{i}/mlp/{name}@{e}"] = own
    return places


QWEN3_MOE = Family("qwen3_moe", "model.", _moe_problems, _moe_settings, _moe_describe, _moe_is_this, _moe_places)
