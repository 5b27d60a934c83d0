"""Lookups of each row's own entries, such as `logits[jnp.arange(n), labels]`, told as what they are: row i of row i.

Written by the numbers of rows it is a lookup anywhere to whatever follows places, and would be made of all rows. Here a program
gets the lookup that `jax.vmap` makes of it: rows of the table paired with rows of the indices. So it does for what is written
into each row's own entries, as by `x.at[jnp.arange(n), places].set(0)`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.program.program import (
    Atom,
    Equation,
    Program,
    aval_of,
    is_constant,
    is_light,
    made_by,
    names_of,
    read_program,
    run,
    value_of,
)

MOST = 2**20
"""The largest number of indices that are computed to see whether they are those of rows."""

Makers = Mapping[int, Equation]
"""The equation that makes each value, by its number."""


class Pair(NamedTuple):
    """A column of a lookup's indices that holds the numbers of rows.

    Attributes:
      column: which it is.
      table, index: the dims of the table and of the indices that it pairs.
    """

    column: int
    table: int
    index: int


class _Dims(NamedTuple):
    """The dims of a lookup's table and indices.

    Attributes:
      gone: dims of the table that no window of the lookup lies along.
      looked_up: those that the columns of the indices are numbers along.
      of_table, of_index: dims that are paired.
    """

    gone: tuple[int, ...]
    looked_up: tuple[int, ...]
    of_table: tuple[int, ...]
    of_index: tuple[int, ...]

    @classmethod
    def names(cls, equation: Equation) -> Sequence[str]:
        """JAX's names of these, of a lookup and of what writes into a table."""
        if equation.name == "gather":
            return "collapsed_slice_dims", "start_index_map", "operand_batching_dims", "start_indices_batching_dims"
        return (
            "inserted_window_dims",
            "scatter_dims_to_operand_dims",
            "operand_batching_dims",
            "scatter_indices_batching_dims",
        )

    @classmethod
    def of(cls, equation: Equation) -> "_Dims":
        """Those of a lookup."""
        numbers = equation.op.options["dimension_numbers"]
        return cls(*(getattr(numbers, name) for name in cls.names(equation)))


def paired(program: Program) -> Program:
    """The program with lookups that pair rows in the place of those by the numbers of rows; it may be the same."""
    makers = {number: each for each in program.equations for number in each.outputs}
    fresh, found = itertools.count(max(program.avals, default=-1) + 1), dict[Equation, list[Equation]]()
    avals, loose = dict(program.avals), set[Equation]()
    for equation in program.equations:
        columns = (
            _columns(equation, makers, avals)
            if equation.name == "gather" or equation.name.startswith("scatter")
            else []
        )
        if pairs := list(_pairs(equation, columns, program)):
            lookup = _lookup(equation, columns, pairs, avals)
            found[equation] = list(_spliced(lookup, equation, columns, pairs, fresh, avals))
            loose.update(made_by(program.equations, names_of([equation.inputs[1]])))
    if not found:
        return program
    equations = [new for each in program.equations for new in found.get(each, [each])]
    return _without_unread(replace(program, equations=tuple(equations), avals=avals), loose)


def _columns(equation: Equation, makers: Makers, avals: Mapping[int, Any]) -> list[Atom]:
    """The columns of a lookup's indices, each [..., 1]; none where they are not joined of such, or types vary over axes."""
    index = equation.inputs[1]
    made = None if is_constant(index) else makers.get(index)
    if made is None or made.name != "concatenate":
        return []
    atoms = (*made.inputs, equation.inputs[0], *equation.inputs[2:])
    if any(map(is_constant, atoms)):
        return []
    own, count = [aval_of(atom, avals) for atom in atoms], len(made.inputs)
    fits = made.op.options["dimension"] == len(own[0].shape) - 1 and all(aval.shape[-1] == 1 for aval in own[:count])
    return list(made.inputs) if fits and not any(map(varying_axes, own)) else []


def _pairs(equation: Equation, columns: Sequence[Atom], program: Program) -> Iterator[Pair]:
    """The columns that hold the numbers of rows; not all of them, as something is to be looked up."""
    if not columns:
        return
    dims, taken = _Dims.of(equation), set[int]()
    for column, table in enumerate(dims.looked_up):
        size = equation.op.given[0].shape[table]
        if size == 1 or table not in dims.gone or len(taken) == len(columns) - 1:
            continue
        rows = _of_rows(columns[column], size, program)
        if rows is not None and rows not in {*dims.of_index, *taken}:
            taken.add(rows)
            yield Pair(column, table, rows)


def _of_rows(column: Atom, size: int, program: Program) -> int | None:
    """The dim along which a column [..., 1] counts 0, 1, 2, ..., `size` of them; None: it does not, or is not known."""
    value = _known(column, program)
    if value is None:
        return None
    for dim, length in enumerate(value.shape[:-1]):
        numbers = np.arange(size).reshape([size if d == dim else 1 for d in range(value.ndim)])
        if length == size and np.array_equal(value, np.broadcast_to(numbers, value.shape)):
            return dim
    return None


def _known(atom: Atom, program: Program) -> np.ndarray | None:
    """The value of an atom that is made of constants alone; None: it is made of something else."""
    needed, env = made_by(program.equations, [atom]), dict(program.constants)
    made = {number for each in needed for number in each.outputs} | env.keys()
    read = {number for each in needed for number in each.read} | set(names_of([atom]))
    sizes = [aval.size for each in needed for aval in each.op.made]
    held = [env[number] for number in read & env.keys()]
    if not read <= made or max(sizes, default=0) > MOST or not all(map(is_light, (each.op for each in needed))):
        return None
    if any(isinstance(x, Tracer) or not hasattr(x, "dtype") for x in held):
        return None
    with jax.ensure_compile_time_eval():
        run(needed, env)
        return np.asarray(value_of(atom, env))


def _lookup(equation: Equation, columns: Sequence[Atom], pairs: Sequence[Pair], avals: Mapping[int, Any]) -> Program:
    """The lookup that pairs rows, as a program of the table and of the other columns."""
    options, gone, old = equation.op.options, {pair.table for pair in pairs}, _Dims.of(equation)
    together = sorted([*zip(old.of_table, old.of_index, strict=True), *(pair[1:] for pair in pairs)])
    new = _Dims(
        gone=tuple(dim for dim in old.gone if dim not in gone),
        looked_up=tuple(dim for dim in old.looked_up if dim not in gone),
        of_table=tuple(table for table, _ in together),
        of_index=tuple(index for _, index in together),
    )
    numbers = options["dimension_numbers"]._replace(**dict(zip(_Dims.names(equation), new, strict=True)))

    def fun(table: jax.Array, *others: jax.Array) -> list[jax.Array]:
        columns, updates = (
            others[: len(others) - len(equation.inputs[2:])],
            others[len(others) - len(equation.inputs[2:]) :],
        )
        arrays = [table, jax.numpy.concatenate(columns, -1), *updates]
        return equation.op.bind(arrays, dimension_numbers=numbers, indices_are_sorted=False, unique_indices=False)

    given = [aval_of(atom, avals) for atom in _operands(equation, columns, pairs)]
    return read_program(trace(fun, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given)).jaxpr)


def _operands(equation: Equation, columns: Sequence[Atom], pairs: Sequence[Pair]) -> list[Atom]:
    """The table, the columns that are looked up, and what is written."""
    return [equation.inputs[0], *_others(columns, pairs), *equation.inputs[2:]]


def _others(columns: Sequence[Atom], pairs: Sequence[Pair]) -> list[Atom]:
    gone = {pair.column for pair in pairs}
    return [atom for k, atom in enumerate(columns) if k not in gone]


def _spliced(
    lookup: Program,
    equation: Equation,
    columns: Sequence[Atom],
    pairs: Sequence[Pair],
    fresh: Iterator[int],
    avals: dict[int, Any],
) -> Iterator[Equation]:
    """The equations of the new lookup between the values of the program around it."""
    given = _operands(equation, columns, pairs)
    names: dict[int, Atom] = dict(zip(lookup.inputs, given, strict=True))
    names |= dict(zip(names_of(lookup.outputs), equation.outputs, strict=True))
    for each in lookup.equations:
        for number in each.outputs:
            if number not in names:
                names[number] = next(fresh)
                avals[names[number]] = lookup.avals[number]
        inputs = tuple(atom if is_constant(atom) else names[atom] for atom in each.inputs)
        yield replace(each, inputs=inputs, outputs=tuple(names[number] for number in each.outputs))


def _without_unread(program: Program, loose: set[Equation]) -> Program:
    """The program without those of some equations, and without constants, that nothing reads any more."""
    kept, read = [], set(names_of(program.outputs))
    for each in reversed(program.equations):
        if each not in loose or not read.isdisjoint(each.outputs):
            kept.append(each)
            read.update(each.read)
    constants = {number: value for number, value in program.constants.items() if number in read}
    return replace(program, equations=tuple(kept[::-1]), constants=constants)
