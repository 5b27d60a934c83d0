"""Programs inside a program, run on one rank's part: calls, loops, conditionals, checkpoints, and derivatives of one's own."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.primitives import max_over, vary_like
from axonml_jax.compat.jaxpr import trace
from axonml_jax.meaning.following import Watching
from axonml_jax.meaning.places import SUM, Places, Split
from axonml_jax.meaning.values import Value
from axonml_jax.program.program import Equation, Program, all_but_named, named_call, read_program

if TYPE_CHECKING:
    from typing import Protocol

    class Runs(Protocol):
        """What is asked of the interpreter."""

        ranks: Any
        following: Any
        call: Any

        def run(self, program: Program, given: Sequence[Value]) -> list[Value]:
            """The results of a program."""
            ...


Body = Callable[[Any, Equation, Sequence[Value]], list[Value]]
"""`body(interpreter, equation, given) -> results`."""


def kind_of(equation: Equation) -> str | None:
    """Which of `BODIES` runs an equation; None: it has no body, or one that is run as it is, on whole values."""
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


def at_places(run: "Runs", program: Program, given: Sequence[Places], made: Sequence[Places] | None) -> Callable:
    """A program as a function of what this rank holds of its inputs.

    Args:
      run: the interpreter.
      program: the program.
      given: the places of its inputs.
      made: of its results; None: as they come.
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


def _called(run: "Runs", equation: Equation, given: Sequence[Value]) -> list[Value]:
    assert equation.called is not None
    if named_call(equation.op) is not None:
        return _named(run, equation, given)
    return run.run(equation.called, given)


def _named(run: "Runs", equation: Equation, given: Sequence[Value]) -> list[Value]:
    """A named call, made again on this rank's part, or on whole values where more than rows go through it."""
    named, watching = named_call(equation.op), Watching(run.ranks.groups)
    assert named is not None and equation.called is not None
    places, arrays = _settled(run, given)
    made = watching.program(equation.called, places)
    if watching.moved:
        arrays = [run.ranks.settled(value, run.following.none) for value in given]
        made = [run.following.none] * len(equation.outputs)
    with equation.op.scope():
        return _held(run, equation, jax.tree.leaves(named.call(*arrays)), made)


def _settled(run: "Runs", given: Sequence[Value]) -> tuple[list[Places], list[jax.Array]]:
    """Values with their sums completed, and what this rank holds of them: what goes into a body is made before it."""
    places = [run.following.settled(value.places) for value in given]
    return places, [run.ranks.settled(value, at) for value, at in zip(given, places, strict=True)]


def _held(run: "Runs", equation: Equation, arrays: Sequence[Any], places: Sequence[Places]) -> list[Value]:
    return [run.ranks.held(x, at, aval.shape) for x, at, aval in zip(arrays, places, equation.op.made, strict=True)]


def _checkpoint(run: "Runs", equation: Equation, given: Sequence[Value]) -> list[Value]:
    view, body = equation.op.checkpointed, equation.body
    assert view is not None and body is not None
    places = [value.places for value in given]
    arrays = [run.ranks.settled(value, at) for value, at in zip(given, places, strict=True)]
    made = run.following.program(body, places)
    call = jax.checkpoint(at_places(run, body, places, made), **view.options)
    with equation.op.scope():
        return _held(run, equation, call(*arrays), made)


def _cond(run: "Runs", equation: Equation, given: Sequence[Value]) -> list[Value]:
    index = run.ranks.settled(given[0], run.following.none)
    places, arrays = _settled(run, given[1:])
    made = run.following.branches(equation, places)
    branches = [at_places(run, branch, places, made) for branch in equation.branches]
    with equation.op.scope():
        return _held(run, equation, jax.lax.switch(index, branches, *arrays), made)


def _scan(run: "Runs", equation: Equation, given: Sequence[Value]) -> list[Value]:
    scan, body, following = equation.op.scan, equation.body, run.following
    assert scan is not None and body is not None
    carried, stacked = following.scan(equation, [value.places for value in given])
    consts, const_arrays = _settled(run, given[: scan.num_consts])
    slices = [following.sliced(value.places) for value in given[scan.first_scanned :]]
    inside = [tuple(each and (each._replace(dim=each.dim + 1)) for each in places) for places in slices]
    xs = [run.ranks.settled(value, places) for value, places in zip(given[scan.first_scanned :], inside, strict=True)]
    carry = [
        run.ranks.vary(run.ranks.settled(value, places))
        for value, places in zip(given[scan.num_consts : scan.first_scanned], carried, strict=True)
    ]
    outs = [tuple(_sliced(place) for place in places) for places in stacked]
    call = at_places(run, body, [*consts, *carried, *slices], [*carried, *outs])

    def trip(carry: list, sliced: list) -> tuple[list, list]:
        before, run.ranks.times = run.ranks.times, run.ranks.times * scan.options["length"]
        made = call(*const_arrays, *carry, *sliced)
        run.ranks.times = before
        return made[: scan.num_carry], made[scan.num_carry :]

    with equation.op.scope():
        carry, ys = jax.lax.scan(trip, carry, xs, **scan.options)
    return _held(run, equation, [*carry, *ys], [*carried, *stacked])


def _sliced(place: Any) -> Any:
    return place._replace(dim=place.dim - 1) if isinstance(place, Split) else place


def _while(run: "Runs", equation: Equation, given: Sequence[Value]) -> list[Value]:
    loop, body, condition = equation.op.loop, equation.body, equation.condition
    assert loop is not None and body is not None and condition is not None
    carried = run.following.loop(equation, [value.places for value in given])
    split = loop.num_condition_consts, loop.num_condition_consts + loop.num_body_consts
    of_condition, condition_arrays = _settled(run, given[: split[0]])
    consts, const_arrays = _settled(run, given[split[0] : split[1]])
    test = at_places(run, condition, [*of_condition, *carried], [run.following.none])
    trip = at_places(run, body, [*consts, *carried], carried)

    def goes_on(carry: list) -> jax.Array:
        (more,) = test(*condition_arrays, *carry)
        # With check_vma a condition may not be typed as varying.
        return max_over(more.astype(jnp.int32), run.ranks.typed).astype(bool) if run.ranks.checked else more

    carry = [
        run.ranks.vary(run.ranks.settled(value, places))
        for value, places in zip(given[split[1] :], carried, strict=True)
    ]
    with equation.op.scope():
        made = jax.lax.while_loop(goes_on, lambda carry: trip(*const_arrays, *carry), carry)
    return _held(run, equation, made, carried)


# Derivatives of one's own


def _floats(avals: Sequence[Any]) -> list[int]:
    return [k for k, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]


def _shapes(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


def _typed(given: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Arrays typed as varying where the values were that they stand for."""
    return [vary_like(x, aval) for x, aval in zip(given, avals, strict=True)]


def _no_tangent(aval: Any) -> np.ndarray:
    return np.zeros(aval.shape, jax.dtypes.float0)


def forward_derivative(op: Any) -> Program:
    """The program of a call's results and their tangents, of its operands and the tangents of the floating ones."""
    floats, avals = _floats(op.given), op.given

    def both(*given: Any) -> tuple[list, list]:
        given = tuple(_typed(given, [*avals, *(avals[k] for k in floats)]))
        moving = dict(zip(floats, given[len(avals) :], strict=True))
        tangents = [moving.get(k) if k in moving else _no_tangent(aval) for k, aval in enumerate(avals)]
        outs, changes = jax.jvp(lambda *args: op.bind(args), given[: len(avals)], tuple(tangents))
        real = [change for k, change in enumerate(changes) if k in _floats(op.made)]
        return outs, real

    shapes = _shapes(avals)
    return read_program(trace(both, *shapes, *[shapes[k] for k in floats]).jaxpr, all_but_named)


def backward_derivative(op: Any) -> Program:
    """The program of the cotangents of a call's floating operands, of its operands and its results' cotangents."""
    floats, avals = _floats(op.given), op.given

    def pulled(*given: Any) -> Any:
        given = tuple(_typed(given, [*avals, *(op.made[k] for k in _floats(op.made))]))
        args = given[: len(avals)]

        def call(*moving: Any) -> list:
            own = dict(zip(floats, moving, strict=True))
            outs = op.bind([own.get(k, x) if k in own else x for k, x in enumerate(args)])
            return [outs[k] for k in _floats(op.made)]

        return jax.vjp(call, *[args[k] for k in floats])[1](list(given[len(avals) :]))

    outs = _shapes(op.made)
    return read_program(trace(pulled, *_shapes(avals), *[outs[k] for k in _floats(op.made)]).jaxpr, all_but_named)


def _custom_jvp(run: "Runs", equation: Equation, given: Sequence[Value]) -> list[Value]:
    """Rebuilt, as the function and its derivative are both programs of the whole batch; inlined, the user's rule would go."""
    op, inner = equation.op, equation.called
    assert inner is not None
    places, arrays = _settled(run, given)
    made, floats, moved = run.following.equation(equation, places), _floats(op.given), _floats(op.made)
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
    """Of a split value it is split alike, of a whole one a sum of the ranks', of a sum the same on every rank."""
    return tuple(SUM if place is None else None if place == SUM else place for place in places)


def _custom_vjp(run: "Runs", equation: Equation, given: Sequence[Value]) -> list[Value]:
    """Rebuilt alike."""
    op, inner = equation.op, equation.called
    assert inner is not None
    places, arrays = _settled(run, given)
    made, floats, moved = run.following.equation(equation, places), _floats(op.given), _floats(op.made)

    @jax.custom_vjp
    def call(*arrays: Any) -> list:
        return at_places(run, inner, places, made)(*arrays)

    def backward(arrays: Any, cotangents: Any) -> tuple:
        given = [*places, *(of_cotangent(made[k]) for k in moved)]
        rule = at_places(run, backward_derivative(op), given, [of_cotangent(places[k]) for k in floats])
        found = dict(zip(floats, rule(*arrays, *[cotangents[k] for k in moved]), strict=True))
        return tuple(found[k] if k in found else _no_tangent(x) for k, x in enumerate(arrays))

    call.defvjp(lambda *arrays: (call(*arrays), arrays), backward)
    with op.scope():
        return _held(run, equation, call(*arrays), made)


def _model_call(run: "Runs", equation: Equation, given: Sequence[Value]) -> list[Value]:
    return run.call(run, equation, given)


BODIES: Mapping[str, Body] = {
    "call": _called,
    "checkpoint": _checkpoint,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "model_call": _model_call,
}
"""By what `kind_of` names."""
