"""Llama (Touvron et al. 2023; Grattafiori et al. 2024), what other families have in common with it, Mistral and Mixtral."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.families.family import (
    Described,
    Family,
    Place,
    Places,
    has_only,
    other_than,
    plain_softmax,
    rope_description,
    rope_problems,
    rope_settings,
)

_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_FOUR_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
_ATTENTION = {f"self_attn.{name[0]}_proj": f"attention/{name}" for name in ("query", "key", "value", "out")}
_HEAD_NORMS = {"self_attn.q_norm": "attention/query_norm", "self_attn.k_norm": "attention/key_norm"}
_MLP = {f"mlp.{name}_proj": f"mlp/{name}" for name in ("gate", "up", "down")}


def settings(described: Described, theta: float = 10_000.0) -> dict[str, Any]:
    """The arguments of `TransformerConfig` for a dense model.

    Args:
      described: the `config.json`.
      theta: base of the rotary frequencies where it says none.
    """
    found = {
        "vocab_size": described["vocab_size"],
        "num_layers": described["num_hidden_layers"],
        "hidden_size": described["hidden_size"],
        "num_heads": described["num_attention_heads"],
        "num_kv_heads": described.get("num_key_value_heads"),
        "max_length": described["max_position_embeddings"],
        "mlp_hidden_size": described["intermediate_size"],
        "norm_eps": described.get("rms_norm_eps", 1e-6),
        "tie_embeddings": described.get("tie_word_embeddings", False),
    }
    if described.get("head_dim") not in (None, found["hidden_size"] // found["num_heads"]):
        found["head_dim"] = described["head_dim"]
    return found | rope_settings(described, theta)


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
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_length,
        "intermediate_size": config.mlp_size,
        "rms_norm_eps": config.norm_eps,
        **rope_description(config),
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": config.param_dtype,
    }


def is_shaped(config: TransformerConfig, activation: str = "swiglu", **options: Any) -> bool:
    """Whether a configuration is Llama's with these options, whatever its feed-forward parts.

    Args:
      config: the configuration.
      activation: what it must be.
      options: see `has_only`.
    """
    shape = config.norm, config.activation, config.position
    return has_only(config, **options) and shape == ("rmsnorm", activation, "rotary")


def around_mlp(config: TransformerConfig) -> Places:
    """The places of everything except the feed-forward parts."""
    places = {"embed/embedding": Place(name="embed_tokens.weight"), "norm/scale": Place(name="norm.weight")}
    if not config.tie_embeddings:
        places["head/kernel"] = Place(name="lm_head.weight", turned=True)
    for i in range(config.num_layers):
        here, there = f"blocks/{i}", f"layers.{i}"
        norms = _FOUR_NORMS if config.post_norms else _NORMS
        for name, own in (norms | (_HEAD_NORMS if config.qk_norm else {})).items():
            places[f"{here}/{own}/scale"] = Place(name=f"{there}.{name}.weight")
        for name, own in ({} if config.latent else _ATTENTION).items():  # torch.nn.Linear: [out, in]
            places[f"{here}/{own}/kernel"] = Place(name=f"{there}.{name}.weight", turned=True)
            if config.use_bias or (config.qkv_bias and own != "attention/out"):
                places[f"{here}/{own}/bias"] = Place(name=f"{there}.{name}.bias")
        if config.sinks:
            places[f"{here}/attention/sinks"] = Place(name=f"{there}.self_attn.sinks")
    return places


def dense_mlp(block: int) -> Places:
    """The places of a block's dense feed-forward part."""
    place = lambda name: Place(name=f"layers.{block}.{name}.weight", turned=True)
    return {f"blocks/{block}/{here}/kernel": place(there) for there, here in _MLP.items()}


def dense_places(config: TransformerConfig) -> Places:
    """The places of everything in a dense model."""
    places = around_mlp(config)
    for i in range(config.num_layers):
        places |= dense_mlp(i)
    return places


def _problems(described: Described) -> Iterator[str]:
    yield from other_than(described, {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)})
    yield from rope_problems(described)


def _is_this(config: TransformerConfig) -> bool:
    return is_shaped(config) and config.experts is None


FAMILY = Family("llama", "model.", _problems, settings, describe, _is_this, dense_places)


# --------------------------------------------------------------------------------------------------
# Mistral (Jiang et al. 2023): Llama with a sliding window.
# --------------------------------------------------------------------------------------------------


def _mistral_problems(described: Described) -> Iterator[str]:
    yield from other_than(described, {"hidden_act": ("silu",), "layer_types": (None,)})
    yield from rope_problems(described)


def _mistral_settings(described: Described) -> dict[str, Any]:
    return settings(described) | {"window": described.get("sliding_window", 4096)}


def _mistral_describe(config: TransformerConfig) -> dict[str, Any]:
    own = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": config.window}
    return describe(config) | own


def _mistral_is_this(config: TransformerConfig) -> bool:
    """Whether a configuration is a Mistral: a Llama with a window."""
    return config.window is not None and is_shaped(config, window=config.window) and config.experts is None


MISTRAL = Family(
    "mistral", "model.", _mistral_problems, _mistral_settings, _mistral_describe, _mistral_is_this, dense_places
)

# --------------------------------------------------------------------------------------------------
# Mixtral (Jiang et al. 2024): Llama's blocks with mixtures of experts.
# --------------------------------------------------------------------------------------------------

_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
_FINE = {"hidden_act": ("silu",), "attention_bias": (False,), "router_jitter_noise": (0.0, 0)}


def _mixtral_problems(described: Described) -> Iterator[str]:
    yield from other_than(described, _FINE)
    yield from rope_problems(described)


def _mixtral_settings(described: Described) -> dict[str, Any]:
    experts = ExpertsConfig(
        num_experts=described["num_local_experts"],
        top_k=described["num_experts_per_tok"],
        load_balance=described.get("router_aux_loss_coef", 0.001)
        * described["num_experts_per_tok"],  # theirs is top_k if balanced, ours 1
    )
    return settings(described, 1e6) | {"experts": experts, "window": described.get("sliding_window")}


def _mixtral_describe(config: TransformerConfig) -> dict[str, Any]:
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
        "sliding_window": config.window,
    }


def _mixtral_is_this(config: TransformerConfig) -> bool:
    """Whether a configuration is a Mixtral: its routers are softmax over the chosen experts."""
    experts = config.experts
    if experts is None or not is_shaped(config, window=config.window) or not experts.alike:
        return False
    return experts.renormalize and plain_softmax(experts)


def _mixtral_places(config: TransformerConfig) -> Places:
    places, experts = around_mlp(config), config.experts
    assert experts is not None
    for i in range(config.num_layers):
        there = f"layers.{i}.block_sparse_moe"
        places[f"blocks/{i}/mlp/router/kernel"] = Place(name=f"{there}.gate.weight", turned=True)
        for here, name in _EXPERT.items():
            for e in range(experts.num_experts):
                own = Place(name=f"{there}.experts.{e}.{name}.weight", turned=True)
                places[f"blocks/{i}/mlp/{here}@{e}"] = own
    return places


MIXTRAL = Family(
    "mixtral", "model.", _mixtral_problems, _mixtral_settings, _mixtral_describe, _mixtral_is_this, _mixtral_places
)
