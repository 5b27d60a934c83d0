"""Published models by name, with their published sizes."""

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.experts_config import ExpertsConfig
from axonml_jax.parallel.tensor.latent.latent_config import LatentConfig
from axonml_jax.parallel.tensor.megatron.rope_scaling import RopeScaling

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

LLAMA2 = {"vocab_size": 32_000, "max_length": 4096, "scan_layers": True}

LLAMA3_2 = {
    **LLAMA3,
    "max_length": 131_072,
    "tie_embeddings": True,
    "rope_scaling": RopeScaling(kind="llama3", factor=32.0, original_length=8192),
}

MISTRAL = {"vocab_size": 32_000, "max_length": 32_768, "num_kv_heads": 8, "window": 4096, "scan_layers": True}

QWEN3 = {
    "vocab_size": 151_936,
    "max_length": 40_960,
    "head_dim": 128,
    "qk_norm": True,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-6,
    "scan_layers": True,
}
QWEN3_EXPERTS = {"num_experts": 128, "top_k": 8, "load_balance": 0.008}

GEMMA = {
    "activation": "geglu",
    "zero_centered_norm": True,
    "post_norms": True,
    "scale_embeddings": True,
    "tie_embeddings": True,
    "norm_eps": 1e-6,
}
GEMMA2 = {
    **GEMMA,
    "vocab_size": 256_000,
    "max_length": 8192,
    "window": 4096,
    "full_every": 2,
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
}
GEMMA3 = {**GEMMA, "qk_norm": True, "full_every": 6, "rope_theta": 1_000_000.0, "window_rope_theta": 10_000.0}
# The language models in Gemma 3's larger sizes, without what reads images.
GEMMA3_LARGE = {
    **GEMMA3,
    "vocab_size": 262_208,
    "max_length": 131_072,
    "window": 1024,
    "rope_scaling": RopeScaling(kind="linear", factor=8.0),
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
    "llama2-7b": TransformerConfig(num_layers=32, hidden_size=4096, num_heads=32, mlp_hidden_size=11_008, **LLAMA2),
    "llama3.2-1b": TransformerConfig(num_layers=16, hidden_size=2048, num_heads=32, mlp_hidden_size=8192, **LLAMA3_2),
    "mistral-7b": TransformerConfig(num_layers=32, hidden_size=4096, num_heads=32, mlp_hidden_size=14_336, **MISTRAL),
    "qwen3-0.6b": TransformerConfig(
        num_layers=28,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        mlp_hidden_size=3072,
        tie_embeddings=True,
        **QWEN3,
    ),
    "qwen3-8b": TransformerConfig(
        num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, mlp_hidden_size=12_288, **QWEN3
    ),
    "qwen3-30b-a3b": TransformerConfig(
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        mlp_hidden_size=6144,
        experts=ExpertsConfig(inner_size=768, **QWEN3_EXPERTS),
        **QWEN3,
    ),
    "qwen3-235b-a22b": TransformerConfig(
        num_layers=94,
        hidden_size=4096,
        num_heads=64,
        num_kv_heads=4,
        mlp_hidden_size=12_288,
        experts=ExpertsConfig(inner_size=1536, **QWEN3_EXPERTS),
        **QWEN3,
    ),
    "gpt-oss-20b": TransformerConfig(
        vocab_size=201_088,
        num_layers=24,
        hidden_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        mlp_hidden_size=2880,
        max_length=131_072,
        use_bias=True,
        sinks=True,
        window=128,
        full_every=2,
        rope_theta=150_000.0,
        rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_length=4096, truncate=False),
        experts=ExpertsConfig(
            num_experts=32, top_k=4, router_bias=True, activation="clamped_swiglu", load_balance=0.004
        ),
    ),
    "gemma2-2b": TransformerConfig(
        num_layers=26, hidden_size=2304, num_heads=8, num_kv_heads=4, head_dim=256, mlp_hidden_size=9216,
        query_scalar=256, **GEMMA2,
    ),
    "gemma2-9b": TransformerConfig(
        num_layers=42, hidden_size=3584, num_heads=16, num_kv_heads=8, head_dim=256, mlp_hidden_size=14_336,
        query_scalar=256, **GEMMA2,
    ),
    "gemma2-27b": TransformerConfig(
        num_layers=46, hidden_size=4608, num_heads=32, num_kv_heads=16, head_dim=128, mlp_hidden_size=36_864,
        query_scalar=144, **GEMMA2,
    ),
    "gemma3-1b": TransformerConfig(
        vocab_size=262_144, max_length=32_768, num_layers=26, hidden_size=1152, num_heads=4, num_kv_heads=1, head_dim=256,
        mlp_hidden_size=6912, window=512, query_scalar=256, **GEMMA3,
    ),
    "gemma3-4b": TransformerConfig(
        num_layers=34, hidden_size=2560, num_heads=8, num_kv_heads=4, head_dim=256, mlp_hidden_size=10_240,
        query_scalar=256, **GEMMA3_LARGE,
    ),
    "gemma3-12b": TransformerConfig(
        num_layers=48, hidden_size=3840, num_heads=16, num_kv_heads=8, head_dim=256, mlp_hidden_size=15_360,
        query_scalar=256, **GEMMA3_LARGE,
    ),
    "gemma3-27b": TransformerConfig(
        num_layers=62, hidden_size=5376, num_heads=32, num_kv_heads=16, head_dim=128, mlp_hidden_size=21_504,
        query_scalar=168, **GEMMA3_LARGE,
    ),
    # Of its two losses that balance experts the bias alone: the one of each sequence is not here.
    "deepseek-v3": TransformerConfig(
        vocab_size=129_280, max_length=163_840, num_layers=61, hidden_size=7168, num_heads=128, mlp_hidden_size=18_432,
        norm_eps=1e-6, latent=LatentConfig(kv_rank=512, query_rank=1536, mscale=1.0),
        rope_scaling=RopeScaling(kind="yarn", factor=40.0, original_length=4096, attention_factor=1.0),
        experts=ExpertsConfig(
            num_experts=256, top_k=8, inner_size=2048, first_dense=3, router="sigmoid", groups=8, top_groups=4, scale=2.5,
            shared_size=2048, load_balance=0.0,
        ),
    ),
}  # fmt: skip
"""Name -> configuration: GPT-2 (Radford et al. 2019), without dropout, Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al.
2024), Mistral and Mixtral (Jiang et al. 2023, 2024), Qwen3 (Yang et al. 2025), gpt-oss (OpenAI 2025), Gemma 2 and the language
models of Gemma 3 (Gemma Team 2024, 2025), and DeepSeek-V3 (DeepSeek-AI 2024) without what predicts a second token."""


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
