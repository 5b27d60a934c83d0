"""The reductions, the dtypes each is defined for, and each on a stack of rows held by one rank."""

import enum

import jax
import jax.numpy as jnp


class ReduceOp(enum.Enum):
    """How values of several ranks become one.

    SUM and AVERAGE are undefined on booleans, AVERAGE also on integers; MIN and MAX of booleans are their and and or.
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVERAGE = "average"


def check_op(name: str, op: ReduceOp, dtype) -> ReduceOp:
    """Return `op`, or refuse it where it has no meaning for `dtype`.

    Raises:
      TypeError: when `op` is no ReduceOp, or is undefined for the dtype; the message names the remedy.
    """
    if not isinstance(op, ReduceOp):
        raise TypeError(f"{name}: op is {op!r}, but it must be one of {', '.join(map(str, ReduceOp))}")
    if jnp.issubdtype(dtype, jnp.bool_) and op not in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(
            f"{name}: {op} of booleans is undefined: use ReduceOp.MAX (any rank), ReduceOp.MIN (every rank), "
            "or cast to int32 to count"
        )
    if op is ReduceOp.AVERAGE and jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{name}: {op} of {jnp.dtype(dtype).name} would be cut to an integer: cast to a floating dtype, "
            "or use ReduceOp.SUM and divide as you mean it"
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{name}: {op} of {jnp.dtype(dtype).name} is undefined: reduce its absolute value or its parts")
    return op


def reduce_rows(rows: jax.Array, op: ReduceOp) -> jax.Array:
    """Reduce the first dim: the dense meaning of every op, in the rows' own dtype."""
    if op is ReduceOp.MIN:
        return rows.min(axis=0)
    if op is ReduceOp.MAX:
        return rows.max(axis=0)
    if op is ReduceOp.PRODUCT:
        return rows.prod(axis=0, dtype=rows.dtype)
    total = rows.sum(axis=0, dtype=rows.dtype)
    return total / rows.shape[0] if op is ReduceOp.AVERAGE else total


def identity_of(op: ReduceOp, dtype):
    """The value that SUM, MIN or MAX ignores: what ranks outside a group contribute."""
    if op is ReduceOp.SUM:
        # -0.0 + x is x for every x, -0.0 included: adding 0.0 would lose the sign of a negative zero.
        return -0.0 if jnp.issubdtype(dtype, jnp.inexact) else 0
    if jnp.issubdtype(dtype, jnp.bool_):
        return op is ReduceOp.MIN
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.inf if op is ReduceOp.MIN else -jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.max if op is ReduceOp.MIN else limits.min
