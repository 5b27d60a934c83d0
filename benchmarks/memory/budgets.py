"""Steps within bytes: what `memory=` compiles to, beside no recomputation and beside recomputing everything.

Run: python benchmarks/memory/budgets.py [--models gpt scan mlp] [--plans ddp fsdp pipe] [--shares 0.25 0.5 0.75]. A budget is
that share of the way from the peak of remat="full" to that of none, on 2 simulated devices. Shows the compiled peak, FLOPs
of products on the traced program, and how far three losses are from those of no recomputation; ends with an error where a
peak is above its budget or a loss differs.
"""

import argparse
import sys
import time
from pathlib import Path

import axonml_jax as ax

ax.fake_devices(2)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.program.program import read_program
from axonml_jax.program.recompute import work_of
from axonml_jax.training.budget import peak_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

SIZES = {"vocab_size": 128, "num_layers": 4, "hidden_size": 64, "num_heads": 4, "max_length": 64}


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(128, 128, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return x


def transformer(**more):
    tokens = np.random.default_rng(0).integers(0, 128, (16, 65), np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    loss_fn = lambda model, batch: optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"]), batch["targets"]
    ).mean()  # fmt: skip
    return lambda: Transformer(TransformerConfig(**SIZES, **more), rngs=nnx.Rngs(0)), loss_fn, batch


def mlp():
    batch = {"x": np.random.default_rng(0).normal(size=(2048, 128)).astype(np.float32)}
    return lambda: Mlp(nnx.Rngs(0)), lambda model, batch: (model(batch["x"]) ** 2).mean(), batch


MODELS = {"gpt": transformer, "scan": lambda: transformer(scan_layers=True), "mlp": mlp}
PLANS = {
    "ddp": lambda model, **own: ax.DDP(model, ax.make_mesh(data=2), **own),
    "fsdp": lambda model, **own: ax.FSDP(model, ax.make_mesh(fsdp=2), **own),
    "pipe": lambda model, **own: ax.Pipeline(model, ax.make_mesh(pipe=2), num_microbatches=4, **own),
}


def measured(model, plan, **own):
    """The compiled peak, FLOPs of products, three losses, seconds of tracing and choosing beside compiling, what was chosen."""
    make, loss_fn, batch = MODELS[model]()
    trainer = PLANS[plan](make(), **own).trainer(optax.adam(1e-3), loss_fn)
    begun = time.process_time()
    traced = trainer.trace(batch)
    peak, seconds = peak_of(traced.lower().compile()), time.process_time() - begun
    flops = sum(map(work_of, read_program(traced.jaxpr).equations))
    return peak, flops, [float(trainer.step(batch)["loss"]) for _ in range(3)], seconds, trainer.recompute


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    args = parser.parse_args()
    print(
        f"jax {jax.__version__}\nmodel  plan  budget kB  peak kB  of full's FLOPs  of none's FLOPs  losses differ  processor s"
    )
    for model, plan in ((model, plan) for model in args.models for plan in args.plans):
        none, full = measured(model, plan), measured(model, plan, remat="full")
        for share in args.shares:
            budget = int(full[0] + share * (none[0] - full[0]))
            peak, flops, losses, seconds, _ = measured(model, plan, memory=budget)
            differ = max(abs(a - b) / abs(b) for a, b in zip(losses, none[2], strict=True))
            bytes_ = f"{budget / 1e3:,.0f}  {peak / 1e3:,.0f}"
            print(
                f"{model}  {plan}  {bytes_}  {flops / full[1]:.3f}  {flops / none[1]:.3f}  {differ:.1e}  {seconds:.1f}",
                flush=True,
            )
            assert peak <= budget and differ < 1e-5, (model, plan, budget, peak, differ)


if __name__ == "__main__":
    main()
