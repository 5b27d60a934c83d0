"""Running a marked program on shards: parameters are gathered late, and what enters between paired layers has its gradient.

A gathered parameter stays a shard until something besides its own layer reads it. Between a layer that leaves its output split
and the one that takes it so, every rank works on a part: a value that is the same on all of them enters there, and its
gradient is the sum of theirs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from axonml_jax.collectives.pairs import copy_to
from axonml_jax.collectives.varying import varying_axes
from axonml_jax.model.atoms import is_constant, value_of, values_of
from axonml_jax.model.trace import called_jaxpr, run_equation, scan_parts, scope_of
from axonml_jax.parallel.tensor.marks import CLOSED, GATHERED, OPENED, OWN, Part, SplitValue
from axonml_jax.parallel.tensor.split_loss import Form, WholeLosses


def run_marked(jaxpr: Any, values: Sequence[Any], losses: WholeLosses) -> list[Any]:
    """Run a program; where a layer takes its part of what was gathered, it gets the shard.

    Args:
      jaxpr: a closed jaxpr.
      values: its inputs; a `SplitValue` in the place of each parameter that the program gathers first.
      losses: those that take a whole operand.

    Raises:
      ValueError: when a result is only a rank's part.

    Communicates: an all-gather of every shard that something else reads, and an all-reduce of the gradient of every value
    that enters between paired layers.
    """
    results = _Level(jaxpr, values, losses).results()
    if any(isinstance(value, Part) for value in results):
        raise ValueError(
            "auto_parallelize paired layers by example=, so that the output of one stays split until the other takes it; in "
            "this call the model, or loss_fn, returns it: give the arguments of this call as the example, or no example"
        )
    return [_read(value) for value in results]


class _Level:
    """A program in one trace."""

    def __init__(self, jaxpr: Any, values: Sequence[Any], losses: WholeLosses):
        self.losses = losses
        self.jaxpr, self.env = jaxpr, dict(zip(jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=True))
        self.env |= zip(jaxpr.invars, values, strict=True)
        self.entered: dict[Any, Any] = {}  # a value enters once, and its gradient is summed once

    def results(self) -> list[Any]:
        for eqn in self.jaxpr.eqns:
            self.env.update(zip(eqn.outvars, self._run(eqn), strict=True))
        return values_of(self.jaxpr.outvars, self.env)

    def _run(self, eqn: Any) -> list[Any]:
        given = values_of(eqn.invars, self.env)
        name = str(eqn.params.get("name", ""))
        if name.startswith(OPENED):
            return [Part(_read(given[0]), name.removeprefix(OPENED))]
        if name.startswith((CLOSED, GATHERED)):
            return [given[0].value if isinstance(given[0], Part) else given[0]]
        if name == OWN and isinstance(given[0], SplitValue):
            return [given[0].value]
        results = _opened(eqn, given, self.losses)
        if results is not None:
            return results
        axis = next((value.axis for value in given if isinstance(value, Part)), None)
        if axis is None:
            return run_equation(eqn, [_read(value) for value in given])
        with scope_of(eqn):
            values = [self._enter(var, axis) for var in eqn.invars]
        return [Part(result, axis) for result in run_equation(eqn, values)]

    def _enter(self, var: Any, axis: str) -> Any:
        """A value where ranks work on parts; with `check_vma` JAX has cast a whole one already."""
        value = value_of(var, self.env)
        if isinstance(value, Part) or is_constant(var):
            return _value(value)
        if var not in self.entered:
            whole = _read(value)
            cast = not jnp.issubdtype(whole.dtype, jnp.inexact) or axis in varying_axes(whole)
            self.entered[var] = whole if cast else copy_to(whole, axis)
        return self.entered[var]


def _loss(form: Form, eqn: Any, given: list[Any]) -> Any:
    """A loss of whole operands; of a table that nobody has read yet the shard is the part."""
    own, *others = given
    with scope_of(eqn):
        if isinstance(own, SplitValue) and own.places == form.places:
            return form.part(own.value, *map(_read, others))
        return form.whole(*map(_read, given))


def _opened(eqn: Any, given: list[Any], losses: WholeLosses) -> list[Any] | None:
    """The results of an equation whose body is run with shards and parts as they are; None: it is run as it is."""
    shards = any(isinstance(value, SplitValue) for value in given)
    parts = any(isinstance(value, Part) for value in given)
    if not parts and (form := losses.taken(eqn)) is not None:
        return [_loss(form, eqn, given)]
    marked = lambda jaxpr: shards or _has_marks(jaxpr) or losses.within(getattr(jaxpr, "jaxpr", jaxpr))
    if (inner := called_jaxpr(eqn)) is not None and (parts or marked(inner)):
        with scope_of(eqn):
            return _Level(inner, given, losses).results()
    if eqn.primitive.name in ("checkpoint", "remat", "remat2") and (parts or marked(eqn.params["jaxpr"])):
        with scope_of(eqn):
            return _checkpointed(eqn, given, losses)
    if scan_parts(eqn) is not None and not parts and marked(eqn.params["jaxpr"]):
        with scope_of(eqn):
            return _scanned(eqn, given, losses)
    return None


def _checkpointed(eqn: Any, given: list[Any], losses: WholeLosses) -> list[Any]:
    results: list[Any] = []

    def body(*values: Any) -> list[Any]:
        again = [_on(old, value) for old, value in zip(given, values, strict=True)]
        results[:] = _Level(eqn.params["jaxpr"], again, losses).results()
        return [value.value if isinstance(value, Part) else _read(value) for value in results]

    options = {key: eqn.params[key] for key in ("prevent_cse", "policy")}
    made = jax.checkpoint(body, **options)(*map(_value, given))
    return [Part(value, old.axis) if isinstance(old, Part) else value for old, value in zip(results, made, strict=True)]


def _scanned(eqn: Any, given: list[Any], losses: WholeLosses) -> list[Any]:
    parts = scan_parts(eqn)
    assert parts is not None
    first = parts.num_consts + parts.num_carry
    consts, carry = given[: parts.num_consts], [_read(value) for value in given[parts.num_consts : first]]
    stacks = [(value.sliced() or value.whole) if isinstance(value, SplitValue) else value for value in given[first:]]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        own = [_on(old, _value(old)) for old in consts]  # what this body gathers belongs to its own trace
        own += [*carry, *(_on(old, value) for old, value in zip(stacks, slices, strict=True))]
        results = run_marked(eqn.params["jaxpr"], own, losses)
        return results[: parts.num_carry], results[parts.num_carry :]

    options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, carry, [_value(value) for value in stacks], **options)
    return [*carry, *ys]


def _has_marks(jaxpr: Any) -> bool:
    """Whether layers leave outputs split within a body."""
    return any(
        str(eqn.params.get("name", "")).startswith(OPENED)
        or any(_has_marks(getattr(inner, "jaxpr", inner)) for inner in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


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
