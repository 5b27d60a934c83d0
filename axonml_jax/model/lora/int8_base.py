"""Frozen matrices that rest as int8 with scales of their columns (Dettmers et al. 2022), and are floats where they are read."""

from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.model.lora.sides import Sides

MATRIX = Sides()
"""The last two dims."""

KINDS = ("int8",)
"""How a base may rest, besides as it is."""

END = "_int8_scale"
"""How the name of a matrix's scales ends, behind that of the matrix."""

_MOST = 127


def scales_name(name: str) -> str:
    """The path of a matrix's scales.

    >>> scales_name("mlp/up/kernel")
    'mlp/up/kernel_int8_scale'
    """
    return name + END


def quantized(matrix: Any, sides: Sides = MATRIX) -> tuple[Any, Any]:
    """A matrix, or a stack of them, as int8 and scales; of a shape the shapes.

    A column's largest absolute value becomes 127, all others the nearest whole number: each is off by half a scale at most.

    Args:
      matrix: W [..., i, o], floating.
      sides: its dims, where it has other ones than these; scales are then [*stack, *out].

    Returns:
      int8 [..., i, o], and scales [..., o] in the dtype of W, which is the dtype that `dequantized` gives back.
    """
    if isinstance(matrix, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda matrix: quantized(matrix, sides), matrix)
    wide = jnp.asarray(matrix).astype(jnp.promote_types(matrix.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(wide), axis=_inputs(sides))
    scales = jnp.where(largest > 0, largest / _MOST, 1).astype(matrix.dtype)
    steps = wide / jnp.expand_dims(scales, _inputs(sides)).astype(
        wide.dtype
    )  # scales as they are kept, rounded to the dtype of W
    return jnp.clip(jnp.round(steps), -_MOST, _MOST).astype(jnp.int8), scales


def dequantized(matrix: Any, scales: Any, sides: Sides = MATRIX) -> Any:
    """The floats [..., i, o] that an int8 matrix stands for, in the dtype of its scales [..., o]; of shapes the shape.

    >>> dequantized(*quantized(jnp.array([[1.0, 0.0], [-0.5, 0.0]]))).tolist()[0]
    [1.0, 0.0]
    """
    if isinstance(matrix, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda matrix, scales: dequantized(matrix, scales, sides), matrix, scales)
    return matrix.astype(scales.dtype) * jnp.expand_dims(scales, _inputs(sides))


def _inputs(sides: Sides) -> tuple[int, ...]:
    """The dims of one column, from behind: however many stacks there are."""
    return sides.dims("i", behind=-len(sides.roles))
