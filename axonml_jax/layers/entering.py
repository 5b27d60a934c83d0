"""Finds where a loss's program enters or leaves split layers without a collective that carries the gradient correctly.

With `check_vma=True` JAX sums the gradient of a value that is the same on every rank where it meets one that differs, and
the transpose of a `psum` sums nothing. With `check_vma=False` it does neither: a rank's gradient is then a part of the
right one, or the right one times the number of ranks (docs/adr/0002). This finds both in a traced program.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_

import jax.numpy as jnp

from axonml_jax.compat.jaxpr import function_of
from axonml_jax.mesh.axes import BATCH_AXES, LAYER_AXES
from axonml_jax.program.program import Equation, Program, results, rule_of, through
from axonml_jax.program.values import SAME, Axes, differing, made_over

AXES: Axes = frozenset(LAYER_AXES).difference(BATCH_AXES)
"""The axes that split layers and nothing else: a rank's gradient is taken as complete along them."""

Fault = tuple[str, str]
"""A mesh axis, and what is wrong along it."""


@dataclass(frozen=True)
class Flow:
    """The facts about a value that decide whether its gradient is complete.

    Attributes:
      trained: whether it is differentiated.
      differs: the axes over which it may differ between ranks.
      entire: the axes over which every rank must have its complete gradient, as of a parameter that is not split.
      joined: the faults of bare collectives (such as `psum`) that it comes from, if the gradient that reaches them is complete.
      faults: the faults on the way to it.
    """

    trained: bool = False
    differs: Axes = SAME
    entire: Axes = SAME
    joined: frozenset[Fault] = frozenset()
    faults: frozenset[Fault] = frozenset()

    def __or__(self, other: "Flow") -> "Flow":
        return Flow(*(getattr(self, name) | getattr(other, name) for name in self.__dataclass_fields__))


Border = Callable[[Equation], tuple[bool, str] | None]
"""`border(equation)`: (whether it opens, or closes, code on parts of a paired layer's output; the axis). `run_marked` completes
the gradients of values that enter there. None: the equation is no border."""


def faults(
    program: Program, axes: Axes, given: Iterable[Axes], trained: Iterable[bool], border: Border = lambda equation: None
) -> list[list[str]]:
    """The faults in the gradient of each result, with the user's lines and remedies; an empty list for none.

    Args:
      program: a traced loss, in a `shard_map` with `check_vma=False`.
      axes: those of `AXES` along which there are several ranks.
      given: over which axes each input differs.
      trained: which inputs are differentiated.
      border: of layers that were swapped.
    """
    flows = [Flow(does, over, axes - over if does else SAME) for over, does in zip(given, trained, strict=True)]
    made = results(program, flows, partial(_rule, border), Flow())
    return [sorted({said for axis, said in flow.joined | flow.faults if axis in axes}) for flow in made]


def _rule(border: Border, equation: Equation, operands: list[Flow]) -> list[Flow]:
    if (at := border(equation)) is not None:
        opens, axis = at
        over = lambda flow: flow.differs - {axis} if opens else flow.differs | {axis}
        return [replace(flow, differs=over(flow), entire=flow.entire - {axis}) for flow in operands]
    if equation.name == "custom_vjp_call" and equation.called is not None:
        made = _of_own_gradient(equation, equation.called, operands)
    else:
        made = through(equation, operands, partial(_rule, border), Flow.__or__, Flow()) or _of_jax(equation, operands)
    stops = equation.name == "stop_gradient"
    floats = [jnp.issubdtype(aval.dtype, jnp.inexact) and not stops for aval in equation.op.made]
    return [flow if does else Flow(differs=flow.differs) for flow, does in zip(made, floats, strict=True)]


def _of_own_gradient(equation: Equation, called: Program, operands: list[Flow]) -> list[Flow]:
    """The flows through a call with a custom derivative, which is taken as right, as `copy_to` and `reduce_from` are."""
    talks: set[str] = set()
    over = differing(called, [flow.differs for flow in operands], lambda each, _: talks.update(each.op.mesh_axes))
    found = reduce(or_, operands, Flow())
    if (
        function_of(equation.op) == "_copy_to"
    ):  # it joins parts of a gradient, which a bare collective before it joins again
        found = replace(found, faults=found.faults | found.joined)
    return [
        Flow(
            found.trained,
            differs,
            found.differs - differs if found.trained else SAME,  # what was the same before may have entered there
            frozenset(fault for fault in found.joined if fault[0] not in differs | talks),
            found.faults,
        )
        for differs in over
    ]


def _of_jax(equation: Equation, operands: list[Flow]) -> list[Flow]:
    """The flows through an equation that JAX differentiates."""
    rule, over = rule_of(equation.name), made_over(equation, [flow.differs for flow in operands])
    if rule.passes:
        return [replace(flow, differs=axes) for flow, axes in zip(operands, over, strict=True)]
    found = reduce(or_, operands, Flow())
    differs = over[0] if over else SAME
    over_axes = AXES.intersection(equation.op.mesh_axes)
    # The transpose of a gather sums the ranks' slices of a gradient.
    parts = differs | over_axes if rule.sends is not None and rule.sends[0] == "all_gather" else differs
    enters = {axis for flow in operands for axis in flow.entire & parts}
    leaves = {axis for flow in operands if flow.trained for axis in (flow.differs & over_axes) - differs}
    joined = {fault for fault in found.joined if fault[0] not in differs}
    joined.update((axis, _LEAVES.format(name=equation.name, line=_line(equation), axis=axis)) for axis in leaves)
    wrong = {(axis, _ENTERS.format(name=equation.name, line=_line(equation), axis=axis)) for axis in enters}
    made = Flow(found.trained, differs, found.entire - differs - leaves, frozenset(joined), found.faults | wrong)
    return [made] * len(over)


_ENTERS = (
    "{name}{line} combines a trained value that is the same on all ranks of {axis!r} with one that differs between them, so "
    "each rank has only a part of its gradient: pass copy_to(value, {axis!r}) instead, or split_to for a rank's slice"
)
_LEAVES = (
    "the transpose of {name} over {axis!r}{line} sums gradients that are the same on all ranks, so the sum is too large: use "
    "reduce_from instead of a psum, gather_from instead of an all_gather"
)


def _line(equation: Equation) -> str:
    return f" ({equation.op.line})" if equation.op.line else ""
