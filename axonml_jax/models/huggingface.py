"""Weights and configurations of Hugging Face's models (`families/`), to and from `Transformer`. Nothing is downloaded."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from axonml_jax._types import named_leaves
from axonml_jax.model.safetensors import load_safetensors, save_safetensors
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families import gpt2, llama, mixtral
from axonml_jax.models.stack import stacked, unstacked
from axonml_jax.models.transformer import Transformer

Values = dict[str, np.ndarray]

FAMILIES = {family.name: family for family in (gpt2.FAMILY, llama.FAMILY, mixtral.FAMILY)}


def pretrained(folder: str | os.PathLike, **changes: Any) -> Transformer:
    """A transformer with the weights that `save_pretrained` of a model of one of the families wrote.

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
    others = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))  # random streams, routers' biases: arrays too
    made = Transformer(config, rngs=nnx.Rngs(0)) if others else model
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
      ValueError: when the model is of none of the families.
    """
    described, folder = description_of(config), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    values = _each_expert(unstacked(values) if config.scan_layers else values, config)
    there = {theirs: own(values) for theirs, own in _exported(described["model_type"], config).items()}
    save_safetensors(folder / "model.safetensors", there, metadata={"format": "pt"})


def config_of(described: Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """The configuration of a `config.json`.

    Raises:
      ValueError: naming every part that the transformer here does not have.
    """
    family = FAMILIES.get(described.get("model_type", ""))
    if family is None:
        known = f"{', '.join([*FAMILIES][:-1])} and {[*FAMILIES][-1]}"
        raise ValueError(f"model_type={described.get('model_type')!r} is not known here: {known} are")
    problems = [
        f"{name}={described[name]!r}"
        for name, fine in family.without.items()
        if described.get(name, fine[0]) not in fine
    ]
    rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if family is not gpt2.FAMILY:
        size, heads = described["hidden_size"], described["num_attention_heads"]
        if described.get("head_dim") not in (None, size // heads):
            problems.append(
                f"head_dim={described['head_dim']} beside hidden_size / num_attention_heads = {size // heads}"
            )
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            problems.append(f"rope scaling {rope}")
    if problems:
        raise ValueError(f"the transformer here cannot be this {family.name}: " + "; ".join(problems))
    return TransformerConfig(**{**family.settings(described, rope), **changes})


def description_of(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of a configuration.

    Raises:
      ValueError: when it is of none of the families.
    """
    family = next((family for family in FAMILIES.values() if family.is_this(config)), None)
    if family is not None:
        return family.describe(config)
    raise ValueError(
        f"norm={config.norm}, activation={config.activation}, position={config.position}, use_bias={config.use_bias} is "
        "neither GPT-2 (layernorm, gelu, learned, True) nor Llama (rmsnorm, swiglu, rotary, False)"
        + ("" if config.experts is None else f", or its experts are not Mixtral's: {config.experts}")
    )


def values_of(kind: str, config: TransformerConfig, theirs: Mapping[str, np.ndarray]) -> Values:
    """A `state_dict` from the arrays of a published model.

    Raises:
      ValueError: listing every array that is missing, and every one that has no place here.
    """
    theirs = {name.removeprefix("transformer.").removeprefix("model."): value for name, value in theirs.items()}
    wanted, used = FAMILIES[kind].places(config), set()
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
    values = _experts_together(values)
    return stacked(values, config.num_layers) if config.scan_layers else values


def _each_expert(values: Mapping[str, Any], config: TransformerConfig) -> dict[str, Any]:
    """Stacks of experts apart: `blocks/0/mlp/up` as `blocks/0/mlp/up@0`, ..."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        block = re.fullmatch(r"blocks/(\d+)/mlp/(gate|up|down)", name)
        if block is not None and config.has_experts(int(block[1])):
            found |= {f"{name}@{e}": part for e, part in enumerate(np.asarray(value))}
        else:
            found[name] = value
    return found


def _experts_together(values: Values) -> Values:
    """The inverse."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for name in [name for name in values if "@" in name]:
        whole, _, expert = name.partition("@")
        parts.setdefault(whole, {})[int(expert)] = values[name]
    stacks = {name: np.stack([own[e] for e in sorted(own)]) for name, own in parts.items()}
    return {name: value for name, value in values.items() if "@" not in name} | stacks


def _exported(kind: str, config: TransformerConfig) -> dict[str, Any]:
    """For every array there, how to make it of those here."""
    family, sources = FAMILIES[kind], {}
    for name, (place, read) in family.places(config).items():
        full = place if place.startswith("lm_head") else family.prefix + place
        sources.setdefault(full, []).append((name, read))

    def make(parts: list) -> Any:
        if len(parts) > 1:  # query, key, value, in this order
            return lambda values: np.concatenate([np.asarray(values[name]) for name, _ in parts], axis=-1)
        [(name, read)] = parts
        return lambda values: read(np.asarray(values[name]))  # a transposition is its own inverse

    return {full: make(parts) for full, parts in sources.items()}
