"""Gemma 2 and 3: Llama with GEGLU, norms on both sides, windows in most blocks, soft caps or norms of queries and keys."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families import llama
from axonml_jax.models.families.family import (
    FULL,
    SLIDING,
    Described,
    Family,
    other_than,
    rope_problems,
    window_description,
    window_problems,
    window_settings,
)

SHARED: dict[str, Any] = {
    "activation": "geglu",
    "zero_centered_norm": True,
    "post_norms": True,
    "scale_embeddings": True,
}
"""What Gemma 2 and 3 have in common."""

DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
"""Gemma 2's and 3's values of keys that their `config.json` leaves out."""

_ACTIVATION = "gelu_pytorch_tanh"


def gemma_problems(described: Described) -> Iterator[str]:
    """Yield settings of Gemma 2 or 3 that the transformer here lacks; positions are checked elsewhere."""
    fine = {"hidden_activation": (_ACTIVATION,), "attention_bias": (False,)}
    yield from other_than(described, fine | {"use_bidirectional_attention": (None, False)})


def gemma_windows(described: Described, period: int) -> Described:
    """The description with the family's default windows: in all blocks but every so many-th."""
    kinds = [SLIDING if (block + 1) % period else FULL for block in range(described["num_hidden_layers"])]
    given = described.get("layer_types")
    return {"sliding_window": 4096} | dict(described) | {"layer_types": given or kinds, "use_sliding_window": True}


def gemma_description(config: TransformerConfig, name: str) -> dict[str, Any]:
    """The `config.json` of Gemma 2 or 3: Llama's keys and the family's own."""
    windows, scalar = window_description(config), config.query_scalar or config.head_size
    return {
        **llama.describe(config),
        "architectures": [f"{name}ForCausalLM"],
        "attention_bias": False,
        "hidden_act": _ACTIVATION,
        "hidden_activation": _ACTIVATION,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "sliding_window": windows["sliding_window"],
        "layer_types": windows["layer_types"],
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


# --------------------------------------------------------------------------------------------------
# Gemma 2 (2024): soft caps of scores and logits, a window in every other block.
# --------------------------------------------------------------------------------------------------

_gemma2_DEFAULTS = DEFAULTS | {
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def _gemma2_problems(described: Described) -> Iterator[str]:
    yield from gemma_problems(described)
    yield from rope_problems(described)
    yield from window_problems(gemma_windows(described, 2))


def _gemma2_settings(described: Described) -> dict[str, Any]:
    whole = _gemma2_DEFAULTS | dict(described)
    own = {
        "query_scalar": whole["query_pre_attn_scalar"],
        "attention_softcap": whole["attn_logit_softcapping"],
        "logit_softcap": whole["final_logit_softcapping"],
    }
    return llama.settings(whole) | window_settings(gemma_windows(whole, 2)) | SHARED | own


def _gemma2_describe(config: TransformerConfig) -> dict[str, Any]:
    return gemma_description(config, "Gemma2") | {"model_type": "gemma2"}


def _gemma2_is_this(config: TransformerConfig) -> bool:
    names = ("window", "full_every", "query_scalar", "attention_softcap", "logit_softcap")
    own = {name: getattr(config, name) for name in names}
    return config.experts is None and llama.is_shaped(config, **SHARED, **own)


GEMMA2 = Family(
    "gemma2", "model.", _gemma2_problems, _gemma2_settings, _gemma2_describe, _gemma2_is_this, llama.dense_places
)

# --------------------------------------------------------------------------------------------------
# Gemma 3 (2025): norms of queries and keys, windows with rotary parameters of their own.
# --------------------------------------------------------------------------------------------------

_gemma3_DEFAULTS = DEFAULTS | {"max_position_embeddings": 131_072}
_THETA, _WINDOW_THETA = 1_000_000.0, 10_000.0


def _of_full(described: Described) -> Described:
    """The description with the rotary parameters of blocks without a window, as if they were all blocks'."""
    parameters = described.get("rope_parameters") or {}
    if FULL not in parameters and SLIDING not in parameters:
        return described
    full = {"rope_theta": described.get("rope_theta", _THETA)} | dict(parameters.get(FULL) or {})
    return dict(described) | {"rope_parameters": full | dict(described.get("rope_scaling") or {})}


def _window_theta(described: Described) -> float:
    own = (described.get("rope_parameters") or {}).get(SLIDING) or {}
    return float(own.get("rope_theta", described.get("rope_local_base_freq", _WINDOW_THETA)))


def _gemma3_problems(described: Described) -> Iterator[str]:
    yield from gemma_problems(described)
    yield from other_than(described, {"attn_logit_softcapping": (None,)})  # which the reference does not read
    yield from rope_problems(_of_full(described))
    own = (described.get("rope_parameters") or {}).get(SLIDING) or {}
    if own.get("rope_type", "default") != "default":
        yield f"rope scaling {own} in blocks with a window"
    yield from window_problems(_gemma3_windows(described))


def _gemma3_windows(described: Described) -> Described:
    return gemma_windows(described, described.get("sliding_window_pattern", 6))


def _gemma3_settings(described: Described) -> dict[str, Any]:
    whole = _of_full(_gemma3_DEFAULTS | dict(described))
    own = {
        "qk_norm": True,
        "query_scalar": whole["query_pre_attn_scalar"],
        "logit_softcap": whole.get("final_logit_softcapping"),
    }
    windows = window_settings(_gemma3_windows(whole))
    if windows:
        own["window_rope_theta"] = _window_theta(described)
    return llama.settings(whole, _THETA) | windows | SHARED | own


def _gemma3_describe(config: TransformerConfig) -> dict[str, Any]:
    plain = gemma_description(config, "Gemma3")
    theta = _WINDOW_THETA if config.window_rope_theta is None else config.window_rope_theta
    window = {"rope_type": "default", "rope_theta": theta}
    return plain | {
        "model_type": "gemma3_text",
        "rope_local_base_freq": theta,
        "rope_parameters": {FULL: plain["rope_parameters"], SLIDING: window},
    }


def _gemma3_is_this(config: TransformerConfig) -> bool:
    names = ("window", "full_every", "query_scalar", "logit_softcap", "window_rope_theta")
    own = {name: getattr(config, name) for name in names}
    turned = (config.window is None) == (config.window_rope_theta is None)
    return turned and config.experts is None and llama.is_shaped(config, qk_norm=True, **SHARED, **own)


GEMMA3 = Family(
    "gemma3_text", "model.", _gemma3_problems, _gemma3_settings, _gemma3_describe, _gemma3_is_this, llama.dense_places
)
