"""Running one of several functions, chosen while the program runs, in which equal programs are compiled once."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.base import PyTree
from axonml_jax.collectives.primitives import vary_like
from axonml_jax.compat.jaxpr import is_jaxpr, trace
from axonml_jax.program.program import Atom, Equation, Program, is_constant, read_program, run_program

# --------------------------------------------------------------------------------------------------
# Running one of several functions, chosen while the program runs, in which functions of one program are compiled once.
# --------------------------------------------------------------------------------------------------


def one_of(index: Any, functions: Sequence[Callable[[], Any]], looks: Sequence[Hashable]) -> Any:
    """`jax.lax.switch(index, functions)`, in which functions of equal programs are compiled once.

    Args:
      index: which function. Ranks may choose differently.
      functions: without arguments, returning the same types. Nobody differentiates through them. One that is there several
        times is compiled once.
      looks: what every function looks like. Only those that look the same are traced here and compared.

    >>> x = jnp.arange(3.0)
    >>> one_of(2, [lambda: x + 1, lambda: x * 2, lambda: x + 1], "aba").tolist()
    [1.0, 2.0, 3.0]
    """
    kept: list[Callable[[], Any]] = []
    known: list[tuple[Hashable, int, Any, Program]] = []
    branches: list[int] = []
    alone = Counter(dict(zip(functions, looks, strict=True)).values())
    for place, (function, look) in enumerate(zip(functions, looks, strict=True)):
        if (first := functions.index(function)) < place:
            branches.append(branches[first])
            continue
        if alone[look] == 1:
            branches.append(len(kept))
            kept.append(function)
            continue
        traced = trace(function)
        program = read_program(traced.jaxpr)
        same = (
            at for other, at, tree, made in known if other == look and tree == traced.out_tree and alike(made, program)
        )
        if (at := next(same, None)) is None:
            at = len(kept)
            known.append((look, at, traced.out_tree, program))
            kept.append(lambda program=program, tree=traced.out_tree: tree.unflatten(run_program(program, [])))
        branches.append(at)
    if len(kept) < len(functions):
        at = jnp.asarray(index)
        index = _entry(vary_like(jnp.asarray(branches, jnp.int32), at), at)
    return jax.lax.switch(jnp.asarray(index), kept)


def _entry(table: jax.Array, at: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(table, at, keepdims=False, allow_negative_indices=False)


def alike(one: Program, other: Program) -> bool:
    """Tells whether two programs are the same, equation by equation, with the same constants.

    >>> first, second, third = (read_program(trace(f, 1.0).jaxpr) for f in (jnp.sin, lambda x: jnp.sin(x), jnp.cos))
    >>> alike(first, second), alike(first, third)
    (True, False)
    """
    if one is other:
        return True
    if (one.inputs, len(one.equations), one.avals) != (other.inputs, len(other.equations), other.avals):
        return False
    if not _same_values(one.constants, other.constants) or not _same_atoms(one.outputs, other.outputs):
        return False
    return all(_same_equation(a, b) for a, b in zip(one.equations, other.equations, strict=True))


def _same_values(one: Mapping[int, Any], other: Mapping[int, Any]) -> bool:
    return one.keys() == other.keys() and all(_same_value(value, other[number]) for number, value in one.items())


def _same_value(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, np.ndarray | np.generic | bool | int | float | complex):
        return False
    first, second = np.asarray(one), np.asarray(other)
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def _same_atoms(one: Sequence[Atom], other: Sequence[Atom]) -> bool:
    return len(one) == len(other) and all(_same_atom(a, b) for a, b in zip(one, other, strict=True))


def _same_atom(one: Atom, other: Atom) -> bool:
    if is_constant(one) and is_constant(other):
        return one.aval == other.aval and _same_value(one.val, other.val)
    return is_constant(one) == is_constant(other) and one == other


def _same_equation(one: Equation, other: Equation) -> bool:
    if one.outputs != other.outputs or not one.op.is_alike(other.op) or not _same_atoms(one.inputs, other.inputs):
        return False
    if len(one.bodies) != len(other.bodies) or not all(map(alike, one.bodies, other.bodies)):
        return False
    return one.name.startswith("custom_") or _same_options(one.op.options, other.op.options)


def _same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the options of two equations are equal, apart from programs among them."""
    if one.keys() != other.keys():
        return False
    return all((_is_body(one[key]) and _is_body(other[key])) or _same_option(one[key], other[key]) for key in one)


def _same_option(one: Any, other: Any) -> bool:
    arrays = isinstance(one, np.ndarray | jax.Array) or isinstance(other, np.ndarray | jax.Array)
    return _same_value(one, other) if arrays else bool(one == other)


def _is_body(option: Any) -> bool:
    return is_jaxpr(option) or (isinstance(option, tuple) and bool(option) and all(map(is_jaxpr, option)))


def on_own_rank(index: Any, num_ranks: int, run: Callable[[int], PyTree]) -> PyTree:
    """Runs `run(rank)` with this rank's number; ranks run different programs that return the same types."""
    if num_ranks == 1:
        return run(0)
    return jax.lax.switch(index, [lambda rank=rank: run(rank) for rank in range(num_ranks)])
