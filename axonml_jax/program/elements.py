"""Elements of values that follow from constants and positions alone, in NumPy: no device, and only those that are asked for.

A mask of 100,000 by 100,000 positions is looked at row by row without ever being there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.compat.operation import Operation
from axonml_jax.compat.varying_types import CASTS
from axonml_jax.program.atoms import Atom, is_constant
from axonml_jax.program.nested import Nested, Node

Places = tuple[np.ndarray, ...]
"""For every dim of a value the indices along it; they are broadcast with each other."""


class NotStatic(Exception):
    """A value depends on an input, or on an operation that is not computed here."""


def elements(values: Nested, atom: Atom, places: Sequence[Any]) -> np.ndarray:
    """Elements of a value.

    Args:
      values: where it is made.
      atom: the value.
      places: for every dim the indices along it; they are broadcast with each other.

    Raises:
      NotStatic: where they do not follow from constants alone.
    """
    return _Reader(values).of(atom, tuple(np.asarray(each) for each in places))


def number(values: Nested, atom: Atom) -> float | None:
    """The number that a value is everywhere; None where it differs from place to place or is not known."""
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
    """Whether a value was made of numbers."""
    if values.aval(atom).shape == ():
        return True
    maker = values.maker(atom)
    if maker is None or maker.name not in (*ELEMENTWISE, *MOVED, "dynamic_slice"):
        return False
    return all(_is_spread(values, each) for each in maker.inputs)


class _Reader:
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
        """Of an elementwise operation's operand, which may be a number, or spread over dims where its size is 1."""
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
    """Integers are divided towards zero, as XLA does."""
    if not np.issubdtype(op.made[0].dtype, np.integer):
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
    "integer_pow": lambda op, x: np.asarray(x ** op.options["y"], op.made[0].dtype),
    "ne": _by(np.not_equal),
    "neg": _by(np.negative),
    "rem": _by(np.fmod),
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
