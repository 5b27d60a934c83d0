"""Two linear layers between which features are split: over one axis (Megatron), or a pair of 3-D ones (AxoNN)."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from axonml_jax.parallel.tensor.axonn.linear3d import ParallelLinear, grid_outputs
from axonml_jax.parallel.tensor.megatron.column import ColumnParallelLinear, column_outputs
from axonml_jax.parallel.tensor.megatron.row import RowParallelLinear
from axonml_jax.parallel.tensor.products.ordered import Prefetch
from axonml_jax.parallel.tensor.specs import Units

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
    """The options of every layer of a pair.

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
    """A layer that takes whole features and leaves each rank its part."""
    if isinstance(axis, str):
        return ColumnParallelLinear(in_features, out_features, axis=axis, units=units, **options)
    return ParallelLinear(
        in_features, out_features, axes=axis, units=units, gather_output=False, **_without_sequence(options)
    )


def closing(in_features: int, out_features: int, *, axis: PairAxes, **options: Any):
    """The layer that takes each rank's part and leaves the features whole."""
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


def closed(layer: RowParallelLinear | ParallelLinear, x: jax.Array, *, prefetch: Prefetch | None = None) -> jax.Array:
    """The output of a closing layer.

    Raises:
      ValueError: for `prefetch` where one axis splits the layer.
    """
    if isinstance(layer, ParallelLinear):
        return layer(x, prefetch=prefetch)
    _refuse_prefetch(prefetch, layer)
    return layer(x)


def split_axis(axis: PairAxes) -> str:
    """The mesh axis that splits features, or heads, inside the pair."""
    return axis if isinstance(axis, str) else axis[0]


def _refuse_prefetch(prefetch: Prefetch | None, layer: Any) -> None:
    if prefetch is not None:
        raise ValueError(
            f"{type(layer).__name__} gathers no weights, so there is nothing to prefetch: leave prefetch out, or split over "
            "the three axes of 3-D layers"
        )


def _without_sequence(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("sequence_parallel", "ring")}
