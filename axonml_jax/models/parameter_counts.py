"""How many parameters the parts of a transformer have."""

from typing import Any


def attention_params(config: Any) -> int:
    """Of a block's attention."""
    shape = config.attention_shape
    biases = shape.opened if config.use_bias or config.qkv_bias else 0
    biases += config.hidden_size if config.use_bias else 0
    own = sum(scale.size for scale in shape.scales) + (config.num_heads if config.sinks else 0)
    return shape.products + biases + own


def mlp_params(config: Any) -> int:
    """Of a dense feed-forward part."""
    inward = 1 if config.activation == "gelu" else 2
    biases = inward * config.mlp_size + config.hidden_size if config.use_bias else 0
    return (inward + 1) * config.hidden_size * config.mlp_size + biases


def experts_params(config: Any, *, active: bool) -> int:
    """Of a mixture of experts; those that a token reads, or all."""
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    kind = experts.activation or config.activation
    inward = 1 if kind == "gelu" else 2
    size = experts.inner_size or config.mlp_size
    biases = lambda inner: inward * inner + hidden if config.use_bias else 0
    one = (inward + 1) * hidden * size + biases(size)
    shared = (inward + 1) * hidden * experts.shared_size + biases(experts.shared_size) if experts.shared_size else 0
    router = (hidden + (1 if experts.router_bias else 0)) * experts.num_experts
    return router + shared + one * (experts.top_k if active else experts.num_experts)


def norm_params(config: Any) -> int:
    """Of a norm over the hidden features."""
    return config.hidden_size * (2 if config.norm == "layernorm" and config.use_bias else 1)
