"""Finetune a GPT-2 that Hugging Face's `save_pretrained` has written, with frozen layers, under FSDP.

    python examples/finetune_pretrained.py [FOLDER]

Without a folder it makes a tiny one itself: nothing is downloaded. Shows that frozen parameters have no optimizer state and
stay as they were, and that the result goes back into files that `from_pretrained` reads.
"""

import sys
import tempfile

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax
from axonml_jax.models.config import GPT2, TransformerConfig
from axonml_jax.models.transformer import Transformer, cross_entropy
from axonml_jax.models.weights import pretrained, read_pretrained, write_pretrained

ax.fake_devices(4)


def loss_fn(model, tokens):
    return ax.WeightedMean(*cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]))


def make_one(folder):
    sizes = {"vocab_size": 64, "max_length": 16, "num_layers": 2, "hidden_size": 32, "num_heads": 4}
    config = TransformerConfig(**GPT2 | sizes)
    model = ax.DDP(Transformer(config, rngs=nnx.Rngs(0)), ax.make_mesh(data=4))
    write_pretrained(folder, config, model.state_dict())


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    if len(sys.argv) == 1:
        make_one(folder)
    model = pretrained(folder)
    last = model.config.num_layers - 1
    # The last block and the last norm train; the rest is read and never changed.
    fsdp = ax.FSDP(model, ax.make_mesh(fsdp=4), trainable=[f"^blocks/{last}/", "^norm/"])
    trainer = fsdp.trainer(optax.adamw(3e-3), loss_fn)
    length = min(model.config.max_length, 16)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (8, length)).astype(np.int32)
    losses = [float(trainer.step(tokens)["loss"]) for _ in range(8)]
    print("loss", *(f"{loss:.3f}" for loss in losses))

    before, after = read_pretrained(folder)[1], fsdp.state_dict()
    changed = {name for name in after if not np.array_equal(before[name], after[name])}
    trained = {name for name in after if name.startswith((f"blocks/{last}/", "norm/"))}
    moments = {name for name in trainer.checkpoint_leaves() if name.startswith("optimizer/0/mu/")}
    assert changed == trained == {name.removeprefix("optimizer/0/mu/") for name in moments}
    write_pretrained(f"{folder}/finetuned", model.config, after)
    again = pretrained(f"{folder}/finetuned")
    assert jnp.allclose(again(tokens), fsdp.eval()(tokens), atol=1e-5)
    assert losses[-1] < losses[0]
    print(f"{len(trained)} of {len(after)} arrays trained; the result is in {folder}/finetuned")


if __name__ == "__main__":
    main()
