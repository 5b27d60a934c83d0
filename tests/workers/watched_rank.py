"""One process of a small training that is watched: `python watched_rank.py slow-data`: rank 1 is slow to draw its batches."""

import sys
import time

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax

STEPS, PAUSE = 120, 0.04


def loss_fn(model, batch):
    return jnp.mean((model(batch) - jnp.sum(batch, 1, keepdims=True)) ** 2)


def slowly(batches, seconds):
    for batch in batches:
        time.sleep(seconds)
        yield batch


def main(kind):
    world = ax.init(timeout=60)
    model = ax.DDP(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), ax.make_mesh(data=-1))
    trainer = model.trainer(optax.adam(0.01), loss_fn)
    rows = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    loader = ax.create_dataloader(rows, 8, model.mesh, seed=1)
    behind = kind == "slow-data" and world.rank == 1
    with ax.Watchdog(120) as watchdog:
        # The pause stands for a step's work, which all have alike.
        batches = watchdog.drawing(slowly(loader, 1.5 * PAUSE if behind else 0.0))
        for step, batch in zip(range(1, STEPS + 1), batches, strict=False):
            watchdog.began(step, trainer.step(batch)["loss"])
            time.sleep(0.0 if behind else PAUSE / 4)
        ax.print0(f"slowest={watchdog.slowest()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
