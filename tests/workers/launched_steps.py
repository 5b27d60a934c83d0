"""A launched process: `python launched_steps.py OUTCOME` makes three DDP steps and prints what it saw; or fails on the way."""

import json
import sys

import jax
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax

jax.config.update("jax_enable_x64", True)

ROWS = np.random.default_rng(0).normal(size=(3, 8, 4))
TX = optax.sgd(0.1)


def loss_fn(model, batch):
    return ((model(batch) - batch.sum(1, keepdims=True)) ** 2).mean()


def model():
    return nnx.Linear(4, 1, rngs=nnx.Rngs(0), param_dtype=np.float64)


def main(outcome):
    world = ax.init(timeout=120)
    trainer = ax.DDP(model(), world).trainer(TX, loss_fn)
    losses = [float(trainer.step(batch)["loss"]) for batch in ROWS]
    seen = {"losses": losses, "rank": world.rank, "size": world.world_size, "local": world.local_rank}
    print(json.dumps(seen | {"devices": len(jax.local_devices())}), flush=True)
    if world.rank == 1 and outcome == "raise":
        raise ValueError("boom")
    if outcome != "end":
        while True:
            trainer.step(ROWS[0])


if __name__ == "__main__":
    main(sys.argv[1])
