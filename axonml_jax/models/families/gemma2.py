"""Gemma 2."""

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
_DEFAULTS = DEFAULTS | {
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def gemma_problems(described: Described) -> Iterator[str]:
    """What a description of Gemma 2 or 3 asks for that the transformer here lacks; positions are checked elsewhere."""
    fine = {"hidden_activation": (_ACTIVATION,), "attention_bias": (False,)}
    yield from other_than(described, fine | {"use_bidirectional_attention": (None, False)})


def gemma_windows(described: Described, period: int) -> Described:
    """What it says of windows, with the family's: all blocks have one but every so many-th."""
    kinds = [SLIDING if (block + 1) % period else FULL for block in range(described["num_hidden_layers"])]
    given = described.get("layer_types")
    return {"sliding_window": 4096} | dict(described) | {"layer_types": given or kinds, "use_sliding_window": True}


def gemma_description(config: TransformerConfig, name: str) -> dict[str, Any]:
    """What a `config.json` of Gemma 2 or 3 says: Llama's keys and these."""
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


def _problems(described: Described) -> Iterator[str]:
    yield from gemma_problems(described)
    yield from rope_problems(described)
    yield from window_problems(gemma_windows(described, 2))


def _settings(described: Described) -> dict[str, Any]:
    whole = _DEFAULTS | dict(described)
    own = {
        "query_scalar": whole["query_pre_attn_scalar"],
        "attention_softcap": whole["attn_logit_softcapping"],
        "logit_softcap": whole["final_logit_softcapping"],
    }
    return llama.settings(whole) | window_settings(gemma_windows(whole, 2)) | SHARED | own


def _describe(config: TransformerConfig) -> dict[str, Any]:
    return gemma_description(config, "Gemma2") | {"model_type": "gemma2"}


def _is_this(config: TransformerConfig) -> bool:
    names = ("window", "full_every", "query_scalar", "attention_softcap", "logit_softcap")
    own = {name: getattr(config, name) for name in names}
    return config.experts is None and llama.is_shaped(config, **SHARED, **own)


FAMILY = Family("gemma2", "model.", _problems, _settings, _describe, _is_this, llama.dense_places)
