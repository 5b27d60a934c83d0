"""Feed-forward networks: the transformer's inner part and a plain multi-layer perceptron."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import jax
from flax import nnx

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.layers import make_linear


class FeedForward(nnx.Module):
    """The transformer's feed-forward part: down(silu(gate(x)) * up(x)) for "swiglu", down(gelu(up(x))) for "gelu".

    Args:
      config: sizes, activation and dtypes.
      rngs: stream `params`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        size, inner = config.hidden_size, config.mlp_size
        self.gate = make_linear(config, size, inner, rngs=rngs) if config.activation == "swiglu" else None
        self.up = make_linear(config, size, inner, rngs=rngs)
        self.down = make_linear(config, inner, size, residual=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., h] -> [..., h] (h hidden size)."""
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x), approximate=True))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class MLP(nnx.Module):
    """A multi-layer perceptron: linear layers with an activation between them (none after the last).

    >>> MLP([784, 128, 10], rngs=nnx.Rngs(0))(jax.numpy.ones((32, 784))).shape
    (32, 10)

    Args:
      sizes: width of the input, of every hidden layer and of the output.
      activation: element-wise function.
      rngs: stream `params`.

    Raises:
      ValueError: fewer than two sizes, or a size below 1.
    """

    def __init__(self, sizes: Sequence[int], *, activation: Callable = jax.nn.relu, rngs: nnx.Rngs):
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"MLP sizes {list(sizes)}: give at least an input and an output width, each at least 1")
        self.activation = activation
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., sizes[0]] -> [..., sizes[-1]]."""
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)
