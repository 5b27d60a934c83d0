"""Weights and configurations of Hugging Face's GPT-2 and Llama models, to and from `Transformer`. Nothing is downloaded."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from axonml_jax._types import named_leaves
from axonml_jax.model.safetensors import load_safetensors, save_safetensors
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.stack import stacked, unstacked
from axonml_jax.models.transformer import Transformer

Values = dict[str, np.ndarray]

_GPT2_NORMS = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
_GPT2_LINEAR = {"attn.c_proj": "attention/out", "mlp.c_fc": "mlp/up", "mlp.c_proj": "mlp/down"}
_LLAMA_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_LLAMA_LINEAR = {
    **{f"self_attn.{name[0]}_proj": f"attention/{name}" for name in ("query", "key", "value", "out")},
    **{f"mlp.{name}_proj": f"mlp/{name}" for name in ("gate", "up", "down")},
}
# What a model must not have, because the transformer here has no such part: name -> the values that mean "without".
_GPT2_WITHOUT = {
    "activation_function": ("gelu_new",),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
_LLAMA_WITHOUT = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}


def pretrained(folder: str | os.PathLike, **changes: Any) -> Transformer:
    """A transformer with the weights that `save_pretrained` of a GPT-2 or Llama model wrote.

    Args:
      folder: with `config.json` and safetensors files.
      changes: to the configuration, such as `param_dtype="bfloat16"` or `split="grid"`.

    Raises:
      ValueError: naming every part of the model that the transformer here does not have.
    """
    config, values = read_pretrained(folder, **changes)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    pure = nnx.to_pure_dict(state)
    leaves = [np.asarray(values[name]).astype(leaf.dtype) for name, leaf in named_leaves(pure).items()]
    nnx.replace_by_pure_dict(
        state, jax.tree.unflatten(jax.tree.structure(pure), [jax.numpy.asarray(x) for x in leaves])
    )
    made = Transformer(config, rngs=nnx.Rngs(0)) if config.dropout else model  # dropout's random streams are arrays too
    nnx.update(made, state)
    return made


def read_pretrained(folder: str | os.PathLike, **changes: Any) -> tuple[TransformerConfig, Values]:
    """The configuration, and whole arrays by the names of a `state_dict`: for `load_state_dict` of a model on any mesh.

    Args:
      folder, changes: see `pretrained`.

    Raises:
      ValueError: see `pretrained`; or listing what the files lack.
    """
    described = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    config = config_of(described, **changes)
    return config, values_of(described["model_type"], config, load_safetensors(folder))


def write_pretrained(folder: str | os.PathLike, config: TransformerConfig, values: Mapping[str, Any]) -> None:
    """The inverse: files that `from_pretrained` reads. One process writes.

    Args:
      folder: made where it is not there.
      config: of the model.
      values: its `state_dict()`.

    Raises:
      ValueError: when the model is neither a GPT-2 nor a Llama.
    """
    described, folder = description_of(config), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    values = unstacked(values) if config.scan_layers else values
    there = {theirs: own(values) for theirs, own in _exported(described["model_type"], config).items()}
    save_safetensors(folder / "model.safetensors", there, metadata={"format": "pt"})


def config_of(described: Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """The configuration of a `config.json`.

    Raises:
      ValueError: naming every part that the transformer here does not have.
    """
    kind = described.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"model_type={kind!r} is not known here: gpt2 and llama are")
    problems = [
        f"{name}={described[name]!r}"
        for name, fine in (_GPT2_WITHOUT if kind == "gpt2" else _LLAMA_WITHOUT).items()
        if described.get(name, fine[0]) not in fine
    ]
    rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if kind == "llama":
        size, heads = described["hidden_size"], described["num_attention_heads"]
        if described.get("head_dim") not in (None, size // heads):
            problems.append(
                f"head_dim={described['head_dim']} beside hidden_size / num_attention_heads = {size // heads}"
            )
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            problems.append(f"rope scaling {rope}")
    if problems:
        raise ValueError(f"the transformer here cannot be this {kind}: " + "; ".join(problems))
    return TransformerConfig(**{**(_gpt2_config if kind == "gpt2" else _llama_config)(described, rope), **changes})


def _gpt2_config(described: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
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


def _llama_config(described: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": described["vocab_size"],
        "num_layers": described["num_hidden_layers"],
        "hidden_size": described["hidden_size"],
        "num_heads": described["num_attention_heads"],
        "num_kv_heads": described.get("num_key_value_heads"),
        "max_length": described["max_position_embeddings"],
        "mlp_hidden_size": described["intermediate_size"],
        "norm_eps": described.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta", described.get("rope_theta", 10_000.0))),
        "tie_embeddings": described.get("tie_word_embeddings", False),
    }


def description_of(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of a configuration.

    Raises:
      ValueError: when it is neither a GPT-2's nor a Llama's.
    """
    if (config.norm, config.activation, config.position, config.use_bias) == ("layernorm", "gelu", "learned", True):
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
    if (config.norm, config.activation, config.position, config.use_bias) == ("rmsnorm", "swiglu", "rotary", False):
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": config.vocab_size,
            "num_hidden_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.kv_heads,
            "max_position_embeddings": config.max_length,
            "intermediate_size": config.mlp_size,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "hidden_act": "silu",
            "tie_word_embeddings": config.tie_embeddings,
        }
    raise ValueError(
        f"norm={config.norm}, activation={config.activation}, position={config.position}, use_bias={config.use_bias} is "
        "neither GPT-2 (layernorm, gelu, learned, True) nor Llama (rmsnorm, swiglu, rotary, False)"
    )


def values_of(kind: str, config: TransformerConfig, theirs: Mapping[str, np.ndarray]) -> Values:
    """A `state_dict` from the arrays of a published model.

    Raises:
      ValueError: listing every array that is missing, and every one that has no place here.
    """
    theirs = {name.removeprefix("transformer.").removeprefix("model."): value for name, value in theirs.items()}
    wanted, used = _places(kind, config), set()
    missing = [place for place, _ in wanted.values() if place not in theirs]
    values: Values = {}
    for name, (place, read) in wanted.items():
        used.add(place)
        if place in theirs:
            values[name] = np.ascontiguousarray(read(theirs[place]))
    buffers = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
    spare = {"lm_head.weight"} if config.tie_embeddings else set()
    left = [name for name in theirs if name not in used | spare and not name.endswith(buffers)]
    if missing or left:
        lines = [f"  {name}: missing" for name in missing] + [f"  {name}: has no place here" for name in left]
        raise ValueError(f"these are not the arrays of the {kind} that config.json describes:\n" + "\n".join(lines))
    return stacked(values, config.num_layers) if config.scan_layers else values


def _places(kind: str, config: TransformerConfig) -> dict[str, tuple[str, Any]]:
    """For every name here, the array there and how to read it."""
    return _gpt2_places(config) if kind == "gpt2" else _llama_places(config)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _gpt2_places(config: TransformerConfig) -> dict[str, tuple[str, Any]]:
    places: dict[str, tuple[str, Any]] = {
        "embed/embedding": ("wte.weight", _same),
        "positions/embedding": ("wpe.weight", _same),
        "norm/scale": ("ln_f.weight", _same),
        "norm/bias": ("ln_f.bias", _same),
    }
    if not config.tie_embeddings:
        places["head/kernel"] = ("lm_head.weight", np.transpose)
    for i in range(config.num_layers):
        for there, here in _GPT2_NORMS.items():
            places[f"blocks/{i}/{here}/scale"] = (f"h.{i}.{there}.weight", _same)
            places[f"blocks/{i}/{here}/bias"] = (f"h.{i}.{there}.bias", _same)
        for there, here in _GPT2_LINEAR.items():  # Conv1D: [in, out], as here
            places[f"blocks/{i}/{here}/kernel"] = (f"h.{i}.{there}.weight", _same)
            places[f"blocks/{i}/{here}/bias"] = (f"h.{i}.{there}.bias", _same)
        for part, here in enumerate(("query", "key", "value")):
            third = lambda x, part=part: np.split(x, 3, axis=-1)[part]
            places[f"blocks/{i}/attention/{here}/kernel"] = (f"h.{i}.attn.c_attn.weight", third)
            places[f"blocks/{i}/attention/{here}/bias"] = (f"h.{i}.attn.c_attn.bias", third)
    return places


def _llama_places(config: TransformerConfig) -> dict[str, tuple[str, Any]]:
    places: dict[str, tuple[str, Any]] = {
        "embed/embedding": ("embed_tokens.weight", _same),
        "norm/scale": ("norm.weight", _same),
    }
    if not config.tie_embeddings:
        places["head/kernel"] = ("lm_head.weight", np.transpose)
    for i in range(config.num_layers):
        for there, here in _LLAMA_NORMS.items():
            places[f"blocks/{i}/{here}/scale"] = (f"layers.{i}.{there}.weight", _same)
        for there, here in _LLAMA_LINEAR.items():  # torch.nn.Linear: [out, in]
            places[f"blocks/{i}/{here}/kernel"] = (f"layers.{i}.{there}.weight", np.transpose)
    return places


def _exported(kind: str, config: TransformerConfig) -> dict[str, Any]:
    """For every array there, how to make it of those here."""
    prefix, sources = ("transformer." if kind == "gpt2" else "model."), {}
    for name, (place, read) in _places(kind, config).items():
        full = place if place.startswith("lm_head") else prefix + place
        sources.setdefault(full, []).append((name, read))

    def make(parts: list) -> Any:
        if len(parts) > 1:  # query, key, value, in this order
            return lambda values: np.concatenate([np.asarray(values[name]) for name, _ in parts], axis=-1)
        [(name, read)] = parts
        return lambda values: read(np.asarray(values[name]))  # a transposition is its own inverse

    return {full: make(parts) for full, parts in sources.items()}
