"""Frozen matrices that rest as int8 with scales of their columns (Dettmers et al. 2022), and are floats where they are read."""

from typing import Any

import jax
import jax.numpy as jnp

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


def quantized(matrix: Any) -> tuple[Any, Any]:
    """A matrix, or a stack of them, as int8 and scales; of a shape the shapes.

    A column's largest absolute value becomes 127, all others the nearest whole number: each is off by half a scale at most.

    Args:
      matrix: W [..., i, o], floating.

    Returns:
      int8 [..., i, o], and scales [..., o] in the dtype of W, which is the dtype that `dequantized` gives back.
    """
    if isinstance(matrix, jax.ShapeDtypeStruct):
        return jax.eval_shape(quantized, matrix)
    wide = jnp.asarray(matrix).astype(jnp.promote_types(matrix.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(wide), axis=-2)
    scales = jnp.where(largest > 0, largest / _MOST, 1).astype(matrix.dtype)
    steps = wide / scales[..., None, :].astype(wide.dtype)  # scales as they are kept, rounded to the dtype of W
    return jnp.clip(jnp.round(steps), -_MOST, _MOST).astype(jnp.int8), scales


def dequantized(matrix: Any, scales: Any) -> Any:
    """The floats [..., i, o] that an int8 matrix stands for, in the dtype of its scales [..., o]; of shapes the shape.

    >>> dequantized(*quantized(jnp.array([[1.0, 0.0], [-0.5, 0.0]]))).tolist()[0]
    [1.0, 0.0]
    """
    if isinstance(matrix, jax.ShapeDtypeStruct):
        return jax.eval_shape(dequantized, matrix, scales)
    return matrix.astype(scales.dtype) * scales[..., None, :]
