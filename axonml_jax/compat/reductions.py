"""Reductions over ranks beside axes that XLA partitions, lowered in a form that XLA:CPU compiles in bfloat16.

XLA:CPU reduces bfloat16 over ranks in float32, for which it rewrites the reduction's computation of two scalars, an addition or
a maximum. Where `shard_map` leaves axes of the mesh to the partitioner, JAX writes a sharding constraint into this computation,
on a scalar, and XLA ends the process ("Invalid binary instruction opcode copy", jax 0.10 to 0.12). Without the constraint the
computation is the one that JAX writes where every axis is manual.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax._src.lax import parallel
from jax.interpreters import mlir

REDUCTIONS = ("psum_p", "psum_invariant_p", "pmax_p", "pmin_p", "reduce_scatter_p")
"""Primitives that reduce, by which attribute of `jax._src.lax.parallel` holds them."""

_REDUCING = frozenset(("stablehlo.all_reduce", "stablehlo.reduce_scatter"))
_AFTERWARDS = frozenset(("sdy.sharding_constraint", "stablehlo.custom_call", "stablehlo.reshape"))
_CONSTRAINTS = frozenset(("sdy.sharding_constraint", "stablehlo.custom_call"))  # Shardy's, and the older partitioner's


def reduce_without_constraints() -> None:
    """Have JAX lower reductions over ranks without sharding constraints on the two scalars that they reduce.

    It holds in the whole process, for the user's own reductions and those of gradients too; once is enough, and again changes
    nothing. Programs for other platforms are lowered as ever.
    """
    for name in REDUCTIONS:
        primitive = getattr(parallel, name)
        rule = _rule_of(primitive)
        if not hasattr(rule, "axonml_jax_own"):
            mlir.register_lowering(primitive, _unconstrained(rule))


def _rule_of(primitive: Any) -> Callable[..., Any]:
    from jax._src.interpreters.mlir import _lowerings

    return _lowerings[primitive].rule


def _unconstrained(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that lowers as `rule`, JAX's own, and takes constraints out of what it wrote."""

    def lowered(ctx: Any, *args: Any, **params: Any) -> Any:
        results = rule(ctx, *args, **params)
        if "cpu" in ctx.module_context.platforms:
            for result in jax.tree.leaves(results):
                _take_out(result.owner)
        return results

    lowered.axonml_jax_own = rule  # pyright: ignore[reportFunctionMemberAccess]
    return lowered


def _take_out(written: Any) -> None:
    """Takes the constraints out of the computation of a reduction, after which JAX may constrain or reshape the result.

    Args:
      written: the operation that made a result; a sum over no axis returns its operand, which may be a block's argument.
    """
    while getattr(written, "name", None) in _AFTERWARDS and len(written.operands) == 1:
        written = written.operands[0].owner
    if getattr(written, "name", None) not in _REDUCING:
        return
    for inner in list(written.regions[0].blocks[0]):
        if inner.operation.name in _CONSTRAINTS:
            inner.operation.results[0].replace_all_uses_with(inner.operation.operands[0])
            inner.operation.erase()
