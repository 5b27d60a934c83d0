"""What the memory benchmarks measure: deep models as shapes alone, their losses and batches, and their residual bytes.

Imported by the other benchmarks; nothing here allocates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.compat.jaxpr import trace
from axonml_jax.layers.losses import vocab_parallel_cross_entropy
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.program.program import forward, names_of, read_program


class Block(nnx.Module):
    """x + down(relu(up(x))): 8 w^2 parameters and 5 w biases at width w."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x)))


class MLP(nnx.Module):
    """Blocks in a Python loop."""

    def __init__(self, blocks: int, width: int, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(width, rngs) for _ in range(blocks)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class ScannedMLP(nnx.Module):
    """The same blocks with stacked parameters under a scan."""

    def __init__(self, blocks: int, width: int, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=blocks)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs):
            return Block(width, rngs)

        self.blocks = stacked(rngs)

    def __call__(self, x):
        graphdef, params = nnx.split(self.blocks)
        return jax.lax.scan(lambda x, p: (nnx.merge(graphdef, p)(x), None), x, params)[0]


@dataclass(frozen=True)
class Case:
    """A model as shapes.

    Attributes:
      model: its NNX module, of shapes.
      loss: `loss(model, batch)`.
      batch: `batch(rows)`: the shapes of a batch.
      rows: of the batch, per device.
      stacked: blocks whose parameters are stacked for a scan, of which one slice is a unit; 1 where none are.
    """

    model: nnx.Module
    loss: Callable
    batch: Callable[[int], Any]
    rows: int
    stacked: int = 1

    def residual_bytes(self) -> int:
        """Bytes that `jax.vjp` of one device's loss keeps beside weights, what is made of them alone, and the batch."""
        graphdef, params = nnx.split(self.model, nnx.Param)

        def kept(params, batch):
            _, vjp = jax.vjp(lambda p: self.loss(nnx.merge(graphdef, p), batch), params)
            return jax.tree.leaves(vjp)

        program = read_program(trace(kept, params, self.batch(self.rows)).jaxpr)
        inputs = set(program.inputs[len(jax.tree.leaves(params)) :])
        reached = lambda equation, operands: [any(operands)] * len(equation.outputs)
        active = forward(program, [number in inputs for number in program.inputs], reached, False)
        saved = {number for number in names_of(program.outputs) if active.get(number)} - inputs
        return sum(program.avals[number].size * program.avals[number].dtype.itemsize for number in saved)


def mlp(width: int = 1024, blocks: int = 16, rows: int = 128, scan: bool = False) -> Case:
    """16 blocks of width 1024: 134 M parameters, 512 MB in float32."""
    make = ScannedMLP if scan else MLP
    shape = lambda count: {name: jax.ShapeDtypeStruct((count, width), jnp.float32) for name in ("x", "y")}
    loss = lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    return Case(nnx.eval_shape(lambda: make(blocks, width, nnx.Rngs(0))), loss, shape, rows, blocks if scan else 1)


def gpt(layers: int = 12, width: int = 768, vocabulary: int = 50_257, length: int = 256, rows: int = 1) -> Case:
    """GPT-2 small, with its tied embedding, on shorter sequences."""
    style = {"norm": "layernorm", "activation": "gelu", "position": "learned", "tie_embeddings": True, "use_bias": True}
    sizes = {"num_layers": layers, "hidden_size": width, "num_heads": width // 64, "max_length": 1024}
    config = TransformerConfig(vocab_size=vocabulary, **sizes, **style)
    shape = lambda count: {name: jax.ShapeDtypeStruct((count, length), jnp.int32) for name in ("tokens", "targets")}
    loss = lambda model, batch: vocab_parallel_cross_entropy(model(batch["tokens"]), batch["targets"]).mean()
    return Case(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))), loss, shape, rows)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "mlp-scan": lambda: mlp(scan=True),
    "gpt": gpt,
    "gpt-bytes": lambda: gpt(vocabulary=256),
}
