"""Where a value comes from before it was moved, spread or cast: what an attention reads is told by that."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from axonml_jax.program.atoms import Atom, is_constant, names_of
from axonml_jax.program.attention.digits import Indices, before, labels_of
from axonml_jax.program.nested import Level, Nested, Node
from axonml_jax.program.program import Program
from axonml_jax.program.rules import is_light


@dataclass(frozen=True)
class Source:
    """A value, and what its dims run over."""

    atom: Atom
    indices: Indices


def sources(values: Nested, atom: Atom, indices: Indices, *, casts: bool = False) -> Iterator[Source]:
    """A value, then what it was before each operation that only places it, to the first.

    Args:
      values: where it is made.
      atom: the value.
      indices: what its dims run over.
      casts: go through all casts, and stopped gradients; else only where the source, cast to the value's dtype, is the value.
    """
    source: Source | None = Source(atom, indices)
    dtype = values.aval(atom).dtype
    while source is not None:
        yield source
        maker = values.maker(source.atom)
        found = (
            None
            if maker is None or not (casts or _is_exact(maker, dtype))
            else before(maker.equation.op, source.indices)
        )
        source = None if found is None or maker is None else Source(maker.inputs[0], found)


def varies_along(values: Nested, atom: Atom, indices: Indices, labels: Collection[Any]) -> bool:
    """Whether a value differs along labels of some kinds, as ("left", 1) is of the kind "left", and was not spread there."""
    *_, last = sources(values, atom, indices, casts=True)
    return any(label[0] in labels for label in labels_of(last.indices))


def operand_indices(values: Nested, node: Node, k: int, indices: Indices) -> Indices:
    """What the dims of an elementwise equation's operand run over, of those of its result: it may be of size 1 along some."""
    shape = values.aval(node.inputs[k]).shape
    return tuple([index if size > 1 else () for index, size in zip(indices, shape, strict=True)]) if shape else ()


def visible(values: Nested, atom: Atom, level: Level) -> bool:
    """Whether code of a level may read a value."""
    return is_constant(atom) or values.at(atom, level) is not None


def _is_exact(maker: Node, dtype: Any) -> bool:
    """Whether an operation keeps values and gradients as they are, or casts them to the dtype that is wanted in the end."""
    if maker.name == "convert_element_type" and maker.equation.op.made[0].dtype != dtype:
        old, new = maker.equation.op.given[0].dtype, maker.equation.op.made[0].dtype
        return jnp.promote_types(old, new) == new and not (jnp.issubdtype(old, jnp.integer) and old.itemsize > 2)
    return maker.name != "stop_gradient"


def activations(values: Nested, program: Program, weights: Collection[int] | None) -> frozenset[int]:
    """The values that are more than weights, or inputs, moved, cast and combined element by element.

    Args:
      values: of the program.
      program: the whole.
      weights: which of its inputs are weights, by position; None: all may be.
    """
    known = range(len(program.inputs)) if weights is None else weights
    prepared = {values.top.values[program.inputs[k]] for k in known} | set(values.constants)
    for node in values.nodes:
        if is_light(node.equation.op) and all(_is_prepared(values, each, prepared) for each in names_of(node.inputs)):
            prepared.update(node.outputs)
    return frozenset(value for value in values.avals if not _is_prepared(values, value, prepared))


def _is_prepared(values: Nested, value: int, prepared: Collection[int]) -> bool:
    """Slices that a loop takes of a weight are weights."""
    links = values.links.get(value, ())
    return value in prepared or (len(links) == 1 and not is_constant(links[0]) and links[0] in prepared)
