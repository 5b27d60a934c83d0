"""Qwen3 (Yang et al. 2025): Llama with norms of each head's queries and keys."""

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
from axonml_jax.models.families.qwen2 import qwen_windows


def qwen3_problems(described: Described) -> Iterator[str]:
    """What the transformer here does not have."""
    yield from other_than(described, {"hidden_act": ("silu",), "attention_bias": (False,)})
    yield from rope_problems(described)


def _problems(described: Described) -> Iterator[str]:
    yield from qwen3_problems(described)
    yield from window_problems(qwen_windows(described))


def qwen3_settings(described: Described) -> dict[str, Any]:
    """The arguments of `TransformerConfig` but for windows and experts; a head has 128 features where nothing is said."""
    return llama.settings({"head_dim": 128} | dict(described)) | {"qk_norm": True}


def _settings(described: Described) -> dict[str, Any]:
    return qwen3_settings(described) | window_settings(qwen_windows(described))


def _describe(config: TransformerConfig) -> dict[str, Any]:
    own = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False}
    return llama.describe(config) | window_description(config) | own


def _is_this(config: TransformerConfig) -> bool:
    own = {"qk_norm": True, "window": config.window, "full_every": config.full_every}
    return llama.is_shaped(config, **own) and config.experts is None


FAMILY = Family("qwen3", "model.", _problems, _settings, _describe, _is_this, llama.dense_places)
