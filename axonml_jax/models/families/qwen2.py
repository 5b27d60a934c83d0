"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases of queries, keys and values."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families import llama
from axonml_jax.models.families.family import (
    Described,
    Family,
    other_than,
    rope_problems,
    window_description,
    window_problems,
    window_settings,
)


def _problems(described: Described) -> Iterator[str]:
    yield from other_than(described, {"hidden_act": ("silu",)})
    yield from rope_problems(described)
    yield from window_problems(qwen_windows(described))


def qwen_windows(described: Described) -> Described:
    """What it says of windows, with Qwen's defaults."""
    return {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28} | dict(described)


def _settings(described: Described) -> dict[str, Any]:
    return llama.settings(described) | window_settings(qwen_windows(described)) | {"qkv_bias": True}


def _describe(config: TransformerConfig) -> dict[str, Any]:
    own = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    return llama.describe(config) | window_description(config) | own


def _is_this(config: TransformerConfig) -> bool:
    own = {"qkv_bias": True, "window": config.window, "full_every": config.full_every}
    return llama.is_shaped(config, **own) and config.experts is None and config.head_dim is None


FAMILY = Family("qwen2", "model.", _problems, _settings, _describe, _is_this, llama.dense_places)
