"""Blocks stacked under one loop, as stages run them: the loop over a stack's rows is unrolled, each row a weight of its own."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.base import PyTree
from axonml_jax.compat.jaxpr import Operation, trace
from axonml_jax.pipeline.assign import Stack
from axonml_jax.pipeline.store import Weight
from axonml_jax.program.program import Equation, is_constant, is_elementwise, read_program, run_program

# --------------------------------------------------------------------------------------------------
# An array as the list of its rows, while a program runs: what is done to each row needs no array of all.
# --------------------------------------------------------------------------------------------------


class Rows:
    """An array [L, ...] as its L rows, each made when it is first read: where the program that is cut into stages reads it.

    Args:
      length: L.
      make: makes one row, [...].
      of_blocks: whether a loop over them is one over the blocks of the stack; else they are what such a loop returned.
    """

    def __init__(self, length: int, make: Callable[[int], Any], *, of_blocks: bool = True):
        self.length, self.of_blocks = length, of_blocks
        self.row = functools.cache(make)

    @classmethod
    def of(cls, rows: Sequence[Any], *, of_blocks: bool = True) -> "Rows":
        """The rows that are there."""
        return cls(len(rows), lambda row: rows[row], of_blocks=of_blocks)

    @functools.cached_property
    def whole(self) -> jax.Array:
        """The array."""
        return jnp.stack([self.row(i) for i in range(self.length)])

    @property
    def like(self) -> jax.Array:
        """An array of its type, of which no value is read. It reads the first row alone: each has a stage of its own."""
        first = self.row(0)
        return jnp.broadcast_to(first[None], (self.length, *first.shape))


def _whole(value: Any) -> Any:
    return value.whole if isinstance(value, Rows) else value


# --------------------------------------------------------------------------------------------------
# Running a traced function so that loops over a stack are unrolled.
# --------------------------------------------------------------------------------------------------


@dataclass
class _Unrolling:
    """Runs equations on arrays and `Rows` (see `run_program`).

    Attributes:
      looped: whether anything read a stack row by row.
      joined: the first operation that read one as a whole; None: there was none.
    """

    looped: bool = False
    joined: Operation | None = None

    def __call__(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        """The results of an equation that reads `Rows`; None: of others, which are run as they are."""
        rows = [value for value in operands if isinstance(value, Rows)]
        if not rows:
            return None
        if equation.op.scan is not None:
            first = equation.op.scan.first_scanned
            if any(isinstance(value, Rows) and value.of_blocks for value in operands[first:]):
                return self._scan(equation, operands)
        if self._passes(equation, operands):
            return self._by_row(equation, operands, rows)
        if (row := self._one_row(equation, operands)) is not None:
            return [row]
        self.joined = self.joined or equation.op
        return equation.op.bind([_whole(value) for value in operands])

    def _scan(self, equation: Equation, operands: list[Any]) -> list[Any]:
        """Runs the trips of a loop one after the other, each on its own rows."""
        scan, body = equation.op.scan, equation.body
        assert scan is not None and body is not None
        self.looped = True
        consts = [_whole(value) for value in operands[: scan.num_consts]]
        carry = [_whole(value) for value in operands[scan.num_consts : scan.first_scanned]]
        scanned, length = operands[scan.first_scanned :], scan.options["length"]
        made: list[list[Any]] = [[] for _ in range(length)]
        trips = reversed(range(length)) if scan.options["reverse"] else range(length)
        for trip in trips:
            with equation.op.scope():
                own = [_row(value, trip) for value in scanned]
                out = run_program(body, [*consts, *carry, *own], self)
            out = [_whole(value) for value in out]
            carry, made[trip] = out[: scan.num_carry], out[scan.num_carry :]
        return [*carry, *(Rows.of(rows, of_blocks=False) for rows in zip(*made, strict=True))]

    def _passes(self, equation: Equation, operands: list[Any]) -> bool:
        """Whether an operation does the same to every row: it is elementwise, on stacks of equal length and numbers."""
        op = equation.op
        if not is_elementwise(equation.name) or len(op.made) != 1:
            return False
        lengths = {value.length for value in operands if isinstance(value, Rows)}
        numbers = [value for value in operands if not isinstance(value, Rows)]
        return len(lengths) == 1 and not any(jnp.ndim(value) for value in numbers)

    def _by_row(self, equation: Equation, operands: list[Any], rows: list[Rows]) -> list[Any]:
        def make(row: int) -> Any:
            own = [value.row(row) if isinstance(value, Rows) else value for value in operands]
            return equation.op.bind(own)[0]

        return [Rows(rows[0].length, make, of_blocks=any(value.of_blocks for value in rows))]

    def _one_row(self, equation: Equation, operands: list[Any]) -> Any:
        """What Python's own loop reads of a stack, `w[2]`: one row, or some; None: it is something else."""
        value, options = operands[0], equation.op.options
        if not isinstance(value, Rows):
            return None
        if equation.name == "squeeze" and tuple(options["dimensions"]) == (0,):
            return value.row(0)
        length, *sizes = equation.op.given[0].shape
        if equation.name == "slice":
            starts, limits, strides = (options[key] for key in ("start_indices", "limit_indices", "strides"))
            whole = tuple(starts[1:]) == (0,) * len(sizes) and tuple(limits[1:]) == tuple(sizes) and not strides
            start, limit = starts[0], limits[0]
        elif equation.name == "dynamic_slice" and all(map(is_constant, equation.inputs[1:])):
            start, *others = (int(each) for each in operands[1:])
            whole = tuple(options["slice_sizes"][1:]) == tuple(sizes) and not any(others)
            start = min(max(start, 0), length - options["slice_sizes"][0])
            limit = start + options["slice_sizes"][0]
        else:
            return None
        if not whole:
            return None
        self.looped |= value.of_blocks and limit - start < length
        return Rows(limit - start, lambda row: value.row(start + row), of_blocks=value.of_blocks)


def _row(value: Any, row: int) -> Any:
    return value.row(row) if isinstance(value, Rows) else jax.lax.index_in_dim(value, row, 0, keepdims=False)


def unrolled(
    fun: Any, leaves: Sequence[Any], states: Sequence[Any], given: tuple[Any, Sequence[Any]], stack: Stack
) -> tuple[PyTree, list[Any]]:
    """Calls `fun(leaves, states, key, batch) -> (results, new states)` with its loop over a stack unrolled.

    Args:
      fun: any function that JAX traces.
      leaves: the model's parameters, arrays and `Rows`.
      states: its state, likewise.
      given: the microbatch's key, and its leaves.
      stack: what is divided, for messages.

    Returns:
      Results as arrays; new states as arrays or `Rows`.

    Raises:
      ValueError: when nothing reads the stack row by row.
    """
    values = [*leaves, *states, *given[1], given[0]]
    ends = len(leaves), len(leaves) + len(states)

    def flat(*arrays: Any) -> tuple[Any, list]:
        *batch, key = arrays[ends[1] :]
        return fun(list(arrays[: ends[0]]), list(arrays[ends[0] : ends[1]]), key, batch)

    traced = trace(flat, *(value.like if isinstance(value, Rows) else value for value in values))
    unrolling, program = _Unrolling(), read_program(traced.jaxpr)
    out = run_program(program, values, unrolling)
    if not unrolling.looped:
        op = unrolling.joined
        first = "" if op is None else f"; the first to read them together is {op.name} ({op.line or 'no line known'})"
        raise ValueError(
            f"the parameters of {stack.path!r} look like a stack of {stack.rows} blocks, whose rows a pipeline divides over "
            f"its stages, but the loss reads no row of them alone{first}. Loop over them by nnx.scan, nn.scan, jax.lax.scan or "
            "in Python, with nothing but elementwise operations before; jax.checkpoint belongs into the loop. If they are no "
            "stack, say where stages begin with split=('path/of/module', ...)"
        )
    results_tree, _ = traced.out_tree.children()
    count = results_tree.num_leaves
    return results_tree.unflatten([_whole(value) for value in out[:count]]), out[count:]


# --------------------------------------------------------------------------------------------------
# The model's leaves, between arrays and the rows that stages hold.
# --------------------------------------------------------------------------------------------------


def stacked(weights: Sequence[Weight], values: Sequence[Any]) -> list[Any]:
    """The model's parameters from what stages read: arrays, and stacks as `Rows`."""
    found: dict[int, Any] = {}
    for weight, value in zip(weights, values, strict=True):
        if weight.row is None:
            found[weight.leaf] = value
        else:
            found.setdefault(weight.leaf, []).append(value)
    return [Rows.of(found[leaf]) if isinstance(found[leaf], list) else found[leaf] for leaf in sorted(found)]


@dataclass(frozen=True)
class StateRows:
    """Which leaves of a model's state are stacks of the blocks' own, as averages of BatchNorm are in a loop over blocks.

    Attributes:
      stack: the blocks.
      stacked: for every leaf whether it is one.
      names: the paths of the states as stages hold them: of a stack, every row's.
    """

    stack: Stack
    stacked: tuple[bool, ...]
    names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, stack: Stack, state: Mapping[str, Any]) -> "StateRows":
        """Finds them; a Linen module's states have the names of their collections before their paths."""
        stacked, names = [], []
        for name, leaf in state.items():
            inside = any(stack.holds(path, jnp.shape(leaf)) for path in (name, name.partition("/")[2]))
            stacked.append(inside)
            names += [f"{name}[{row}]" for row in range(stack.rows)] if inside else [name]
        return cls(stack, tuple(stacked), names)

    def divided(self, leaves: Sequence[Any]) -> list[Any]:
        """The states as stages hold them, from those of the model."""
        found = []
        for leaf, stacked in zip(leaves, self.stacked, strict=True):
            if not stacked:
                found.append(_whole(leaf))
            else:
                found += [_row(leaf, row) for row in range(self.stack.rows)]
        return found

    def each(self, known: Sequence[bool]) -> list[bool]:
        """What is known of the model's states, of those that stages hold."""
        rows = [self.stack.rows if stacked else 1 for stacked in self.stacked]
        return [own for own, count in zip(known, rows, strict=True) for _ in range(count)]

    def joined(self, states: Sequence[Any]) -> list[Any]:
        """The model's states, with stacks as `Rows`, from those that stages hold."""
        own = iter(states)
        rows = self.stack.rows
        return [Rows.of([next(own) for _ in range(rows)]) if stacked else next(own) for stacked in self.stacked]

    def whole(self, states: Sequence[Any]) -> list[jax.Array]:
        """The model's states as arrays, from those that stages hold."""
        return [_whole(value) for value in self.joined(states)]
