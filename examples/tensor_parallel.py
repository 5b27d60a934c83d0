"""A transformer block split over 4 tensor ranks, its batch over 2 data ranks: same losses as on one device.

    python examples/tensor_parallel.py

Shows that outside a mesh the layers are plain Flax layers with the same parameters, so that one definition serves both.
"""

import axonml_jax as ax

ax.fake_devices(8)

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Net(nnx.Module):
    """One block of attention and MLP between a tied vocabulary."""

    def __init__(self, rngs):
        self.embed = ax.VocabParallelEmbedding(32, 16, rngs=rngs)
        self.norms = nnx.List([ax.ParallelLayerNorm(16, rngs=rngs) for _ in range(2)])
        self.attention = ax.TensorParallelAttention(16, 4, rngs=rngs)
        self.mlp = ax.ParallelMLP(16, 64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.embed.attend(x)


def loss_fn(model, batch):
    # Logits are split over the vocabulary, and the loss never has them whole.
    return jnp.mean(ax.vocab_parallel_cross_entropy(model(batch[:, :-1]), batch[:, 1:]))


def losses(mesh):
    model = ax.parallelize(lambda: Net(nnx.Rngs(0)), mesh)
    trainer = model.trainer(optax.adamw(1e-2), loss_fn, max_grad_norm=1.0)
    batch = jax.random.randint(jax.random.key(1), (8, 13), 0, 32)
    held = {len(leaf.sharding.spec) > 0 for leaf in jax.tree.leaves(model.variables.params)}
    return [float(trainer.step(batch)["loss"]) for _ in range(10)], held


split, held = losses(ax.make_mesh(data=2, tensor=4))
whole, _ = losses(ax.make_mesh(data=1, devices=jax.devices()[:1]))
print("split over 4:", split[-1], "one device:", whole[-1])
assert held == {True, False}  # weights are split, norms are not
assert all(abs(a - b) < 1e-4 for a, b in zip(split, whole, strict=True)) and split[-1] < split[0]
