"""The families of published models, and configurations to and from their `config.json`."""

import json
import os
from pathlib import Path
from typing import Any

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families import deepseek_v3, gemma, gpt2, gpt_oss, llama, qwen
from axonml_jax.models.families.family import OFF, Described, Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(gpt2.FAMILY, llama.FAMILY, llama.MISTRAL, llama.MIXTRAL, qwen.QWEN2, qwen.QWEN3, qwen.QWEN3_MOE),
        *(gpt_oss.FAMILY, gemma.GEMMA2, gemma.GEMMA3, deepseek_v3.FAMILY),
    )
}
"""`model_type` -> family."""

TITLES = "GPT-2, Llama 2 and 3, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, gpt-oss, Gemma 2, Gemma 3 and DeepSeek-V3"
"""The names of the families, for messages."""

_LAYERS = ("num_hidden_layers", "n_layer")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 200_000


def family_named(kind: Any) -> Family:
    """The family with a `model_type`.

    Raises:
      ValueError: when it is not known here.
    """
    if not isinstance(kind, str) or kind not in FAMILIES:
        *others, last = FAMILIES
        raise ValueError(f"model_type={kind!r} is not known here: {', '.join(others)} and {last} are")
    return FAMILIES[kind]


def described_in(folder: str | os.PathLike) -> dict[str, Any]:
    """The content of a folder's `config.json`.

    Raises:
      FileNotFoundError: when there is none.
      ValueError: when it is no JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: give a folder that save_pretrained wrote")
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(described, dict):
        raise ValueError(f"{path} holds no object: give a folder that save_pretrained wrote")
    return described


def config_of(described: Described, **changes: Any) -> TransformerConfig:
    """The configuration that a `config.json` describes.

    Args:
      described: its content.
      changes: to the configuration, such as `param_dtype="bfloat16"`.

    Raises:
      ValueError: naming every part that the transformer here does not have.
    """
    family = family_named(described.get("model_type"))
    _refuse_sizes(described)
    try:
        if problems := list(family.problems(described)):
            raise ValueError(f"the transformer here cannot be this {family.name}: " + "; ".join(problems))
        settings = family.settings(described)
    except KeyError as error:
        raise ValueError(f"config.json lacks {error}, which a {family.name} needs") from error
    except (TypeError, AttributeError, OverflowError, ZeroDivisionError) as error:  # values of other types than theirs
        raise ValueError(f"config.json is not what a {family.name} writes: {error}") from error
    return TransformerConfig(**{**settings, **changes})


def _refuse_sizes(described: Described) -> None:
    """Refuse implausible numbers of layers and experts, before anything is made for each."""
    counts = {name: described[name] for name in (*_LAYERS, *_EXPERTS) if described.get(name) is not None}
    wrong = [
        name for name, value in counts.items() if not isinstance(value, int) or isinstance(value, bool) or value < 0
    ]
    layers, experts = (0 if wrong else max(counts.get(name, 1) for name in names) for names in (_LAYERS, _EXPERTS))
    if wrong or layers > _MOST_LAYERS or layers * experts > _MOST_EXPERTS:
        said = ", ".join(f"{name}={counts[name]!r:.60}" for name in wrong or counts)
        rule = f"whole numbers, at most {_MOST_LAYERS:,} layers, and {_MOST_EXPERTS:,} experts in all layers together"
        raise ValueError(f"config.json says {said}: these must be {rule}")


def family_of(config: TransformerConfig) -> Family:
    """The family of a configuration.

    Raises:
      ValueError: when it is of none.
    """
    family = next((family for family in FAMILIES.values() if family.is_this(config)), None)
    if family is not None:
        return family
    names = ("norm", "activation", "position", *(name for name, off in OFF.items() if getattr(config, name) != off))
    given = ", ".join(f"{name}={getattr(config, name)}" for name in names)
    raise ValueError(
        f"a model with {given} is of none of the families {TITLES}, such as GPT-2 (layernorm, gelu, learned, biases) or Llama "
        "(rmsnorm, swiglu, rotary, none)"
        + ("" if config.experts is None else f", or its experts are not theirs: {config.experts}")
    )
