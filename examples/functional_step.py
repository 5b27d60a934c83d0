"""The functional way, for JAX people: a state, a compiled step, and nothing hidden in objects.

    python examples/functional_step.py

Shows `ax.make_train_step`, a loss with unequal weights (`ax.WeightedMean`), the plan as a value, and the lowered program.
"""

import numpy as np
import optax
from flax import nnx

import axonml_jax as ax

ax.fake_devices(8)  # simulated; leave it out on real devices


def loss_fn(model, batch):
    """A mean over real tokens: exact although every rank has another number of them."""
    errors = (model(batch["x"])[..., 0] - batch["y"]) ** 2
    return ax.WeightedMean((errors * batch["mask"]).sum(), batch["mask"].sum())


rng = np.random.default_rng(0)
x = rng.normal(size=(32, 4)).astype(np.float32)
batch = {"x": x, "y": x @ np.float32([1, -2, 3, 0.5]), "mask": (np.arange(32) < 21).astype(np.float32)}

plan = ax.Plan(
    mesh=ax.MeshShape(data=8),
    data=ax.Replicate(sync_strategy=ax.GradSyncStrategy.SYNCHRONOUS, bucket_size_mb=1),
    accumulate=2,
)
model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
state, step = ax.make_train_step(model, optax.adam(0.1), loss_fn, plan=plan, max_grad_norm=10.0)

text = step.lower(state, batch).as_text()
print(f"the lowered step has {text.count('stablehlo.all_reduce')} all_reduce operations")
losses = []
for _ in range(100):
    state, metrics = step(state, batch)  # the old state is donated
    losses.append(float(metrics["loss"]))
print(f"loss {losses[0]:.4f} -> {losses[-1]:.6f} after {int(state.step)} updates")

whole = ((x @ np.asarray(model.kernel) + np.asarray(model.bias))[:21, 0] - batch["y"][:21]) ** 2
assert np.isclose(losses[0], whole.mean(), rtol=1e-5)
assert losses[-1] < 0.01
