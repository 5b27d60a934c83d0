"""Atoms: what an equation reads and a program returns, each the name of a value or a constant written into the program.

A program (`program.py`) names its values by numbers. A constant has no name and cannot be hashed, so it is never a key: every
table and set of values is asked here, wherever an atom may be a constant.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp

from axonml_jax.compat.jaxpr import Literal

Atom = Any
"""A number, or a constant with a `val` and an `aval`."""

T = TypeVar("T")


def is_constant(atom: Atom) -> bool:
    """Whether an atom is a constant."""
    return isinstance(atom, Literal)


def names_of(atoms: Iterable[Atom]) -> tuple[Any, ...]:
    """The atoms that are names, in order."""
    return tuple([atom for atom in atoms if not isinstance(atom, Literal)])


def among(atom: Atom, some: Collection[Hashable]) -> bool:
    """Whether an atom names one of some values; a constant names none."""
    return not is_constant(atom) and atom in some


def entry_of(atom: Atom, table: Mapping[Any, T], otherwise: T) -> T:
    """What a table says about the value that an atom names; `otherwise` for those that it lacks, and for constants."""
    return otherwise if is_constant(atom) else table.get(atom, otherwise)


def value_of(atom: Atom, env: Mapping[Any, Any]) -> Any:
    """The value that an equation reads: the one of that name, or the constant."""
    return atom.val if is_constant(atom) else env[atom]


def values_of(atoms: Iterable[Atom], env: Mapping[Any, Any]) -> list[Any]:
    """The value of each atom."""
    return [value_of(atom, env) for atom in atoms]


def result_of(atom: Atom, env: Mapping[Any, Any]) -> Any:
    """The value that a program returns: an array always, of the dtype that was traced."""
    return jnp.asarray(atom.val, atom.aval.dtype) if is_constant(atom) else env[atom]


def results_of(atoms: Iterable[Atom], env: Mapping[Any, Any]) -> list[Any]:
    """The result of each atom."""
    return [result_of(atom, env) for atom in atoms]


def aval_of(atom: Atom, avals: Mapping[Any, Any]) -> Any:
    """The abstract value of an atom."""
    return atom.aval if is_constant(atom) else avals[atom]
