"""A product of two arrays that are rounded to 8-bit floats, as are the operands of both products of its backward.

Values are rounded to float8_e4m3fn, gradients to float8_e5m2 (Micikevicius et al. 2022), each array by one scale, of the
largest element that it has at the moment ("current scaling" of Transformer Engine, "tensorwise" of torchao). A scale is a power
of two: what an element rounds to does then not depend on its neighbours, unless it is small beside the largest of them. So
ranks that hold parts of an array need not agree on a scale, and nothing is sent.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axonml_jax.program.recomputed import PRODUCTS

VALUES, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2

_LEAST = 2.0**-110
"""What counts as the largest element of an array of smaller ones: scales, their inverses and zeros stay finite."""

_EXPONENT = 0x7F800000
"""The bits of a float32's exponent."""


class Rounded(NamedTuple):
    """An array in 8 bits, and the power of two that its elements are to be multiplied by."""

    values: jax.Array
    factor: jax.Array


@dataclass(frozen=True)
class ProductForm:
    """A product without its operands.

    Attributes:
      contracted: which dims of the left operand are summed over with which dims of the right one.
      dtype: of the result.
      native: whether the device multiplies floats of 8 bits; else they are cast to `dtype` first, which holds them exactly.
    """

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: Any
    native: bool


def float8_product(form: ProductForm, left: jax.Array, right: jax.Array) -> jax.Array:
    """The product of two arrays that are rounded to 8 bits: first the dims of `left` that are not summed over, then those of
    `right`, as `jax.lax.dot_general` has them.

    Sums are in float32, or in float64 for a result in it; a GPU that multiplies 8-bit floats adds up fewer bits in the forward.
    The backward rounds both operands anew: what is kept for it is what a plain product keeps, and recomputation knows the
    result as one.
    """
    return checkpoint_name(_product(form, left, right), PRODUCTS)


def rounded(x: jax.Array, dtype: Any) -> Rounded:
    """An array in 8 bits. With an element that is not finite all are NaN, once they are multiplied by their factor.

    Args:
      x: floating, of any shape.
      dtype: `VALUES` or `GRADIENTS`.
    """
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), initial=0)
    bits = jax.lax.bitcast_convert_type(float(jnp.finfo(dtype).max) / jnp.maximum(most, _LEAST), jnp.uint32)
    scale = jax.lax.bitcast_convert_type(bits & jnp.uint32(_EXPONENT), jnp.float32)
    return Rounded((wide * scale).astype(dtype), 1 / scale)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(form, left, right):
    return _multiplied(form, rounded(left, VALUES), rounded(right, VALUES))


def _forward(form, left, right):
    return _product(form, left, right), (left, right)


def _backward(form, saved, grad):
    left, right = saved
    of_left, of_right = form.contracted
    free_left = tuple(dim for dim in range(left.ndim) if dim not in of_left)
    free_right = tuple(dim for dim in range(right.ndim) if dim not in of_right)
    outer, inner = tuple(range(len(free_left))), tuple(range(len(free_left), grad.ndim))
    given = rounded(grad, GRADIENTS)
    to_left = ProductForm((inner, free_right), left.dtype, form.native)
    to_right = ProductForm((free_left, outer), right.dtype, form.native)
    # Free dims of left, then summed ones as right has them; summed dims as left has them, then free ones of right.
    made_left = _multiplied(to_left, given, rounded(right, VALUES), backward=True)
    made_right = _multiplied(to_right, rounded(left, VALUES), given, backward=True)
    places_left = dict(zip((*free_left, *_partners(of_right, of_left)), range(left.ndim), strict=True))
    places_right = dict(zip((*_partners(of_left, of_right), *free_right), range(right.ndim), strict=True))
    return (
        jnp.transpose(made_left, [places_left[dim] for dim in range(left.ndim)]),
        jnp.transpose(made_right, [places_right[dim] for dim in range(right.ndim)]),
    )


def _partners(own: tuple[int, ...], others: tuple[int, ...]) -> list[int]:
    """The dims that some dims are summed over with, in the order of the latter."""
    return [other for _, other in sorted(zip(own, others, strict=True))]


_product.defvjp(_forward, _backward)


def _multiplied(form: ProductForm, left: Rounded, right: Rounded, *, backward: bool = False) -> jax.Array:
    dtype = jnp.dtype(form.dtype)
    # Factors are powers of two: results in bfloat16 may be rounded before they are multiplied by them. float16 has no room.
    summed = jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype
    a, b = (each.values if form.native else each.values.astype(summed) for each in (left, right))
    # XLA:GPU adds up fewer bits of 8-bit operands' products by default; of gradients all, as Flax's own operations ask for.
    precision = jax.lax.Precision.HIGHEST if form.native and backward else None
    numbers = form.contracted, ((), ())
    y = jax.lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=summed)
    return (y * left.factor.astype(summed) * right.factor.astype(summed)).astype(dtype)
