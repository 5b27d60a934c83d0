"""Fully sharded data parallelism (FULL_SHARD, ZeRO-3) for an NNX model that was written for one device.

    python examples/fsdp_nnx.py

Shows `ax.FSDP` on a model made sharded from the start, what every device holds, the memory estimate, what a step sends, and
that the training is the one of plain data parallelism.
"""

import jax
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax

ax.fake_devices(8)  # simulated; leave it out on real devices


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(6)])  # each block is a unit, gathered alone
        self.head = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, batch):  # of the whole batch, as on one device
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make():
    return Net(nnx.Rngs(0))


x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
batch = {"x": x, "y": np.sin(x.sum(1, keepdims=True))}  # the global batch

fsdp = ax.FSDP(make, ax.make_mesh(fsdp=-1))  # given as a function, it is never whole on any device
trainer = fsdp.trainer(optax.adam(1e-3), loss_fn, max_grad_norm=1.0)
first, *_, last = [float(trainer.step(batch)["loss"]) for _ in range(10)]
ax.print0(f"loss {first:.4f} -> {last:.4f} on {fsdp.mesh.size} devices")
ax.print0(fsdp.memory_estimate())
ax.print0(ax.explain(trainer, batch))

kernel = fsdp.parameters()["blocks"][0]["up"]["kernel"]
ax.print0(f"a device holds {kernel.addressable_shards[0].data.shape} of a {kernel.shape} kernel")
assert kernel.addressable_shards[0].data.size == kernel.size / 8

ddp = ax.DDP(make(), ax.make_mesh(data=-1))
whole = ddp.trainer(optax.adam(1e-3), loss_fn, max_grad_norm=1.0)
losses = [float(whole.step(batch)["loss"]) for _ in range(10)]
assert last < first and np.isclose(last, losses[-1], rtol=1e-3)
assert fsdp.memory_estimate().memory_savings > 0.6, jax.__version__
