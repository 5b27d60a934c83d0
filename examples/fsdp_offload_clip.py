"""Parameters, gradients and optimizer state in host memory; clipping by hand; whole parameters in a context.

    python examples/fsdp_offload_clip.py

Shows `cpu_offload`, where arrays then live, that results are the same up to rounding, `clip_grad_norm`, and `whole_parameters`.
"""

import math

import jax
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax
from axonml_jax.models.transformer import MLP

ax.fake_devices(4)  # simulated; leave it out on real devices


def loss_fn(model, batch):  # of the whole batch, as on one device
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
batch = {"x": x, "y": np.sin(x.sum(1, keepdims=True))}


def train(offload: ax.CPUOffload):
    model = MLP([16, 64, 64, 1], rngs=nnx.Rngs(0))
    fsdp = ax.FSDP(model, ax.make_mesh(fsdp=-1), cpu_offload=offload)
    trainer = fsdp.trainer(optax.adamw(1e-2), loss_fn, max_grad_norm=1.0)
    losses = [float(trainer.step(batch)["loss"]) for _ in range(20)]
    return fsdp, trainer, losses


kept, _, losses = train(ax.CPUOffload.NONE)
fsdp, trainer, same = train(ax.CPUOffload.FULL)
kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(trainer.state) if leaf.ndim}
ax.print0(f"loss {same[0]:.4f} -> {same[-1]:.4f}; arrays of the state rest in {', '.join(sorted(kinds))}")
ax.print0(fsdp.memory_estimate())
assert np.allclose(losses, same, rtol=1e-5) and "pinned_host" in kinds
for name, value in kept.state_dict().items():
    assert np.allclose(value, fsdp.state_dict()[name], rtol=1e-4, atol=1e-6), name

# By hand: gradients are sharded like parameters, their norm is that of one device.
_, grads = kept.value_and_grad(loss_fn)(batch)
for p in (1, 2, math.inf):
    clipped, norm = kept.clip_grad_norm(grads, 0.01, norm_type=p)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(clipped))])
    ax.print0(f"{p}-norm of the gradients {float(norm):.4f}, clipped to {np.linalg.norm(flat, p):.4f}")

# Whole parameters, written back at the end of the context.
with kept.whole_parameters() as params:
    params["layers"][2]["bias"] = params["layers"][2]["bias"] + 1.0
moved = kept.state_dict()["layers/2/bias"] - fsdp.state_dict()["layers/2/bias"]
assert np.allclose(moved, 1.0) and np.linalg.norm(flat, math.inf) <= 0.01
