"""Where a linear layer of any kind may leave its output split, and where it may take a split input."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flax import nnx

from axonml_jax.parallel.tensor.auto import swap
from axonml_jax.parallel.tensor.auto.general import letters_of, result_dim


@dataclass(frozen=True)
class Port:
    """A layer as a pair sees it.

    Attributes:
      out_size: size of the output dim that would be split.
      out_dim: that dim, of so many dims of the output.
      takes: how the layer takes an input of so many dims that is split along one of them: the change; None: it cannot.
      opens: the change that leaves the output split, in so many blocks.
      fuses: whether they may be more than one.
    """

    out_size: int
    out_dim: Callable[[int], int]
    takes: Callable[[int, int], swap.Change | None]
    opens: Callable[[int], swap.Change]
    fuses: bool = False


def port(layer: Any, axis: str, ranks: int) -> Port | None:
    """That of a layer; None for other layers."""
    if type(layer) is nnx.Linear:
        closing = swap.row(axis, input_is_parallel=True)
        return Port(
            layer.out_features,
            lambda ndim: ndim - 1,
            lambda dim, ndim: closing if dim == ndim - 1 else None,
            lambda blocks: swap.fused(axis, blocks) if blocks > 1 else swap.column(axis, gather_output=False),
            fuses=True,
        )
    if type(layer) is nnx.LinearGeneral:
        return _general(layer, axis)
    return _einsum(layer, axis, ranks) if type(layer) is nnx.Einsum else None


def _general(layer: nnx.LinearGeneral, axis: str) -> Port:
    first = layer.axis[0] if isinstance(layer.axis, tuple) else layer.axis

    def takes(dim: int, ndim: int) -> swap.Change | None:
        return swap.of_heads(layer, axis) if dim == first % ndim and not layer.batch_axis else None

    out = len(layer.out_features)
    return Port(
        layer.out_features[0], lambda ndim: ndim - out, takes, lambda _: swap.heads(layer, axis, gather_output=False)
    )


def _einsum(layer: nnx.Einsum, axis: str, ranks: int) -> Port | None:
    equation = layer.einsum_str
    if equation is None:
        return None
    given, kernel, result = letters_of(equation)
    if "..." in kernel:
        return None
    free = swap.free_letters(layer, ranks)

    def takes(dim: int, ndim: int) -> swap.Change | None:
        """A letter that is summed over may be split."""
        before, dots, after = given.partition("...")
        names = [*before, *("." for _ in range(ndim - len(before) - len(after))), *after] if dots else [*given]
        letter = names[dim]
        summed = letter in kernel and letter not in result and names.count(letter) == kernel.count(letter) == 1
        divides = summed and layer.kernel_shape[kernel.index(letter)] % ranks == 0
        return swap.einsum_row(layer, axis, letter) if divides else None

    return Port(
        layer.kernel_shape[kernel.index(free[0])] if free else 1,
        lambda ndim: result_dim(equation, free[0]) % ndim,
        takes,
        lambda _: swap.einsum_column(layer, axis, free[0], gather_output=False),
    )
