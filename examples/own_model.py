"""A model, a loss and data of one's own, trained by `axonml-jax train` as examples/own_model.yaml says.

    cd examples && axonml-jax train own_model.yaml --allow-imports own_model
    python examples/own_model.py    # the same, on 4 simulated devices, with a check of the outcome

Shows what a configuration names by class_path and init_args: a class, a function, a function that makes arrays, a callback.
"""

import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax


class Classifier(nnx.Module):
    def __init__(self, features: int, width: int, depth: int, classes: int, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(features, width, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.gelu(self.first(x))
        for block in self.blocks:
            x = x + nnx.gelu(block(x))
        return self.head(x)


def classify(model, batch, smoothing: float = 0.0):
    logits = model(batch["x"])
    wanted = optax.smooth_labels(jnp.eye(logits.shape[-1])[batch["label"]], smoothing)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    return optax.softmax_cross_entropy(logits, wanted).mean(), {"accuracy": accuracy}


def spirals(samples: int, seed: int = 0):
    """Points on two spirals: arrays with a row for every sample."""
    rng = np.random.default_rng(seed)
    label, t = rng.integers(0, 2, samples), rng.uniform(0.5, 6.0, samples)
    angle = t + np.pi * label
    x = np.stack([t * np.cos(angle), t * np.sin(angle)], axis=1) / 6 + rng.normal(0, 0.01, (samples, 2))
    return {"x": x.astype(np.float32), "label": label.astype(np.int32)}


class BestAccuracy(ax.Callback):
    """Says when a validation is better than all before."""

    def __init__(self):
        self.best = 0.0

    def on_eval(self, event):
        if event.metrics["accuracy"] > self.best and event.is_main_process:
            print(f"step {event.step}: best accuracy so far, {event.metrics['accuracy']:.3f}")
        self.best = max(self.best, event.metrics["accuracy"])


def main():
    from axonml_jax.__main__ import main as axonml_jax

    with tempfile.TemporaryDirectory() as folder:
        config = Path(__file__).with_suffix(".yaml")
        flags = ["--allow-imports", "own_model", "--output.dir", folder, "--output.plot", "false"]
        status = axonml_jax(["train", str(config), *flags])
        lines = Path(folder, "own_model", "metrics.jsonl").read_text().splitlines()
        return status, json.loads(lines[-1])


if __name__ == "__main__":
    status, last = main()
    assert status == 0 and last["valid_accuracy"] > 0.9, last
