"""Gradients of kernels as XLA:CPU multiplies them fast: with the operand transposed first whose rows they sum over.

The gradient of a kernel [i, o] is x^T dy, of x [r, i] and dy [r, o], where r counts rows (positions of all sequences). XLA:CPU
has no fast product that sums over the first dims of two matrices: it takes up to twice the time, and the compiler moves every
transposition back into the product. So x^T is made first, behind a barrier that keeps it there (docs/performance.md). Of
operands with more dims XLA:CPU makes a transposed one by itself: they stay as they are.
"""

from typing import Any

import numpy as np

from axonml_jax.compat.operation import Operation
from axonml_jax.compat.rewriting import Reader, Writer, rewritten

FEWEST = 128
"""Rows and widths below which a product gains nothing."""

MOST_BYTES = 8 * 2**20
"""Of the operand that is transposed: a larger one takes as long to transpose as the product gains."""


def with_transposed_operands(jaxpr: Any) -> Any:
    """A traced step, with gradients of kernels from operands that are transposed first.

    Nothing else changes, nor do the numbers but for the order in which rows are added. A `shard_map` that leaves an axis to
    XLA's partitioner stays as it is.

    Args:
      jaxpr: what `trace` returns.

    Returns:
      The jaxpr; the same object where it has no such product.
    """
    return rewritten(jaxpr, _at, where=lambda op: op.mapped is None or _is_manual(op))


def _is_manual(op: Operation) -> bool:
    mapped = op.mapped
    return mapped is not None and mapped.manual == set(mapped.axis_sizes)


def _at(op: Operation, reader: Reader, writer: Writer) -> bool:
    """Write a kernel's gradient anew, if the operation is one and gains."""
    if op.name != "dot_general" or not _gains(op):
        return False
    x, y = op.operands
    last = reader()
    swaps = last is not None and last.name == "transpose"
    first, second = (y, x) if swaps else (x, y)  # whose dim comes first in memory
    if first.aval.size * first.aval.dtype.itemsize > MOST_BYTES:
        return False
    turned = writer.barrier(writer.transpose(first, (1, 0)))
    made = writer.product(turned, second, **{**op.options, "dimension_numbers": (((1,), (0,)), ((), ()))})
    if swaps:
        writer.transpose(made, (1, 0))
    return True


def _gains(op: Operation) -> bool:
    """Whether a product sums over the rows of two matrices that are large enough."""
    x, y = op.given
    rows = op.contraction.contracted == ((0,), (0,)) and x.ndim == y.ndim == 2
    alike = x.dtype == y.dtype == op.made[0].dtype == np.float32
    return rows and alike and min(*x.shape, *y.shape) >= FEWEST
