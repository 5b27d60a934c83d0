"""A training step of a small transformer, all of it trained, with LoRA, and with LoRA on int8: seconds, operations, memory.

Run: python benchmarks/speed/lora_step.py
Shows: on one CPU device, FLOPs and bytes as the compiler counts them, and the median of six steps in seconds of processor time.
"""

import time

import jax
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer

CONFIG = TransformerConfig(
    vocab_size=512, num_layers=4, hidden_size=512, num_heads=8, max_length=256, mlp_hidden_size=1408
)
TARGETS = ["attention/.*kernel$", "mlp/.*kernel$"]


def loss_fn(model, batch):
    return ax.WeightedMean(*model.loss(**batch))


def measured(model):
    """Seconds of a step, its FLOPs, bytes of its arguments and temporaries, and parameters that train."""
    drawn = np.random.default_rng(0).integers(0, 512, (4, 257)).astype(np.int32)
    batch = {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}
    parallel = ax.DDP(model, ax.make_mesh(data=1, devices=jax.devices()[:1]))
    trainer = parallel.trainer(optax.adamw(1e-3), loss_fn)
    compiled = trainer.train_step.lower(trainer.state, batch).compile()
    seconds = []
    for _ in range(7):
        start = time.process_time()
        trainer.step(batch)
        jax.block_until_ready(trainer.state)
        seconds.append(time.process_time() - start)
    memory = compiled.memory_analysis()
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    trained = sum(leaf.size for leaf in jax.tree.leaves(parallel.parameters()))
    return float(np.median(seconds[1:])), compiled.cost_analysis()["flops"], *sizes, trained


if __name__ == "__main__":
    make = lambda: Transformer(CONFIG, rngs=nnx.Rngs(0))
    adapted = lambda base: ax.lora(make(), rank=8, alpha=16, targets=TARGETS, base=base)
    for name, model in (("all", make()), ("lora", adapted(None)), ("int8", adapted("int8"))):
        seconds, flops, held, temporary, trained = measured(model)
        sizes = f"{held / 2**20:.0f} MiB of arguments, {temporary / 2**20:.0f} of temporaries"
        print(f"{name:<5} {trained:>10,} train  {seconds:.2f} s  {flops / 1e9:.1f} GFLOP  {sizes}")
