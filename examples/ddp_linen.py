"""Data parallelism for a Linen model with dropout and BatchNorm: the module and its variables go in together.

    python examples/ddp_linen.py

Shows `ax.DDP(module, mesh, params=variables)`, a loss with metrics, train and eval mode, and evaluation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import axonml_jax as ax

ax.fake_devices(4)  # simulated; leave it out on real devices


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(32)(x))
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(3)(x)


def loss_fn(model, batch):
    # Called like an NNX module: variables and dropout keys are inside.
    logits = model(batch["x"], train=model.is_training)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).astype(jnp.float32).mean()}


rng = np.random.default_rng(0)
x = rng.normal(size=(256, 8)).astype(np.float32)
batch = {"x": x, "y": x[:, :3].argmax(1).astype(np.int32)}

module = Net()
variables = module.init(jax.random.key(0), x[:1], train=False)
ddp = ax.DDP(module, ax.make_mesh(data=-1), params=variables)
trainer = ddp.trainer(optax.adamw(1e-2), loss_fn)
for step in range(60):
    metrics = trainer.step(batch)
    if step % 20 == 0:
        ax.print0(f"step {step:2d}  loss {float(metrics['loss']):.4f}  accuracy {float(metrics['accuracy']):.2%}")

evaluated = trainer.evaluate(batch)  # dropout off, running averages used
ax.print0(f"evaluated: loss {float(evaluated['loss']):.4f}  accuracy {float(evaluated['accuracy']):.2%}")

logits = ddp.module(x, train=False)  # the Linen module, bound to the trained parameters
assert np.isclose(float(evaluated["accuracy"]), (np.asarray(logits).argmax(-1) == batch["y"]).mean())
assert float(evaluated["accuracy"]) > 0.9
