"""`Nested`: a program and all programs inside it with one name for every value, whatever calls and loops hand it through.

What goes through a loop unchanged keeps its name inside; what is carried or scanned over has a name of its own there. Calls are
as if they stood open: their results have the names that they have inside. Bodies that are not known what for stay closed.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from axonml_jax.program.atoms import Atom, is_constant, names_of
from axonml_jax.program.program import Equation, Program


@dataclass(frozen=True, eq=False)
class Level:
    """A program at its place.

    Attributes:
      program: it.
      parent: the level of the equation that it is in; None: it is the whole.
      equation: the equation whose body it is.
      values: the value behind each of its numbers.
    """

    program: Program
    parent: "Level | None"
    equation: Equation | None
    values: dict[int, Atom] = field(default_factory=dict)

    @property
    def around(self) -> "Iterator[Level]":
        """It, then the level around it, and so on."""
        level: Level | None = self
        while level is not None:
            yield level
            level = level.parent

    @cached_property
    def numbers(self) -> Mapping[int, int]:
        """The first number here of each value."""
        found: dict[int, int] = {}
        for number, atom in self.values.items():
            if not is_constant(atom):
                found.setdefault(atom, number)
        return found

    def of(self, atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        """The values behind atoms of its program."""
        return tuple([atom if is_constant(atom) else self.values[atom] for atom in atoms])


@dataclass(frozen=True, eq=False)
class Node:
    """An equation at its place that is no call: what it reads and makes, by the names of values."""

    level: Level
    equation: Equation
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        """The primitive's."""
        return self.equation.name

    @property
    def read(self) -> tuple[int, ...]:
        """The values that it reads."""
        return names_of(self.inputs)


@dataclass(frozen=True, eq=False)
class Nested:
    """A program and all that is inside it.

    Attributes:
      top: the whole.
      nodes: in the order in which they are run; those of a body stand before the loop or conditional itself.
      makers: value -> the node that makes it, and as which result.
      links: value -> what it is the same as, or one of: for what loops carry, slice and stack, and what conditionals choose.
      homes: value -> the level and the equation that it is a result of; what a loop hands its body has no equation.
      constants: value -> the array, of those known when the program was traced.
      avals: value -> its abstract value.
      levels: for every equation with a body the levels in it.
    """

    top: Level
    nodes: list[Node] = field(default_factory=list)
    makers: dict[int, tuple[Node, int]] = field(default_factory=dict)
    links: dict[int, tuple[Atom, ...]] = field(default_factory=dict)
    homes: dict[int, tuple[Level, Equation | None]] = field(default_factory=dict)
    constants: dict[int, Any] = field(default_factory=dict)
    avals: dict[int, Any] = field(default_factory=dict)
    levels: dict[Equation, tuple[Level, ...]] = field(default_factory=dict)

    def maker(self, atom: Atom) -> Node | None:
        """The node that makes a value; None for constants, inputs, and what loops and branches hand on."""
        return None if is_constant(atom) or atom not in self.makers else self.makers[atom][0]

    def aval(self, atom: Atom) -> Any:
        """The abstract value of an atom."""
        return atom.aval if is_constant(atom) else self.avals[atom]

    def read_for(self, value: int) -> tuple[Atom, ...]:
        """What a value is made of, in one step."""
        maker = self.maker(value)
        return self.links.get(value, ()) if maker is None else maker.inputs

    @property
    def results(self) -> tuple[Atom, ...]:
        """What the whole returns."""
        return self.top.of(self.top.program.outputs)

    def handed_on(self, atom: Atom) -> Atom:
        """The value that an atom is the same as, where loops only slice it and stack it again."""
        while not is_constant(atom) and len(links := self.links.get(atom, ())) == 1:
            atom = links[0]
        return atom

    def at(self, atom: Atom, level: Level) -> tuple[Level, int] | None:
        """Where code of a level finds a value: the nearest level around it that has it, and its number there."""
        return next(((each, each.numbers[atom]) for each in level.around if atom in each.numbers), None)

    def same(self, a: Atom, b: Atom) -> bool:
        """Whether two values are made alike of the same values."""
        todo, seen = [(a, b)], set()
        while todo:
            pair = todo.pop()
            if any(map(is_constant, pair)):
                if not _same_number(*pair):
                    return False
            elif pair[0] != pair[1] and pair not in seen:
                seen.add(pair)
                if not self._made_alike(*pair):
                    return False
                todo += zip(self.makers[pair[0]][0].inputs, self.makers[pair[1]][0].inputs, strict=True)
        return True

    def _made_alike(self, a: int, b: int) -> bool:
        """Whether two values are the same results of equations that do the same."""
        if a not in self.makers or b not in self.makers:
            return False
        (one, i), (other, j) = self.makers[a], self.makers[b]
        alike = i == j and len(one.inputs) == len(other.inputs) and not one.equation.op.has_effects
        return alike and one.equation.op.does_the_same(other.equation.op)


def _same_number(a: Atom, b: Atom) -> bool:
    return is_constant(a) and is_constant(b) and a.aval == b.aval and a.aval.shape == () and bool(a.val == b.val)


def nested(program: Program) -> Nested:
    """The values of a program and of what is inside it."""
    whole = Nested(Level(program, None, None))
    _Reader(whole).read(whole.top)
    return whole


class _Reader:
    def __init__(self, whole: Nested):
        self.whole, self._count = whole, itertools.count()

    def new(self, aval: Any, home: tuple[Level, Equation | None] | None = None, links: Sequence[Atom] = ()) -> int:
        value = next(self._count)
        self.whole.avals[value] = aval
        if home is not None:
            self.whole.homes[value] = home
        if links:
            self.whole.links[value] = tuple(links)
        return value

    def read(self, level: Level) -> None:
        """Name the values of a level whose inputs have names, if it is not the whole."""
        program = level.program
        for number in program.inputs:
            if number not in level.values:
                level.values[number] = self.new(program.avals[number])
        for number, constant in program.constants.items():
            value = level.values[number] = self.new(program.avals[number])
            if constant is not None:
                self.whole.constants[value] = constant
        for equation in program.equations:
            inputs = level.of(equation.inputs)
            outputs = self._inside(level, equation, inputs)
            if outputs is None:
                made = tuple([self.new(aval, (level, equation)) for aval in equation.op.made])
                node = Node(level, equation, inputs, made)
                self.whole.makers.update({value: (node, k) for k, value in enumerate(made)})
                self.whole.nodes.append(node)
                outputs = made
            level.values.update(zip(equation.outputs, outputs, strict=True))

    def _inside(self, level: Level, equation: Equation, inputs: Sequence[Atom]) -> Sequence[Atom] | None:
        """The results of an equation with bodies that are read; None: it is a node."""
        if equation.called is not None:
            return self._level(Level(equation.called, level, equation), inputs)
        if (scan := equation.op.scan) is not None:
            return self._loop(level, equation, inputs, scan.num_consts, scan.num_carry)
        if (loop := equation.op.loop) is not None:
            given = inputs[loop.num_condition_consts :]
            return self._loop(level, equation, given, loop.num_body_consts, len(given) - loop.num_body_consts)
        if equation.branches:
            each = [self._level(Level(branch, level, equation), inputs[1:]) for branch in equation.branches]
            made = zip(equation.op.made, *each, strict=True)
            return [self.new(aval, (level, equation), (inputs[0], *cases)) for aval, *cases in made]
        return None

    def _level(self, level: Level, inputs: Sequence[Atom]) -> tuple[Atom, ...]:
        level.values.update(zip(level.program.inputs, inputs, strict=True))
        self.read(level)
        assert level.equation is not None
        self.whole.levels[level.equation] = (*self.whole.levels.get(level.equation, ()), level)
        return level.of(level.program.outputs)

    def _loop(
        self, level: Level, equation: Equation, given: Sequence[Atom], num_consts: int, num_carry: int
    ) -> list[Atom]:
        """A loop over what its body is given: constants, what is carried, and what is sliced."""
        assert equation.body is not None
        body, inside = Level(equation.body, level, equation), list(given)
        carried = range(num_consts, num_consts + num_carry)
        for k in range(num_consts, len(given)):
            if k not in carried or not stays(body.program, k, k - num_consts):
                inside[k] = self.new(body.program.avals[body.program.inputs[k]], (body, None), (given[k],))
        made, results = self._level(body, inside), []
        for k, aval in enumerate(equation.op.made):
            j = num_consts + k
            if k >= num_carry:
                results.append(self.new(aval, (level, equation), (made[k],)))
            elif stays(body.program, j, k):
                results.append(given[j])
            else:
                self.whole.links[inside[j]] = (given[j], made[k])
                results.append(self.new(aval, (level, equation), (given[j], made[k])))
        return results


def stays(body: Program, k: int, carried: int) -> bool:
    """Whether a loop hands on what it carries, its body's input k, as it got it."""
    return handed(body, body.outputs[carried]) == k


def handed(program: Program, atom: Atom) -> int | None:
    """The position of the input that a value is, handed through calls; None: it is none."""
    if is_constant(atom):
        return None
    if atom in program.inputs:
        return program.inputs.index(atom)
    maker = next((each for each in program.equations if atom in each.outputs), None)
    if maker is None or maker.called is None:
        return None
    through = handed(maker.called, maker.called.outputs[maker.outputs.index(atom)])
    return None if through is None else handed(program, maker.inputs[through])
