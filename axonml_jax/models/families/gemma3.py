"""Gemma 3."""

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
    window_problems,
    window_settings,
)
from axonml_jax.models.families.gemma2 import DEFAULTS, SHARED, gemma_description, gemma_problems, gemma_windows

_DEFAULTS = DEFAULTS | {"max_position_embeddings": 131_072}
_THETA, _WINDOW_THETA = 1_000_000.0, 10_000.0


def _of_full(described: Described) -> Described:
    """The description with the rotary parameters of blocks without a window, as if they were those of all blocks."""
    parameters = described.get("rope_parameters") or {}
    if FULL not in parameters and SLIDING not in parameters:
        return described
    full = {"rope_theta": described.get("rope_theta", _THETA)} | dict(parameters.get(FULL) or {})
    return dict(described) | {"rope_parameters": full | dict(described.get("rope_scaling") or {})}


def _window_theta(described: Described) -> float:
    own = (described.get("rope_parameters") or {}).get(SLIDING) or {}
    return float(own.get("rope_theta", described.get("rope_local_base_freq", _WINDOW_THETA)))


def _problems(described: Described) -> Iterator[str]:
    yield from gemma_problems(described)
    yield from other_than(described, {"attn_logit_softcapping": (None,)})  # which the reference does not read
    yield from rope_problems(_of_full(described))
    own = (described.get("rope_parameters") or {}).get(SLIDING) or {}
    if own.get("rope_type", "default") != "default":
        yield f"rope scaling {own} in blocks with a window"
    yield from window_problems(_windows(described))


def _windows(described: Described) -> Described:
    return gemma_windows(described, described.get("sliding_window_pattern", 6))


def _settings(described: Described) -> dict[str, Any]:
    whole = _of_full(_DEFAULTS | dict(described))
    own = {
        "qk_norm": True,
        "query_scalar": whole["query_pre_attn_scalar"],
        "logit_softcap": whole.get("final_logit_softcapping"),
    }
    windows = window_settings(_windows(whole))
    if windows:
        own["window_rope_theta"] = _window_theta(described)
    return llama.settings(whole, _THETA) | windows | SHARED | own


def _describe(config: TransformerConfig) -> dict[str, Any]:
    plain = gemma_description(config, "Gemma3")
    theta = _WINDOW_THETA if config.window_rope_theta is None else config.window_rope_theta
    window = {"rope_type": "default", "rope_theta": theta}
    return plain | {
        "model_type": "gemma3_text",
        "rope_local_base_freq": theta,
        "rope_parameters": {FULL: plain["rope_parameters"], SLIDING: window},
    }


def _is_this(config: TransformerConfig) -> bool:
    names = ("window", "full_every", "query_scalar", "logit_softcap", "window_rope_theta")
    own = {name: getattr(config, name) for name in names}
    turned = (config.window is None) == (config.window_rope_theta is None)
    return turned and config.experts is None and llama.is_shaped(config, qk_norm=True, **SHARED, **own)


FAMILY = Family("gemma3_text", "model.", _problems, _settings, _describe, _is_this, llama.dense_places)
