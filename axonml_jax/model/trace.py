"""Reading and running a traced program equation by equation; how jaxprs differ between JAX versions is known only here."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr

from axonml_jax._types import PyTree


class Traced(NamedTuple):
    """A function traced on given arguments: its jaxpr over flat arguments, and the structure of what it returns."""

    jaxpr: Any
    out_tree: Any


def trace(fun: Callable[..., PyTree], *args: PyTree) -> Traced:
    """Trace `fun` on `args` (arrays or tracers), under whatever mesh axes are bound around the call."""
    jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    return Traced(jaxpr, jax.tree.structure(shape))


def called_jaxpr(eqn) -> Any | None:
    """The program that an equation merely calls (`jit`), whose body may stand in its place; None for all others."""
    return eqn.params["jaxpr"] if eqn.primitive.name in ("jit", "pjit") else None


CALLS = frozenset(
    ["jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"]
)
"""Primitives that call their body once, on the same operands."""


def plain_call(eqn) -> Jaxpr | None:
    """The body of an equation that calls it once on the same operands; None for all others."""
    if eqn.primitive.name not in CALLS:
        return None
    inner = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None)
    inner = getattr(inner, "jaxpr", inner)  # a closed one
    return inner if isinstance(inner, Jaxpr) and len(inner.invars) == len(eqn.invars) else None


def acts(eqn) -> bool:
    """Whether an equation does something besides making its results, such as printing."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


class ScanParts(NamedTuple):
    """How a scan's operands divide: constants, then the carry, then what is scanned over."""

    num_consts: int
    num_carry: int


def scan_parts(eqn) -> ScanParts | None:
    """The parts of a scan equation's operands; None for all others."""
    if eqn.primitive.name != "scan":
        return None
    if "num_consts" in eqn.params:  # jax < 0.12
        return ScanParts(eqn.params["num_consts"], eqn.params["num_carry"])
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return ScanParts(len(consts), len(carry))


def run_equation(eqn, values: Sequence[Any]) -> list[Any]:
    """Run one equation on `values`, keeping its source line and name scopes; returns its results."""
    params = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):  # jax < 0.11 returned (functions, params) for call-like primitives
        functions, params = params
        values = [*functions, *values]
    with scope_of(eqn), eqn.ctx.manager:
        results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def scope_of(eqn):
    """A context in which new equations carry the source line and name scopes of `eqn`."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
