"""Derivatives of a user's own in a model (`custom_vjp`, `custom_jvp`) that are no sum over rows, as a clipped gradient is.

A rank, or a microbatch, has the gradients of its rows alone, and they are added up afterwards. That is the gradient of the
whole batch if a derivative hands on a sum over rows as it is: what bends it (a clip, a sign, a norm), adds to it, or joins it
with rows sees a part of it. The model's calls are walked, and behind each call with a derivative of its own that
derivative's program. Only what is certain is found.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from axonml_jax.compat.jaxpr import Operation, is_users_function
from axonml_jax.compat.order import CALLS_WITH_GRADIENTS
from axonml_jax.meaning.interpreter import ClosedOver, backward_derivative, floats_of, forward_derivative, moving_of
from axonml_jax.meaning.model_call import Call
from axonml_jax.meaning.places import SUM, Group, Place, Split, step_of
from axonml_jax.program.program import (
    Equation,
    Program,
    all_but_named,
    is_constant,
    is_elementwise,
    read_program,
    rule_of,
)


class State(NamedTuple):
    """What is known of a value.

    Attributes:
      kind: "zero": it is zero; "free": it comes from no rows; "rows": it holds rows; "sum": it is a sum over rows that nothing
        has bent; "bent": it is made of such a sum by something that a sum of its parts is not; "other": nothing is known.
      place: of rows, the dim that holds them.
      note: the operation that bent it.
    """

    kind: str
    place: Split | None = None
    note: str = ""


ZERO, FREE, TOTAL, OTHER = map(State, ("zero", "free", "sum", "other"))
_GROUP = (Group((), 1),)
_BENDS = frozenset(
    ["cholesky", "clamp", "eigh", "lu", "qr", "reduce_max", "reduce_min", "reduce_prod", "sort", "svd", "top_k"]
)
"""Operations, besides elementwise ones, that are not linear."""

_MEETINGS = ("concatenate", "dot_general", "stack")
_KEEP_ZERO = ("add", "convert_element_type", "copy", "neg", "pad", "reduce_sum", "reshard", "slice", "sub")
_HANDS_ON = ("add", "add_any", "sub", "complex", "concatenate", "pad", "stack", "dynamic_update_slice", "select_n")
"""Operations that hand on a sum over rows beside other sums and zeros alone, and of whose operands one may be an index."""


def own_gradients(whole: Sequence[Call], local: Sequence[Call]) -> list[str]:
    """The operations by which derivatives of the user's own make no sum over rows of what rows or parameters get.

    Args:
      whole, local: the model's calls, noted at the whole batch's shapes and at a rank's.
    """
    walk = _Walk()
    for of_all, of_rank in zip(whole, local, strict=False):
        if of_rank.traced is None or not of_all.alike(of_rank):
            continue
        pairs = zip((*of_all.given, *of_all.made), (*of_rank.given, *of_rank.made), strict=True)
        walk.sizes = {b for of_a, of_b in pairs for a, b in zip(of_a.shape, of_b.shape, strict=False) if a != b}
        program = read_program(of_rank.traced, all_but_named)
        given = [_given(a.shape, b.shape) for a, b in zip(of_all.given, of_rank.given, strict=True)]
        walk.program(program, [*[FREE] * (len(program.inputs) - len(given)), *given])
    return list(dict.fromkeys(walk.found))


def _given(whole: Sequence[int], own: Sequence[int]) -> State:
    grown = [dim for dim, (a, b) in enumerate(zip(whole, own, strict=True)) if a != b]
    return FREE if not grown else State("rows", Split(grown[0])) if len(grown) == 1 else OTHER


class _Walk:
    """Walks programs; `found` is what it notes behind calls with derivatives of their own.

    Attributes:
      sizes: the sizes that dims of rows have on a rank.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.sizes: set[int] = set()
        self._behind = False

    def program(self, program: Program, given: Sequence[State]) -> list[State]:
        """The states of a program's results."""
        env = {number: _of_constant(value) for number, value in program.constants.items()}
        env.update(zip(program.inputs, given, strict=True))
        read = lambda atom: _of_constant(atom.val) if is_constant(atom) else env[atom]
        for equation in program.equations:
            env.update(zip(equation.outputs, self._equation(equation, [*map(read, equation.inputs)]), strict=True))
        return [*map(read, program.outputs)]

    def _equation(self, equation: Equation, given: list[State]) -> list[State]:
        op = equation.op
        if op.scan is not None:
            return self._scan(equation, given)
        if op.loop is not None:
            return self._loop(equation, given)
        if equation.branches:
            made = [self.program(branch, given[1:]) for branch in equation.branches]
            bent = [given[0]] if given[0].kind == "bent" else []
            return [_joined((*bent, *each)) for each in zip(*made, strict=True)]
        inner = equation.called if equation.called is not None else equation.body
        if inner is not None and not op.name.startswith("scatter"):
            made = self.program(inner, given)
            if op.name in CALLS_WITH_GRADIENTS and not self._behind and is_users_function(op):
                self._behind = True
                try:
                    own = self._backward if op.name == "custom_vjp_call" else self._forward
                    with suppress(ClosedOver):  # nothing is known of it
                        own(equation, given, made)
                finally:
                    self._behind = False
            return made
        if rule_of(op.name).casts or rule_of(op.name).passes:
            return given
        return self._made(op, given)

    def _forward(self, equation: Equation, given: list[State], made: list[State]) -> None:
        """Notes where a call's own rule for tangents joins rows with a sum over them, and the call itself does not."""
        op = equation.op
        program = forward_derivative(op)
        found = self.program(program, [*given, *(given[k] for k in floats_of(op.given))])
        calls = [made[k] for k in floats_of(op.made)]
        for state, call in zip(found[len(made) :], calls, strict=True):
            if state.kind == "bent" and call.kind in ("rows", "free"):
                self.found.append(state.note)

    def _backward(self, equation: Equation, given: list[State], made: list[State]) -> None:
        """Notes what a call's own derivative makes of its results' cotangents, if it is no sum over rows."""
        op, moving, results = equation.op, moving_of(equation), floats_of(equation.op.made)
        found = self.program(
            backward_derivative(op, moving), [*given, *(self._cotangent(made[k], op.made[k]) for k in results)]
        )
        for k, state in zip(moving, found, strict=True):
            wanted = self._cotangent(given[k], op.given[k]).kind
            if state.kind == "bent" and wanted != "other":
                self.found.append(state.note)
            elif {wanted, state.kind} in ({"sum", "free"}, {"rows", "sum"}):
                self.found.append(f"custom_vjp ({op.line or 'no line known'})")

    def _cotangent(self, state: State, aval: Any) -> State:
        """The state of a value's cotangent: split like the value; a sum over rows for a value that has none.

        A value that comes from no rows may be as large as they are, such as a first carry of zeros: each of its rows may have a
        gradient of its own.
        """
        if state.kind == "rows":
            return State("rows", state.place)
        return TOTAL if state.kind in ("zero", "free") and self.sizes.isdisjoint(aval.shape) else OTHER

    # Bodies

    def _scan(self, equation: Equation, given: list[State]) -> list[State]:
        scan, body = equation.op.scan, equation.body
        assert scan is not None and body is not None
        consts, carry = given[: scan.num_consts], given[scan.num_consts : scan.first_scanned]
        slices = [_moved(state, -1) for state in given[scan.first_scanned :]]
        made = self._carried(carry, lambda carry: self.program(body, [*consts, *carry, *slices]))
        return [*made[: scan.num_carry], *(_moved(state, 1) for state in made[scan.num_carry :])]

    def _loop(self, equation: Equation, given: list[State]) -> list[State]:
        loop, body = equation.op.loop, equation.body
        assert loop is not None and body is not None
        first = loop.num_condition_consts
        consts, carry = given[first : first + loop.num_body_consts], given[first + loop.num_body_consts :]
        return self._carried(carry, lambda carry: self.program(body, [*consts, *carry]))

    def _carried(self, carry: list[State], trip: Callable[[list[State]], list[State]]) -> list[State]:
        """The results of a trip whose carry holds in every trip; what an earlier one notes is not said."""
        known = list(self.found)
        while True:
            self.found = list(known)
            made = trip(carry)
            joined = [_joined(pair) for pair in zip(carry, made, strict=False)]
            if joined == carry:
                return [*carry, *made[len(carry) :]]
            carry = joined

    # Operations

    def _made(self, op: Operation, given: list[State]) -> list[State]:
        """The states of the results of an operation without a body."""
        kinds, count = {state.kind for state in given}, len(op.made)
        if "other" in kinds or rule_of(op.name).sends is not None:
            return [OTHER] * count
        if kinds <= {"zero", "free"}:
            return [ZERO if _keeps_zero(op, given) else FREE] * count
        if op.name in ("mul", "dot_general") and "zero" in kinds:
            return [ZERO] * count
        if "bent" in kinds or ("sum" in kinds and "rows" in kinds):
            return self._of_bent(op, given)
        if op.name == "is_finite":  # a guard, of which no number depends
            return [FREE if "rows" not in kinds else given[0]]
        if "sum" in kinds:
            bends = is_elementwise(op.name) or op.name in _BENDS or (op.name == "dot_general" and kinds == {"sum"})
            return [TOTAL if _hands_on(op, given) else _bent(op) if bends else OTHER] * count
        step = step_of(op, [(state.place,) for state in given], _GROUP)[0]
        reduced = bool(step.act) and op.name.startswith("reduce_")
        return [_bent(op) if reduced else _of_place(place) for place in step.made]

    def _of_bent(self, op: Operation, given: list[State]) -> list[State]:
        """The results of an operation on a bent sum, which stay so, or on a sum beside rows, which bends where these meet."""
        bent = next((state for state in given if state.kind == "bent"), None)
        meets = is_elementwise(op.name) or op.name in _MEETINGS or rule_of(op.name).kind == "placing"
        if any(state.kind == "rows" for state in given) and not meets:
            return [OTHER] * len(op.made)
        return [bent if bent is not None else _bent(op)] * len(op.made)


def _of_constant(value: Any) -> State:
    known = isinstance(value, np.ndarray | np.generic | bool | int | float)
    return ZERO if known and not np.any(value) else FREE


def _of_place(place: Place) -> State:
    return State("rows", place) if isinstance(place, Split) else TOTAL if place == SUM else OTHER


def _bent(op: Operation) -> State:
    return State("bent", None, f"{op.name} ({op.line or 'no line known'})")


def _keeps_zero(op: Operation, given: Sequence[State]) -> bool:
    """Whether an operation on values that come from no rows makes zeros."""
    zeros = [state.kind == "zero" for state in given]
    if op.name in ("mul", "dot_general"):
        return any(zeros)
    return bool(zeros) and all(zeros) and (rule_of(op.name).kind == "placing" or op.name in _KEEP_ZERO)


def _hands_on(op: Operation, given: Sequence[State]) -> bool:
    """Whether an operation hands on a sum over rows: of parts of the sum it makes parts of its result."""
    kinds = [state.kind for state in given]
    if op.name == "select_n":
        return kinds[0] in ("zero", "free") and set(kinds[1:]) <= {"sum", "zero"}
    if op.name in _HANDS_ON:
        floats = [kind for kind, aval in zip(kinds, op.given, strict=True) if jnp.issubdtype(aval.dtype, jnp.inexact)]
        return set(floats) <= {"sum", "zero"}
    if not all(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in op.made):
        return False
    if op.name == "reduce_precision":
        return True
    step = step_of(op, [(SUM if kind == "sum" else None,) for kind in kinds], _GROUP)[0]
    return kinds.count("sum") == 1 and set(step.made) == {SUM}


def _joined(states: Sequence[State]) -> State:
    """What is known of a value that is one of several."""
    some = [state for state in dict.fromkeys(states) if state is not ZERO] or [ZERO]
    bent = next((state for state in some if state.kind == "bent"), None)
    return bent if bent is not None else some[0] if len(some) == 1 else OTHER


def _moved(state: State, by: int) -> State:
    """The state of slices along a new or a former first dim."""
    if state.place is None:
        return state
    dim = state.place.dim + by
    return OTHER if dim < 0 else state._replace(place=state.place._replace(dim=dim))
