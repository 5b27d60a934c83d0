"""A small image classifier of `ParallelConv` layers over a 2 x 2 x 2 grid of row, col and depth (AxoNN): as on one device.

    python examples/tensor_3d_conv.py

Shows that every kernel is split over all eight devices, the batch over depth, and that losses equal those of one device.
The images are MNIST-like: ten noisy patterns of 8 x 8, made here.
"""

import axonml_jax as ax

ax.fake_devices(8)

import jax
import numpy as np
import optax
from flax import nnx


class Net(nnx.Module):
    """Two convolutions and two linear layers, alternately transposed."""

    def __init__(self, rngs):
        self.first = ax.ParallelConv(4, 16, (3, 3), strides=2, rngs=rngs)
        self.second = ax.ParallelConv(16, 32, (3, 3), strides=2, transpose=True, rngs=rngs)
        self.hidden = ax.ParallelLinear(2 * 2 * 32, 64, gather_output=False, rngs=rngs)
        self.last = ax.ParallelLinear(64, 10, transpose=True, scatter_input=False, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.second(nnx.relu(self.first(images))))
        return self.last(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def batches(count, rng):
    patterns = rng.normal(size=(10, 8, 8, 4))
    for _ in range(count):
        label = rng.integers(0, 10, 64)
        image = patterns[label] + rng.normal(size=(64, 8, 8, 4))
        yield {"image": image.astype(np.float32), "label": label.astype(np.int32)}


def train(mesh):
    model = ax.parallelize(lambda: Net(nnx.Rngs(0)), mesh)
    trainer = model.trainer(optax.adam(3e-3), loss_fn)
    records = [trainer.step(batch) for batch in batches(40, np.random.default_rng(0))]
    kernel = model.variables.params["second"]["kernel"]
    return [float(r["loss"]) for r in records], float(records[-1]["accuracy"]), kernel


losses, accuracy, kernel = train(ax.make_mesh(data=1, row=2, col=2, depth=2))
alone, _, whole = train(ax.make_mesh(data=1, devices=jax.devices()[:1]))
held = kernel.addressable_shards[0].data.size / kernel.size
print(
    f"loss {losses[0]:.3f} -> {losses[-1]:.3f} (one device {alone[-1]:.3f}), accuracy {accuracy:.2f}, a device holds {held}"
)
assert held == 1 / 8 and accuracy > 0.9
assert all(abs(a - b) < 1e-3 for a, b in zip(losses, alone, strict=True))
