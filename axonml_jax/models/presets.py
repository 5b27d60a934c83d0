"""Published models by name, with their published sizes."""

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.experts_config import ExpertsConfig

GPT2 = {
    "vocab_size": 50_257,
    "max_length": 1024,
    "norm": "layernorm",
    "activation": "gelu",
    "position": "learned",
    "tie_embeddings": True,
    "use_bias": True,
}
LLAMA3 = {"vocab_size": 128_256, "max_length": 8192, "num_kv_heads": 8, "rope_theta": 500_000.0, "scan_layers": True}

MIXTRAL = {
    "vocab_size": 32_000,
    "max_length": 32_768,
    "num_kv_heads": 8,
    "rope_theta": 1_000_000.0,
    "scan_layers": True,
}

PRESETS: dict[str, TransformerConfig] = {
    "gpt2-small": TransformerConfig(num_layers=12, hidden_size=768, num_heads=12, **GPT2),
    "gpt2-medium": TransformerConfig(num_layers=24, hidden_size=1024, num_heads=16, **GPT2),
    "gpt2-large": TransformerConfig(num_layers=36, hidden_size=1280, num_heads=20, **GPT2),
    "gpt2-xl": TransformerConfig(num_layers=48, hidden_size=1600, num_heads=25, **GPT2),
    "llama3-8b": TransformerConfig(num_layers=32, hidden_size=4096, num_heads=32, mlp_hidden_size=14_336, **LLAMA3),
    "llama3-70b": TransformerConfig(num_layers=80, hidden_size=8192, num_heads=64, mlp_hidden_size=28_672, **LLAMA3),
    # 405B as pretrained at 8192 tokens; the frequency scaling of its later long-context stage is not included.
    "llama3-405b": TransformerConfig(
        num_layers=126, hidden_size=16_384, num_heads=128, mlp_hidden_size=53_248, **LLAMA3
    ),
    "mixtral-8x7b": TransformerConfig(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        mlp_hidden_size=14_336,
        experts=ExpertsConfig(num_experts=8, top_k=2, load_balance=0.04),
        **MIXTRAL,
    ),
}
"""Name -> configuration: GPT-2 (Radford et al. 2019), without dropout, Llama 3 (Grattafiori et al. 2024) and Mixtral (Jiang et
al. 2024)."""


def preset(name: str) -> TransformerConfig:
    """The configuration called `name`.

    >>> preset("gpt2-small").num_params
    124439808

    Raises:
      ValueError: no preset has that name.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset is called {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
