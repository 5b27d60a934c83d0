"""Mistral (Jiang et al. 2023): Llama with a sliding window."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families import llama
from axonml_jax.models.families.family import Described, Family, other_than, rope_problems


def _problems(described: Described) -> Iterator[str]:
    yield from other_than(described, {"hidden_act": ("silu",), "layer_types": (None,)})
    yield from rope_problems(described)


def _settings(described: Described) -> dict[str, Any]:
    return llama.settings(described) | {"window": described.get("sliding_window", 4096)}


def _describe(config: TransformerConfig) -> dict[str, Any]:
    own = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": config.window}
    return llama.describe(config) | own


def _is_this(config: TransformerConfig) -> bool:
    """Without a window it is written as a Llama."""
    return config.window is not None and llama.is_shaped(config, window=config.window) and config.experts is None


FAMILY = Family("mistral", "model.", _problems, _settings, _describe, _is_this, llama.dense_places)
