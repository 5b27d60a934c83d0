"""Mixtral (Jiang et al. 2024): Llama's blocks with mixtures of experts."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.families import llama
from axonml_jax.models.families.family import Described, Family, Place, Places, other_than, rope_problems
from axonml_jax.models.families.qwen3_moe import plain_softmax

_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
_FINE = {"hidden_act": ("silu",), "attention_bias": (False,), "router_jitter_noise": (0.0, 0)}


def _problems(described: Described) -> Iterator[str]:
    yield from other_than(described, _FINE)
    yield from rope_problems(described)


def _settings(described: Described) -> dict[str, Any]:
    experts = ExpertsConfig(
        num_experts=described["num_local_experts"],
        top_k=described["num_experts_per_tok"],
        load_balance=described.get("router_aux_loss_coef", 0.001)
        * described["num_experts_per_tok"],  # theirs is k, balanced
    )
    return llama.settings(described, 1e6) | {"experts": experts, "window": described.get("sliding_window")}


def _describe(config: TransformerConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {
        **llama.describe(config),
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": experts.inner_size or config.mlp_size,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.load_balance / experts.top_k,
        "sliding_window": config.window,
    }


def _is_this(config: TransformerConfig) -> bool:
    """Its routers are softmax over the chosen experts."""
    experts = config.experts
    if experts is None or not llama.is_shaped(config, window=config.window) or not experts.alike:
        return False
    return experts.renormalize and plain_softmax(experts)


def _places(config: TransformerConfig) -> Places:
    places, experts = llama.around_mlp(config), config.experts
    assert experts is not None
    for i in range(config.num_layers):
        there = f"layers.{i}.block_sparse_moe"
        places[f"blocks/{i}/mlp/router/kernel"] = Place(name=f"{there}.gate.weight", turned=True)
        for here, name in _EXPERT.items():
            for e in range(experts.num_experts):
                own = Place(name=f"{there}.experts.{e}.{name}.weight", turned=True)
                places[f"blocks/{i}/mlp/{here}@{e}"] = own
    return places


FAMILY = Family("mixtral", "model.", _problems, _settings, _describe, _is_this, _places)
