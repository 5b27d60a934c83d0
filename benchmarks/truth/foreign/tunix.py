"""NNX models of Google's Tunix (`google-tunix`): Llama 3, Gemma, Qwen dense and of experts."""

import importlib
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from .family import ROWS, Family, Made, cross_entropy, without_its_init

VOCABULARY, LENGTH = 64, 8
SIZES = {
    "num_layers": 2, "embed_dim": 16, "hidden_dim": 32, "num_heads": 4, "head_dim": 4, "num_kv_heads": 2,
}  # fmt: skip
TYPED = {"rope_theta": 10_000, "norm_eps": 1e-6, "vocab_size": VOCABULARY}
RULES = {
    ".*/(q_proj|k_proj|v_proj)/w": P(None, "tensor"),
    ".*/o_proj/w": P("tensor"),
    ".*/(gate_proj|up_proj)/kernel": P(None, "tensor"),
    ".*/down_proj/kernel": P("tensor"),
    ".*": P(),
}


def model_file(name: str) -> Any:
    """A model's module; the package's own `__init__` imports every trainer and sampler it has."""
    without_its_init("tunix")
    return importlib.import_module(f"tunix.models.{name}.model")


def made(model: Any, rules: Any) -> Made:
    """The model with the loss of next tokens; all four are called alike, most compute softmax or norms in float32."""

    def loss_fn(model: Any, batch: Any) -> Any:
        logits, _ = model(batch["ids"], batch["places"], None, batch["mask"])
        return cross_entropy(logits, batch["labels"])

    def draw(generator: np.random.Generator) -> dict[str, np.ndarray]:
        ids = generator.integers(0, VOCABULARY, (2, ROWS, LENGTH))
        mask = np.broadcast_to(np.tril(np.ones((LENGTH, LENGTH), bool)), (ROWS, LENGTH, LENGTH))
        places = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
        return {"ids": ids[0], "labels": ids[1], "places": places, "mask": mask}

    one = draw(np.random.default_rng(0))
    return Made(model, None, loss_fn, draw, rules, (one["ids"], one["places"], None, one["mask"]), double=False)


def llama(dtype: Any) -> Made:
    """Llama 3: separate head, grouped heads."""
    file = model_file("llama3")
    return made(file.Llama3(file.ModelConfig(**SIZES, **TYPED), rngs=nnx.Rngs(0)), RULES)


def gemma(dtype: Any) -> Made:
    """Gemma 2: local and global attention in turn, soft caps, tied embedding, norms after each half."""
    file = model_file("gemma")
    config = file.ModelConfig(
        **SIZES, num_embed=VOCABULARY, final_logit_softcap=30.0, attn_logits_soft_cap=50.0, use_post_attn_norm=True,
        use_post_ffw_norm=True, sliding_window_size=4,
        attention_types=(file.AttentionType.LOCAL_SLIDING, file.AttentionType.GLOBAL),
    )  # fmt: skip
    rules = {
        ".*/q_einsum/w": P("tensor"),
        ".*/kv_einsum/w": P(None, "tensor"),
        ".*/attn_vec_einsum/w": P("tensor"),
        ".*/(gate_proj|up_proj)/kernel": P(None, "tensor"),
        ".*/down_proj/kernel": P("tensor"),
        ".*": P(),
    }
    return replace(made(file.Gemma(config, rngs=nnx.Rngs(0)), rules), double=True)


def gemma3(dtype: Any) -> Made:
    """Gemma 3: norms of queries and keys, five local layers to a global one."""
    file = model_file("gemma3")
    config = file.ModelConfig(**SIZES, num_embed=VOCABULARY, sliding_window_size=4, param_dtype=jnp.float32)
    rules = {
        ".*/(q_einsum|attn_vec_einsum)/w": P("tensor"),
        ".*/(kv_einsum|qkv_einsum)/w": P(None, "tensor"),
        ".*/(gate_proj|up_proj)/kernel": P(None, "tensor"),
        ".*/down_proj/kernel": P("tensor"),
        ".*": P(),
    }
    return made(file.Gemma3(config, rngs=nnx.Rngs(0)), rules)


def qwen(dtype: Any) -> Made:
    """Qwen 3: norms of queries and keys, tied embedding."""
    file = model_file("qwen3")
    config = file.ModelConfig(**SIZES, **TYPED, use_tied_embedding=True, dtype=dtype, param_dtype=jnp.float32)
    return made(file.Qwen3(config, rngs=nnx.Rngs(0)), RULES)


def qwen_experts(dtype: Any) -> Made:
    """Qwen 3 with four experts of which each token takes two."""
    file = model_file("qwen3")
    config = file.ModelConfig(
        **SIZES, **TYPED, num_experts=4, num_experts_per_tok=2, dtype=dtype, param_dtype=jnp.float32
    )
    rules = {
        ".*/(q_proj|k_proj|v_proj)/w": P(None, "tensor"),
        ".*/o_proj/w": P("tensor"),
        ".*/mlp/.*_proj": P("tensor"),
        ".*": P(),
    }
    return made(file.Qwen3(config, rngs=nnx.Rngs(0)), rules)


FAMILIES = (
    Family("Llama 3 (Tunix)", "decoder", "google-tunix", llama),
    Family("Gemma 2 (Tunix)", "decoder", "google-tunix", gemma),
    Family("Gemma 3 (Tunix)", "decoder", "google-tunix", gemma3),
    Family("Qwen 3 (Tunix)", "decoder", "google-tunix", qwen),
    Family("Qwen 3 of experts (Tunix)", "mixture of experts", "google-tunix", qwen_experts),
)
