"""Step time under context parallelism: each method on two simulated devices against one device with the whole sequence.

    PYTHONPATH=. python benchmarks/speed/context_time.py --length 8192 --rounds 7
    PYTHONPATH=. taskset -c 0 python benchmarks/speed/context_time.py --length 8192 --rounds 7   # the same work on one core

Sides take turns; the ratio of medians with its 95% interval. One device uses all cores that the process has, two share them: 1
is what splitting costs nothing. Zigzag and contiguous show what the balance of causal work is worth.
"""

import argparse

import axonml_jax as ax

ax.fake_devices(2)

import jax
import numpy as np
import optax
from flax import nnx

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from benchmarks.paired import alternate, ratio


def trainer_of(plan, config, devices):
    """A trainer on the first so many devices, along context."""
    mesh = ax.make_mesh(data=1, context=devices, devices=jax.devices()[:devices])
    model = ax.parallelize(Transformer(config, rngs=nnx.Rngs(0)), mesh, plan)
    return model.trainer(optax.adamw(1e-3), loss)


def loss(model, batch):
    return ax.WeightedMean(*model.loss(batch["tokens"], batch["targets"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    config = TransformerConfig(
        vocab_size=512,
        num_layers=given.layers,
        hidden_size=given.hidden,
        num_heads=given.hidden // 64,
        max_length=given.length,
    )
    rows = np.random.default_rng(0).integers(0, 512, (1, given.length + 1)).astype(np.int32)
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    plans = {"one device": (ax.Plan(), 1)}
    plans |= {method: (ax.Plan(context=ax.Context(method=method)), 2) for method in ("gather", "ulysses", "ring")}
    plans["ring, contiguous"] = ax.Plan(context=ax.Context(method="ring", order="contiguous")), 2
    trainers = {name: trainer_of(plan, config, devices) for name, (plan, devices) in plans.items()}
    losses = {name: float(trainer.step(batch)["loss"]) for name, trainer in trainers.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    sides = {name: lambda own=own: jax.block_until_ready(own.step(batch)["loss"]) for name, own in trainers.items()}
    times = alternate(sides, given.rounds)
    for name, own in times.items():
        print(f"{name:18} {np.median(own):6.2f} s  {ratio(own, times['one device'])} of one device", flush=True)


if __name__ == "__main__":
    main()
