"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, groups of experts, and a bias that balances them; weights in bfloat16."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.layers.options import LatentConfig
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.families import llama
from axonml_jax.models.families.family import Described, Family, Place, Places, other_than, quantized, rope_problems

_FINE = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "rope_interleave": (True,),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
_MATRICES = {
    "q_a_proj": "query_down",
    "q_b_proj": "query",
    "kv_a_proj_with_mqa": "key_value_down",
    "kv_b_proj": "key_value",
    "o_proj": "out",
}
_NORMS = {"q_a_layernorm": "query_norm", "kv_a_layernorm": "key_value_norm"}
_EPSILON = 1e-6
"""The epsilon of the latents' norms, whatever `rms_norm_eps` says."""


def _problems(described: Described) -> Iterator[str]:
    yield from other_than(described, _FINE)
    yield from rope_problems(described)
    yield from quantized(described)
    heads = described["num_attention_heads"]
    if described.get("num_key_value_heads") not in (None, heads):
        yield f"num_key_value_heads={described['num_key_value_heads']}: every one of {heads} heads has keys of its own"
    if (dense := described.get("first_k_dense_replace", 3)) >= described["num_hidden_layers"]:
        yield f"first_k_dense_replace={dense}: no block has experts"
    if not described.get("n_shared_experts", 1):
        yield "n_shared_experts=0: blocks with experts have a shared one"


def _settings(described: Described) -> dict[str, Any]:
    found = llama.settings({name: value for name, value in described.items() if name != "head_dim"})
    rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    inner = described["moe_intermediate_size"]
    experts = ExpertsConfig(
        num_experts=described["n_routed_experts"]
        if "n_routed_experts" in described
        else described["num_local_experts"],
        top_k=described["num_experts_per_tok"],
        inner_size=inner,
        first_dense=described.get("first_k_dense_replace", 3),
        router="sigmoid",
        renormalize=described.get("norm_topk_prob", True),
        groups=described.get("n_group") or 1,
        top_groups=described.get("topk_group") or 1,
        scale=described.get("routed_scaling_factor", 2.5),
        shared_size=described.get("n_shared_experts", 1) * inner,
        load_balance=0.0,
    )
    latent = LatentConfig(
        kv_rank=described["kv_lora_rank"],
        query_rank=described["q_lora_rank"],
        plain_size=described["qk_nope_head_dim"],
        rotary_size=described["qk_rope_head_dim"],
        value_size=described["v_head_dim"],
        norm_eps=_EPSILON,
        mscale=float(rope.get("mscale_all_dim") or 0) if "rope_scaling" in found else 0.0,
    )
    return found | {"num_kv_heads": None, "experts": experts, "latent": latent}


def _describe(config: TransformerConfig) -> dict[str, Any]:
    experts, latent = config.experts, config.latent
    assert experts is not None and latent is not None
    inner = experts.inner_size or config.mlp_size
    found = llama.describe(config)
    for name in ("rope_parameters", "rope_scaling") if latent.mscale else ():
        more = {"mscale_all_dim": latent.mscale}
        if found[name].get("attention_factor") == 1:  # as DeepSeek's own code has it
            more["mscale"] = latent.mscale
        found[name] = found[name] | more
    return {
        **found,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "head_dim": latent.rotary_size,
        "attention_bias": False,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.plain_size,
        "qk_rope_head_dim": latent.rotary_size,
        "v_head_dim": latent.value_size,
        "rope_interleave": True,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_size // inner,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": inner,
        "first_k_dense_replace": experts.first_dense,
        "moe_layer_freq": 1,
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        "routed_scaling_factor": experts.scale,
        "norm_topk_prob": experts.renormalize,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }


def _is_this(config: TransformerConfig) -> bool:
    experts, latent = config.experts, config.latent
    if experts is None or latent is None or latent.norm_eps != _EPSILON:
        return False
    chooses = (experts.router, experts.router_bias, experts.every, experts.bias_rate > 0)
    whole = experts.shared_size > 0 and experts.shared_size % (experts.inner_size or config.mlp_size) == 0
    fits = chooses == ("sigmoid", False, 1, True) and experts.activation in (None, "swiglu") and whole
    return fits and llama.is_shaped(config, latent=latent)


def _places(config: TransformerConfig) -> Places:
    places, experts, latent = llama.around_mlp(config), config.experts, config.latent
    assert experts is not None and latent is not None
    matrices = (
        _MATRICES
        if latent.query_rank
        else {"q_proj": "query"} | {name: own for name, own in _MATRICES.items() if not name.startswith("q_")}
    )
    for i in range(config.num_layers):
        here, there = f"blocks/{i}/attention", f"layers.{i}.self_attn"
        for name, own in matrices.items():
            places[f"{here}/{own}/kernel"] = Place(name=f"{there}.{name}.weight", turned=True)
        for name, own in _NORMS.items():
            if latent.query_rank or own != "query_norm":
                places[f"{here}/{own}/scale"] = Place(name=f"{there}.{name}.weight")
        places |= _experts(i, experts.num_experts) if config.has_experts(i) else llama.dense_mlp(i)
    return places


def _experts(block: int, count: int) -> Places:
    here, there = f"blocks/{block}/mlp", f"layers.{block}.mlp"
    places = {
        f"{here}/router/kernel": Place(name=f"{there}.gate.weight", turned=True),
        f"{here}/bias": Place(name=f"{there}.gate.e_score_correction_bias"),
    }
    for name in ("gate", "up", "down"):
        shared = Place(name=f"{there}.shared_experts.{name}_proj.weight", turned=True)
        places[f"{here}/shared/{name}/kernel"] = shared
        for e in range(count):
            places[f"{here}/{name}@{e}"] = Place(name=f"{there}.experts.{e}.{name}_proj.weight", turned=True)
    return places


def _unread(config: TransformerConfig) -> tuple[str, ...]:
    """Name prefixes of the modules behind the last block, which predict further tokens and are not read."""
    return (f"layers.{config.num_layers}.",)


FAMILY = Family("deepseek_v3", "model.", _problems, _settings, _describe, _is_this, _places, _unread)
