"""Qwen 3 of JAX's Bonsai, which writes placement over Explicit axes into its code; a clone of it must be on the path."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCABULARY, LENGTH, ROWS = 64, 8, 16
SIZES = {
    "num_layers": 2, "vocab_size": VOCABULARY, "emb_dim": 16, "mlp_dim": 32, "num_heads": 8, "head_dim": 4,
    "num_kv_heads": 8, "rope_theta": 10_000, "rope_scaling_factor": 8.0, "local_rope_theta": 1e4, "norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip


def made(fsdp: bool = False, tp: bool = False) -> tuple[Any, Any]:
    """The model with its own annotations over these axes, and a loss of next tokens that makes the caches it wants."""
    from bonsai.models.qwen3 import modeling

    shards = modeling.ShardConfig.default(fsdp, tp) if fsdp or tp else modeling.ShardConfig.no_sharding()
    config = modeling.ModelConfig(**SIZES, shd_cfg=shards)
    rows = None if shards.act_btd is None else jax.P(shards.act_btd[0])

    def loss_fn(model: Any, batch: Any) -> Any:
        shape = batch["ids"].shape
        cache = modeling.init_cache(config, *shape, 0, jnp.float32)
        logits = model(batch["ids"], cache=cache, segment_ids=jnp.ones(shape, jnp.int32, out_sharding=rows))
        logits = logits if rows is None else jax.sharding.reshard(logits, rows)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["labels"]).mean()

    return modeling.Qwen3(config, rngs=nnx.Rngs(0)), loss_fn


def batches(count: int) -> list[dict[str, np.ndarray]]:
    """Of random tokens."""
    generator = np.random.default_rng(0)
    draw = lambda: generator.integers(0, VOCABULARY, (ROWS, LENGTH))
    return [{"ids": draw(), "labels": draw()} for _ in range(count)]
