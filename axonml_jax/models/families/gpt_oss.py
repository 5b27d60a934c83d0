"""gpt-oss (OpenAI 2025): alternating windows, sinks, and clipped experts with biases; its weights in bfloat16."""

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
    quantized,
    rope_problems,
    window_description,
    window_problems,
    window_settings,
)

_FINE = {"hidden_act": ("silu",), "attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _whole(described: Described) -> Described:
    """The description with the family's defaults filled in: windows in every other block."""
    layers = ["sliding_attention", "full_attention"] * described["num_hidden_layers"]
    defaults = {
        "head_dim": 64,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "layer_types": layers[: described["num_hidden_layers"]],
    }
    rope = {} if described.get("rope_parameters") or described.get("rope_scaling") else {"rope_scaling": _YARN}
    return defaults | rope | {name: value for name, value in described.items() if value is not None}


def _problems(described: Described) -> Iterator[str]:
    yield from other_than(described, _FINE)
    yield from rope_problems(described)
    yield from window_problems(_whole(described))
    yield from quantized(described)


def _settings(described: Described) -> dict[str, Any]:
    described = _whole(described)
    top_k = described["num_experts_per_tok"]
    experts = ExpertsConfig(
        num_experts=described["num_local_experts"] if "num_local_experts" in described else described["num_experts"],
        top_k=top_k,
        router_bias=True,
        activation="clamped_swiglu",
        load_balance=described.get("router_aux_loss_coef", 0.001) * top_k,  # theirs is top_k if balanced, ours 1
    )
    own = {"use_bias": True, "sinks": True, "experts": experts}
    return llama.settings(described, 150_000.0) | window_settings(described) | own


def _describe(config: TransformerConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    windows = window_description(config)
    return {
        **llama.describe(config),
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "intermediate_size": experts.inner_size or config.mlp_size,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.load_balance / experts.top_k,
        "sliding_window": windows["sliding_window"],
        "layer_types": windows["layer_types"],
    }


def _is_this(config: TransformerConfig) -> bool:
    experts = config.experts
    own = {"use_bias": True, "sinks": True, "window": config.window, "full_every": config.full_every}
    if experts is None or not llama.is_shaped(config, **own) or not experts.alike:
        return False
    plain = (experts.router, experts.renormalize, experts.router_bias, experts.shared_size)
    return plain == ("softmax", True, True, 0) and experts.activation == "clamped_swiglu"


def _places(config: TransformerConfig) -> Places:
    places = llama.around_mlp(config)
    for i in range(config.num_layers):
        here, there = f"blocks/{i}/mlp", f"layers.{i}.mlp"
        places[f"{here}/router/kernel"] = Place(name=f"{there}.router.weight", turned=True)
        places[f"{here}/router/bias"] = Place(name=f"{there}.router.bias")
        for part, name in enumerate(("gate", "up")):
            both = f"{there}.experts.gate_up_proj"
            places[f"{here}/{name}"] = Place(name=both, part=part, parts=2, mixed=True)
            places[f"{here}/{name}_bias"] = Place(name=f"{both}_bias", part=part, parts=2, mixed=True)
        places[f"{here}/down"] = Place(name=f"{there}.experts.down_proj")
        places[f"{here}/down_bias"] = Place(name=f"{there}.experts.down_proj_bias")
    return places


FAMILY = Family("gpt_oss", "model.", _problems, _settings, _describe, _is_this, _places)
