"""A scan over stacked weights, forward and backward with one slice of the weights gathered at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from axonml_jax.collectives.varying import vary_like
from axonml_jax.compat.residuals import Saved
from axonml_jax.parallel.units.body import Body, Prelude, Transform, Values, add
from axonml_jax.parallel.units.gathered import Gathered, Slices
from axonml_jax.program.atoms import among, is_constant, names_of, value_of, values_of
from axonml_jax.program.dataflow import with_gradient
from axonml_jax.program.prelude import mark, prelude_of
from axonml_jax.program.program import Program
from axonml_jax.program.segments import Segment


class LoopSaved(NamedTuple):
    """What a loop's forward leaves: every trip's residuals, stacked, and the operands that are no weights."""

    trips: Saved
    operands: dict[int, Any]


@dataclass(frozen=True)
class UnitLoop:
    """A scan equation; operands are known by their position.

    Attributes:
      prelude: what prepares the weights that the scan reads whole.
      body: one trip.
      operands: number or literal of every operand.
      inner: the body's number of every operand.
      num_consts, num_carry: how the operands divide.
      scanned: operand -> weight, where a trip gathers its own slice.
      constants: the body's constants.
      results: the number of every result.
      returned: the body's number or literal of every result.
      options: of the scan.
      scope: a context with the scan's name and source line.
    """

    prelude: Prelude
    body: Body
    operands: tuple[Any, ...]
    inner: tuple[int, ...]
    num_consts: int
    num_carry: int
    scanned: Mapping[int, int]
    constants: Values
    results: tuple[int, ...]
    returned: tuple[Any, ...]
    options: Mapping[str, Any]
    scope: Callable[[], Any]

    def apply(
        self,
        weights: Values,
        inputs: Values,
        shards: Values,
        slices: Slices,
        transform: Transform = lambda work: work,
    ) -> Values:
        """The results; each trip's work as `transform` makes it."""
        given = self._given(inputs, self.prelude.apply(weights))

        def trip(carry, rest, read):
            env = self._env(given, carry, rest, read)
            carry, out = self._return(env, transform(self.body.apply)(self._weights(env), self._inputs(env)))
            return carry, (out, None)

        return self._scan(trip, given, shards, slices)[0]

    def forward(
        self, weights: Values, inputs: Values, shards: Values, slices: Slices, transform: Transform
    ) -> tuple[Values, LoopSaved]:
        """The results, and what the backward needs beside the weights."""
        given, traced = self._given(inputs, self.prelude.apply(weights)), []

        def trip(carry, rest, read):
            env = self._env(given, carry, rest, read)
            made, saved = self.body.forward(self._weights(env), env, self._again, transform)
            traced.append(saved)
            carry, out = self._return(env, made)
            return carry, (out, saved.residuals)

        results, residuals = self._scan(trip, given, shards, slices)
        kept = {
            k: v for k, v in given.items() if k not in self._carry and not among(self.operands[k], self.prelude.derived)
        }
        return results, LoopSaved(Saved(residuals, traced[-1].treedef, traced[-1].places), kept)

    def backward(
        self, saved: LoopSaved, weights: Values, shards: Values, slices: Slices, cotangents: Values
    ) -> tuple[Values, Values, Values]:
        """Gradients of the inputs, of the weights read whole, and of the shards of those read slice by slice."""
        prepared, pull = self.prelude.vjp(weights)
        given = saved.operands | {k: prepared[atom] for k, atom in enumerate(self.operands) if among(atom, prepared)}
        ends = {i: cotangents[n] for i, n in enumerate(self.results) if n in cotangents}
        carried = zip(range(self.num_carry), self._carry, strict=True)
        start = {k: self.body.cotangent(self.inner[k], ends.pop(i, None)) for i, k in carried if self._varies(k)}
        totals = {k: self.body.cotangent(self.inner[k]) for k in range(self.num_consts) if self._varies(k)}
        xs = ({k: given[k] for k in self._stacked}, saved.trips.residuals, ends)

        def trip(state, xs, read):
            (ct_carry, totals), (rest, residuals, ct_outs) = state, xs
            env = self._env(given, None, rest, read)
            trips = Saved(residuals, saved.trips.treedef, saved.trips.places)
            grads = self._trip_backward(trips, env, ct_carry, ct_outs)
            of = lambda ks: {k: grads[k] for k in ks if self._varies(k)}
            totals = {k: total + grads[k] for k, total in totals.items()}
            return (of(self._carry), totals), (
                of(self._stacked),
                slices.sync(self._trained, list(of(self.scanned).values())),
            )

        options = dict(self.options) | {"reverse": not self.options["reverse"]}
        gathered = Gathered(slices, self.scanned, shards, self.scope)
        (first, totals), (stacked, own) = gathered.scan(trip, (start, totals), xs, options)
        grads: Values = {}
        for k, grad in (first | totals | stacked).items():
            if not is_constant(self.operands[k]):
                add(grads, self.operands[k], grad)
        zero = lambda value: vary_like(jnp.zeros_like(value), value)
        of_weights = pull({n: grads[n] if n in grads else zero(value) for n, value in prepared.items()})
        of_inputs = {number: grad for number, grad in grads.items() if number not in prepared}
        return of_inputs, of_weights, dict(zip(self._trained, own, strict=True))

    def _trip_backward(self, saved: Saved, env: Values, ct_carry: dict[int, Any], ct_outs: dict[int, Any]) -> Values:
        """Gradients of one trip's operands that have one, by position."""
        varied, given = self.body.prelude.varied, {}
        carried = {i: ct_carry[k] for i, k in enumerate(self._carry) if k in ct_carry}
        for i, ct in (carried | ct_outs).items():
            if among(self.returned[i], varied):
                add(given, self.returned[i], ct)
        again = [env[number] for number in self._again]
        of_inputs, found = self.body.backward(saved, self._weights(env), again, given)
        found = found | of_inputs
        for number in given.keys() & set(self.inner):  # handed through, untouched by the work
            add(found, number, given[number])
        return {
            k: self.body.cotangent(number, found.get(number)) for k, number in enumerate(self.inner) if self._varies(k)
        }

    def _varies(self, k: int) -> bool:
        return self.inner[k] in self.body.prelude.varied

    @property
    def _trained(self) -> list[int]:
        return [weight for k, weight in self.scanned.items() if self._varies(k)]

    def _scan(self, trip: Callable, given: dict[int, Any], shards: Values, slices: Slices) -> tuple[Values, Any]:
        carry, xs = [given[k] for k in self._carry], {k: given[k] for k in self._stacked}
        gathered = Gathered(slices, self.scanned, shards, self.scope)
        carry, (out, extra) = gathered.scan(trip, carry, xs, self.options)
        return dict(zip(self.results, [*carry, *out], strict=True)), extra

    def _given(self, inputs: Values, prepared: Values) -> dict[int, Any]:
        values = inputs | prepared
        whole = {k: atom for k, atom in enumerate(self.operands) if k not in self.scanned}
        return {k: value_of(atom, values) for k, atom in whole.items()}

    def _env(self, given: dict[int, Any], carry: Sequence[Any] | None, rest: dict[int, Any], read: dict[int, Any]):
        carried = dict(zip(self._carry, carry, strict=True)) if carry is not None else {}
        values = {k: given[k] for k in range(self.num_consts)} | carried | rest | read
        return self.constants | {self.inner[k]: value for k, value in values.items()}

    def _weights(self, env: Values) -> Values:
        return {number: env[number] for number in self.body.prelude.weights}

    def _inputs(self, env: Values) -> Values:
        return {number: env[number] for number in self.body.inputs}

    def _return(self, env: Values, made: Values) -> tuple[list[Any], list[Any]]:
        out = values_of(self.returned, env | made)
        return out[: self.num_carry], out[self.num_carry :]

    @property
    def _again(self) -> list[int]:
        carried = {self.inner[k] for k in self._carry}
        return [number for number in self.body.inputs if number not in carried]

    @property
    def _carry(self) -> range:
        return range(self.num_consts, self.num_consts + self.num_carry)

    @property
    def _stacked(self) -> list[int]:
        return [k for k in range(self.num_consts + self.num_carry, len(self.operands)) if k not in self.scanned]


def loop_of(segment: Segment, program: Program, prelude: Prelude) -> UnitLoop:
    """The loop that a segment with scanned weights is.

    Args:
      segment: one scan equation.
      program: the program it was cut from.
      prelude: the segment's.
    """
    (equation,) = segment.equations
    scan, inner = equation.op.scan, equation.body
    assert scan is not None and inner is not None
    derived = set(segment.derived)
    carry = range(scan.num_consts, scan.first_scanned)
    weights = [
        k for k, atom in enumerate(equation.inputs) if k in segment.scanned or (among(atom, derived) and k not in carry)
    ]
    start = {n for n, atom in zip(inner.inputs, equation.inputs, strict=True) if among(atom, prelude.varied)}
    varied = _varied(inner, start, carry)
    marks = mark(inner, {inner.inputs[k]: k for k in weights})
    work = [inner.equations[position] for position in marks.work]
    made = {number for each in work for number in each.outputs}
    read = dict.fromkeys(number for each in work for number in each.read)
    own = Prelude(
        [inner.inputs[k] for k in weights],
        prelude_of(inner, derived_in := [number for number in read if number in marks.made_of], marks),
        derived_in,
        varied,
    )
    inputs = [number for number in read if number not in marks.made_of and number not in made]
    outputs = [number for number in dict.fromkeys(names_of(inner.outputs)) if number in made]
    return UnitLoop(
        prelude=prelude,
        body=Body(own, work, inputs, outputs, inner.avals),
        operands=equation.inputs,
        inner=inner.inputs,
        num_consts=scan.num_consts,
        num_carry=scan.num_carry,
        scanned=segment.scanned,
        constants=dict(inner.constants),
        results=equation.outputs,
        returned=inner.outputs,
        options=scan.options,
        scope=equation.op.scope,
    )


def _varied(inner: Program, start: set[int], carry: range) -> frozenset[int]:
    """Values of a trip that have a gradient: what one trip makes of them, the next one may carry."""
    while True:
        varied = with_gradient(inner, start)
        more = {inner.inputs[k] for i, k in enumerate(carry) if among(inner.outputs[i], varied)} - start
        if not more:
            return varied
        start = start | more
