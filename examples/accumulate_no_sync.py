"""Gradient accumulation, by hand with `no_sync()` and by the plan: one reduction per update, the same result.

    python examples/accumulate_no_sync.py

Shows `no_sync`, `sync_gradients`, `accumulate=` and, by the ledger, that accumulating sends nothing more.
"""

import jax
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax

ax.fake_devices(4)  # simulated; leave it out on real devices


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def new_model():
    return nnx.Linear(16, 1, rngs=nnx.Rngs(0))


rng = np.random.default_rng(0)
x = rng.normal(size=(4, 32, 16)).astype(np.float32)  # four microbatches of 32 examples
y = x.sum(-1, keepdims=True)
mesh = ax.make_mesh(data=-1)

# By hand: within no_sync() every rank keeps its own gradients (dim 0 = rank); they are averaged once, at the end.
ddp = ax.DDP(new_model(), mesh)
value_and_grad = ddp.value_and_grad(loss_fn)
with ddp.no_sync():
    grads = [value_and_grad({"x": x[i], "y": y[i]})[1] for i in range(4)]
mean = ddp.sync_gradients(jax.tree.map(lambda *g: sum(g) / 4, *grads))

# The whole batch at once gives the same gradient.
whole = {"x": x.reshape(128, 16), "y": y.reshape(128, 1)}
_, expected = ddp.value_and_grad(loss_fn)(whole)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), mean, expected)

# Fused: four microbatches per rank and update, and not one byte more on the wire.
plain = ax.DDP(new_model(), mesh).trainer(optax.sgd(0.1), loss_fn)
accumulating = ax.DDP(new_model(), mesh).trainer(optax.sgd(0.1), loss_fn, accumulate=4)
report = ax.explain(accumulating, whole)
print(report)
assert report.total_bytes == ax.explain(plain, whole).total_bytes
losses = [(float(plain.step(whole)["loss"]), float(accumulating.step(whole)["loss"])) for _ in range(5)]
assert np.allclose(*zip(*losses, strict=True), rtol=1e-4)
assert losses[-1][0] < losses[0][0]
