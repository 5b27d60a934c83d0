"""Running a marked program on shards: parameters are gathered late, and what enters between paired layers has its gradient.

A gathered parameter stays a shard until something besides its own layer reads it. Between a layer that leaves its output split
and the one that takes it so, every rank works on a part: a value that is the same on all of them enters there, and its
gradient is the sum of theirs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.gradients.pairs import copy_to
from axonml_jax.collectives.varying import varying_axes
from axonml_jax.parallel.tensor.whole.marks import CLOSED, GATHERED, OPENED, OWN, Part, SplitValue
from axonml_jax.parallel.tensor.whole.split_loss import Form, WholeLosses
from axonml_jax.program.atoms import Atom, is_constant
from axonml_jax.program.program import Equation, Program
from axonml_jax.program.run import run_program


def run_marked(program: Program, values: Sequence[Any], losses: WholeLosses) -> list[Any]:
    """Run a program; where a layer takes its part of what was gathered, it gets the shard.

    Args:
      program: a program whose marked calls are kept.
      values: its inputs; a `SplitValue` in the place of each parameter that the program gathers first.
      losses: those that take a whole operand.

    Raises:
      ValueError: when a result is only a rank's part.

    Communicates: an all-gather of every shard that something else reads, and an all-reduce of the gradient of every value
    that enters between paired layers.
    """
    results = _Level(losses).run(program, values)
    if any(isinstance(value, Part) for value in results):
        raise ValueError(
            "auto_parallelize paired layers by example=, so that the output of one stays split until the other takes it; in "
            "this call the model, or loss_fn, returns it: give the arguments of this call as the example, or no example"
        )
    return [_read(value) for value in results]


class _Level:
    """A program in one trace."""

    def __init__(self, losses: WholeLosses):
        self.losses = losses
        self.entered: dict[Any, Any] = {}  # a value enters once, and its gradient is summed once

    def run(self, program: Program, values: Sequence[Any]) -> list[Any]:
        """The results, as they are."""
        return run_program(program, values, self._at)

    def _at(self, equation: Equation, given: list[Any]) -> Sequence[Any]:
        op, name = equation.op, equation.op.label
        if name.startswith(OPENED):
            return [Part(_read(given[0]), name.removeprefix(OPENED))]
        if name.startswith((CLOSED, GATHERED)):
            return [given[0].value if isinstance(given[0], Part) else given[0]]
        if name == OWN and isinstance(given[0], SplitValue):
            return [given[0].value]
        results = _opened(equation, given, self.losses)
        if results is not None:
            return results
        axis = next((value.axis for value in given if isinstance(value, Part)), None)
        if axis is None:
            return op.bind([_read(value) for value in given])
        with op.scope():
            values = [self._enter(*each, axis) for each in zip(equation.inputs, given, strict=True)]
        return [Part(result, axis) for result in op.bind(values)]

    def _enter(self, atom: Atom, value: Any, axis: str) -> Any:
        """A value where ranks work on parts; with `check_vma` JAX has cast a whole one already."""
        if isinstance(value, Part) or is_constant(atom):
            return _value(value)
        if atom not in self.entered:
            whole = _read(value)
            cast = not jnp.issubdtype(whole.dtype, jnp.inexact) or axis in varying_axes(whole)
            self.entered[atom] = whole if cast else copy_to(whole, axis)
        return self.entered[atom]


def _loss(form: Form, equation: Equation, given: list[Any]) -> Any:
    """A loss of whole operands; of a table that nobody has read yet the shard is the part."""
    own, *others = given
    with equation.op.scope():
        if isinstance(own, SplitValue) and own.places == form.places:
            return form.part(own.value, *map(_read, others))
        return form.whole(*map(_read, given))


def _opened(equation: Equation, given: list[Any], losses: WholeLosses) -> list[Any] | None:
    """The results of an equation whose body is run with shards and parts as they are; None: it is run as it is."""
    shards = any(isinstance(value, SplitValue) for value in given)
    parts = any(isinstance(value, Part) for value in given)
    if not parts and (form := losses.taken(equation)) is not None:
        return [_loss(form, equation, given)]
    body = equation.body
    if body is None or equation.op.loop is not None:
        return None
    marked = shards or _has_marks(body) or losses.within(body)
    if equation.op.checkpointed is not None and (parts or marked):
        with equation.op.scope():
            return _checkpointed(equation, body, given, losses)
    if equation.op.scan is not None and marked and not parts:
        with equation.op.scope():
            return _scanned(equation, body, given, losses)
    return None


def _checkpointed(equation: Equation, body: Program, given: list[Any], losses: WholeLosses) -> list[Any]:
    results: list[Any] = []

    def call(*values: Any) -> list[Any]:
        again = [_on(old, value) for old, value in zip(given, values, strict=True)]
        results[:] = _Level(losses).run(body, again)
        return [value.value if isinstance(value, Part) else _read(value) for value in results]

    view = equation.op.checkpointed
    assert view is not None
    made = jax.checkpoint(call, **view.options)(*map(_value, given))
    return [Part(value, old.axis) if isinstance(old, Part) else value for old, value in zip(results, made, strict=True)]


def _scanned(equation: Equation, body: Program, given: list[Any], losses: WholeLosses) -> list[Any]:
    scan = equation.op.scan
    assert scan is not None
    first = scan.first_scanned
    consts, carry = given[: scan.num_consts], [_read(value) for value in given[scan.num_consts : first]]
    stacks = [(value.sliced() or value.whole) if isinstance(value, SplitValue) else value for value in given[first:]]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        own = [_on(old, _value(old)) for old in consts]  # what this body gathers belongs to its own trace
        own += [*carry, *(_on(old, value) for old, value in zip(stacks, slices, strict=True))]
        results = run_marked(body, own, losses)
        return results[: scan.num_carry], results[scan.num_carry :]

    carry, ys = jax.lax.scan(step, carry, [_value(value) for value in stacks], **scan.options)
    return [*carry, *ys]


def _has_marks(program: Program) -> bool:
    """Whether layers leave outputs split within a body."""
    return any(each.op.label.startswith(OPENED) or any(map(_has_marks, each.bodies)) for each in program.equations)


def _read(value: Any) -> Any:
    """A value as every equation but a layer's own reads it."""
    return value.whole if isinstance(value, SplitValue) else value


def _value(value: Any) -> Any:
    return value.value if isinstance(value, (SplitValue, Part)) else value


def _on(old: Any, value: Any) -> Any:
    """The same kind of thing on another value."""
    if isinstance(old, SplitValue):
        return SplitValue(value, old.places)
    return Part(value, old.axis) if isinstance(old, Part) else value
