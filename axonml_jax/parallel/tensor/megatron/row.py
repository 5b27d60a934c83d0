"""`RowParallelLinear`: a linear layer whose input features are split over the ranks of an axis (Shoeybi et al. 2019)."""

from typing import Unpack

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.collectives.gradients.pairs import split_to
from axonml_jax.parallel.tensor.bound_axes import bound
from axonml_jax.parallel.tensor.products.flat import flat_dot_general
from axonml_jax.parallel.tensor.products.options import LinearOptions
from axonml_jax.parallel.tensor.products.region import check_ring, outside, summed
from axonml_jax.parallel.tensor.products.substitute import add_bias, linear
from axonml_jax.parallel.tensor.specs import check_shard, metadata
from axonml_jax.parallel.tensor.whole.whole_reads import own_part, taken_split


class RowParallelLinear(nnx.Linear):
    """y = x A + b with the rows of A split over `axis`: the second half of a Megatron pair.

    Every rank holds all of b, which is added once, after the reduction. Where `axis` is not bound it is `nnx.Linear`.

    Args:
      in_features: size i of the input's last dim; it must divide by the axis's n ranks.
      out_features: size o of the output's last dim.
      use_bias: whether to add b.
      input_is_parallel: the input is this rank's features [..., i/n]; False: it is whole, and each rank takes its own.
      sequence_parallel: the output is this rank's part [..., s/n, o] of the sequence.
      ring: cut gathers and scatters into hops between the products, to overlap them; needs `sequence_parallel`.
      axis: the mesh axis.
      rngs: stream `params`.
      **options: those of `nnx.Linear`.

    Raises:
      ValueError: in the call, when i does not divide; from the constructor, for `ring` without sequence parallelism.

    Communicates: one all-reduce of y forward, nothing backward; with sequence parallelism one reduce-scatter of y forward,
    one all-gather of its gradient and an all-reduce of the bias's backward. A whole input: one all-gather of its gradient.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        ring: bool = False,
        axis: str = "tensor",
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        check_ring("RowParallelLinear", ring, sequence_parallel)
        options["kernel_metadata"] = metadata(PartitionSpec(axis, None), options.get("kernel_metadata"))
        options.setdefault("dot_general", flat_dot_general)
        super().__init__(in_features, out_features, use_bias=use_bias, rngs=rngs, **options)
        self.input_is_parallel, self.sequence_parallel, self.ring = input_is_parallel, sequence_parallel, ring
        self.axis = axis

    def __call__(self, x: jax.Array, out_sharding=None) -> jax.Array:
        """Apply the layer.

        Args:
          x: [..., i/n], this rank's features; [..., i] without `input_is_parallel` or where the axis is not bound.
          out_sharding: as `nnx.Linear`; only where the axis is not bound.

        Returns:
          [..., o], the same on every rank; [..., s/n, o] with `sequence_parallel`.
        """
        axes = bound(self.axis)
        if not axes:
            return super().__call__(x, out_sharding)
        kernel, bias = own_part(self.kernel), None if self.bias is None else self.bias[...]
        name = f"{type(self).__name__}({self.in_features}, {self.out_features})"
        check_shard(f"{name} kernel", kernel, (self.in_features, self.out_features), PartitionSpec(self.axis, None))
        x, kernel, bias = self.promote_dtype((x, kernel, bias), dtype=self.dtype)
        x = taken_split(self, x, self.axis) if self.input_is_parallel else split_to(x, axes)
        split = {"sequence": self.sequence_parallel, "ring": self.ring}
        y = summed(lambda x, kernel: linear(self, x, kernel), x, kernel, axes, **split)
        return add_bias(y, outside(bias, axes, sequence=self.sequence_parallel))
