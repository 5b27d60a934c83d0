"""Qwen3-MoE (Yang et al. 2025): Qwen3 with mixtures of experts."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.families import llama
from axonml_jax.models.families.family import Described, Family, Place, Places, other_than
from axonml_jax.models.families.qwen3 import qwen3_problems, qwen3_settings


def _problems(described: Described) -> Iterator[str]:
    yield from qwen3_problems(described)
    yield from other_than(described, {"use_sliding_window": (False,)})
    dense = described.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        yield f"mlp_only_layers={dense}: only the first so many blocks can be without experts"


def _settings(described: Described) -> dict[str, Any]:
    top_k = described["num_experts_per_tok"]
    experts = ExpertsConfig(
        num_experts=described["num_experts"] if "num_experts" in described else described["num_local_experts"],
        top_k=top_k,
        inner_size=described["moe_intermediate_size"],
        every=described.get("decoder_sparse_step", 1),
        first_dense=len(described.get("mlp_only_layers") or []),
        renormalize=described.get("norm_topk_prob", False),
        load_balance=described.get("router_aux_loss_coef", 0.001) * top_k,  # theirs is k, balanced
    )
    return qwen3_settings(described) | {"experts": experts}


def _describe(config: TransformerConfig) -> dict[str, Any]:
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


def plain_softmax(experts: ExpertsConfig) -> bool:
    """Whether routers are softmax without bias and nothing is shared; what only training uses, as a capacity, may differ."""
    plain = (experts.router, experts.router_bias, experts.shared_size)
    return plain == ("softmax", False, 0) and experts.activation in (None, "swiglu")


def _is_this(config: TransformerConfig) -> bool:
    return config.experts is not None and llama.is_shaped(config, qk_norm=True) and plain_softmax(config.experts)


def _places(config: TransformerConfig) -> Places:
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


FAMILY = Family("qwen3_moe", "model.", _problems, _settings, _describe, _is_this, _places)
