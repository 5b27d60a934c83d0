"""Hybrid sharding for a Linen model: split over groups of four devices, copies in two groups, computing in bfloat16.

    python examples/fsdp_hybrid_linen.py

Shows HYBRID_SHARD on a mesh of `data` x `fsdp` (hosts x devices of a host), a wrap policy, mixed precision, and evaluation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import axonml_jax as ax

ax.fake_devices(8)  # simulated; leave it out on real devices


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        y = nn.Dense(128, dtype=x.dtype)(nn.LayerNorm(dtype=x.dtype)(x))
        return x + nn.Dropout(0.1, deterministic=not train)(nn.Dense(32, dtype=x.dtype)(nn.gelu(y)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(32, dtype=x.dtype)(x)
        for _ in range(3):
            x = Block()(x, train)
        return nn.Dense(3, dtype=x.dtype)(x)


def loss_fn(model, batch):
    logits = model(batch["x"], train=model.is_training)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).astype(jnp.float32).mean()}


x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
batch = {"x": x, "y": x[:, :3].argmax(1).astype(np.int32)}

module = Net()
fsdp = ax.FSDP(
    module,
    ax.make_mesh(data=2, fsdp=4),
    params=module.init(jax.random.key(0), x[:1], train=False),
    sharding_strategy=ax.ShardingStrategy.HYBRID_SHARD,
    mixed_precision="bf16",  # shards are cast, then gathered: half the bytes travel
    wrap=r"Block_\d+",  # module paths; the default finds these repeated blocks too
)
trainer = fsdp.trainer(optax.adamw(1e-2), loss_fn)
for step in range(40):
    metrics = trainer.step(batch)
    if step % 10 == 0:
        ax.print0(f"step {step:2d}  loss {float(metrics['loss']):.4f}  accuracy {float(metrics['accuracy']):.2%}")

evaluated = trainer.evaluate(batch)  # dropout off
ax.print0(f"evaluated: loss {float(evaluated['loss']):.4f}  accuracy {float(evaluated['accuracy']):.2%}")
ax.print0(ax.explain(trainer, batch))  # gathers along fsdp in bfloat16, one all-reduce of shards along data

kernel = fsdp.parameters()["Block_0"]["Dense_0"]["kernel"]
assert kernel.dtype == jnp.float32 and kernel.addressable_shards[0].data.size == kernel.size / 4
assert float(evaluated["accuracy"]) > 0.85
