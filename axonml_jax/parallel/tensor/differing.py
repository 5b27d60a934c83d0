"""Which values of a traced program may differ from rank to rank of an axis; all others are whole, the same on every rank.

JAX's own types say the same where `check_vma` is on; this says it of any program, after it was traced.
"""

from collections.abc import Callable, Sequence
from typing import Any

from axonml_jax.collectives.varying import CASTS
from axonml_jax.model.atoms import entry_of
from axonml_jax.model.trace import plain_call, scan_parts

Axes = frozenset[str]

JOINING = frozenset(
    """psum psum_invariant unreduced_psum pmax unreduced_pmax pmin unreduced_pmin
    all_gather all_gather_invariant all_gather_reduced""".split()  # noqa: SIM905
)
"""Collectives whose result is the same on every rank of their axes."""

SAME: Axes = frozenset()


def differing(jaxpr: Any, given: Sequence[Axes], visit: Callable[[Any, Sequence[Axes]], None]) -> list[Axes]:
    """Over which axes each result may differ.

    Args:
      jaxpr: a program, not closed.
      given: over which axes each input may.
      visit: called with every equation, in bodies too and perhaps more than once, and what its operands may differ over.
    """
    table = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        operands = [entry_of(atom, table, SAME) for atom in eqn.invars]
        visit(eqn, operands)
        table.update(zip(eqn.outvars, _results(eqn, operands, visit), strict=True))
    return [entry_of(atom, table, SAME) for atom in jaxpr.outvars]


def _results(eqn: Any, operands: list[Axes], visit: Callable) -> list[Axes]:
    name = eqn.primitive.name
    if (inner := plain_call(eqn)) is not None:
        return differing(inner, operands, visit)
    if (parts := scan_parts(eqn)) is not None:
        body, consts = eqn.params["jaxpr"].jaxpr, operands[: parts.num_consts]
        return _looped(body, consts, operands[parts.num_consts :], parts.num_carry, visit)
    if name == "while":
        return _while(eqn, operands, visit)
    if name == "cond":
        bodies = [differing(branch.jaxpr, operands[1:], visit) for branch in eqn.params["branches"]]
        return [operands[0].union(*each) for each in zip(*bodies, strict=True)]
    if name == "optimization_barrier":
        return operands
    axes = _named_axes(eqn)
    found = SAME.union(*operands)
    if name in JOINING and eqn.params.get("axis_index_groups") is None:
        found -= axes
    elif name not in CASTS:  # what is scattered, exchanged or permuted, and the rank's own index
        found |= axes
    return [found] * len(eqn.outvars)


def _looped(body: Any, consts: list[Axes], rest: list[Axes], num_carry: int, visit: Callable) -> list[Axes]:
    """A loop's results: what its carry may differ over grows until it stays."""
    while True:
        results = differing(body, [*consts, *rest], visit)
        carry = [old | new for old, new in zip(rest[:num_carry], results[:num_carry], strict=True)]
        if carry == rest[:num_carry]:
            return [*carry, *results[num_carry:]]
        rest = [*carry, *rest[num_carry:]]


def _while(eqn: Any, operands: list[Axes], visit: Callable) -> list[Axes]:
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, consts, carry = operands[:first], operands[first : first + second], operands[first + second :]
    while True:
        results = _looped(eqn.params["body_jaxpr"].jaxpr, consts, carry, len(carry), visit)
        (ends,) = differing(eqn.params["cond_jaxpr"].jaxpr, [*of_cond, *results], visit)
        grown = [each | ends for each in results]  # where ranks end after different rounds all results differ
        if grown == carry:
            return grown
        carry = grown


def _named_axes(eqn: Any) -> Axes:
    axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return frozenset(axis for axis in axes if isinstance(axis, str))
