"""GPT-2 (Radford et al. 2019)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families.family import Family, Places, same

_NORMS = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
_LINEAR = {"attn.c_proj": "attention/out", "mlp.c_fc": "mlp/up", "mlp.c_proj": "mlp/down"}
_WITHOUT = {
    "activation_function": ("gelu_new",),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def _settings(described: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": described["vocab_size"],
        "num_layers": described["n_layer"],
        "hidden_size": described["n_embd"],
        "num_heads": described["n_head"],
        "max_length": described["n_positions"],
        "mlp_hidden_size": described.get("n_inner"),
        "norm_eps": described.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": described.get("tie_word_embeddings", True),
        "norm": "layernorm",
        "activation": "gelu",
        "position": "learned",
        "use_bias": True,
    }


def _describe(config: TransformerConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_heads,
        "n_positions": config.max_length,
        "n_inner": config.mlp_size,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": config.tie_embeddings,
    }


def _is_this(config: TransformerConfig) -> bool:
    shape = config.norm, config.activation, config.position, config.use_bias
    return shape == ("layernorm", "gelu", "learned", True) and config.experts is None


def _places(config: TransformerConfig) -> Places:
    places: Places = {
        "embed/embedding": ("wte.weight", same),
        "positions/embedding": ("wpe.weight", same),
        "norm/scale": ("ln_f.weight", same),
        "norm/bias": ("ln_f.bias", same),
    }
    if not config.tie_embeddings:
        places["head/kernel"] = ("lm_head.weight", np.transpose)
    for i in range(config.num_layers):
        for there, here in _NORMS.items():
            places[f"blocks/{i}/{here}/scale"] = (f"h.{i}.{there}.weight", same)
            places[f"blocks/{i}/{here}/bias"] = (f"h.{i}.{there}.bias", same)
        for there, here in _LINEAR.items():  # Conv1D: [in, out], as here
            places[f"blocks/{i}/{here}/kernel"] = (f"h.{i}.{there}.weight", same)
            places[f"blocks/{i}/{here}/bias"] = (f"h.{i}.{there}.bias", same)
        for part, here in enumerate(("query", "key", "value")):
            third = lambda x, part=part: np.split(x, 3, axis=-1)[part]
            places[f"blocks/{i}/attention/{here}/kernel"] = (f"h.{i}.attn.c_attn.weight", third)
            places[f"blocks/{i}/attention/{here}/bias"] = (f"h.{i}.attn.c_attn.bias", third)
    return places


FAMILY = Family("gpt2", "transformer.", _WITHOUT, _settings, _describe, _is_this, _places)
