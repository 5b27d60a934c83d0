"""Data parallelism for an NNX model, written as a PyTorch loop and as a fused step: both give the same parameters.

    python examples/ddp_nnx.py

Shows `ax.DDP`, `value_and_grad` with an optimizer of your own, `trainer.step`, and saving by name.
"""

import jax
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax

ax.fake_devices(8)  # simulated; leave it out on real devices


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(8, 64, use_bias=False, rngs=rngs)  # BatchNorm has one
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.head = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.hidden(x))))


def loss_fn(model, batch):  # of the whole batch, as on one device
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


rng = np.random.default_rng(0)
x = rng.normal(size=(64, 8)).astype(np.float32)
batch = {"x": x, "y": np.sin(x.sum(1, keepdims=True))}  # the global batch: DDP splits it over the devices
mesh = ax.make_mesh(data=-1)

# As in PyTorch: gradients arrive averaged, the optimizer is yours.
ddp = ax.DDP(Net(nnx.Rngs(0)), mesh)
tx = optax.adam(1e-2)
opt_state = tx.init(ddp.parameters())
update = jax.jit(tx.update)
for _ in range(20):
    loss, grads = ddp.value_and_grad(loss_fn)(batch)
    updates, opt_state = update(grads, opt_state, ddp.parameters())
    ddp.set_parameters(optax.apply_updates(ddp.parameters(), updates))

# The same as one compiled, donated step.
fused = ax.DDP(Net(nnx.Rngs(0)), mesh)
trainer = fused.trainer(optax.adam(1e-2), loss_fn)
first, *_, last = [float(trainer.step(batch)["loss"]) for _ in range(20)]
ax.print0(f"loss {first:.4f} -> {last:.4f} on {mesh.size} devices; the PyTorch-style loop: {float(loss):.4f}")

assert last < first / 2
for name, value in fused.state_dict().items():
    np.testing.assert_allclose(value, ddp.state_dict()[name], rtol=1e-3, atol=1e-4, err_msg=name)
