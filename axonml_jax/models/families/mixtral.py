"""Mixtral (Jiang et al. 2024): Llama's blocks with mixtures of experts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.experts_config import ExpertsConfig
from axonml_jax.models.families.family import Family, Places
from axonml_jax.models.families.llama import around_mlp, describe, is_shaped, settings

_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
_WITHOUT = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "sliding_window": (None,),
    "router_jitter_noise": (0, 0.0),
}


def _settings(described: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    experts = ExpertsConfig(
        num_experts=described["num_local_experts"],
        top_k=described["num_experts_per_tok"],
        load_balance=described.get("router_aux_loss_coef", 0.001)
        * described["num_experts_per_tok"],  # theirs is k, balanced
    )
    return {**settings(described, rope), "experts": experts}


def _describe(config: TransformerConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {
        **describe(config),
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": experts.inner_size or config.mlp_size,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.load_balance / experts.top_k,
        "sliding_window": None,
    }


def _is_this(config: TransformerConfig) -> bool:
    """Its routers are softmax over the chosen experts; what only training uses may differ."""
    experts = config.experts
    if experts is None or not is_shaped(config) or not experts.alike:
        return False
    plain = (experts.router, experts.renormalize, experts.router_bias, experts.shared_size, experts.capacity_factor)
    return plain == ("softmax", True, False, 0, None) and experts.activation in (None, "swiglu")


def _places(config: TransformerConfig) -> Places:
    places, experts = around_mlp(config), config.experts
    assert experts is not None
    for i in range(config.num_layers):
        there = f"layers.{i}.block_sparse_moe"
        places[f"blocks/{i}/mlp/router/kernel"] = (f"{there}.gate.weight", np.transpose)
        for here, name in _EXPERT.items():
            for e in range(experts.num_experts):
                places[f"blocks/{i}/mlp/{here}@{e}"] = (f"{there}.experts.{e}.{name}.weight", np.transpose)
    return places


FAMILY = Family("mixtral", "model.", _WITHOUT, _settings, _describe, _is_this, _places)
