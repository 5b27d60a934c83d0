"""GPT-2 (Radford et al. 2019)."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families.family import Described, Family, Place, Places, has_only, other_than

_NORMS = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
_LINEAR = {"attn.c_proj": "attention/out", "mlp.c_fc": "mlp/up", "mlp.c_proj": "mlp/down"}
_FINE = {
    "activation_function": ("gelu_new",),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def _problems(described: Described) -> Iterator[str]:
    yield from other_than(described, _FINE)


def _settings(described: Described) -> dict[str, Any]:
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
    shape = config.norm, config.activation, config.position
    return (
        has_only(config, use_bias=True)
        and config.head_dim is None
        and shape == ("layernorm", "gelu", "learned")
        and config.kv_heads == config.num_heads
        and config.experts is None
    )


def _places(config: TransformerConfig) -> Places:
    places: Places = {
        "embed/embedding": Place(name="wte.weight"),
        "positions/embedding": Place(name="wpe.weight"),
        "norm/scale": Place(name="ln_f.weight"),
        "norm/bias": Place(name="ln_f.bias"),
    }
    if not config.tie_embeddings:
        places["head/kernel"] = Place(name="lm_head.weight", turned=True)
    for i in range(config.num_layers):
        for there, here in _NORMS.items():
            places[f"blocks/{i}/{here}/scale"] = Place(name=f"h.{i}.{there}.weight")
            places[f"blocks/{i}/{here}/bias"] = Place(name=f"h.{i}.{there}.bias")
        for there, here in _LINEAR.items():  # Conv1D: [in, out], as here
            places[f"blocks/{i}/{here}/kernel"] = Place(name=f"h.{i}.{there}.weight")
            places[f"blocks/{i}/{here}/bias"] = Place(name=f"h.{i}.{there}.bias")
        for part, here in enumerate(("query", "key", "value")):
            for own, name in (("kernel", "weight"), ("bias", "bias")):
                third = Place(name=f"h.{i}.attn.c_attn.{name}", part=part, parts=3)
                places[f"blocks/{i}/attention/{here}/{own}"] = third
    return places


FAMILY = Family("gpt2", "transformer.", _problems, _settings, _describe, _is_this, _places)
