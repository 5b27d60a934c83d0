"""Operations that treat every element alike: an optimizer of these is right on shards, and redoing them is cheap."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ELEMENTWISE = frozenset(
    (
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
        "bitcast_convert_type", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy", "copy_p",
        "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
        "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul",
        "ne", "neg", "nextafter", "not", "one_minus_square", "or", "pcast", "pow", "pvary", "real", "reduce_precision",
        "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan",
        "tanh", "xor",
    )
)  # fmt: skip
"""Names of primitives whose results have an element for every element of their operands."""

_PLACING = frozenset(
    (
        "broadcast_in_dim", "concatenate", "expand_dims", "iota", "name", "reshape", "rev", "split", "squeeze", "transpose",
    )
)  # fmt: skip

PARTS, PRODUCT_PARTS = "axonml.parts", "axonml.products.parts"
"""The names by which a checkpoint policy knows the real and imaginary parts of complex results, and of products among them."""

LITTLE = 16
"""A slice that leaves no more than this part of an array is kept in the array's place."""

_COMPARING = frozenset(("eq", "ge", "gt", "le", "lt", "ne"))


def all_but_elementwise(prim: Any, *avals: Any, **params: Any) -> bool:
    """Whether a result is kept for the backward, as `jax.checkpoint` asks: whatever is not elementwise or moved about.

    Products, sums, random bits, lookups and collectives are never done twice. Comparisons of floats are kept, a byte each:
    dropout's mask instead of the bits it is made of. So is what little is taken of a large array: the one column that counts
    of the 128 that an attention kernel writes. Of complex results the parts are kept, where they are named.
    """
    if prim.name == "name":
        return params["name"] in (PARTS, PRODUCT_PARTS)
    if prim.name in ("slice", "dynamic_slice"):
        taken = params.get("slice_sizes") or np.subtract(params["limit_indices"], params["start_indices"])
        return math.prod(map(int, taken)) * LITTLE <= avals[0].size
    if prim.name in _COMPARING:
        return any(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)
    return not redone(prim.name) and not _complex(prim, avals, params)


def redone(name: str) -> bool:
    """Whether an operation of this name is cheap to redo: elementwise, or merely moving elements about."""
    return name in ELEMENTWISE or name in _PLACING


def _complex(prim: Any, avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Whether an operation may have complex results."""
    if prim.name == "fft":
        return params["fft_type"] != jax.lax.FftType.IRFFT
    return prim.name == "eig" or any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals)
