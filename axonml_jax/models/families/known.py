"""The families of published models, and configurations to and from their `config.json`."""

from typing import Any

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families import deepseek_v3, gpt2, gpt_oss, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from axonml_jax.models.families.family import OFF, Described, Family
from axonml_jax.models.families.gemma import gemma2, gemma3

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gpt_oss, gemma2, gemma3, deepseek_v3)
}
"""`model_type` -> family."""

TITLES = "GPT-2, Llama 2 and 3, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, gpt-oss, Gemma 2, Gemma 3 and DeepSeek-V3"
"""What they are called."""


def family_named(kind: Any) -> Family:
    """The family of a `model_type`.

    Raises:
      ValueError: when it is not known here.
    """
    if kind not in FAMILIES:
        *others, last = FAMILIES
        raise ValueError(f"model_type={kind!r} is not known here: {', '.join(others)} and {last} are")
    return FAMILIES[kind]


def config_of(described: Described, **changes: Any) -> TransformerConfig:
    """The configuration of a `config.json`.

    Args:
      described: its content.
      changes: to the configuration, such as `param_dtype="bfloat16"`.

    Raises:
      ValueError: naming every part that the transformer here does not have.
    """
    family = family_named(described.get("model_type"))
    if problems := list(family.problems(described)):
        raise ValueError(f"the transformer here cannot be this {family.name}: " + "; ".join(problems))
    return TransformerConfig(**{**family.settings(described), **changes})


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


def description_of(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of a configuration.

    Raises:
      ValueError: when it is of none of the families.
    """
    return family_of(config).describe(config)
