"""ZeRO-3's units of a program: gathered where they are used, replayed in the backward, recomputed, overlapped."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.collectives.gradients import Partial, assign_buckets
from axonml_jax.collectives.primitives import vary, vary_like
from axonml_jax.compat.order import Saved, SaveWhere, policies_are_asked, require_policies, together, vjp_without
from axonml_jax.compat.varying_types import shape_of, varying_axes
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.model.view import Functional
from axonml_jax.parallel.placement import Placement, accumulating, lacking, load, moment, parts_of, wire_itemsize
from axonml_jax.parallel.plan import Remat
from axonml_jax.program.cut import (
    PRODUCT_PARTS,
    PRODUCTS,
    Cut,
    Segment,
    all_but_elementwise,
    cut,
    mark,
    named,
    prelude_of,
    products_and_sums,
    run_named,
    sink,
    sums,
)
from axonml_jax.program.program import (
    Equation,
    Program,
    among,
    is_constant,
    names_of,
    results_of,
    run,
    value_of,
    values_of,
    with_gradient,
)
from axonml_jax.sharding.layout import Layout, is_layout
from axonml_jax.strategies.shard import Feedback
from axonml_jax.strategies.strategy import Wrap, reads_exactly, units

# --------------------------------------------------------------------------------------------------
# Reducing gradients where they are ready: each bucket's gather and sync become one hook at its first use in the loss.
# --------------------------------------------------------------------------------------------------


def overlapped(
    loss: Callable,
    placement: Placement,
    params: PyTree,
    read: PyTree | None,
    args: tuple,
    axes: Collection[AxisNames] | None,
    feedback: Feedback | None = None,
) -> Callable:
    """Wraps a loss so that its gradients for resting parameters are reduced during the backward, bucket by bucket.

    Args:
      loss: `loss(read_params, *args) -> (scalar, aux)`, inside `shard_map`.
      placement: how parameters are read and gradients reduced.
      params: the resting parameters.
      read: the parameters as read, where they were gathered before; None: each bucket is gathered at its first use.
      args: the loss's other arguments.
      axes: synchronize over these only; None: all.
      feedback: makes the gradient by `accumulated` what the sums leave out (`Feedback.left_out`); None: it has none.

    Returns:
      `hooked(carriers, accumulated, *args) -> (scalar, aux)`: differentiated for `carriers`, trees like the resting
      parameters in the dtype in which gradients accumulate, whose values do not count, it gives synchronized gradients, each
      bucket reduced as soon as the backward is past its first use. `accumulated` is a tree (or None) of gradients
      synchronized over the plan's inner axes that join before the rest of the reduction.
    """
    leaves, treedef = jax.tree.flatten(params)
    wholes = None if read is None else treedef.flatten_up_to(read)
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    # What is rounded on its way must be the same in every step and in evaluation, which gather stacks whole.
    rounded = any(
        not reads_exactly(each) and each.role.parameters == "sharded" for each in placement.strategies.values()
    )

    def group(indices: Sequence[int], values: Sequence) -> list[list[int]]:
        sizes = [value.size * wire_itemsize(placement, layouts[i]) for i, value in zip(indices, values, strict=True)]
        return assign_buckets(sizes, placement.reducer.bucket_bytes)

    def hook(indices: Sequence[int], carriers: Sequence[jax.Array], extras: Sequence) -> Sequence[jax.Array]:
        own = tuple(layouts[i].sliced(carrier.ndim) for i, carrier in zip(indices, carriers, strict=True))
        sources, accumulated = zip(*extras, strict=True)
        bucket = _bucket(placement, own, min(indices), axes, read is not None, feedback)
        return bucket(list(carriers), sources, accumulated)

    def sliceable(leaf: int, depth: int) -> bool:
        return not rounded and all(parts == 1 for parts in layouts[leaf].parts[:depth])

    seen = placement.read(leaves, layouts) if wholes is None else wholes
    hooked = sink(loss, treedef.unflatten(seen), args, group=group, hook=hook, sliceable=sliceable)

    def run(carriers: PyTree, accumulated: PyTree | None, *args):
        more = [None] * len(leaves) if accumulated is None else jax.tree.leaves(accumulated)
        sources = leaves if wholes is None else wholes
        return hooked(jax.tree.leaves(carriers), list(zip(sources, more, strict=True)), *args)

    return run


def _bucket(
    placement: Placement,
    layouts: tuple[Layout, ...],
    name: int,
    axes: Collection[AxisNames] | None,
    gathered: bool,
    feedback: Feedback | None,
) -> Callable:
    def gather(sources: Any) -> list[jax.Array]:
        return list(sources) if gathered else placement.read(sources, layouts)

    @jax.custom_vjp
    def read(carriers, sources, accumulated):
        return gather(sources)

    def forward(carriers, sources, accumulated):
        return gather(sources), accumulated

    def backward(accumulated, grads):
        more, residual = None, None
        if any(each is not None for each in accumulated):
            more = parts_of(placement, accumulated, placement.axes.each_microbatch)
        if feedback is not None:
            wholes = map(partial(accumulating, placement), grads, layouts)
            residual = tuple(feedback.left_out([a + b for a, b in zip(wholes, accumulated, strict=True)], layouts))
        synced = placement.sync(parts_of(placement, grads), layouts, name, axes=axes, accumulated=more)
        return [grad.taken(lacking(placement, axes)) for grad in synced], None, residual

    read.defvjp(forward, backward)
    return read


# --------------------------------------------------------------------------------------------------
# A piece of a program run forward keeping no weights, and backward with weights read again.
# --------------------------------------------------------------------------------------------------

Values = dict[int, Any]
"""Arrays by their number in a program."""

Transform = Callable[[Callable], Callable]
"""A wrapper of a unit's function, such as a checkpoint; or the identity."""


@dataclass(frozen=True)
class Prelude:
    """The equations that prepare weights, such as casts, before a unit's work reads them.

    Attributes:
      weights: numbers of the weights.
      equations: casts, reshapes and the like.
      derived: numbers of weights and prepared weights that the work reads.
      varied: numbers of values with a gradient.
    """

    weights: Sequence[int]
    equations: Sequence[Equation]
    derived: Sequence[int]
    varied: frozenset[int]

    def apply(self, weights: Values) -> Values:
        """The prepared values and weights that the work reads."""
        moving, fixed = self._split(weights)
        return moving | fixed

    def vjp(self, weights: Values) -> tuple[Values, Callable[[Values], Values]]:
        """`apply`, and its transpose: from gradients of prepared values to gradients of the trained weights."""
        trained = {number: value for number, value in weights.items() if number in self.varied}
        moving, pull, fixed = jax.vjp(lambda moving: self._split(weights | moving), trained, has_aux=True)
        return moving | fixed, lambda grads: pull({number: grads[number] for number in moving})[0]

    def _split(self, weights: Values) -> tuple[Values, Values]:
        env = dict(weights)
        run(self.equations, env)
        moving = {number: env[number] for number in self.derived if number in self.varied}
        return moving, {number: env[number] for number in self.derived if number not in self.varied}


@dataclass(frozen=True)
class Body:
    """Equations as a function of weights and inputs.

    Attributes:
      prelude: what prepares the weights.
      equations: the work.
      inputs: numbers of everything else it reads.
      outputs: numbers of what is read elsewhere.
      avals: the abstract value of every number.
      names: the names that checkpoint policies know values by, by number.
    """

    prelude: Prelude
    equations: Sequence[Equation]
    inputs: Sequence[int]
    outputs: Sequence[int]
    avals: Mapping[int, Any]
    names: Mapping[int, str] = field(default_factory=dict)

    def apply(self, weights: Values, inputs: Values) -> Values:
        """Runs the equations, and returns the outputs."""
        env = {number: inputs[number] for number in self.inputs} | self.prelude.apply(weights)
        self.run(env)
        return {number: env[number] for number in self.outputs}

    def run(self, env: Values) -> None:
        """Runs the equations in place on `env`; values that have names for checkpoint policies are marked with them."""
        env |= {number: named(env[number], self.names[number]) for number in self.inputs if number in self.names}
        run_named(self.equations, env, self.names)

    def work(self) -> tuple[Callable, Sequence[Any], Sequence[int]]:
        """The body as a function of a list, its arguments' shapes, and positions of those with a gradient: for `graph_of`."""
        numbers = [*self.inputs, *self.prelude.weights]

        def run(*values: Any) -> list[Any]:
            given = dict(zip(numbers, values, strict=True))
            made = self.apply({n: given[n] for n in self.prelude.weights}, {n: given[n] for n in self.inputs})
            return [made[number] for number in self._varied_outputs]

        moving = [i for i, number in enumerate(numbers) if number in self._varied]
        return run, [shape_of(self.avals[number]) for number in numbers], moving

    def forward(
        self, weights: Values, inputs: Values, again: Iterable[int], transform: Transform
    ) -> tuple[Values, Saved]:
        """The outputs, and the residuals of the backward, without weights and the inputs numbered `again`."""
        env = {number: inputs[number] for number in self.inputs} | self.prelude.apply(weights)
        moving = {number: env[number] for number in self._moving}

        def work(*values):
            inner = env | dict(zip(moving, values, strict=True))
            self.run(inner)
            outputs = {number: inner[number] for number in self.outputs}
            varied = [outputs[number] for number in self._varied_outputs]
            return varied, {number: value for number, value in outputs.items() if number not in self._varied}

        provided = [env[number] for number in (*self.prelude.derived, *again)]
        out, rest, saved = vjp_without(transform(work), list(moving.values()), provided)
        return dict(zip(self._varied_outputs, out, strict=True)) | rest, saved

    def backward(
        self, saved: Saved, weights: Values, again: Sequence[Any], cotangents: Values
    ) -> tuple[Values, Values]:
        """Gradients of the inputs and of the weights, from those of the outputs.

        Args:
          saved: what the forward left.
          weights: the weights, read again.
          again: the inputs that the forward left out of the residuals, given again.
          cotangents: the cotangents of the outputs; a missing one is zero.
        """
        prepared, pull = self.prelude.vjp(weights)
        vjp = saved.restore([*(prepared[number] for number in self.prelude.derived), *again])
        grads = vjp([self.cotangent(number, cotangents.get(number)) for number in self._varied_outputs])
        found = dict(zip(self._moving, grads, strict=True))
        return {number: found[number] for number in self.inputs if number in found}, pull(found)

    def cotangent(self, number: int, value: Any = None) -> Any:
        """A cotangent of a value, zero when None, typed as varying like the value itself."""
        aval = self.avals[number]
        return vary(jnp.zeros(aval.shape, aval.dtype) if value is None else value, tuple(varying_axes(aval)))

    @property
    def _varied(self) -> frozenset[int]:
        return self.prelude.varied

    @property
    def _varied_outputs(self) -> list[int]:
        return [number for number in self.outputs if number in self._varied]

    @property
    def _moving(self) -> list[int]:
        return [number for number in (*self.inputs, *self.prelude.derived) if number in self._varied]


def add(grads: Values, number: int, grad: Any) -> None:
    """Add a gradient to those that `number` has already."""
    grads[number] = grads[number] + grad if number in grads else grad


# --------------------------------------------------------------------------------------------------
# Slices of stacked weights inside a scan: gathered when their trip begins, or some trips before.
# --------------------------------------------------------------------------------------------------


class Slices(NamedTuple):
    """How slices of stacked weights are read and their gradients reduced.

    Attributes:
      read: `(weights, shards, tie) -> (whole slices, tie)`: gathers nothing before `tie` is there.
      sync: `(weights, gradients of whole slices) -> gradients of the shards`.
      ahead: how many trips before its own a slice is read.
    """

    read: Callable[[Sequence[int], Sequence[Any], Any], tuple[list[Any], Any]]
    sync: Callable[[Sequence[int], Sequence[Any]], list[Any]]
    ahead: int = 0


@dataclass(frozen=True)
class Gathered:
    """A scan whose trips find the slices of their weights gathered.

    A trip gathers its own slices when it begins; or, to run `ahead` trips before them, those of a later trip, which the loop
    carries until then. The first are gathered before the loop. The last trips have no later one: they gather the first slices
    again, in vain, as every trip is the same program.

    Attributes:
      slices: how they are read.
      scanned: operand -> weight, where a trip reads its own slice.
      shards: this rank's part of every weight's stack.
      scope: a context with the scan's name and source line.
    """

    slices: Slices
    scanned: Mapping[int, int]
    shards: Values
    scope: Callable[[], Any]

    def scan(self, trip: Callable, carry: Any, xs: Any, params: Mapping[str, Any]) -> tuple[Any, Any]:
        """Runs `jax.lax.scan` of `trip(carry, x, slices by operand) -> (carry, y)` with gathered slices.

        Args:
          trip: one trip.
          carry: to begin with.
          xs: what the trips read besides, stacked.
          params: the scan's parameters: length, reverse, unroll.
        """
        if not self.scanned or not self.slices.ahead:
            own = {k: self.shards[weight] for k, weight in self.scanned.items()}

            def at_once(carry, x):
                own, x = x
                read, carry = self._read(own, carry)
                return trip(carry, x, read)

            with self.scope():
                return jax.lax.scan(at_once, carry, (own, xs), **params)
        length, reverse = params["length"], params["reverse"]
        ahead = min(self.slices.ahead, length)
        places = jnp.arange(length, dtype=jnp.int32)
        queue = []
        for place in range(ahead):
            read, carry = self._read(self._at(length - 1 - place if reverse else place), carry)
            queue.append(read)

        def later(state, x):
            (carry, queue), (place, x) = state, x
            read, carry = self._read(self._at((place + (-ahead if reverse else ahead)) % length), carry)
            carry, y = trip(carry, x, queue[0])
            return (carry, [*queue[1:], jax.tree.map(vary_like, read, queue[0])]), y

        with self.scope():
            (carry, _), ys = jax.lax.scan(later, (carry, queue), (places, xs), **params)
        return carry, ys

    def _at(self, place: Any) -> dict[int, Any]:
        """The slices of the shards that one trip reads."""
        return {
            k: jax.lax.dynamic_index_in_dim(self.shards[weight], place, keepdims=False)
            for k, weight in self.scanned.items()
        }

    def _read(self, own: dict[int, Any], tie: Any) -> tuple[dict[int, Any], Any]:
        read, tie = self.slices.read([self.scanned[k] for k in own], list(own.values()), tie)
        return dict(zip(own, read, strict=True)), tie


# --------------------------------------------------------------------------------------------------
# A scan over stacked weights, forward and backward with one slice of the weights gathered at a time.
# --------------------------------------------------------------------------------------------------


class LoopSaved(NamedTuple):
    """Residuals of a loop's forward: those of every trip, stacked, and the operands that are no weights."""

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
      options: the scan's options.
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
        self, weights: Values, inputs: Values, shards: Values, slices: Slices, transform: Transform = lambda work: work
    ) -> Values:
        """Runs the loop, each trip's work wrapped by `transform`, and returns the results."""
        given = self._given(inputs, self.prelude.apply(weights))

        def trip(carry, rest, read):
            env = self._env(given, carry, rest, read)
            carry, out = self._return(env, transform(self.body.apply)(self._weights(env), self._inputs(env)))
            return carry, (out, None)

        return self._scan(trip, given, shards, slices)[0]

    def forward(
        self, weights: Values, inputs: Values, shards: Values, slices: Slices, transform: Transform
    ) -> tuple[Values, LoopSaved]:
        """The results, and the residuals of the backward, without the weights."""
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
    """Builds the loop of a segment that scans over weights.

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
    """Values of a trip that have a gradient, also by way of the carry from trip to trip."""
    while True:
        varied = with_gradient(inner, start)
        more = {inner.inputs[k] for i, k in enumerate(carry) if among(inner.outputs[i], varied)} - start
        if not more:
            return varied
        start = start | more


# --------------------------------------------------------------------------------------------------
# The functions that run the segments of a cut program.
# --------------------------------------------------------------------------------------------------


def part_of(segment: Segment, cut: Cut) -> Body | UnitLoop:
    """Builds what runs a segment: a body, or a loop where it scans over weights."""
    program = cut.program
    weights = [program.inputs[w] for w in segment.weights]
    prelude = Prelude(weights, segment.prelude, segment.derived, cut.varied)
    if segment.scanned:
        return loop_of(segment, program, prelude)
    return Body(prelude, segment.equations, segment.inputs, segment.outputs, program.avals)


# --------------------------------------------------------------------------------------------------
# Recomputing activations in the backward, unit by unit: less memory for more work (Chen et al. 2016).
# --------------------------------------------------------------------------------------------------


def transform_of(remat: Remat, *, apart: bool = False) -> Callable[[Callable], Callable]:
    """Wraps a unit's function for a policy given as a word, or None.

    Args:
      remat: the policy.
      apart: whether the backward is in another branch or loop than the forward. Then every value between them is an array in
        memory, and even with None elementwise work is redone, as XLA does by itself where it sees both.
    """
    if remat is None and not apart:
        return lambda work: work
    if remat is None:
        require_policies()
    if policies_are_asked():
        policy = SaveWhere({None: all_but_elementwise, "selective": products_and_sums, "full": sums}[remat])
    else:  # by names alone: what is summed over ranks inside of gradients of its own is sent again
        names = () if remat == "full" else (PRODUCTS, PRODUCT_PARTS)
        policy = jax.checkpoint_policies.save_only_these_names(*names)
    return lambda work: jax.checkpoint(work, policy=policy, prevent_cse=not apart)


def transforms_of(
    remat: Any, pieces: Cut, parts: list, names: Sequence[str], grads: Sequence[int]
) -> tuple[list, list]:
    """The parts of a program, and the wrapper of each that a plan's recomputation asks for.

    Args:
      remat: None, a word, a policy of JAX's, regular expressions, or a chooser of what each unit keeps (`recompute.py`).
      pieces: the program in segments.
      parts: what runs each segment.
      names: the weights' names.
      grads: bytes of each weight's gradient.
    """
    if isinstance(remat, str) or remat is None:
        return parts, [transform_of(remat, apart=isinstance(part, UnitLoop)) for part in parts]
    from axonml_jax.parallel.recompute import ByNames, by_policy, chosen

    if callable(remat):
        return parts, [by_policy(remat, loop=isinstance(part, UnitLoop)) for part in parts]
    require_policies()
    return chosen(ByNames(remat) if isinstance(remat, tuple) else remat, pieces, parts, names, grads)


def recomputed(loss: Callable, model: Functional, wrap: Wrap, remat: Remat, params: PyTree, args: tuple) -> Callable:
    """A loss whose backward recomputes its units; with None the loss itself.

    Args:
      loss: `loss(read_params, *args)`.
      model: names its modules.
      wrap: which parts are units.
      remat: what is recomputed.
      params: the parameters as read; only shapes and types count.
      args: the loss's other arguments; only shapes and types count.
    """
    if remat is None:
        return loss
    leaves, treedef = jax.tree.flatten(params)
    names = list(named_leaves(params))

    def flat(weights: Sequence[Any], *args):
        return loss(treedef.unflatten(weights), *args)

    groups = lambda: list(units(names, wrap, model.module_types()).values())
    pieces = cut(flat, leaves, args, units=groups, trained=len(leaves), sliceable=range(len(leaves)), narrow=True)
    parts = [part_of(segment, pieces) for segment in pieces.segments]
    parts, transforms = transforms_of(remat, pieces, parts, names, [leaf.size * leaf.dtype.itemsize for leaf in leaves])
    whole = Slices(lambda weights, shards, tie: (list(shards), tie), lambda weights, grads: list(grads))
    number = pieces.program.inputs

    def run_units(params: PyTree, *args):
        weights = jax.tree.leaves(params)
        env = dict(pieces.program.constants)
        env |= zip(number[len(weights) :], jax.tree.leaves(args), strict=True)
        for segment, part, transform in zip(pieces.segments, parts, transforms, strict=True):
            own = {number[w]: weights[w] for w in segment.weights}
            inputs = {n: env[n] for n in segment.inputs}
            if isinstance(part, UnitLoop):
                stacks = {w: weights[w] for w in segment.scanned.values()}
                env |= part.apply(own, inputs, stacks, whole, transform)
            else:
                env |= transform(part.apply)(own, inputs)
        results = results_of(pieces.program.outputs, env)
        return pieces.out_tree.unflatten(results)

    return run_units


# --------------------------------------------------------------------------------------------------
# A loss run unit by unit: weights gathered for the forward, dropped, gathered again for the backward (ZeRO-3).
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """Runs a model's loss unit by unit, inside `shard_map`.

    Attributes:
      placement: how weights are read and gradients reduced.
      model: names its modules.
    """

    placement: Placement
    model: Functional

    def value_and_grad(
        self,
        loss: Callable,
        params: PyTree,
        frozen: PyTree,
        args: tuple,
        axes: Collection[AxisNames] | None,
        accumulated: Any,
    ) -> tuple[Any, list[Partial]]:
        """Differentiate `loss(read_params, read_frozen, *args) -> (scalar, aux)`.

        Returns:
          aux, and a gradient per leaf of `params`, in the dtype in which it accumulates, synchronized over `axes` (None: all);
          `accumulated` gradients, synchronized over the plan's inner axes, join before the rest of the reduction.
        """
        run = _Run.of(self, loss, params, frozen, args)
        (_, aux), saved = run.forward(keep=True)
        return aux, run.backward(saved, axes, accumulated)

    def apply(self, fun: Callable, params: PyTree, frozen: PyTree, args: tuple) -> Any:
        """Runs `fun(read_params, read_frozen, *args)` unit by unit, without gradients."""
        return _Run.of(self, fun, params, frozen, args).forward(keep=False)[0]


def check_units(placement: Placement, model: Functional) -> None:
    """Refuse a wrap policy that matches nothing, as far as module types are known before a call (Linen's are not).

    Raises:
      ValueError: naming the modules there are.
    """
    if placement.at_use:
        wrap, types = placement.at_use.wrap, model.module_types()
        known = types or not (isinstance(wrap, tuple) and any(isinstance(rule, type) for rule in wrap))
        if known:
            units([*named_leaves(placement.params), *named_leaves(placement.frozen)], wrap, types)


class _Run:
    """A loss cut into segments, run forward and backward on one rank's shards."""

    def __init__(
        self, placement: Placement, shards: list, layouts: list[Layout], trained: int, cut: Cut, args: list,
        names: list[str],
    ):  # fmt: skip
        self.placement = placement
        self.shards = shards
        self.layouts = layouts
        self.trained = trained
        self.cut = cut
        assert placement.at_use is not None
        self.prefetch = placement.at_use.prefetch
        self.inputs = dict(cut.program.constants) | dict(zip(cut.program.inputs[len(shards) :], args, strict=True))
        self.parts = [part_of(segment, cut) for segment in cut.segments]
        sizes = [math.prod(layout.shard) * layout.dtype.itemsize for layout in layouts]
        self.parts, self.transforms = transforms_of(placement.plan.remat, cut, self.parts, names, sizes)
        self.slices = Slices(self._read_slices, self._sync_slices, self.prefetch)

    @staticmethod
    def of(replayed: Replayed, fun: Callable, params: PyTree, frozen: PyTree, args: tuple) -> "_Run":
        placement = replayed.placement
        trained, treedef = jax.tree.flatten(params)
        rest, frozen_treedef = jax.tree.flatten(frozen)
        layouts = [*_layouts(placement.params), *_layouts(placement.frozen)]
        shards = [*trained, *rest]
        names = [*named_leaves(params), *named_leaves(frozen)]

        def flat(weights: Sequence[jax.Array], *args):
            return fun(
                treedef.unflatten(weights[: len(trained)]), frozen_treedef.unflatten(weights[len(trained) :]), *args
            )

        def groups() -> list[list[int]]:
            assert placement.at_use is not None
            return list(units(names, placement.at_use.wrap, replayed.model.module_types()).values())

        sliceable = [i for i, layout in enumerate(layouts) if layout.shape and layout.parts[0] == 1]
        read = placement.read(shards, layouts)  # for its shapes and types; nothing depends on the values
        pieces = cut(
            flat, read, args, units=groups, trained=len(trained), sliceable=sliceable,
            narrow=placement.plan.remat is not None,
        )  # fmt: skip
        return _Run(placement, shards, layouts, len(trained), pieces, jax.tree.leaves(args), names)

    def forward(self, keep: bool) -> tuple[Any, list[Any]]:
        """Runs all segments; returns the results and, with `keep`, each segment's residuals."""
        env, held, saved = dict(self.inputs), {}, []
        for i, (segment, part) in enumerate(zip(self.cut.segments, self.parts, strict=True)):
            entering = {number: env[number] for number in segment.inputs}
            due = [w for w in self._ahead(i, 1) if w not in held]
            read, entering = self._read(due, entering)
            held |= read
            weights = self._weights(segment, held)
            transform = self.transforms[i]
            if isinstance(part, UnitLoop):
                own = {w: self.shards[w] for w in segment.scanned.values()}
                if keep:
                    out, kept = part.forward(weights, entering, own, self.slices, transform)
                else:
                    out, kept = part.apply(weights, entering, own, self.slices), None
            elif keep:
                out, residuals = part.forward(weights, entering, (), transform)
                kept = residuals
            else:
                out, kept = part.apply(weights, entering), None
            env |= out
            saved.append(kept)
            held = {w: value for w, value in held.items() if self.cut.last[w] > i}
        results = results_of(self.cut.program.outputs, env)
        return self.cut.out_tree.unflatten(results), saved

    def backward(self, saved: list[Any], axes: Collection[AxisNames] | None, accumulated: Any) -> list[Partial]:
        """Synchronized gradients of the trained weights, from a seed of one for the first result."""
        (loss, *_), held, done = self.cut.program.outputs, {}, {}
        # Synchronized gradients of a segment are there before the next but one starts: while one unit is differentiated, the
        # reduction of the one before may run, and no compiler gathers the reductions of many units, whole, into one.
        before: dict[int, Any] = {}
        now: dict[int, Any] = {}
        grads: Values = {}
        whole: Values = {}
        if among(loss, self.cut.varied):
            grads[loss] = jnp.ones((), self.cut.program.avals[loss].dtype)
        for i in reversed(range(len(self.parts))):
            segment, part = self.cut.segments[i], self.parts[i]
            leaving = {number: grads.pop(number) for number in segment.outputs if number in grads}
            if not leaving:
                continue  # nothing of it reaches the loss
            settled, leaving = self._settled(list(before.values()), leaving)
            done |= zip(before, settled, strict=True)
            before, now = now, {}
            due = [w for w in self._ahead(i, -1) if w not in held]
            read, leaving = self._read(due, leaving)
            held |= read
            weights = self._weights(segment, held)
            if isinstance(part, UnitLoop):
                own = {w: self.shards[w] for w in segment.scanned.values()}
                of_inputs, of_weights, of_shards = part.backward(saved[i], weights, own, self.slices, leaving)
                now |= self._finish(of_shards, axes, accumulated)
            else:
                of_inputs, of_weights = part.backward(saved[i], weights, (), leaving)
            for number, grad in of_inputs.items():
                add(grads, number, grad)
            for number, grad in of_weights.items():
                add(whole, number, grad)
            complete = [w for w in segment.weights if self.cut.first[w] == i and self._number(w) in whole]
            own = parts_of(self.placement, [whole.pop(self._number(w)) for w in complete])
            now |= self._sync(dict(zip(complete, own, strict=True)), axes, accumulated)
            held = {w: value for w, value in held.items() if self.cut.first[w] < i}
        done |= before | now
        missing = [w for w in range(self.trained) if w not in done]
        done |= zip(missing, parts_of(self.placement, map(self._no_gradient, missing), axes), strict=True)
        return [done[w] for w in range(self.trained)]

    def _ahead(self, i: int, step: int) -> list[int]:
        """The weights of a segment and of those next in this direction that are to be prefetched."""
        near = range(i, i + step * (self.prefetch + 1), step)
        return [w for j in near if 0 <= j < len(self.parts) for w in self.cut.segments[j].weights]

    def _read(self, due: Sequence[int], tie: Values) -> tuple[dict[int, Any], Values]:
        """Gathers weights, but not before the values `tie` are there."""
        if not (due := list(dict.fromkeys(due))):
            return {}, tie
        shards, tie = self._tied([self.shards[w] for w in due], tie)
        if self.placement.plan.offload.params:
            at = moment(tie)
            shards = [load(shard, at) for shard in shards]
        return dict(zip(due, self.placement.read(shards, [self.layouts[w] for w in due]), strict=True)), tie

    def _read_slices(self, weights: Sequence[int], shards: Sequence[Any], tie: Any) -> tuple[list[Any], Any]:
        shards, tie = self._tied(list(shards), tie)
        return self.placement.read(shards, self._sliced(weights, shards)), tie

    def _sync_slices(self, weights: Sequence[int], grads: Sequence[Any]) -> list[Any]:
        layouts = [self.layouts[w].sliced(len(self.layouts[w].stored) - 1) for w in weights]
        inner, first = self.placement.axes.each_microbatch, min(weights, default=0)
        return self.placement.sync(parts_of(self.placement, grads), layouts, first, axes=inner)

    def _sliced(self, weights: Sequence[int], shards: Sequence[Any]) -> list[Layout]:
        return [self.layouts[w].sliced(shard.ndim) for w, shard in zip(weights, shards, strict=True)]

    def _sync(
        self, grads: dict[int, Partial], axes: Collection[AxisNames] | None, accumulated: Any
    ) -> dict[int, Partial]:
        if not grads:
            return {}
        more = None if accumulated is None else [accumulated[w] for w in grads]
        layouts = [self.layouts[w] for w in grads]
        synced = self.placement.sync(list(grads.values()), layouts, min(grads), axes=axes, accumulated=more)
        return dict(zip(grads, synced, strict=True))

    def _finish(
        self, shards: dict[int, Partial], axes: Collection[AxisNames] | None, accumulated: Any
    ) -> dict[int, Partial]:
        """Synchronizes gradients that a loop has synchronized over the inner axes, over the others too."""
        wanted = tuple(self.placement.strategies) if axes is None else axes
        return self._sync(
            shards, [axis for axis in wanted if axis not in self.placement.axes.each_microbatch], accumulated
        )

    def _no_gradient(self, weight: int) -> jax.Array:
        layout = self.layouts[weight]
        return jnp.zeros(layout.shard, self.placement.plan.precision.accumulate_dtype(layout.dtype))

    def _settled(self, grads: list[Partial], tie: Any) -> tuple[list[Partial], Any]:
        """Orders gradients before `tie` by a barrier: nothing is done with `tie` before they are there.

        Not in jax 0.10's typed mode, whose barrier would type reduced gradients as varying over what `tie` varies over.
        """
        tied, after = self._tied([grad.value for grad in grads], tie)
        same = all(varying_axes(new) == varying_axes(old.value) for new, old in zip(tied, grads, strict=True))
        settled = [Partial(new, old.lacking) for new, old in zip(tied, grads, strict=True)]
        return (settled, after) if same else (grads, tie)

    def _tied(self, shards: list[Any], tie: Any) -> tuple[list[Any], Any]:
        """Orders `tie` before shards by a barrier: shards are not used before it is there, and no two reads are merged."""
        leaves, treedef = jax.tree.flatten(tie)
        arrays = [i for i, x in enumerate(leaves) if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)]
        # jax 0.10 types all results of a barrier as varying over what any operand varies over. Along batch axes that is what
        # gathered weights are anyway; what varies over other axes gets a barrier of its own.
        apart = lambda x: varying_axes(x) - set(self.placement.axes.batch)
        arrays = [i for i in arrays if not apart(leaves[i])]
        widest = frozenset().union(*(varying_axes(leaves[i]) for i in arrays))
        arrays = [i for i in arrays if varying_axes(leaves[i]) == widest]
        alike = [i for i, shard in enumerate(shards) if not apart(shard)]
        for others in {apart(shard) for shard in shards} - {frozenset()}:
            own = [i for i, shard in enumerate(shards) if apart(shard) == others]
            for i, shard in zip(own, together([shards[i] for i in own]), strict=True):
                shards[i] = shard
        tied, after = together(([shards[i] for i in alike], [leaves[i] for i in arrays]))
        for i, shard in zip(alike, tied, strict=True):
            shards[i] = shard
        for i, leaf in zip(arrays, after, strict=True):
            leaves[i] = leaf
        return shards, treedef.unflatten(leaves)

    def _weights(self, segment: Segment, held: dict[int, Any]) -> Values:
        return {self._number(w): held[w] for w in segment.weights}

    def _number(self, weight: int) -> int:
        return self.cut.program.inputs[weight]


def _layouts(tree: PyTree) -> list[Layout]:
    return jax.tree.leaves(tree, is_leaf=is_layout)
