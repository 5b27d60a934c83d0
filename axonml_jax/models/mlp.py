"""A plain multi-layer perceptron, the same definition for one device and for every plan."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import jax
from flax import nnx

from axonml_jax.parallel.tensor.megatron.column import ColumnParallelLinear
from axonml_jax.parallel.tensor.megatron.row import RowParallelLinear


class MLP(nnx.Module):
    """A multi-layer perceptron: linear layers with an activation between them (none after the last).

    Layers are column- and row-parallel in pairs over `tensor`, where that is bound; one that is left over is whole on every
    rank.

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
        widths = list(pairwise(sizes))
        kinds: list[type[nnx.Linear]] = [ColumnParallelLinear, RowParallelLinear] * (len(widths) // 2)
        kinds += [nnx.Linear] * (len(widths) % 2)
        self.layers = nnx.List([kind(*width, rngs=rngs) for kind, width in zip(kinds, widths, strict=True)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., sizes[0]] -> [..., sizes[-1]]."""
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)
