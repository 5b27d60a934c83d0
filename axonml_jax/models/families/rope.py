"""Rotary positions as a `config.json` says them, and back."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families.family import Described
from axonml_jax.parallel.tensor.megatron.rope_scaling import RopeScaling

_NAMES = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "low_frequency": "low_freq_factor",
        "high_frequency": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "fast": "beta_fast",
        "slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
}


def rope_problems(described: Described) -> Iterator[str]:
    """What of them the transformer here does not do."""
    rope = _rope(described)
    if _kind(rope) not in ("default", *_NAMES):
        yield f"rope scaling {rope}"
    if rope.get("partial_rotary_factor", described.get("partial_rotary_factor")) not in (None, 1, 1.0):
        yield "partial_rotary_factor: only whole heads are turned"
    if _kind(rope) in _NAMES and rope.get("factor") is None:
        yield f"rope scaling {rope} without a factor"


def rope_settings(described: Described, theta: float = 10_000.0) -> dict[str, Any]:
    """The arguments of `TransformerConfig`.

    Args:
      described: the `config.json`.
      theta: where it says none.
    """
    rope = _rope(described)
    found: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta", described.get("rope_theta", theta)))}
    if (kind := _kind(rope)) != "default":
        longest = {"original_max_position_embeddings": described["max_position_embeddings"]} | dict(rope)
        own = {name: longest[there] for name, there in _NAMES[kind].items() if longest.get(there) is not None}
        if kind == "yarn" and "attention_factor" not in own and rope.get("mscale") and rope.get("mscale_all_dim"):
            plain = RopeScaling(kind="yarn", factor=rope["factor"], original_length=1).attention_scale - 1
            own["attention_factor"] = (1 + rope["mscale"] * plain) / (1 + rope["mscale_all_dim"] * plain)
        found["rope_scaling"] = RopeScaling(kind=kind, **own)
    return found


def rope_description(config: TransformerConfig) -> dict[str, Any]:
    """What a `config.json` says of them, for readers old and new."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    found: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_parameters": rope}
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind != "none":
        values = {there: getattr(scaling, name) for name, there in _NAMES[scaling.kind].items()}
        rope |= {"rope_type": scaling.kind} | {name: value for name, value in values.items() if value is not None}
        found["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return found


def _rope(described: Described) -> dict[str, Any]:
    return described.get("rope_parameters") or described.get("rope_scaling") or {}


def _kind(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))
