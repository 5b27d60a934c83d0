"""What a recomputing backward keeps of a forward: whatever is not elementwise or merely placed; it makes the rest again."""

import math
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from axonml_jax.compat.checkpoint_policy import Saveable
from axonml_jax.program.program import Equation
from axonml_jax.program.rules import is_redone, rule_of
from axonml_jax.program.run import run

PRODUCTS = "axonml.products"
"""The name by which a checkpoint policy knows results of weight multiplications."""

PARTS, PRODUCT_PARTS = "axonml.parts", "axonml.products.parts"
"""The names by which a checkpoint policy knows the real and imaginary parts of complex results, and of products among them."""

KEPT = "axonml.kept"
"""The name of what is kept whatever made it: a loop's results, of which JAX would else keep every trip's products instead."""

LITTLE = 16
"""A slice that leaves no more than this part of an array is kept in the array's place."""


def all_but_elementwise(result: Saveable) -> bool:
    """Whether a result is kept for the backward, as `SaveWhere` asks: whatever is not elementwise or moved about.

    Products, sums, random bits, lookups and collectives are never done twice. Comparisons of floats are kept, a byte each:
    dropout's mask instead of the bits it is made of. So is what little is taken of a large array: the one column that counts
    of the 128 that an attention kernel writes. Of complex results the parts are kept, where they are named.
    """
    name, avals, params = result.primitive, result.operands, result.params
    if result.given_name is not None:
        return result.given_name in (PARTS, PRODUCT_PARTS, KEPT)
    if name in ("slice", "dynamic_slice"):
        taken = params.get("slice_sizes") or np.subtract(params["limit_indices"], params["start_indices"])
        return math.prod(map(int, taken)) * LITTLE <= avals[0].size
    if rule_of(name).compares:
        return any(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)
    return not is_redone(name) and not _complex(result)


def run_named(equations: Iterable[Equation], env: MutableMapping[int, Any]) -> None:
    """`run`, with results named that a checkpoint policy may keep: those of weight multiplications and convolutions.

    Complex ones are joined of parts, and these are named, whatever made them: `jax.checkpoint` can keep real numbers alone
    (it passes what it keeps through `reduce_precision`, which complex ones do not have).
    """
    run(equations, env, _named_results)


def _named_results(equation: Equation, operands: Sequence[Any]) -> Sequence[Any] | None:
    op = equation.op
    weighs = op.name == "conv_general_dilated" or (op.name == "dot_general" and not any(op.contraction.batched))
    if not is_redone(op.name) and any(
        jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in (*op.given, *op.made)
    ):
        name = PRODUCT_PARTS if weighs else PARTS
    elif weighs:
        name = PRODUCTS
    else:
        return None
    return [_named(value, name) for value in op.bind(operands)]


def _named(value: Any, name: str) -> Any:
    if not jnp.iscomplexobj(value):
        return checkpoint_name(value, name)
    return jax.lax.complex(checkpoint_name(value.real, name), checkpoint_name(value.imag, name))


def _complex(result: Saveable) -> bool:
    """Whether an operation may have complex results."""
    if result.primitive == "fft":
        return result.fft_type != jax.lax.FftType.IRFFT
    return result.primitive == "eig" or any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in result.operands)
