"""`ParallelMLP`: the transformer's feed-forward part as a column-parallel and a row-parallel layer (Shoeybi et al. 2019)."""

from typing import Any, Literal, Unpack

import jax
from flax import nnx

from axonml_jax.parallel.tensor.products.options import LinearOptions
from axonml_jax.parallel.tensor.products.ordered import Prefetch
from axonml_jax.parallel.tensor.products.pair import PairAxes, closed, closing, opened, opening, pair_options


class ParallelMLP(nnx.Module):
    """down(gelu(up(x))) for "gelu", down(silu(gate(x)) * up(x)) for "swiglu" (Shazeer 2020), gelu in the place of silu
    for "geglu".

    Args:
      hidden_size: h.
      inner_size: the width between; it must divide by the axis's n ranks.
      activation: "gelu" (its tanh approximation, as in GPT-2), or of two inner products "swiglu" or "geglu" (Gemma).
      use_bias: whether the linear layers have biases.
      sequence_parallel: input and output are this rank's part of the sequence.
      ring: cut gathers and scatters into hops between the products, to overlap them; needs `sequence_parallel`.
      overlap: issue each reduction of an input's gradient before the weights' gradients, to run behind them; not with `ring`.
      out_init: initializer of the last layer's kernel; None: that of the others.
      axis: the mesh axis; three of them (row, col, depth) make it of AxoNN's 3-D layers.
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
        activation: Literal["gelu", "swiglu", "geglu"] = "gelu",
        use_bias: bool = True,
        sequence_parallel: bool = False,
        ring: bool = False,
        overlap: bool = False,
        out_init: nnx.Initializer | None = None,
        axis: PairAxes = "tensor",
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        if activation not in ("gelu", "swiglu", "geglu"):
            raise ValueError(f"ParallelMLP: activation {activation!r} is not one of 'gelu', 'swiglu', 'geglu'")

        flags = {"sequence_parallel": sequence_parallel, "ring": ring, "overlap": overlap}
        shared = pair_options("ParallelMLP", axis, options, use_bias=use_bias, rngs=rngs, **flags)
        self.activation = activation
        self.gate = None if activation == "gelu" else opening(hidden_size, inner_size, **shared)
        self.up = opening(hidden_size, inner_size, **shared)
        out: dict[str, Any] = shared | ({"kernel_init": out_init} if out_init else {})
        self.down = closing(inner_size, hidden_size, **out)

    def __call__(self, x: jax.Array, *, prefetch: Prefetch | None = None) -> jax.Array:
        """Apply the two layers.

        Args:
          x: [..., h], the same on every rank; [..., s/n, h] with `sequence_parallel`.
          prefetch: of 3-D layers: the order in which weights are gathered over depth, each while the layer before computes.

        Returns:
          As x.
        """
        if self.gate is None:
            (up,) = opened([self.up], x, prefetch=prefetch)
            inner = jax.nn.gelu(up, approximate=True)
        else:
            gate, up = opened([self.gate, self.up], x, prefetch=prefetch)
            inner = (jax.nn.silu(gate) if self.activation == "swiglu" else jax.nn.gelu(gate, approximate=True)) * up
        return closed(self.down, inner, prefetch=prefetch)
