"""A column and a row layer as a pair, with the operation between them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

import jax
from flax import nnx

from axonml_jax.collectives.primitives import degree
from axonml_jax.layers import fused
from axonml_jax.layers.grid import ParallelLinear, grid_outputs
from axonml_jax.layers.linear import ColumnParallelLinear, RowParallelLinear, column_outputs, column_product
from axonml_jax.layers.products import LinearOptions, Prefetch
from axonml_jax.layers.whole import Units

# --------------------------------------------------------------------------------------------------
# Two linear layers between which features are split: over one axis (Megatron), or a pair of 3-D ones (AxoNN).
# --------------------------------------------------------------------------------------------------

PairAxes = str | tuple[str, str, str]
"""One axis: Megatron's pair. The names of row, col and depth: AxoNN's, with activations whole before and after it."""

Opening = ColumnParallelLinear | ParallelLinear


def pair_options(
    layer: str,
    axis: PairAxes,
    options: Mapping[str, Any],
    *,
    sequence_parallel: bool,
    ring: bool,
    **more: Any,
) -> dict[str, Any]:
    """The options that both layers of a pair share.

    Raises:
      ValueError: for what 3-D layers do not do, naming the layer.
    """
    if not isinstance(axis, str) and (sequence_parallel or ring):
        raise ValueError(
            f"{layer}: sequence_parallel and ring belong to one axis, and axis={axis!r} names the three of 3-D layers: "
            "give axis='tensor', or leave them out"
        )
    return {"axis": axis, "sequence_parallel": sequence_parallel, "ring": ring, **more, **options}


def opening(
    in_features: int, out_features: int, *, axis: PairAxes, units: Units | None = None, **options: Any
) -> Opening:
    """Make the first layer of a pair: it takes full features and leaves each rank a part."""
    if isinstance(axis, str):
        return ColumnParallelLinear(in_features, out_features, axis=axis, units=units, **options)
    return ParallelLinear(
        in_features, out_features, axes=axis, units=units, gather_output=False, **_without_sequence(options)
    )


def closing(in_features: int, out_features: int, *, axis: PairAxes, **options: Any):
    """Make the second layer of a pair: it takes each rank's part and returns full features."""
    if isinstance(axis, str):
        options.pop("overlap", None)  # of these only a column layer reduces its input's gradient
        return RowParallelLinear(in_features, out_features, axis=axis, **options)
    own = _without_sequence(options)
    return ParallelLinear(in_features, out_features, axes=axis, transpose=True, scatter_input=False, **own)


def opened(layers: Sequence[Opening], x: jax.Array, *, prefetch: Prefetch | None = None) -> tuple[jax.Array, ...]:
    """The outputs of opening layers of one kind that read the same x, which enters the region once.

    Raises:
      ValueError: for `prefetch` where one axis splits the layers.
    """
    if isinstance(layers[0], ParallelLinear):
        own = [layer for layer in layers if isinstance(layer, ParallelLinear)]
        return grid_outputs(own, x, prefetch=prefetch)
    _refuse_prefetch(prefetch, layers[0])
    return column_outputs([layer for layer in layers if isinstance(layer, ColumnParallelLinear)], x)


def opened_biased(
    layers: Sequence[Opening], x: jax.Array, *, prefetch: Prefetch | None = None
) -> tuple[jax.Array, ...]:
    """As `opened`; on GPUs by one product, and one pass that adds the biases and splits the result.

    Raises:
      ValueError: for `prefetch` where one axis splits the layers.
    """
    found = _one_product(layers, x)
    if found is None:
        return opened(layers, x, prefetch=prefetch)
    _refuse_prefetch(prefetch, layers[0])
    y, bias, form = found
    ranks = sum(layer.out_features for layer in layers) // y.shape[-1]
    sizes = [layer.out_features // ranks for layer in layers]
    return fused.biased_parts(y, bias, sizes, form=form)


def opened_gelu(layer: Opening, x: jax.Array, *, prefetch: Prefetch | None = None) -> jax.Array:
    """GELU (tanh form) of an opening layer's output; on GPUs in one pass with the bias.

    Raises:
      ValueError: for `prefetch` where one axis splits the layer.
    """
    found = _one_product([layer], x)
    if found is None:
        (up,) = opened([layer], x, prefetch=prefetch)
        return jax.nn.gelu(up, approximate=True)
    _refuse_prefetch(prefetch, layer)
    y, bias, form = found
    return fused.bias_gelu(y, bias, form=form)


def _one_product(layers: Sequence[Opening], x: jax.Array) -> tuple[jax.Array, jax.Array, str] | None:
    """The product of x with all weights side by side, the biases, and the form to go on with; None if no kernel applies."""
    own = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
    biased = len(own) == len(layers) and all(each.bias is not None for each in own)
    shared = any(each.units is not None and each.units.whole_on(degree(each.axis)) for each in own)
    usual = biased and not shared and own[0].dtype in (None, x.dtype)
    if not usual or (form := fused.one_product(x)) == "xla":
        return None
    y, bias = column_product(own, x)
    assert bias is not None
    return (y, bias, form) if y.dtype == x.dtype else None


def closed(layer: RowParallelLinear | ParallelLinear, x: jax.Array, *, prefetch: Prefetch | None = None) -> jax.Array:
    """Apply a closing layer.

    Raises:
      ValueError: for `prefetch` where one axis splits the layer.
    """
    if isinstance(layer, ParallelLinear):
        return layer(x, prefetch=prefetch)
    _refuse_prefetch(prefetch, layer)
    return layer(x)


def split_axis(axis: PairAxes) -> str:
    """The mesh axis that splits features, or heads, inside a pair."""
    return axis if isinstance(axis, str) else axis[0]


def _refuse_prefetch(prefetch: Prefetch | None, layer: Any) -> None:
    if prefetch is not None:
        raise ValueError(
            f"{type(layer).__name__} gathers no weights, so there is nothing to prefetch: leave prefetch out, or split over "
            "the three axes of 3-D layers"
        )


def _without_sequence(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("sequence_parallel", "ring")}


# --------------------------------------------------------------------------------------------------
# `ParallelMLP`: the transformer's feed-forward part as a column-parallel and a row-parallel layer (Shoeybi et al.
# 2019).
# --------------------------------------------------------------------------------------------------


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
        """Apply the layers.

        Args:
          x: [..., h], the same on every rank; [..., s/n, h] with `sequence_parallel`.
          prefetch: of 3-D layers: the order in which weights are gathered over depth, each while the layer before computes.

        Returns:
          As x.
        """
        if self.gate is None:
            inner = opened_gelu(self.up, x, prefetch=prefetch)
        else:
            gate, up = opened([self.gate, self.up], x, prefetch=prefetch)
            inner = (jax.nn.silu(gate) if self.activation == "swiglu" else jax.nn.gelu(gate, approximate=True)) * up
        return closed(self.down, inner, prefetch=prefetch)
