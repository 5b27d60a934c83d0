"""`WholeLinear`: a linear layer that every rank of a tensor axis has whole."""

from typing import Unpack

import jax
from flax import nnx

from axonml_jax.parallel.tensor.bound_axes import bound
from axonml_jax.parallel.tensor.products.flat import flat_dot_general
from axonml_jax.parallel.tensor.products.options import LinearOptions
from axonml_jax.parallel.tensor.products.region import outside
from axonml_jax.parallel.tensor.products.substitute import substitute


class WholeLinear(nnx.Linear):
    """`nnx.Linear` without a bias, outside of the region in which features are split.

    Args:
      in_features: size i of the input's last dim.
      out_features: size o of the output's last dim.
      sequence_parallel: the input is this rank's part [..., s/n, i] of the sequence.
      axis: the mesh axis.
      rngs: stream `params`.
      **options: those of `nnx.Linear`.

    Communicates: nothing; with sequence parallelism one all-reduce of the kernel's gradient.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        axis: str = "tensor",
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        options.setdefault("dot_general", flat_dot_general)
        super().__init__(in_features, out_features, use_bias=False, rngs=rngs, **options)
        self.sequence_parallel, self.axis = sequence_parallel, axis

    def __call__(self, x: jax.Array, out_sharding=None) -> jax.Array:
        """[..., i] -> [..., o]; `out_sharding` as `nnx.Linear`."""
        layer, axes = self, bound(self.axis)
        if axes and self.sequence_parallel:
            layer = substitute(self, kernel=outside(self.kernel[...], axes, sequence=True))
        return nnx.Linear.__call__(layer, x, out_sharding)
