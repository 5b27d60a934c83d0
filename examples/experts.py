"""A mixture of experts on 8 simulated devices: two experts on each of four ranks, two of these groups side by side.

    python examples/experts.py

Shows `ax.ParallelMoE` in a model of your own, its routers' losses, what tokens cost on their way, and that the training is that
of one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax

ax.fake_devices(8)  # simulated; leave it out on real devices


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.experts = ax.ParallelMoE(
            32, 64, num_experts=8, router=ax.SoftmaxRouter(top_k=2), dispatch="rounds", rngs=rngs
        )

    def __call__(self, x, mask):
        y, router = self.experts(self.norm(x), mask)  # what is padding goes to no expert
        return x + y, router


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.last = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x, mask):
        x, routers = self.first(x), []
        for block in self.blocks:
            x, router = block(x, mask)
            routers.append(router)
        return self.last(x)[..., 0], routers


def loss_fn(model, batch):  # a mean over the tokens that are none of the padding
    out, routers = model(batch["x"], batch["mask"])
    weight = batch["mask"].sum(dtype=jnp.float32)
    squares = jnp.where(batch["mask"], jnp.square(out - batch["y"]), 0).sum()
    balance = sum(0.01 * router.load_balance + 0.001 * router.z for router in routers)  # equal on every rank
    return ax.WeightedMean(squares + weight * balance, weight), {
        "busiest": routers[0].counts.max() / routers[0].counts.mean()
    }


rng = np.random.default_rng(0)
x = rng.normal(size=(32, 8, 16)).astype(np.float32)
mask = np.arange(8) < rng.integers(4, 9, 32)[:, None]
batch = {"x": x, "y": np.sin(2 * x[..., 0]) * np.sign(x[..., 1]), "mask": mask}

losses = {}
for name, mesh in {
    "one device": ax.make_mesh(devices=jax.devices()[:1]),
    "experts": ax.make_mesh(data=2, expert=4),
}.items():
    model = ax.parallelize(Net(nnx.Rngs(0)), mesh, ax.Plan())
    trainer = model.trainer(optax.adam(3e-3), loss_fn, max_grad_norm=1.0)
    metrics = [trainer.step(batch) for _ in range(30)]
    losses[name] = [float(each["loss"]) for each in metrics]
    ax.print0(
        f"{name}: loss {losses[name][0]:.4f} -> {losses[name][-1]:.4f}, busiest {float(metrics[-1]['busiest']):.2f}x"
    )

ax.print0(ax.explain(trainer, batch))
up = model.parameters()["blocks"][0]["experts"]["up"]
ax.print0(f"a device holds {up.addressable_shards[0].data.shape} of {up.shape}")
assert up.addressable_shards[0].data.shape == (2, 32, 64)
assert np.allclose(losses["experts"], losses["one device"], rtol=1e-3) and losses["experts"][-1] < losses["experts"][0]
