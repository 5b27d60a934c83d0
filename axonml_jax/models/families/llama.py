"""Llama (Touvron et al. 2023)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families.family import Family, Places, same

_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_ATTENTION = {f"self_attn.{name[0]}_proj": f"attention/{name}" for name in ("query", "key", "value", "out")}
_MLP = {f"mlp.{name}_proj": f"mlp/{name}" for name in ("gate", "up", "down")}
_WITHOUT = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}


def settings(described: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `TransformerConfig`, of a dense model."""
    return {
        "vocab_size": described["vocab_size"],
        "num_layers": described["num_hidden_layers"],
        "hidden_size": described["hidden_size"],
        "num_heads": described["num_attention_heads"],
        "num_kv_heads": described.get("num_key_value_heads"),
        "max_length": described["max_position_embeddings"],
        "mlp_hidden_size": described["intermediate_size"],
        "norm_eps": described.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta", described.get("rope_theta", 10_000.0))),
        "tie_embeddings": described.get("tie_word_embeddings", False),
    }


def describe(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json`, of a dense model."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.max_length,
        "intermediate_size": config.mlp_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
    }


def is_shaped(config: TransformerConfig) -> bool:
    """Whether all but the feed-forward parts is Llama's."""
    shape = config.norm, config.activation, config.position, config.use_bias
    return shape == ("rmsnorm", "swiglu", "rotary", False)


def around_mlp(config: TransformerConfig) -> Places:
    """Where everything but the feed-forward parts is."""
    places: Places = {"embed/embedding": ("embed_tokens.weight", same), "norm/scale": ("norm.weight", same)}
    if not config.tie_embeddings:
        places["head/kernel"] = ("lm_head.weight", np.transpose)
    for i in range(config.num_layers):
        for there, here in _NORMS.items():
            places[f"blocks/{i}/{here}/scale"] = (f"layers.{i}.{there}.weight", same)
        for there, here in _ATTENTION.items():  # torch.nn.Linear: [out, in]
            places[f"blocks/{i}/{here}/kernel"] = (f"layers.{i}.{there}.weight", np.transpose)
    return places


def _places(config: TransformerConfig) -> Places:
    places = around_mlp(config)
    for i in range(config.num_layers):
        for there, here in _MLP.items():
            places[f"blocks/{i}/{here}/kernel"] = (f"layers.{i}.{there}.weight", np.transpose)
    return places


def _is_this(config: TransformerConfig) -> bool:
    return is_shaped(config) and config.experts is None


FAMILY = Family("llama", "model.", _WITHOUT, settings, describe, _is_this, _places)
