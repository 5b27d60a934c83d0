"""Whether two configurations describe models that compute the same from the same weights."""

from dataclasses import fields
from typing import Any

from axonml_jax.models.config import TransformerConfig

_FREE = {
    "dropout", "split", "sequence_parallel", "ring", "overlap", "prefetch", "attention", "scan_layers", "loss_chunk", "dtype",
    "param_dtype", "max_length", "num_kv_heads", "mlp_hidden_size", "head_dim", "experts", "rope_scaling",
    "query_scalar",
}  # fmt: skip
_TRAINING = {"noise", "capacity_factor", "dispatch", "load_balance", "z", "bias_rate", "inner_size"}


def unlike(config: TransformerConfig, other: TransformerConfig) -> list[str]:
    """What of a configuration makes it another model's than another one, a line each."""
    own, theirs = _computed(config), _computed(other)
    return [f"{name}={own[name]}, there {theirs[name]}" for name in own if own[name] != theirs.get(name)]


def _computed(config: TransformerConfig) -> dict[str, Any]:
    """What decides over results, with defaults in place."""
    plain = {f"model.{each.name}": getattr(config, each.name) for each in fields(config) if each.name not in _FREE}
    plain |= {
        "model.num_kv_heads": config.kv_heads,
        "model.mlp_hidden_size": config.mlp_size,
        "model.head_dim": config.head_size,
        "model.query_scalar": config.query_scalar or config.head_size,
        "rope_scaling": None
        if config.rope_scaling is None or config.rope_scaling.kind == "none"
        else config.rope_scaling,
    }
    experts = config.experts
    if experts is None:
        return plain | {"experts.num_experts": 0}
    own = {
        f"experts.{each.name}": getattr(experts, each.name) for each in fields(experts) if each.name not in _TRAINING
    }
    own["experts.activation"] = experts.activation or config.activation
    own["experts.inner_size"] = experts.inner_size or config.mlp_size
    if experts.alike:
        plain.pop("model.mlp_hidden_size")  # no block has a dense one
    return plain | own
