"""Whether an optimizer treats every element alike, and so is right on shards: seen in the program of its update.

Norms, factored moments and matrix functions look at more than one element; on shards they would be silently wrong (by 7%
to 210% in our measurements, docs/adr/0007).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from axonml_jax._types import PyTree
from axonml_jax.model.atoms import entry_of
from axonml_jax.model.elementwise import ELEMENTWISE
from axonml_jax.model.trace import trace

_CALLS = frozenset(
    (
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "checkpoint",
    )
)


def first_mixing(update: Any, args: Sequence[PyTree], sharded: Sequence[PyTree]) -> str | None:
    """The first operation of `update(*args)` that mixes elements of a sharded array, or None.

    Args:
      update: a function of trees of arrays.
      args: their shapes.
      sharded: trees of booleans like `args`: which arrays are shards.
    """
    traced = trace(lambda *args: jax.tree.leaves(update(*args)), *args)
    return _mixing(traced.jaxpr, jax.tree.leaves(list(sharded)))[1]


def operations(update: Any, *trees: PyTree) -> list[str]:
    """The names of all operations of `update(*trees)` in order: they differ where its Python code looks at shapes."""
    return list(_names(trace(lambda *args: jax.tree.leaves(update(*args)), *trees).jaxpr))


def _names(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jaxprs_in_params(eqn.params):
            yield from _names(inner)


def _mixing(jaxpr: Any, marked: Sequence[bool]) -> tuple[list[bool], str | None]:
    """Which results hold elements of marked inputs, and the first operation that mixes such elements."""
    env = dict(zip(jaxpr.invars, marked, strict=True))
    for eqn in jaxpr.eqns:
        given = [entry_of(atom, env, False) for atom in eqn.invars]
        made, culprit = _equation(eqn, given)
        if culprit:
            return [], culprit
        env.update(zip(eqn.outvars, made, strict=True))
    return [entry_of(atom, env, False) for atom in jaxpr.outvars], None


def _equation(eqn: Any, given: list[bool]) -> tuple[list[bool], str | None]:
    name = eqn.primitive.name
    if name == "random_bits" and any(var.aval.size > 1 for var in eqn.outvars):
        return [], "random numbers of a parameter's shape"
    if name == "cond" and not given[0]:
        results = [_mixing(branch, given[1:]) for branch in eqn.params["branches"]]
        culprit = next((culprit for _, culprit in results if culprit), None)
        return [any(each) for each in zip(*(made for made, _ in results), strict=True)] if not culprit else [], culprit
    inner = list(jaxprs_in_params(eqn.params))
    if name in _CALLS and inner:
        return _mixing(inner[0], given)
    if not any(given):
        return [False] * len(eqn.outvars), None
    shapes = {var.aval.shape for var, own in zip(eqn.invars, given, strict=True) if own}
    same = all(var.aval.shape in shapes for var in eqn.outvars) and len(shapes) == 1
    spread = name == "broadcast_in_dim"  # of an array to its own shape
    if same and (name in ELEMENTWISE or spread):
        return [True] * len(eqn.outvars), None
    return [], name
