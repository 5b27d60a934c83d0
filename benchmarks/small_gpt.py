"""What the step benchmarks share: a small GPT-2-like model, its batch and loss, and the step written by hand.

Imported by the other benchmarks; needs jax, flax and optax only.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.layers.losses import vocab_parallel_cross_entropy
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer

LEARNING_RATE = 1e-3


def config(layers: int, width: int, length: int = 128, *, tied: bool = True) -> TransformerConfig:
    """GPT-2's architecture over bytes, with heads of 32; `tied`: the embedding is the head too."""
    style = {"norm": "layernorm", "activation": "gelu", "position": "learned", "tie_embeddings": tied, "use_bias": True}
    sizes = {"num_layers": layers, "hidden_size": width, "num_heads": width // 32, "max_length": length}
    return TransformerConfig(vocab_size=256, **sizes, **style)


def make_model(shape: TransformerConfig) -> Transformer:
    """The model with the same parameters every time."""
    return Transformer(shape, rngs=nnx.Rngs(0))


class FlaxBlock(nnx.Module):
    """A block of GPT-2 in Flax's own modules."""

    def __init__(self, shape: TransformerConfig, rngs: nnx.Rngs):
        width, own = shape.hidden_size, {"dtype": shape.dtype, "rngs": rngs}
        self.heads = shape.num_heads
        self.first, self.second = nnx.LayerNorm(width, **own), nnx.LayerNorm(width, **own)
        self.qkv, self.out = nnx.Linear(width, 3 * width, **own), nnx.Linear(width, width, **own)
        self.up, self.down = nnx.Linear(width, 4 * width, **own), nnx.Linear(4 * width, width, **own)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[b, s, h] -> [b, s, h]."""
        q, k, v = (each.reshape(*x.shape[:2], self.heads, -1) for each in jnp.split(self.qkv(self.first(x)), 3, -1))
        platform = "cudnn" if jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16 else None
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=platform)
        x = x + self.out(seen.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.second(x))))


class FlaxGPT(nnx.Module):
    """GPT-2 in Flax's own modules, as somebody else would write it."""

    def __init__(self, shape: TransformerConfig, rngs: nnx.Rngs):
        width, own = shape.hidden_size, {"dtype": shape.dtype, "rngs": rngs}
        self.words = nnx.Embed(shape.vocab_size, width, **own)
        self.places = nnx.Embed(shape.max_length, width, **own)
        self.blocks = nnx.List([FlaxBlock(shape, rngs) for _ in range(shape.num_layers)])
        self.norm = nnx.LayerNorm(width, **own)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Integers [b, s] -> logits [b, s, v]."""
        x = self.words(tokens) + self.places(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.words.attend(self.norm(x))


def flax_loss(model, batch) -> jax.Array:
    """The mean cross entropy of all positions, as optax has it."""
    logits = model(batch["tokens"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def make_batch(rows: int, shape: TransformerConfig) -> dict[str, np.ndarray]:
    """Random tokens [rows, length] and the tokens that follow them."""
    drawn = np.random.default_rng(0).integers(0, shape.vocab_size, size=(rows, shape.max_length + 1), dtype=np.int32)
    return {"tokens": drawn[:, :-1].copy(), "targets": drawn[:, 1:].copy()}


def loss_fn(model, batch) -> jax.Array:
    """The mean cross entropy of all positions."""
    return vocab_parallel_cross_entropy(model(batch["tokens"]), batch["targets"]).mean()


def optimizer() -> optax.GradientTransformation:
    """AdamW with PyTorch's defaults."""
    return optax.adamw(LEARNING_RATE, weight_decay=0.01)


def hand_written(model: nnx.Module, mesh: Mesh | None, *, auto: bool = False, compute=None):
    """The training step as one would write it without this library.

    Args:
      model: the NNX module.
      mesh: its devices, on one axis "data".
      auto: leave partitioning to `jax.jit` (batch split, parameters replicated) instead of `jax.shard_map`.
      compute: dtype the model computes in; None: that of the parameters.

    Returns:
      `(state, step)`: `step(state, batch) -> (state, metrics)` compiled, with donated, committed state. Like any
      training state that can be resumed, it carries the step number and the random key.
    """
    tx, (graphdef, params) = optimizer(), nnx.split(model, nnx.Param)
    mapped = mesh is not None and not auto
    # Dividing the loss instead of the summed gradients (`pmean` of them) saves one multiplication per leaf.
    parts = mesh.size if mapped else 1
    total = (lambda x: jax.lax.psum(x, "data")) if mapped else (lambda x: x)

    def step(state, batch):
        number, params, opt_state, key = state

        def loss_of(params):
            read = params if compute is None else jax.tree.map(lambda x: x.astype(compute), params)
            loss = loss_fn(nnx.merge(graphdef, read), batch)
            return loss / parts, loss

        (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        loss, grads = total(loss) / parts, total(grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return (number + 1, optax.apply_updates(params, updates), opt_state, key), metrics

    if mapped:
        whole, split = PartitionSpec(), PartitionSpec("data")
        step = jax.shard_map(step, mesh=mesh, in_specs=(whole, split), out_specs=whole, check_vma=False)
    state = (jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(0))
    everywhere = jax.devices()[0] if mesh is None else NamedSharding(mesh, PartitionSpec())
    state = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(jax.device_put(state, everywhere))
    return state, jax.jit(step, donate_argnums=0)


class Stepping:
    """A training run as a call: one step (or `steps` of them) on the same batch, waited for."""

    def __init__(self, state, step, batch, steps: int = 1):
        self.state, self.step, self.batch, self.steps, self.metrics = state, step, batch, steps, {}

    def __call__(self):
        """Run and wait."""
        for _ in range(self.steps):
            self.state, self.metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, self.metrics))
