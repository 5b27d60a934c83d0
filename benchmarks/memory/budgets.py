"""Steps within bytes: what `memory=` compiles to, beside no recomputation and beside recomputing everything.

Run: python benchmarks/memory/budgets.py [--models gpt llama ...] [--plans ddp fsdp pipe] [--budgets 12]. Budgets lie evenly
from the peak of remat="full" to that of none, on 2 simulated devices. Shows the compiled peak, FLOPs of products on the traced
program, and how far three losses and what parameters moved by (plain SGD: sums of gradients) are from those of no
recomputation; ends with an error where a peak is above its budget or a number differs. `qwen` is Tunix's model as it is
published (google-tunix must be installed).
"""

import argparse
import dataclasses
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

from axonml_jax.base import named_leaves
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.program.program import read_program
from axonml_jax.program.recompute import work_of
from axonml_jax.training.budget import peak_of

FOLDER = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(FOLDER), str(FOLDER / "speed"), str(FOLDER / "truth")]  # what all folders share, and others' models

from build_models import UNet

SIZES = {"vocab_size": 128, "num_layers": 4, "hidden_size": 64, "num_heads": 4, "max_length": 64}


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(128, 128, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return x


class EncoderBlock(nnx.Module):
    def __init__(self, width, rngs):
        self.norm, self.mlp_norm = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class ViT(nnx.Module):
    """Patches of 4 x 4 pixels of images of 32 x 32, Flax's own attention."""

    def __init__(self, rngs, width=64, depth=4):
        self.embed = nnx.Conv(3, width, (4, 4), strides=4, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((64, width)))
        self.blocks = nnx.List([EncoderBlock(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, image):
        x = self.embed(image).reshape(image.shape[0], 64, -1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def transformer(**more):
    tokens = np.random.default_rng(0).integers(0, 128, (16, 65), np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    loss_fn = lambda model, batch: optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"]), batch["targets"]
    ).mean()  # fmt: skip
    return lambda: Transformer(TransformerConfig(**SIZES, **more), rngs=nnx.Rngs(0)), loss_fn, batch


def experts():
    return transformer(experts=ExpertsConfig(num_experts=4, top_k=2, inner_size=64))


def mlp():
    batch = {"x": np.random.default_rng(0).normal(size=(2048, 128)).astype(np.float32)}
    return lambda: Mlp(nnx.Rngs(0)), lambda model, batch: (model(batch["x"]) ** 2).mean(), batch


def vit():
    draws = np.random.default_rng(0)
    batch = {"x": draws.normal(size=(16, 32, 32, 3)).astype(np.float32), "y": draws.integers(0, 10, 16, np.int32)}
    loss = lambda model, batch: optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()
    return lambda: ViT(nnx.Rngs(0)), loss, batch


def unet():
    draws = np.random.default_rng(0)
    numbers = lambda *shape: draws.normal(size=shape).astype(np.float32)
    batch = {"x": numbers(16, 16, 16, 3), "t": numbers(16), "y": numbers(16, 16, 16, 3)}
    loss = lambda model, batch: jnp.mean((model(batch["x"], batch["t"]) - batch["y"]) ** 2)
    return lambda: UNet((16, 32, 32), 2, nnx.Rngs(0)), loss, batch


def qwen():
    from foreign import tunix

    file = tunix.model_file("qwen3")
    sizes = {**tunix.SIZES, **tunix.TYPED, "num_layers": 4, "embed_dim": 64, "hidden_dim": 256, "head_dim": 16}
    config = file.ModelConfig(**sizes, use_tied_embedding=True, dtype=jnp.float32, param_dtype=jnp.float32)
    made = tunix.made(file.Qwen3(config, rngs=nnx.Rngs(0)), tunix.RULES)
    ids, length = np.random.default_rng(0).integers(0, tunix.VOCABULARY, (2, 16, 64), np.int32), 64
    mask = np.broadcast_to(np.tril(np.ones((length, length), bool)), (16, length, length))
    places = np.broadcast_to(np.arange(length, dtype=np.int32), (16, length))
    batch = {"ids": ids[0], "labels": ids[1], "places": places, "mask": mask}
    return lambda: nnx.clone(made.model), made.loss_fn, batch


MODELS = {
    "gpt": transformer,
    "llama": lambda: transformer(scan_layers=True),
    "moe": experts,
    "vit": vit,
    "unet": unet,
    "qwen": qwen,
    "mlp": mlp,
}
PLANS = {
    "ddp": lambda model, **own: ax.DDP(model, ax.make_mesh(data=2), **own),
    "fsdp": lambda model, **own: ax.FSDP(model, ax.make_mesh(fsdp=2), **own),
    "pipe": lambda model, **own: ax.Pipeline(model, ax.make_mesh(pipe=2), num_microbatches=4, **own),
}


@dataclasses.dataclass
class Measured:
    """Of one step: the compiled peak, FLOPs of products, losses, how far parameters moved, processor seconds to build it."""

    peak: int
    flops: float
    losses: list[float]
    moved: np.ndarray
    seconds: float

    def apart(self, other: "Measured") -> float:
        """The largest difference of a loss from another's, and that of all that parameters moved by, over its norm."""
        losses = [abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True)]
        return max(*losses, float(np.linalg.norm(self.moved - other.moved) / np.linalg.norm(other.moved)))


def measured(model, plan, **own):
    """A model under a plan, three steps."""
    make, loss_fn, batch = MODELS[model]()
    trainer = PLANS[plan](make(), **own).trainer(optax.sgd(0.05), loss_fn)
    begun = time.process_time()
    traced = trainer.trace(batch)
    peak, seconds = peak_of(traced.lower().compile()), time.process_time() - begun
    flops = sum(map(work_of, read_program(traced.jaxpr).equations))
    before = _parameters(trainer)
    losses = [float(trainer.step(batch)["loss"]) for _ in range(3)]
    return Measured(peak, flops, losses, _parameters(trainer) - before, seconds)


def _parameters(trainer):
    leaves = named_leaves(trainer.model.parameters())
    return np.concatenate([np.asarray(leaves[name], np.float64).ravel() for name in sorted(leaves)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--budgets", type=int, default=12, help="for each model under each plan")
    args = parser.parse_args()
    print(f"jax {jax.__version__}")
    print("model  plan  budget kB  peak kB  of full's FLOPs  of none's FLOPs  differ  processor s")
    above: list[str] = []
    for model, plan in ((model, plan) for model in args.models for plan in args.plans):
        try:
            none, full = measured(model, plan), measured(model, plan, remat="full")
        except ValueError as refused:
            print(f"{model}  {plan}  refused: {refused}", flush=True)
            continue
        for budget in np.linspace(full.peak, max(full.peak, none.peak), args.budgets).astype(int).tolist():
            found = measured(model, plan, memory=budget)
            flops, differ = f"{found.flops / full.flops:.3f}  {found.flops / none.flops:.3f}", found.apart(none)
            line = f"{model}  {plan}  {budget / 1e3:,.0f}  {found.peak / 1e3:,.0f}  {flops}  {differ:.1e}  {found.seconds:.1f}"
            wrong = found.peak > budget or not differ < 1e-4
            above += [line] * wrong
            print(line, "  WRONG" * wrong, flush=True)
    sys.exit("\n".join(above) or None)


if __name__ == "__main__":
    main()
