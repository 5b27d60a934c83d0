"""Losses of which every rank computes a part: an equation known by name, so that a whole operand is never taken for a part.

A loss gets an array of which each rank should have its own part: logits or an output layer. Shapes do not tell a part from the
whole, but the traced program does (`differing.py`). Where layers were swapped code sees whole arrays, and so does the loss:
`run_marked.py` takes the form that is right for what it is given. Elsewhere a whole operand is refused.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.varying import types_are_checked, varying_axes
from axonml_jax.parallel.tensor.bound_axes import degree
from axonml_jax.parallel.tensor.whole.marks import MARK, Places
from axonml_jax.program.differing import Axes, differing
from axonml_jax.program.program import Equation, Program

PREFIX = f"{MARK}split_loss_"
"""How the equations' names begin."""


@dataclass(frozen=True)
class Form:
    """How a loss is computed.

    Attributes:
      name: the function's, for messages.
      options: all that its result depends on besides the operands, for the equation's name.
      subject: what its first operand is called.
      remedy: what to do where that is whole.
      axes: those that split it.
      part: the loss of parts.
      whole: the loss of the same operands, whole over all axes.
      dims: how many dims each operand has.
      places: where the first operand is split, as of a parameter; () where it is none.
    """

    name: str
    options: tuple[Any, ...]
    subject: str
    remedy: str
    axes: tuple[str, ...]
    part: Callable[..., jax.Array]
    whole: Callable[..., jax.Array]
    dims: tuple[int, ...]
    places: Places = ()

    def require(self, operand: Any, differs: Axes) -> None:
        """Refuse an operand (or its type) that does not differ over an axis that should split it.

        Raises:
          ValueError: with the remedy.
        """
        over = tuple(axis for axis in self.axes if degree(axis) > 1 and axis not in differs)
        if over:
            raise ValueError(
                f"{self.name} over {self.axes} takes each rank's own part of the {self.subject}, but this "
                f"{jnp.dtype(operand.dtype).name}{list(operand.shape)} is the same on every rank of {over}: {self.remedy}"
            )


_forms: dict[str, Form] = {}
_recorded: ContextVar[list[bool] | None] = ContextVar("recorded", default=None)
_marking: ContextVar[bool] = ContextVar("marking", default=False)


def split_loss(form: Form, *operands: jax.Array) -> jax.Array:
    """The loss of parts, as an equation known by name.

    Raises:
      ValueError: where JAX's types say that the first operand is whole; not while a model with swapped layers is traced.
    """
    if degree(form.axes) == 1:
        return form.part(*operands)
    if (seen := _recorded.get()) is not None:
        seen.append(True)
    if types_are_checked(form.axes[0]) and not _marking.get():
        form.require(operands[0], varying_axes(operands[0]))
    return _named(form)(*operands)


@contextmanager
def recorded() -> Iterator[list[bool]]:
    """Collects whether such a loss is traced in the block."""
    token = _recorded.set(seen := [])
    try:
        yield seen
    finally:
        _recorded.reset(token)


@contextmanager
def whole_allowed() -> Iterator[None]:
    """A block whose traced program `run_marked` runs: the form of each loss is chosen there."""
    token = _marking.set(True)
    try:
        yield
    finally:
        _marking.reset(token)


class WholeLosses:
    """The losses of a program whose first operand is whole.

    Args:
      program: a program whose marked calls are kept.
      given: over which axes each input differs.
    """

    def __init__(self, program: Program, given: Sequence[Axes]):
        self._axes: dict[Equation, Axes] = {}
        self._done: set[Equation] = set()
        differing(program, given, self._visit)

    def _visit(self, equation: Equation, operands: Sequence[Axes]) -> None:
        form = _form(equation)
        if form is not None and len(operands) == len(form.dims):
            self._axes[equation] = self._axes.get(equation, frozenset()) | operands[0]

    def taken(self, equation: Equation) -> Form | None:
        """The form of an equation to run for whole operands; None: it is none of these, or not as it was written."""
        form, op = _form(equation), equation.op
        as_written = form is not None and tuple(aval.ndim for aval in op.given) == form.dims and len(op.made) == 1
        if form is None or not as_written or equation not in self._axes or self._axes[equation] & set(form.axes):
            return None
        self._done.add(equation)
        return form

    def within(self, program: Program) -> bool:
        """Whether a body has one of them."""
        return any(each in self._axes or any(map(self.within, each.bodies)) for each in program.equations)

    def refuse(self) -> None:
        """Refuse those that nobody took: batched ones, those in branches, those whole over some of the axes.

        Raises:
          ValueError: naming the first.
        """
        for equation, differs in self._axes.items():
            if equation not in self._done and (form := _form(equation)) is not None:
                form.require(equation.op.given[0], differs)


def _form(equation: Equation) -> Form | None:
    return _forms.get(equation.op.label)


@functools.cache
def _named(form: Form) -> Callable[..., jax.Array]:
    def run(*operands: jax.Array) -> jax.Array:
        return form.part(*operands)

    words = (form.name, *form.axes, *form.options, *form.dims)
    run.__name__ = run.__qualname__ = PREFIX + "_".join(map(str, words))
    _forms[run.__name__] = form
    return jax.jit(run)
