"""How many products XLA must find kernels for before a GPU's first step: counted on CPU, in steps that are lowered for CUDA.

    python benchmarks/speed/gpu_products.py

A line for each variant of a small transformer: products, those of different shapes, lines of the lowered step, processor time
to trace and lower it. Needs no GPU.
"""

import re
import time

import axonml_jax as ax

ax.fake_devices(1)

import numpy as np
import optax
from flax import nnx

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer

SIZES = {
    "vocab_size": 512,
    "num_layers": 8,
    "hidden_size": 128,
    "num_heads": 4,
    "max_length": 256,
    "mlp_hidden_size": 512,
}
VARIANTS = {
    "bf16": {},
    "a window of 64": {"window": 64},
    "fp8": {"precision": "fp8"},
    "recomputed": {"remat": "full"},
    "fp8, recomputed": {"precision": "fp8", "remat": "full"},
    "fp8, recomputed, scan_layers": {"precision": "fp8", "remat": "full", "scan_layers": True},
}


def lowered(precision="bf16", remat=None, **options):
    """The text of a step on one GPU."""
    model = Transformer(TransformerConfig(**SIZES | options), rngs=nnx.Rngs(0))
    plan = ax.Plan(precision=precision) if remat is None else ax.Plan(precision=precision, remat=remat)
    loss_fn = lambda model, batch: ax.WeightedMean(*model.loss(batch["x"], batch["y"]))
    trainer = ax.parallelize(model, ax.make_mesh(data=1), plan).trainer(optax.adamw(1e-3), loss_fn)
    batch = {name: np.zeros((4, 256), np.int32) for name in "xy"}
    return trainer.train_step.trace(trainer.state, batch).lower(lowering_platforms=("cuda",)).as_text()


def main():
    print(f"{'':32s}{'products':>10s}{'shapes':>8s}{'lines':>8s}{'s':>6s}")
    for name, options in VARIANTS.items():
        start = time.process_time()
        text = lowered(**options)
        products = re.findall(r"stablehlo\.dot_general[^\n]* : (\([^\n]*)", text)
        shapes = {re.sub(r" loc.*", "", each) for each in products}
        seconds = time.process_time() - start
        print(f"{name:32s}{len(products):10,d}{len(shapes):8,d}{text.count(chr(10)):8,d}{seconds:6.1f}")


if __name__ == "__main__":
    main()
