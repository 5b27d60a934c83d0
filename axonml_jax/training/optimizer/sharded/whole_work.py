"""What an update does to the whole of one parameter, noted while the update is read, until its result is asked for."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from axonml_jax.program.program import Equation
from axonml_jax.sharding.layout import Layout
from axonml_jax.training.optimizer.sharded.bind_typed import bind_typed
from axonml_jax.training.optimizer.sharded.matrices import MatrixWork, same_place
from axonml_jax.training.optimizer.sharded.mixing import Mixing
from axonml_jax.training.optimizer.sharded.value import Value


@dataclass(frozen=True)
class _Noted:
    """An operation on whole arrays: what it reads, the numbers of what it makes, and the functions around it."""

    equation: Equation
    given: tuple[Value, ...]
    made: tuple[int, ...]
    frames: Sequence[str]


@dataclass
class WholeWork:
    """The operations on whole arrays of an update.

    Attributes:
      layouts: of every parameter.
      constants: of the update, by number.
    """

    layouts: Sequence[Layout]
    constants: Mapping[int, Any]
    _noted: dict[int, _Noted] = field(default_factory=dict)

    def has(self, value: Value) -> bool:
        """Whether a value is whole, on the rank that owns the parameter in this update."""
        return value.number in self._noted

    def note(self, equation: Equation, given: Sequence[Value], made: Sequence[Value], frames: Sequence[str]) -> None:
        """Remember an operation."""
        noted = _Noted(equation, tuple(given), tuple(value.number for value in made), frames)
        self._noted.update(dict.fromkeys(noted.made, noted))

    def frames(self, value: Value) -> Sequence[str]:
        """The functions around the operation that makes a whole value."""
        return self._noted[value.number].frames

    def work(self, value: Value, *, part: bool) -> tuple[MatrixWork, list[Value]]:
        """What makes a value, and what that reads: parts of the parameter, then what is the same on all ranks.

        Args:
          value: a whole one.
          part: whether each rank is to have its part of it, else all ranks all of it.

        Raises:
          Mixing: where something that it reads is neither.
        """
        assert value.owner is not None
        layout, order = self.layouts[value.owner], self._order(value)
        read = {each.number: each for noted in order for each in noted.given if not self.has(each)}
        parts = [each for each in read.values() if each.owner is not None]
        same = [each for each in read.values() if each.owner is None and each.number not in self.constants]
        for each in parts:
            if each.aval.size != layout.size:
                raise Mixing("state of another shape than its parameter's", self.frames(value))
        given = [*parts, *same]
        known = {number: self.constants[number] for number in read if number in self.constants}
        names: dict[int, Hashable] = {each.number: k for k, each in enumerate(given)}
        names |= {number: _bits(constant) for number, constant in known.items()}
        names |= {made: ("made", i, j) for i, noted in enumerate(order) for j, made in enumerate(noted.made)}
        told = lambda noted: [(names[each.number], each.aval.shape) for each in noted.given]
        like = tuple((noted.equation.name, str(noted.equation.op.options), *told(noted)) for noted in order)
        avals = tuple((each.aval.shape, str(each.aval.dtype), each.uniform) for each in given)
        key = (like, avals, names[value.number], part, same_place(layout))
        return MatrixWork(_run(order, given, known, value), len(parts), part, key), given

    def _order(self, value: Value) -> list[_Noted]:
        """The operations that make a value, in order."""
        found: dict[int, _Noted] = {}

        def visit(number: int) -> None:
            noted = self._noted.get(number)
            if noted is None or noted.made[0] in found:
                return
            for each in noted.given:
                visit(each.number)
            found[noted.made[0]] = noted

        visit(value.number)
        return list(found.values())


def _run(
    order: Sequence[_Noted], given: Sequence[Value], known: Mapping[int, Any], value: Value
) -> Callable[[Sequence[Any]], Any]:
    """From what is read to the value. A number may stand for a whole array, and a parameter for its elements in a row."""

    def read(env: Mapping[int, Any], value: Value) -> Any:
        found, shape = env[value.number], value.aval.shape
        return jnp.broadcast_to(found, shape) if value.uniform else jnp.reshape(found, shape)

    def run(values: Sequence[Any]) -> Any:
        env = dict(known) | {each.number: x for each, x in zip(given, values, strict=True)}
        for noted in order:
            made = bind_typed(noted.equation, [read(env, each) for each in noted.given])
            env.update(zip(noted.made, made, strict=True))
        return env[value.number]

    return run


def _bits(constant: Any) -> Hashable:
    array = np.asarray(constant)
    return array.shape, str(array.dtype), array.tobytes()
