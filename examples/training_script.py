"""A training script from text to exported weights. The page "Your own training script" explains it part by part.

    python examples/training_script.py                                  # 4 simulated devices
    python examples/training_script.py --steps 60                       # goes on after its last checkpoint
    axonml-jax launch --nproc-per-node 2 examples/training_script.py    # two processes with a device each

Shows data, model, schedule, weight decay by a mask, evaluation, checkpoints, resuming, generation and export.
"""

import argparse
import os
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax
from axonml_jax.data.sources import ByteWindows, load_text
from axonml_jax.models.config import GPT2, TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.models.weights import write_pretrained

LENGTH, BATCH = 64, 16
CONFIG = TransformerConfig(**GPT2 | {"vocab_size": 256, "max_length": 128}, num_layers=2, hidden_size=64, num_heads=4)


def loss_fn(model, batch):
    return ax.WeightedMean(*model.loss(batch["tokens"], batch["targets"]))


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def main():
    parser = argparse.ArgumentParser(description="Train a small language model.")
    parser.add_argument("--text", help="a file or folder; without it, the source of Python's standard library")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("run"))
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        ax.fake_devices(4)  # leave it out on real devices
    world = ax.init()
    mesh = ax.make_mesh(fsdp=-1)  # all devices of all processes
    text = load_text(options.text, max_bytes=300_000)
    train = ax.create_dataloader(ByteWindows(text.train, LENGTH), BATCH, mesh, seed=0)
    valid = ax.create_dataloader(ByteWindows(text.valid[:20_000], LENGTH), BATCH, mesh, shuffle=False, num_epochs=1)

    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup_steps=5, decay_steps=options.steps)
    tx = optax.adamw(schedule, weight_decay=0.1, mask=matrices)
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))  # or any Flax module of your own
    trainer = ax.FSDP(model, mesh).trainer(tx, loss_fn, max_grad_norm=1.0)

    with ax.CheckpointManager(options.out / "checkpoints", every=10, keep=2) as checkpoints:
        restored = checkpoints.restore(trainer, data=train)
        start = restored.step if restored else 0
        ax.print0(f"{world.world_size} ranks; starting after step {start} of {options.steps}")
        for step, batch in zip(range(start + 1, options.steps + 1), train, strict=False):
            metrics = trainer.step(batch)
            checkpoints.save(step, trainer, data=train)
            if step % 10 == 0 or step == options.steps:
                valid_loss = float(trainer.validate(valid)["loss"])
                ax.print0(f"step {step}: loss {float(metrics['loss']):.3f}, validation {valid_loss:.3f}")

    prompt = np.frombuffer(b"import ", np.uint8).astype(np.int32)[None]
    [written] = ax.generate(trainer.model, prompt, 40, jax.random.key(0), temperature=0.7)
    ax.print0(bytes(written.astype(np.uint8)).decode(errors="replace"))
    values = trainer.model.state_dict()  # every process: whole arrays
    if world.is_main_process:
        write_pretrained(options.out / "exported", CONFIG, values)  # transformers reads it
    assert restored or valid_loss < np.log(256)
    ax.shutdown()


if __name__ == "__main__":
    main()
