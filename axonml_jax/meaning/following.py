"""Follows the places of all values of a program from those of its inputs, before anything is run or traced."""

from collections.abc import Callable, Sequence
from typing import Any

from axonml_jax.compat.jaxpr import Operation, solve_of
from axonml_jax.compat.model_call import PRIMITIVE as MODEL_CALL
from axonml_jax.meaning.places import SUM, Group, Place, Places, Split, Step, shifted, step_of
from axonml_jax.program.program import Equation, Program, ends_by_rows, is_constant, rule_of


class TalksItself(Exception):
    """Raised where a loss has collectives of its own over the batch's axes: it was written for one rank's part."""


class Following:
    """Infers the places of a program's values from those of its inputs.

    Attributes:
      groups: the groups of ranks.
      calls: `calls.places(number)` gives the places of the results of the model's call with this number.
    """

    def __init__(self, groups: Sequence[Group], calls: Any = None):
        self.groups, self.calls = tuple(groups), calls

    @property
    def none(self) -> Places:
        """The places of a whole value."""
        return (None,) * len(self.groups)

    def steps(self, op: Operation, given: Sequence[Places]) -> list[Step]:
        """The step of each group for an operation without a body."""
        return step_of(op, given, self.groups)

    def program(self, program: Program, given: Sequence[Places]) -> list[Places]:
        """The places of a program's results."""
        env = dict.fromkeys(program.constants, self.none)
        env.update(zip(program.inputs, given, strict=True))
        read = lambda atom: self.none if is_constant(atom) else env[atom]
        for equation in program.equations:
            made = self.equation(equation, [read(atom) for atom in equation.inputs])
            env.update(zip(equation.outputs, made, strict=True))
        return [read(atom) for atom in program.outputs]

    def equation(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """The places of an equation's results."""
        op = equation.op
        if op.scan is not None:
            carry, ys = self.scan(equation, given)
            return [*carry, *ys]
        if op.loop is not None:
            return self.loop(equation, given)
        if equation.branches and not op.chooses_by_platform:
            return self.branches(equation, [self.settled(each) for each in given[1:]])
        if equation.called is not None or op.checkpointed is not None:
            return self.call(equation, given)
        if solve_of(op) is not None:
            found, made = self.solve(equation, given)
            self.held(given, found)
            return made
        if rule_of(op.name).casts:
            return list(given)
        if op.name == MODEL_CALL:
            return self.calls.places(op.options["number"])
        steps = self.steps(op, given)
        return [tuple(each) for each in zip(*(step.made for step in steps), strict=True)]

    def call(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """The places of a call's results; sums are completed before a call with derivatives of its own."""
        inner = equation.called if equation.called is not None else equation.body
        assert inner is not None
        if equation.name.startswith("custom_"):
            return self.program(inner, [self.settled(each) for each in given])
        return self.program(inner, given)

    def solve(self, equation: Equation, given: Sequence[Places]) -> tuple[list[Places], list[Places]]:
        """The places of a linear solve's operands, and of its results.

        Its right side is where the product with the matrix is; where one of its parts would send something, all is whole.
        """
        view, inner = solve_of(equation.op), Watching(self.groups, self.calls)
        assert view is not None
        given, count = [self.settled(each) for each in given], len(given) - view.first

        def of(part: tuple[Any, slice], vector: list[Places]) -> list[Places]:
            jaxpr, own = part
            return [inner.settled(each) for each in inner.program(equation.part(jaxpr), [*given[own], *vector])]

        made = of(view.solve, given[view.first :])
        right = of(view.matvec, made[:count])
        back = right if view.transposed is None else of(view.transposed, made[:count])
        if inner.moved or back != right or of(view.solve, right) != made or any(map(moves, given[view.first :], right)):
            return [self.none] * len(given), [self.none] * len(made)
        return [*given[: view.first], *right], made

    def settled(self, places: Places) -> Places:
        """The places with every sum completed."""
        return tuple(None if place == SUM else place for place in places)

    def branches(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """The places of a conditional's results: those in which all branches can give them."""
        cases = [self.program(branch, given) for branch in equation.branches]
        found = cases[0]
        for other in cases[1:]:
            found = [tuple(map(either, a, b)) for a, b in zip(found, other, strict=True)]
        for case in cases:
            self.held(case, found)
        return found

    def held(self, made: Sequence[Places], found: Sequence[Places]) -> None:
        """Called where values that are made in some places are held in others, as those of branches and carries."""

    def scan(self, equation: Equation, given: Sequence[Places]) -> tuple[list[Places], list[Places]]:
        """The places of a scan's carry, and of what it stacks."""
        scan, body = equation.op.scan, equation.body
        assert scan is not None and body is not None
        consts = [self.settled(each) for each in given[: scan.num_consts]]
        rows, slices = self.rows_of(equation, given), [self.sliced(each) for each in given[scan.first_scanned :]]

        def trip(carry: list[Places]) -> list[Places]:
            return self.program(body, [*consts, *carry, *slices])

        carry = self._carried(list(given[scan.num_consts : scan.first_scanned]), trip, scan.num_carry)
        stacked = [shifted(self.settled(each) if any(rows) else each, 1) for each in trip(carry)[scan.num_carry :]]
        return carry, [tuple(map(either, each, rows)) for each in stacked]

    def rows_of(self, equation: Equation, given: Sequence[Places]) -> Places:
        """The places over which ranks go by themselves: in a scan that carries nothing from row to row, as `jax.lax.map`."""
        scan = equation.op.scan
        assert scan is not None
        if scan.num_carry or calls_model(equation):
            return self.none  # what the model makes of one row is taken for the mean of the ranks'
        found: list[Place] = []
        for k in range(len(self.groups)):
            consts, over = (
                [each[k] for each in part] for part in (given[: scan.num_consts], given[scan.first_scanned :])
            )
            alone = Split(0) in over and all(place in (None, Split(0)) for place in over) and not any(consts)
            found.append(Split(0) if alone else None)
        return tuple(found)

    def sliced(self, places: Places) -> Places:
        """The places of the slices of what a scan goes over, which is gathered if the dim that it goes over is split."""
        return tuple(
            place._replace(dim=place.dim - 1) if isinstance(place, Split) and place.dim else None for place in places
        )

    def loop(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """The places of a while loop's carry, which is never a sum, as the loop's condition reads it.

        Where the loop ends row by row, under `jax.vmap`, the carry has these rows in one place.
        """
        loop, body, condition = equation.op.loop, equation.body, equation.condition
        assert loop is not None and body is not None and condition is not None
        given = [self.settled(each) for each in given]
        split = loop.num_condition_consts, loop.num_condition_consts + loop.num_body_consts
        consts, carry = given[split[0] : split[1]], given[split[1] :]
        ends = lambda carry: self.settled(self.program(condition, [*given[: split[0]], *carry])[0])
        by_rows = ends_by_rows(condition)

        def trip(carry: list[Places]) -> list[Places]:
            made = [self.settled(each) for each in self.program(body, [*consts, *carry])]
            return beside([ends(carry), *made], by_rows)[1:] if by_rows else made

        carry = self._carried(carry, trip, len(carry))
        ends(carry)
        if by_rows:
            together = beside(carry, by_rows)
            self.held(carry, together)
            carry = together
        return carry

    def _carried(self, carry: list[Places], trip: Callable[[list[Places]], list[Places]], count: int) -> list[Places]:
        """The places of a carry that hold in every trip; where trips disagree, whole."""
        pinned, given = set[tuple[int, int]](), carry
        while True:
            made, before = trip(carry)[:count], carry
            carry = []
            for i, (old, new) in enumerate(zip(before, made, strict=True)):
                places: list[Any] = []
                for g, (a, b) in enumerate(zip(old, new, strict=True)):
                    if a is not None and b is not None and a != b:
                        pinned.add((i, g))
                    places.append(None if (i, g) in pinned else (a if a is not None else b))
                carry.append(tuple(places))
            if carry == before:
                self.held(given, carry)
                self.held(made, carry)
                return carry


class Watching(Following):
    """Follows places, and notes whether anything must be sent between ranks.

    Attributes:
      watched: how many groups, from the first on, are watched; None: all.
      moved: whether something was sent among the ranks of a watched group.
    """

    watched: int | None = None
    moved = False

    def moves(self, old: Places, new: Places) -> bool:
        """Whether something is sent for a value to change its places."""
        return moves(old[: self.watched], new[: self.watched])

    def steps(self, op: Operation, given: Sequence[Places]) -> list[Step]:
        """The step of each group for an operation; notes whether one sends."""
        steps = super().steps(op, given)
        wanted = list(zip(*(step.wanted for step in steps), strict=True)) if given else []
        self.moved |= any(step.act for step in steps[: self.watched]) or any(map(self.moves, given, wanted))
        return steps

    def held(self, made: Sequence[Places], found: Sequence[Places]) -> None:
        """Notes whether values are sent to be held in other places than they are made in."""
        self.moved |= any(map(self.moves, made, found))

    def settled(self, places: Places) -> Places:
        """The places with every sum completed, which sends."""
        self.moved |= SUM in places[: self.watched]
        return super().settled(places)

    def scan(self, equation: Equation, given: Sequence[Places]) -> tuple[list[Places], list[Places]]:
        """The places of a scan's carry and stacks; to go over a split dim sends."""
        scan = equation.op.scan
        assert scan is not None
        rows = self.rows_of(equation, given)
        for places in given[scan.first_scanned :]:
            found = list(zip(places, self.sliced(places), rows, strict=True))[: self.watched]
            self.moved |= any(place is not None and inner is None and place != own for place, inner, own in found)
        return super().scan(equation, given)


def moves(old: Places, new: Places) -> bool:
    """Whether something is sent for a value to change its places; a whole value is on every rank already."""
    return any(a != b and (a == SUM or isinstance(a, Split)) for a, b in zip(old, new, strict=True))


def beside(values: Sequence[Places], dims: int) -> list[Places]:
    """The places in which values that are put side by side can be held, whose first `dims` dims are the same rows."""
    found = []
    for places in zip(*values, strict=True):
        rows = {place for place in places if isinstance(place, Split) and place.dim < dims}
        others = any(isinstance(place, Split) and place.dim >= dims for place in places)
        if not rows:
            found.append(places)
        elif len(rows) == 1 and not others:
            found.append([*rows] * len(places))
        else:
            found.append([None] * len(places))
    return [tuple(each) for each in zip(*found, strict=True)]


def either(a: Place, b: Place) -> Place:
    """A place in which values of both places can be held, as the results of branches must be."""
    if a is None or b is None:
        return a if b is None else b
    return a if a == b else None


def calls_model(equation: Equation) -> bool:
    """Whether an equation of a traced loss is a call of the model, or has one in a program of its own."""
    return equation.name == MODEL_CALL or any(calls_model(each) for body in equation.bodies for each in body.equations)
