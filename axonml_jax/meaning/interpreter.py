"""Runs a program of the whole batch on one rank's part, inside `shard_map`, with its calls, loops and branches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.primitives import max_over, vary, vary_like
from axonml_jax.compat.jaxpr import Operation, is_closed_over, num_closed_over, solve_of, trace
from axonml_jax.meaning.following import Following, TalksItself, Watching, either
from axonml_jax.meaning.places import SUM, Places, Split, shifted
from axonml_jax.meaning.values import ACTS, Ranks, Value
from axonml_jax.program.program import (
    Equation,
    Program,
    all_but_named,
    ends_by_rows,
    is_constant,
    is_elementwise,
    made_by,
    named_call,
    read_program,
    rule_of,
    while_loop,
)


class Interpreter:
    """Runs programs that were traced at the whole batch's shape on this rank's part.

    Attributes:
      ranks: the groups of ranks, and their collectives.
      following: infers the places of values from shapes alone (`following.py`).
      call: runs the model on this rank's operands in the place of a call of it (`model_call.py`).
    """

    def __init__(self, ranks: Ranks, call: Any = None):
        self.ranks, self.call = ranks, call
        self.following = Following(ranks.groups, call)

    def run(
        self, program: Program, given: Sequence[Value], known: Mapping[int, Value] | None = None, wanted: Any = None
    ) -> list[Value]:
        """Runs a program, and returns its results.

        Args:
          program: the program.
          given: its inputs.
          known: values by number; the equations that would make them are not run.
          wanted: numbers to return instead of the program's results, of which only the equations that they need are run; None:
            the results.
        """
        known = known or {}
        env = {number: self.ranks.known(constant) for number, constant in program.constants.items()}
        env.update(zip(program.inputs, given, strict=True))
        env.update(known)
        read = lambda atom: self._constant(atom) if is_constant(atom) else env[atom]
        for equation in program.equations if wanted is None else made_by(program.equations, wanted, known):
            if equation.outputs and all(number in known for number in equation.outputs):
                continue
            operands, before = [read(atom) for atom in equation.inputs], self.ranks.at
            self.ranks.at = equation.name, equation.op.line
            env.update(zip(equation.outputs, self._equation(equation, operands), strict=True))
            env.update(known)
            self.ranks.at = before
        return [read(atom) for atom in (program.outputs if wanted is None else wanted)]

    def _constant(self, atom: Any) -> Value:
        value = self.ranks.known(jnp.asarray(atom.val, atom.aval.dtype))
        value.zero = value.shape == () and not jnp.issubdtype(value.dtype, jax.dtypes.extended) and bool(atom.val == 0)
        return value

    def _equation(self, equation: Equation, given: Sequence[Value]) -> list[Value]:
        op = equation.op
        if (kind := kind_of(equation)) is not None:
            return BODIES[kind](self, equation, given)
        if set(op.mesh_axes) & set(self.ranks.axes) and not rule_of(op.name).casts:
            raise TalksItself(op.name, op.line)
        if rule_of(op.name).casts:
            return [self._cast(op, value) for value in given]
        if all(value.is_whole for value in given) and (made := self._lazily(op, given)) is not None:
            return made
        steps = self.following.steps(op, [value.places for value in given])
        wanted = list(zip(*(step.wanted for step in steps), strict=True)) if given else []
        arrays = [self.ranks.settled(value, tuple(places)) for value, places in zip(given, wanted, strict=True)]
        places = [tuple(each) for each in zip(*(step.made for step in steps), strict=True)]
        joined = [group for step, group in zip(steps, self.ranks.groups, strict=True) if step.act]
        if joined:
            self.ranks.check_talk(joined)
            act = next(step.act for step in steps if step.act)
            with jax.named_scope("axonml.loss"):
                made = [ACTS[act](self.ranks, op, arrays, joined)]
        else:
            made = self.bound(op, arrays, wanted, places)
        return [self.ranks.held(x, at, aval.shape) for x, at, aval in zip(made, places, op.made, strict=True)]

    def _cast(self, op: Operation, value: Value) -> Value:
        make = value.make
        return Value(
            value.shape, value.dtype, value.places, lambda places: vary(make(places), op.mesh_axes), value.zero
        )

    def bound(
        self, op: Operation, arrays: Sequence[Any], wanted: Sequence[Places], made: Sequence[Places]
    ) -> list[Any]:
        """Runs an operation as it is on arrays in the places in which it takes them."""
        if op.bodies and self.ranks.checked and not op.name.startswith("scatter") and not any(map(any, wanted)):
            arrays = [self.ranks.unvaried(x) for x in arrays]
        changed = localised(op, self.ranks, wanted, made) if any(map(any, [*wanted, *made])) else {}
        return op.bind(arrays, **changed)

    # Whole values that are made as far as they are read

    def _lazily(self, op: Operation, given: Sequence[Value]) -> list[Value] | None:
        if op.name == "broadcast_in_dim" and len(given) == 1:
            return [self._lazy_broadcast(op, given[0])]
        if op.name == "iota" and not given:
            return [self._lazy_iota(op)]
        one = len(op.made) == 1 and given and not op.has_effects
        if one and is_elementwise(op.name) and op.name != "bitcast_convert_type":
            return [self._lazy_elementwise(op, given)]
        return None

    def _lazy_elementwise(self, op: Operation, given: Sequence[Value]) -> Value:
        (aval,) = op.made

        def make(places: Places) -> jax.Array:
            return op.bind([value.at(_spread(places, value.shape)) for value in given])[0]

        zero = op.name in ("convert_element_type", "copy") and given[0].zero
        return self.ranks.lazy(aval.shape, aval.dtype, make, zero)

    def _lazy_broadcast(self, op: Operation, value: Value) -> Value:
        shape, to = op.options["shape"], tuple(op.options["broadcast_dimensions"])

        def inside(place: Any) -> Any:
            kept = isinstance(place, Split) and place.dim in to and value.shape[to.index(place.dim)] == shape[place.dim]
            return place._replace(dim=to.index(place.dim)) if kept else None

        def make(places: Places) -> jax.Array:
            return op.bind([value.at(tuple(map(inside, places)))], shape=self.ranks.local(shape, places))[0]

        return self.ranks.lazy(shape, value.dtype, make, value.zero)

    def _lazy_iota(self, op: Operation) -> Value:
        (aval,), along = op.made, op.options["dimension"]

        def make(places: Places) -> jax.Array:
            own = tuple(
                place._replace(dim=0) if isinstance(place, Split) and place.dim == along else None for place in places
            )
            numbers = self.ranks.block(jnp.arange(aval.shape[along], dtype=aval.dtype), own)
            return jax.lax.broadcast_in_dim(numbers, self.ranks.local(aval.shape, places), (along,))

        return self.ranks.lazy(aval.shape, aval.dtype, make)


def _spread(places: Places, shape: Sequence[int]) -> Places:
    """The places of an operand of an elementwise operation, whose dims of size 1 are broadcast."""
    return tuple(place if isinstance(place, Split) and shape and shape[place.dim] > 1 else None for place in places)


def localised(op: Operation, ranks: Ranks, wanted: Sequence[Places], made: Sequence[Places]) -> dict[str, Any]:
    """The options of an operation that hold shapes, for this rank's part."""
    if op.name == "broadcast_in_dim":
        return {"shape": ranks.local(op.made[0].shape, made[0])}
    if op.name == "reshape":
        return {"new_sizes": ranks.local(op.made[0].shape, made[0])}
    whole = op.given[0].shape if op.given else ()
    own = ranks.local(whole, wanted[0]) if wanted else ()
    if op.name == "slice":
        ends = zip(op.options["limit_indices"], whole, own, strict=True)
        return {"limit_indices": tuple(part if part != size else end for end, size, part in ends)}
    if op.name in ("dynamic_slice", "gather"):
        sizes = zip(op.options["slice_sizes"], whole, own, strict=True)
        return {"slice_sizes": tuple(part if size == n else size for size, n, part in sizes)}
    return {}


# --------------------------------------------------------------------------------------------------
# Programs inside a program: calls, loops, conditionals, checkpoints, and derivatives of one's own.
# --------------------------------------------------------------------------------------------------


Body = Callable[[Any, Equation, Sequence[Value]], list[Value]]
"""`body(interpreter, equation, given) -> results`."""


def kind_of(equation: Equation) -> str | None:
    """The kind of `BODIES` that runs an equation; None: it has no body, or one that is run as it is, on whole values."""
    op = equation.op
    if op.name in BODIES:
        return op.name
    if op.scan is not None:
        return "scan"
    if op.loop is not None:
        return "while"
    if equation.branches and not op.chooses_by_platform:
        return "cond"
    if op.checkpointed is not None:
        return "checkpoint"
    return "call" if equation.called is not None else None


def at_places(run: Interpreter, program: Program, given: Sequence[Places], made: Sequence[Places] | None) -> Callable:
    """Wraps a program as a function of this rank's parts of its inputs.

    Args:
      run: the interpreter.
      program: the program.
      given: the places of its inputs.
      made: the places in which its results are returned; None: those in which they come out.
    """

    def call(*arrays: Any) -> list[jax.Array]:
        values = [
            run.ranks.held(x, places, program.avals[number].shape)
            for x, places, number in zip(arrays, given, program.inputs, strict=True)
        ]
        outs = run.run(program, values)
        wanted = [value.places for value in outs] if made is None else made
        return [run.ranks.vary(run.ranks.settled(value, places)) for value, places in zip(outs, wanted, strict=True)]

    return call


def _called(run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
    assert equation.called is not None
    if named_call(equation.op) is not None:
        return _named(run, equation, given)
    return run.run(equation.called, given)


def _named(run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
    """Runs a named call again on this rank's part, or on whole values where it mixes rows.

    Its last two operands have the same rows: where one is split along them and the other is whole, both are split.
    """
    named, watching = named_call(equation.op), Watching(run.ranks.groups)
    assert named is not None and equation.called is not None
    places = [run.following.settled(value.places) for value in given]
    places[-2:] = [tuple(a or b for a, b in zip(*pair, strict=True)) for pair in (places[-2:], places[:-3:-1])]
    arrays = [run.ranks.settled(value, at) for value, at in zip(given, places, strict=True)]
    made = watching.program(equation.called, places)
    if watching.moved:
        arrays = [run.ranks.settled(value, run.following.none) for value in given]
        made = [run.following.none] * len(equation.outputs)
    with equation.op.scope():
        return _held(run, equation, jax.tree.leaves(named.call(*arrays)), made)


def _settled(run: Interpreter, given: Sequence[Value]) -> tuple[list[Places], list[jax.Array]]:
    """Completes the sums of values, and returns their places and this rank's parts, before a body reads them."""
    places = [run.following.settled(value.places) for value in given]
    return places, [run.ranks.settled(value, at) for value, at in zip(given, places, strict=True)]


def _held(run: Interpreter, equation: Equation, arrays: Sequence[Any], places: Sequence[Places]) -> list[Value]:
    return [run.ranks.held(x, at, aval.shape) for x, at, aval in zip(arrays, places, equation.op.made, strict=True)]


def _checkpoint(run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
    view, body = equation.op.checkpointed, equation.body
    assert view is not None and body is not None
    places = [value.places for value in given]
    arrays = [run.ranks.settled(value, at) for value, at in zip(given, places, strict=True)]
    made = run.following.program(body, places)
    call = jax.checkpoint(at_places(run, body, places, made), **view.options)
    with equation.op.scope():
        return _held(run, equation, call(*arrays), made)


def _cond(run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
    index = run.ranks.settled(given[0], run.following.none)
    places, arrays = _settled(run, given[1:])
    made = run.following.branches(equation, places)
    branches = [at_places(run, branch, places, made) for branch in equation.branches]
    with equation.op.scope():
        return _held(run, equation, jax.lax.switch(index, branches, *arrays), made)


def _scan(run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
    scan, body, following = equation.op.scan, equation.body, run.following
    assert scan is not None and body is not None
    carried, stacked = following.scan(equation, [value.places for value in given])
    consts, const_arrays = _settled(run, given[: scan.num_consts])
    slices = [following.sliced(value.places) for value in given[scan.first_scanned :]]
    rows = following.rows_of(equation, [value.places for value in given])
    inside = [tuple(map(either, shifted(places, 1), rows)) for places in slices]
    xs = [run.ranks.settled(value, places) for value, places in zip(given[scan.first_scanned :], inside, strict=True)]
    carry = [
        run.ranks.vary(run.ranks.settled(value, places))
        for value, places in zip(given[scan.num_consts : scan.first_scanned], carried, strict=True)
    ]
    outs = [tuple(None if own else place for place, own in zip(shifted(at, -1), rows, strict=True)) for at in stacked]
    call = at_places(run, body, [*consts, *carried, *slices], [*carried, *outs])

    def trip(carry: list, sliced: list) -> tuple[list, list]:
        before, run.ranks.times = run.ranks.times, run.ranks.times * scan.options["length"]
        made = call(*const_arrays, *carry, *sliced)
        run.ranks.times = before
        return made[: scan.num_carry], made[scan.num_carry :]

    with equation.op.scope():
        carry, ys = jax.lax.scan(trip, carry, xs, **{**scan.options, **({"length": None} if any(rows) else {})})
    return _held(run, equation, [*carry, *ys], [*carried, *stacked])


def _while(run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
    loop, body, condition = equation.op.loop, equation.body, equation.condition
    assert loop is not None and body is not None and condition is not None
    carried = run.following.loop(equation, [value.places for value in given])
    split = loop.num_condition_consts, loop.num_condition_consts + loop.num_body_consts
    of_condition, condition_arrays = _settled(run, given[: split[0]])
    consts, const_arrays = _settled(run, given[split[0] : split[1]])
    by_rows = [
        place if isinstance(place, Split) and place.dim < ends_by_rows(condition) else None for place in carried[0]
    ]
    test = at_places(run, condition, [*of_condition, *carried], [tuple(by_rows)])
    trip = at_places(run, body, [*consts, *carried], carried)
    watching = Watching(run.ranks.groups, run.following.calls)
    watching.loop(equation, [value.places for value in given])
    talking = [group.axes for group, place in zip(run.ranks.groups, by_rows, strict=True) if place and watching.moved]
    axes = run.ranks.typed if run.ranks.checked else tuple(axis for each in talking for axis in each)

    def together(more: jax.Array) -> jax.Array:
        """Ranks that talk go on as long as one of them does; with check_vma a condition may not be typed as varying."""
        return max_over(more.astype(jnp.int32), axes).astype(bool) if axes else more

    carry = [
        run.ranks.vary(run.ranks.settled(value, places))
        for value, places in zip(given[split[1] :], carried, strict=True)
    ]
    with equation.op.scope():
        made = while_loop(
            condition,
            lambda carry: test(*condition_arrays, *carry)[0],
            lambda carry: trip(*const_arrays, *carry),
            carry,
            together,
        )
    return _held(run, equation, made, carried)


def _solve(run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
    """Solves for this rank's part of the right side, by programs of its parts: gradients are those of the solution."""
    view = solve_of(equation.op)
    assert view is not None
    places, made = run.following.solve(equation, [value.places for value in given])
    arrays = [run.ranks.settled(value, at) for value, at in zip(given, places, strict=True)]
    if not any(map(any, places)):
        # Typed as it is: ranks that end its loops together may not differ in their cotangents.
        return _held(run, equation, run.bound(equation.op, arrays, places, made), made)
    arrays, right, count = list(map(run.ranks.vary, arrays)), places[view.first :], len(places) - view.first

    def of(part: tuple[Any, slice], vector: list[Places], outs: list[Places]) -> Callable[[list], list]:
        jaxpr, own = part
        call = at_places(run, equation.part(jaxpr), [*places[own], *vector], outs)
        return lambda arrays_of_vector: call(*arrays[own], *arrays_of_vector)

    solve, rest = of(view.solve, right, made), len(made) > count
    matvec = of(view.matvec, made[:count], right)
    transposed = None if view.transposed is None else of(view.transposed, made[:count], right)
    with equation.op.scope():
        outs: Any = jax.lax.custom_linear_solve(
            matvec,
            arrays[view.first :],
            lambda _, b: (solve(b)[:count], solve(b)[count:]) if rest else solve(b),
            None if transposed is None else lambda _, b: transposed(b),
            has_aux=rest,
        )
    return _held(run, equation, [*outs[0], *outs[1]] if rest else outs, made)


# Derivatives of one's own


def floats_of(avals: Sequence[Any]) -> list[int]:
    """The positions of the values that have derivatives."""
    return [k for k, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]


def shapes_of(avals: Sequence[Any], *, typed: bool = False) -> list[jax.ShapeDtypeStruct]:
    """The shapes of abstract values; `typed` keeps their shardings on the mesh of the trace."""
    lies = lambda aval: aval.sharding if typed and not aval.sharding.mesh.empty else None
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=lies(aval)) for aval in avals]


def _typed(given: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Types arrays as varying like the values that they stand for."""
    return [vary_like(x, aval) for x, aval in zip(given, avals, strict=True)]


def no_tangent(aval: Any) -> np.ndarray:
    """The zero tangent, of dtype float0, of a value that has no derivative."""
    return np.zeros(aval.shape, jax.dtypes.float0)


def forward_derivative(op: Any, *, typed: bool = False) -> Program:
    """The program of a call's results and tangents, from its operands and the tangents of the floating ones.

    `typed`: operands keep the shardings with which the call was traced.
    """
    floats, avals = floats_of(op.given), op.given

    def both(*given: Any) -> tuple[list, list]:
        given = tuple(_typed(given, [*avals, *(avals[k] for k in floats)]))
        moving = dict(zip(floats, given[len(avals) :], strict=True))
        tangents = [moving.get(k) if k in moving else no_tangent(aval) for k, aval in enumerate(avals)]
        outs, changes = jax.jvp(lambda *args: op.bind(args), given[: len(avals)], tuple(tangents))
        real = [change for k, change in enumerate(changes) if k in floats_of(op.made)]
        return outs, real

    shapes = shapes_of(avals, typed=typed)
    return read_program(trace(both, *shapes, *[shapes[k] for k in floats]).jaxpr, all_but_named)


def open_floats(equation: Equation) -> list[int]:
    """The floating operands of a call with a VJP of its own, but for what its equation says that its function closes over."""
    return [k for k in floats_of(equation.op.given) if k >= num_closed_over(equation.op)]


def moving_of(equation: Equation) -> list[int]:
    """The operands by which such a call may be differentiated: those that are no constants, as most that it closes over are."""
    return [k for k in open_floats(equation) if k not in equation.fixed]


def backward_derivative(op: Any, moving: Sequence[int]) -> Program:
    """The program of the cotangents of some of a call's operands, from all operands and its results' cotangents.

    Args:
      op: the call.
      moving: these operands.

    Raises:
      ClosedOver: where the call's function closes over one of them.
    """
    avals, results = op.given, floats_of(op.made)

    def pulled(*given: Any) -> Any:
        given = tuple(_typed(given, [*avals, *(op.made[k] for k in results)]))
        args = given[: len(avals)]

        def call(*moved: Any) -> list:
            own = dict(zip(moving, moved, strict=True))
            outs = op.bind([own.get(k, x) if k in own else x for k, x in enumerate(args)])
            return [outs[k] for k in results]

        return jax.vjp(call, *[args[k] for k in moving])[1](list(given[len(avals) :]))

    outs = shapes_of(op.made)
    try:
        traced = trace(pulled, *shapes_of(avals), *[outs[k] for k in results])
    except Exception as error:
        if is_closed_over(error):
            raise ClosedOver(*error.args) from error
        raise
    return read_program(traced.jaxpr, all_but_named)


class ClosedOver(Exception):
    """Raised where a call would be differentiated by what its function closes over."""


def _custom_jvp(run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
    """Rebuilds a function with its own JVP from programs of the whole batch; inlined, the user's rule would be lost."""
    op, inner = equation.op, equation.called
    assert inner is not None
    places, arrays = _settled(run, given)
    made, floats, moved = run.following.equation(equation, places), floats_of(op.given), floats_of(op.made)
    call = jax.custom_jvp(at_places(run, inner, places, made))

    @call.defjvp
    def _(primals: Any, tangents: Any) -> tuple[list, list]:
        given = [*places, *(places[k] for k in floats)]
        rule = at_places(run, forward_derivative(op), given, [*made, *(made[k] for k in moved)])
        outs = rule(*primals, *[tangents[k] for k in floats])
        changes = iter(outs[len(made) :])
        return outs[: len(made)], [
            next(changes) if k in moved else np.zeros(outs[k].shape, jax.dtypes.float0) for k in range(len(made))
        ]

    with op.scope():
        return _held(run, equation, call(*arrays), made)


def of_cotangent(places: Places) -> Places:
    """The places of a cotangent: split like the value; a sum for a value that is whole; whole for a sum."""
    return tuple(SUM if place is None else None if place == SUM else place for place in places)


def _custom_vjp(run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
    """Rebuilds a function with its own VJP from programs of the whole batch."""
    op, inner = equation.op, equation.called
    assert inner is not None
    places, arrays = _settled(run, given)
    made, floats, moved = run.following.equation(equation, places), floats_of(op.given), floats_of(op.made)

    @jax.custom_vjp
    def call(*arrays: Any) -> list:
        return at_places(run, inner, places, made)(*arrays)

    def forward(*primals: Any) -> tuple:
        arrays = [each.value for each in primals]
        return call(*arrays), (arrays, _Moving(k for k in floats if primals[k].perturbed))

    def backward(kept: Any, cotangents: Any) -> tuple:
        arrays, moving = kept
        given = [*places, *(of_cotangent(made[k]) for k in moved)]
        rule = at_places(run, backward_derivative(op, moving), given, [of_cotangent(places[k]) for k in moving])
        found = dict(zip(moving, rule(*arrays, *[_instantiated(cotangents[k]) for k in moved]), strict=True))
        found |= {k: jnp.zeros_like(arrays[k]) for k in floats if k not in found}
        return tuple(found[k] if k in found else no_tangent(x) for k, x in enumerate(arrays))

    call.defvjp(forward, backward, symbolic_zeros=True)
    with op.scope():
        return _held(run, equation, call(*arrays), made)


@jax.tree_util.register_static
class _Moving(tuple[int, ...]):
    """The operands of a call that have a derivative."""


def _instantiated(cotangent: Any) -> Any:
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return vary_like(jnp.zeros(aval.shape, aval.dtype), aval)


def _model_call(run: Interpreter, equation: Equation, given: Sequence[Value]) -> list[Value]:
    return run.call(run, equation, given)


BODIES: Mapping[str, Body] = {
    "call": _called,
    "checkpoint": _checkpoint,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "custom_jvp_call": _custom_jvp,
    "custom_linear_solve": _solve,
    "custom_vjp_call": _custom_vjp,
    "model_call": _model_call,
}
"""The runner of each kind of equation (`kind_of`)."""
