"""The two borders of a tensor-parallel region: how an activation enters it and how partial sums leave it.

With sequence parallelism (Korthikanti et al. 2022) the activation outside is split along the sequence: the all-reduce at each
border becomes a reduce-scatter or an all-gather of the same bytes.
"""

from collections.abc import Callable
from typing import Any

import jax

from axonml_jax.collectives.gradients.pairs import copy_to, reduce_from
from axonml_jax.collectives.primitives import scatter_sum
from axonml_jax.parallel.tensor.products.ordered import Border, ordered
from axonml_jax.parallel.tensor.products.ring import ring_gathered, ring_scattered

SEQUENCE_DIM = -2
"""The dim that sequence parallelism splits: s of [..., s, h]."""


def entered(
    fn: Callable[..., Any],
    x: jax.Array,
    weights: Any,
    axes: tuple[str, ...],
    *,
    sequence: bool,
    ring: bool = False,
    overlap: bool = False,
) -> Any:
    """`fn(x, weights)` with x read by every rank of `axes`.

    Args:
      fn: a function of the whole x and the rank's weights; one call for all weights that read the same x.
      x: [..., s, h], the same on every rank; with `sequence` [..., s/n, h], this rank's part of the sequence.
      weights: a pytree of arrays.
      axes: bound mesh axes of total size n.
      sequence: whether x is split along the sequence.
      ring: whether its gathers and the scatter are cut into hops between the products (`ring.py`).
      overlap: whether the reduction of x's gradient is issued before the products of the weights' gradients.

    Communicates: nothing forward and one all-reduce of x backward; with `sequence` one all-gather forward, an all-gather
    and a reduce-scatter backward.
    """
    if sequence and axes:
        _require_sequence(x)
        if ring:
            return ring_gathered(fn, x, weights, axes, SEQUENCE_DIM)
    elif not (overlap and axes):
        return fn(copy_to(x, axes) if axes else x, weights)
    border = Border(axes, SEQUENCE_DIM if sequence else None)
    return ordered(fn, x, weights, border, Border(), overlap=overlap)


def left(y: jax.Array, axes: tuple[str, ...], *, sequence: bool) -> jax.Array:
    """The sum of every rank's partial y: whole on all of them, or with `sequence` each rank's part of the sequence.

    Communicates: one all-reduce forward; with `sequence` one reduce-scatter forward and one all-gather backward.
    """
    if not axes:
        return y
    if not sequence:
        return reduce_from(y, axes)
    _require_sequence(y)
    return scatter_sum(y, axes, SEQUENCE_DIM)


def summed(
    fn: Callable[..., jax.Array], x: jax.Array, weights: Any, axes: tuple[str, ...], *, sequence: bool, ring: bool
) -> jax.Array:
    """`left(fn(x, weights))`; a ring cuts the reduce-scatter into hops between the products.

    Communicates: what `left` does.
    """
    if ring and sequence and axes:
        _require_sequence(x)
        return ring_scattered(fn, x, weights, axes, SEQUENCE_DIM)
    return left(fn(x, weights), axes, sequence=sequence)


def outside(parameter: jax.Array | None, axes: tuple[str, ...], *, sequence: bool) -> jax.Array | None:
    """A parameter that is used outside the region, such as a norm's scale: with `sequence` its gradient is summed.

    Communicates: with `sequence` one all-reduce of the parameter backward.
    """
    return copy_to(parameter, axes) if sequence and axes and parameter is not None else parameter


def check_ring(layer: str, ring: bool, sequence_parallel: bool, overlap: bool = False) -> None:
    """Refuse a ring where there is no gather and no scatter to cut, and two ways to hide one reduction.

    Raises:
      ValueError: naming the layer.
    """
    if ring and not sequence_parallel:
        raise ValueError(
            f"{layer}: ring=True cuts the gathers and scatters of sequence parallelism into hops, and there are none: "
            "set sequence_parallel=True too"
        )
    if ring and overlap:
        raise ValueError(
            f"{layer}: ring=True runs the reduction of the input's gradient between parts of the products, overlap=True behind "
            "the weights' gradients: choose one"
        )


def _require_sequence(x: jax.Array) -> None:
    if x.ndim < 2:
        raise ValueError(
            f"sequence parallelism splits dim {SEQUENCE_DIM} of [..., sequence, features], but the activation has shape "
            f"{x.shape}: give it a sequence dim, or set sequence_parallel=False"
        )
