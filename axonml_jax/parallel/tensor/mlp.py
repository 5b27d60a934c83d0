"""`ParallelMLP`: the transformer's feed-forward part as a column-parallel and a row-parallel layer (Shoeybi et al. 2019)."""

from typing import Literal, Unpack

import jax
from flax import nnx

from axonml_jax.parallel.tensor.column import ColumnParallelLinear, column_outputs
from axonml_jax.parallel.tensor.options import LinearOptions
from axonml_jax.parallel.tensor.row import RowParallelLinear


class ParallelMLP(nnx.Module):
    """down(gelu(up(x))) for "gelu", down(silu(gate(x)) * up(x)) for "swiglu" (Shazeer 2020).

    Args:
      hidden_size: h.
      inner_size: the width between; it must divide by the axis's n ranks.
      activation: "gelu" (its tanh approximation, as in GPT-2) or "swiglu".
      use_bias: whether the linear layers have biases.
      sequence_parallel: input and output are this rank's part of the sequence.
      ring: cut gathers and scatters into hops between the products, to overlap them; needs `sequence_parallel`.
      axis: the mesh axis.
      rngs: stream `params`.
      **options: those of `nnx.Linear`, for every linear layer.

    Raises:
      ValueError: for another activation; in the call, when the inner size does not divide.

    Communicates: one all-reduce of [..., h] forward and one backward; with sequence parallelism an all-gather and a
    reduce-scatter each way, and one more all-gather backward.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        activation: Literal["gelu", "swiglu"] = "gelu",
        use_bias: bool = True,
        sequence_parallel: bool = False,
        ring: bool = False,
        axis: str = "tensor",
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        if activation not in ("gelu", "swiglu"):
            raise ValueError(f"ParallelMLP: activation {activation!r} is not one of 'gelu', 'swiglu'")

        def column():
            return ColumnParallelLinear(
                hidden_size,
                inner_size,
                use_bias=use_bias,
                sequence_parallel=sequence_parallel,
                ring=ring,
                axis=axis,
                rngs=rngs,
                **options,
            )

        self.gate = column() if activation == "swiglu" else None
        self.up = column()
        self.down = RowParallelLinear(
            inner_size,
            hidden_size,
            use_bias=use_bias,
            sequence_parallel=sequence_parallel,
            ring=ring,
            axis=axis,
            rngs=rngs,
            **options,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., h] -> [..., h], the same on every rank; [..., s/n, h] with `sequence_parallel`."""
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x), approximate=True))
        gate, up = column_outputs([self.gate, self.up], x)
        return self.down(jax.nn.silu(gate) * up)
