"""Varying types: the manual mesh axes over which JAX types a value as varying from rank to rank (`check_vma=True`).

JAX documents the argument `check_vma`, not the attribute of an abstract value that holds the answer: it has moved before.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import AbstractValue, ShapedArray

CASTS: frozenset[str] = frozenset(
    [
        "pcast",
        "preduced",
        "pvary",
        "reduced_vary_cast",
        "reduced_vary_cast_p",
        "vary_unreduced_cast",
        "vary_unreduced_cast_p",
    ]
)
"""Primitives that change a varying type: they name axes but move nothing."""


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes a value is typed as varying over (none with `check_vma=False` or outside `shard_map`).

    Args:
      x: an array, a tracer, or the abstract value of a variable of a traced program.

    Raises:
      AttributeError: when abstract arrays no longer have the attribute.
    """
    aval = x if isinstance(x, AbstractValue) else jax.typeof(x)
    if not isinstance(aval, ShapedArray):  # a token, a reference
        return frozenset()
    return frozenset(aval.mat.varying)  # pyright: ignore[reportAttributeAccessIssue]


def shape_of(aval: AbstractValue) -> Any:
    """A stand-in for a value, with its shape, dtype and varying type: a `ShapeDtypeStruct`, or an array if it varies."""
    shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    if not (axes := tuple(sorted(varying_axes(aval)))):
        return shape
    keys = jax.numpy.issubdtype(shape.dtype, jax.dtypes.prng_key)
    some = jax.random.key(0) if keys else jax.numpy.zeros((), shape.dtype)
    return cast_to_varying(jax.numpy.broadcast_to(some, shape.shape), axes)


def cast_to_varying(x: Any, axes: tuple[str, ...]) -> jax.Array:
    """`x` typed as varying over `axes` as well: moves nothing; its transpose sums over them.

    Args:
      x: an array that varies over none of `axes`.
      axes: bound manual mesh axes.
    """
    return jax.lax.pcast(x, axes, to="varying")


def varying_alike(values: Sequence[Any], given: Sequence[AbstractValue]) -> Sequence[Any]:
    """Types `values` as varying over the same axes, where the operands that they stand for did.

    When a program runs again on values that vary over more axes than in its trace (a pipeline stage's inputs vary over `pipe`),
    operations that need operands of one varying type also get values made inside the program, which vary over fewer.

    Args:
      values: operands.
      given: the abstract values that the operation was traced with.
    """
    if len(values) < 2 or len({varying_axes(each) for each in given}) > 1:
        return values
    axes = [varying_axes(each) for each in values]
    every = frozenset().union(*axes)
    missing = [tuple(sorted(every - own)) for own in axes]
    return [cast_to_varying(x, more) if more else x for x, more in zip(values, missing, strict=True)]
