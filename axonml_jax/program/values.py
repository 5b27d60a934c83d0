"""Facts that can be proven of a program's values: constants, elements, mapped dims, inner programs."""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.compat.jaxpr import Operation
from axonml_jax.compat.varying_types import CASTS
from axonml_jax.mesh.axes import as_axes
from axonml_jax.program.program import (
    Atom,
    Equation,
    Program,
    aval_of,
    is_constant,
    names_of,
    results,
    rule_of,
    through,
)

# --------------------------------------------------------------------------------------------------
# Which values of a traced program may differ from rank to rank of an axis; all others are whole, the same on every
# rank.
#
# JAX's own types say the same where `check_vma` is on; this says it of any program, after it was traced.
# --------------------------------------------------------------------------------------------------

Axes = frozenset[str]

SAME: Axes = frozenset()


def differing(program: Program, given: Sequence[Axes], visit: Callable[[Equation, Sequence[Axes]], None]) -> list[Axes]:
    """The mesh axes over which each result may differ.

    Args:
      program: a traced program.
      given: over which axes each input may.
      visit: called with every equation, in bodies too and perhaps more than once, and what its operands may differ over.
    """

    def rule(equation: Equation, operands: list[Axes]) -> Sequence[Axes]:
        visit(equation, operands)
        inside = through(equation, operands, rule, operator.or_, SAME)
        return made_over(equation, operands) if inside is None else inside

    return results(program, given, rule, SAME)


def made_over(equation: Equation, operands: list[Axes]) -> list[Axes]:
    """The mesh axes over which each result of an equation without a body may differ."""
    rule, axes, found = rule_of(equation.name), frozenset(equation.op.mesh_axes), SAME.union(*operands)
    if rule.passes:
        return operands
    if rule.joins and equation.op.groups is None:
        found -= axes
    elif not rule.casts:  # what is scattered, exchanged or permuted, and the rank's own index
        found |= axes
    return [found] * len(equation.outputs)


# --------------------------------------------------------------------------------------------------
# `Nested`: a program and all programs inside it with one name for every value, whatever calls and loops hand it
# through.
#
# What goes through a loop unchanged keeps its name inside; what is carried or scanned over has a name of its own there.
# Calls are as if they stood open: their results have the names that they have inside. Bodies whose
# purpose is not known stay closed.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Level:
    """A program, with the level and equation that contain it.

    Attributes:
      program: the program.
      parent: the level of the equation that contains it; None: nothing does.
      equation: the equation whose body it is.
      values: the value behind each of its numbers.
    """

    program: Program
    parent: "Level | None"
    equation: Equation | None
    values: dict[int, Atom] = field(default_factory=dict)

    @property
    def around(self) -> "Iterator[Level]":
        """Yield this level, then the levels that contain it."""
        level: Level | None = self
        while level is not None:
            yield level
            level = level.parent

    @cached_property
    def numbers(self) -> Mapping[int, int]:
        """Map each value to its first number at this level."""
        found: dict[int, int] = {}
        for number, atom in self.values.items():
            if not is_constant(atom):
                found.setdefault(atom, number)
        return found

    def of(self, atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        """The values that atoms of this level's program name."""
        return tuple([atom if is_constant(atom) else self.values[atom] for atom in atoms])


@dataclass(frozen=True, eq=False)
class Node:
    """An equation that is not inlined, at its level: the values that it reads and makes."""

    level: Level
    equation: Equation
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.equation.name

    @property
    def read(self) -> tuple[int, ...]:
        """The values that it reads."""
        return names_of(self.inputs)


@dataclass(frozen=True, eq=False)
class Nested:
    """The values of a program and of everything inside it.

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
        """The node that makes a value; None for constants, inputs, and values that loops and branches hand on."""
        return None if is_constant(atom) or atom not in self.makers else self.makers[atom][0]

    def aval(self, atom: Atom) -> Any:
        """The abstract value of an atom."""
        return atom.aval if is_constant(atom) else self.avals[atom]

    def read_for(self, value: int) -> tuple[Atom, ...]:
        """The values from which a value is made, in one step."""
        maker = self.maker(value)
        return self.links.get(value, ()) if maker is None else maker.inputs

    @property
    def results(self) -> tuple[Atom, ...]:
        """The values that the outermost program returns."""
        return self.top.of(self.top.program.outputs)

    def handed_on(self, atom: Atom) -> Atom:
        """The value that an atom equals, if loops only slice it and stack it again."""
        while not is_constant(atom) and len(links := self.links.get(atom, ())) == 1:
            atom = links[0]
        return atom

    def at(self, atom: Atom, level: Level) -> tuple[Level, int] | None:
        """The nearest level around a given one that contains a value, and the value's number there; None if none does."""
        return next(((each, each.numbers[atom]) for each in level.around if atom in each.numbers), None)

    def same(self, a: Atom, b: Atom) -> bool:
        """Whether two values are computed by the same operations from the same values."""
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
        """Whether two values are the same results of equations that do the same (their operands aside)."""
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
    _NestedReader(whole).read(whole.top)
    return whole


class _NestedReader:
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
        """Give names to the values of a level whose inputs have names."""
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
        """The results of an equation whose bodies are read; None if it becomes a node."""
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
        """Read a loop's body, whose inputs are constants, carried values and slices."""
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
    """Whether a loop returns its carried value, the body's input k, unchanged."""
    return handed(body, body.outputs[carried]) == k


def handed(program: Program, atom: Atom) -> int | None:
    """The position of the input that a value equals, passed through calls; None if it is not an input."""
    if is_constant(atom):
        return None
    if atom in program.inputs:
        return program.inputs.index(atom)
    maker = next((each for each in program.equations if atom in each.outputs), None)
    if maker is None or maker.called is None:
        return None
    through = handed(maker.called, maker.called.outputs[maker.outputs.index(atom)])
    return None if through is None else handed(program, maker.inputs[through])


# --------------------------------------------------------------------------------------------------
# Which dim of a value a `shard_map` in its program leaves split over an axis: as its specs say.
# --------------------------------------------------------------------------------------------------


def mapped_dim(program: Program, atom: Atom, axis: str) -> int | None:
    """The dim of a value that a `shard_map` leaves split over an axis, as far as shape-preserving operations follow; else None.

    Args:
      program: a traced program.
      atom: one of its values.
      axis: the mesh axis.
    """
    return _mapped_dim(program, atom, axis, {})


def _mapped_dim(program: Program, atom: Atom, axis: str, known: dict[Any, int | None]) -> int | None:
    if is_constant(atom):
        return None
    key = id(program), atom
    if key not in known:
        known[key] = _mapped_dim_of(program, atom, axis, known)
    return known[key]


def _mapped_dim_of(program: Program, atom: Atom, axis: str, known: dict[Any, int | None]) -> int | None:
    maker = next((equation for equation in program.equations if atom in equation.outputs), None)
    if maker is None:
        return None
    place = maker.outputs.index(atom)
    if (mapped := maker.op.mapped) is not None:
        return _dim(mapped.options["out_specs"][place], axis)
    if (scan := maker.op.scan) is not None and maker.body is not None:
        inside = _mapped_dim(maker.body, maker.body.outputs[place], axis, known)
        return inside if inside is None or place < scan.num_carry else inside + 1
    if (inner := maker.called or maker.body) is not None:
        alike = len(inner.outputs) == len(maker.outputs)
        return _mapped_dim(inner, inner.outputs[place], axis, known) if alike else None
    rule = rule_of(maker.name)
    given = (
        maker.inputs[place : place + 1]
        if rule.passes
        else maker.inputs * (rule.kind == "elementwise" or maker.name == "name")
    )
    shape = program.avals[atom].shape
    alike = (other for other in given if aval_of(other, program.avals).shape == shape)
    return next((dim for other in alike if (dim := _mapped_dim(program, other, axis, known)) is not None), None)


def _dim(spec: Any, axis: str) -> int | None:
    return next((dim for dim, entry in enumerate(spec) if axis in as_axes(entry or ())), None)


# --------------------------------------------------------------------------------------------------
# Elements of values that follow from constants and positions alone, in NumPy: no device, and only those that are asked
# for.
#
# A mask of 100,000 by 100,000 positions is looked at row by row without ever being there.
# --------------------------------------------------------------------------------------------------

Places = tuple[np.ndarray, ...]
"""For every dim of a value the indices along it; they are broadcast with each other."""


class NotStatic(Exception):
    """Raised when a value depends on an input, or on an operation that is not computed here."""


def elements(values: Nested, atom: Atom, places: Sequence[Any]) -> np.ndarray:
    """Compute elements of a value at given places.

    Args:
      values: where it is made.
      atom: the value.
      places: for every dim the indices along it; they are broadcast with each other.

    Raises:
      NotStatic: where they do not follow from constants alone.
    """
    return _ElementsReader(values).of(atom, tuple(np.asarray(each) for each in places))


def number(values: Nested, atom: Atom) -> float | None:
    """The single number that all elements of a value equal; None if they differ or are not known."""
    shape = values.aval(atom).shape
    try:
        if 0 in shape:
            return None
        if shape == ():
            return elements(values, atom, ()).item()
        constant = values.maker(atom) is None and is_constant(atom)
        if not constant and not _is_spread(values, atom):
            return None
        return elements(values, atom, [0] * len(shape)).item()
    except NotStatic:
        return None


def _is_spread(values: Nested, atom: Atom) -> bool:
    """Whether a value is made of numbers that are broadcast."""
    left, seen = [atom], set()
    while left:
        if values.aval(each := left.pop()).shape == ():
            continue
        maker = values.maker(each)
        if maker is None or maker.name not in (*ELEMENTWISE, *MOVED, "dynamic_slice"):
            return False
        if each not in seen:
            seen.add(each)
            left += maker.inputs
    return True


class _ElementsReader:
    def __init__(self, values: Nested):
        self.values = values
        self.known: dict[Any, tuple[np.ndarray, Places]] = {}

    def of(self, atom: Atom, places: Places) -> np.ndarray:
        if is_constant(atom):
            return _taken(np.asarray(atom.val, atom.aval.dtype), places)
        key = (atom, tuple(map(id, places)))
        if key not in self.known:  # the places are kept so that no other array takes their addresses
            self.known[key] = self._made(atom, places), places
        return self.known[key][0]

    def _made(self, atom: int, places: Places) -> np.ndarray:
        if atom in self.values.constants:
            constant = self.values.constants[atom]
            if not hasattr(constant, "dtype") or jnp.issubdtype(constant.dtype, jax.dtypes.extended):
                raise NotStatic
            return _taken(_to_host(constant), places)
        node = self.values.maker(atom)
        if node is None:
            raise NotStatic
        op, name = node.equation.op, node.name
        if name in ELEMENTWISE:
            return ELEMENTWISE[name](op, *[self._element(each, places) for each in node.inputs])
        if name in MOVED:
            return self.of(node.inputs[0], MOVED[name](op, places))
        if name == "iota":
            return np.asarray(places[op.options["dimension"]], op.options["dtype"])
        if name == "concatenate":
            return self._concatenated(node, places)
        if name == "dynamic_slice":
            first, sizes = node.inputs[1:], op.options["slice_sizes"]
            starts = [int(self.of(each, ())) for each in first]
            starts = [min(max(s, 0), n - m) for s, n, m in zip(starts, op.given[0].shape, sizes, strict=True)]
            return self.of(node.inputs[0], tuple(p + s for p, s in zip(places, starts, strict=True)))
        raise NotStatic

    def _element(self, atom: Atom, places: Places) -> np.ndarray:
        """Elements of an elementwise operand at the result's places; dims of size 1, and scalars, are broadcast."""
        shape = self.values.aval(atom).shape
        return self.of(
            atom, tuple([p if n > 1 else _ZERO for p, n in zip(places, shape, strict=True)]) if shape else ()
        )

    def _concatenated(self, node: Node, places: Places) -> np.ndarray:
        dim, begin, found = node.equation.op.options["dimension"], 0, None
        for each in node.inputs:
            size = self.values.aval(each).shape[dim]
            within = np.clip(places[dim] - begin, 0, max(size - 1, 0))
            part = self.of(each, (*places[:dim], within, *places[dim + 1 :])) if size else None
            if part is not None:
                found = part if found is None else np.where(places[dim] >= begin, part, found)
            begin += size
        assert found is not None
        return found


_ZERO = np.asarray(0)


def _to_host(constant: Any) -> np.ndarray:
    try:
        return np.asarray(constant)
    except Exception as error:  # a tracer of an outer trace, or an array of other processes
        raise NotStatic from error


def _taken(array: np.ndarray, places: Places) -> np.ndarray:
    return array[places] if array.ndim else array


def _broadcast(op: Operation, places: Places) -> Places:
    to = op.options["broadcast_dimensions"]
    return tuple([places[d] if n > 1 else _ZERO for d, n in zip(to, op.given[0].shape, strict=True)])


def _transposed(op: Operation, places: Places) -> Places:
    found = [_ZERO] * len(places)
    for place, dim in zip(places, op.options["permutation"], strict=True):
        found[dim] = place
    return tuple(found)


def _reshaped(op: Operation, places: Places) -> Places:
    if op.options["dimensions"] is not None:
        raise NotStatic
    at: Any = 0
    for place, size in zip(places, op.made[0].shape, strict=True):
        at = at * size + place
    found = []
    for size in reversed(op.given[0].shape):
        found.append(at % size)
        at = at // size
    return tuple(found[::-1])


def _squeezed(op: Operation, places: Places) -> Places:
    left, gone = iter(places), {d % op.given[0].ndim for d in op.options["dimensions"]}
    return tuple([_ZERO if d in gone else next(left) for d in range(op.given[0].ndim)])


def _sliced(op: Operation, places: Places) -> Places:
    strides = op.options["strides"] or (1,) * len(places)
    return tuple([p * s + b for p, s, b in zip(places, strides, op.options["start_indices"], strict=True)])


def _reversed(op: Operation, places: Places) -> Places:
    sizes = op.made[0].shape
    return tuple(
        [n - 1 - p if d in op.options["dimensions"] else p for d, (p, n) in enumerate(zip(places, sizes, strict=True))]
    )


def _tiled(op: Operation, places: Places) -> Places:
    return tuple([p % n for p, n in zip(places, op.given[0].shape, strict=True)])


MOVED: Mapping[str, Callable[[Operation, Places], Places]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "rev": _reversed,
    "slice": _sliced,
    "squeeze": _squeezed,
    "tile": _tiled,
    "transpose": _transposed,
}
"""Where in their operand the elements are that an operation moves."""


def _cast(op: Operation, x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(op.options["new_dtype"])


def _quotient(op: Operation, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Divide; integers towards zero, as XLA does."""
    if not np.issubdtype(op.made[0].dtype, np.integer):
        with np.errstate(all="ignore"):
            return np.divide(x, y)
    if np.any(np.equal(y, 0)):
        raise NotStatic
    return np.asarray((np.abs(x) // np.abs(y)) * np.sign(x) * np.sign(y), op.made[0].dtype)


def _selected(op: Operation, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(which.astype(np.int32), np.broadcast_arrays(*cases))


def _by(fun: Callable[..., Any]) -> Callable[..., np.ndarray]:
    def apply(op: Operation, *operands: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(fun(*operands), op.made[0].dtype)

    return apply


def _bits(of_bool: Callable[..., Any], of_bits: Callable[..., Any]) -> Callable[..., np.ndarray]:
    return lambda op, *xs: (of_bool if op.made[0].dtype == np.bool_ else of_bits)(*xs)


_SAME = ("copy", "layout_constraint", "name", "reshard", "sharding_constraint", "stop_gradient")

ELEMENTWISE: Mapping[str, Callable[..., np.ndarray]] = {
    "and": _bits(np.logical_and, np.bitwise_and),
    "or": _bits(np.logical_or, np.bitwise_or),
    "xor": _bits(np.logical_xor, np.bitwise_xor),
    "not": _bits(np.logical_not, np.bitwise_not),
    "clamp": _by(lambda low, x, high: np.clip(x, low, high)),
    "convert_element_type": _cast,
    "div": _quotient,
    "integer_pow": lambda op, x: _by(lambda x: x ** op.options["y"])(op, x),
    "ne": _by(np.not_equal),
    "neg": _by(np.negative),
    "rem": _by(lambda x, y: np.where((y == 0) & np.issubdtype(x.dtype, np.integer), x, np.fmod(x, y))),
    "select_n": _selected,
    **{
        name: _by(getattr(np, name))
        for name in ("abs", "ceil", "cos", "exp", "exp2", "floor", "log", "sign", "sin", "sqrt")
    },
    **{
        name: _by(fun) for name, fun in {"add": np.add, "sub": np.subtract, "mul": np.multiply, "pow": np.power}.items()
    },
    **{name: _by(fun) for name, fun in {"max": np.maximum, "min": np.minimum, "square": np.square}.items()},
    **{name: _by(fun) for name, fun in {"eq": np.equal, "ge": np.greater_equal, "gt": np.greater}.items()},
    **{name: _by(fun) for name, fun in {"le": np.less_equal, "lt": np.less, "rsqrt": lambda x: 1 / np.sqrt(x)}.items()},
    **{name: lambda op, x: x for name in (*CASTS, *_SAME)},
}
"""What an elementwise operation makes of its operands' elements."""
