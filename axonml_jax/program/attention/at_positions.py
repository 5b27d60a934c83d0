"""Arrays that an attention reads, at some positions of queries and keys; what follows from positions is computed there alone.

ALiBi's biases, T5's lookups by distance, masks of positions: none of them is ever there for all queries and all keys.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.program.atoms import Atom, is_constant
from axonml_jax.program.attention.operand import Operand
from axonml_jax.program.elements import MOVED
from axonml_jax.program.nested import Level, Nested, Node
from axonml_jax.program.rules import is_elementwise

Places = tuple[Any, ...]
"""For every dim of a value the indices along it; they are broadcast with each other."""


class PositionReader:
    """Reads values at places, inside a program that is being run.

    Args:
      values: the program.
      level: where it is run.
      whole: `whole(value)`: all of a value.
    """

    def __init__(self, values: Nested, level: Level, whole: Callable[[int], Any]):
        self.values, self.level, self.whole = values, level, whole
        self._known: dict[Any, tuple[Any, Places]] = {}
        self._followed: dict[int, bool] = {}

    def operand(self, operand: Operand, sizes: Mapping[str, int], queries: jax.Array, keys: jax.Array) -> jax.Array:
        """An operand in its layout, of size 1 along dims where it does not change, at positions int [x] and [y] alone."""
        shape = [1] * len(operand.layout)
        at: dict[str, Any] = {}
        for dim, labels in enumerate(operand.layout):
            positions = {"query": queries, "key": keys}.get(labels[0])
            if not operand.labels & set(labels):
                continue
            shape[dim] = math.prod(sizes[label] for label in labels) if positions is None else positions.shape[0]
            index = jnp.arange(shape[dim]) if positions is None else positions
            index = index.reshape([-1 if other == dim else 1 for other in range(len(shape))])
            for label in reversed(labels):
                at[label], index = (index % sizes[label], index // sizes[label]) if len(labels) > 1 else (index, 0)
        places = []
        for index in operand.indices:
            place: Any = 0
            for digit in index:
                place = place * digit.size + at[digit.label] // digit.stride % digit.size
            places.append(place)
        found = self.of(operand.value, tuple(places)).astype(operand.dtype)
        return jnp.broadcast_to(found, shape)

    def of(self, atom: Atom, places: Places) -> Any:
        """Elements of a value."""
        if is_constant(atom):
            return jnp.asarray(atom.val, atom.aval.dtype)[places]
        key = (atom, tuple(map(id, places)))
        if key not in self._known:  # the places are kept so that no others take their addresses
            self._known[key] = self._made(atom, places), places
        return self._known[key][0]

    def _made(self, atom: int, places: Places) -> Any:
        node = self.values.maker(atom)
        if node is None or not self._follows(atom):
            return jnp.asarray(self.whole(atom))[places]
        op = node.equation.op
        with op.scope():
            if node.name == "iota":
                return jnp.asarray(places[op.options["dimension"]], op.options["dtype"])
            if node.name in MOVED:
                return self.of(node.inputs[0], MOVED[node.name](op, places))
            if node.name == "gather":
                return self._looked_up(node, places)
            given = [self._element(each, places) for each in node.inputs]
            shape = jnp.broadcast_shapes(*[jnp.shape(x) for x in given])
            return op.bind([jnp.broadcast_to(x, shape) for x in given])[0]

    def _element(self, atom: Atom, places: Places) -> Any:
        """Of an elementwise operation's operand, which may be a number, or of size 1 along some dims."""
        shape = self.values.aval(atom).shape
        return self.of(atom, tuple([p if n > 1 else 0 for p, n in zip(places, shape, strict=True)]) if shape else ())

    def _looked_up(self, node: Node, places: Places) -> Any:
        op, (table, rows) = node.equation.op, node.inputs
        dims = op.options["dimension_numbers"]
        batch = tuple([place for dim, place in enumerate(places) if dim not in dims.offset_dims])
        along = iter([places[dim] for dim in dims.offset_dims])
        looked = {dim: self.of(rows, (*batch, k)) for k, dim in enumerate(dims.start_index_map)}
        at = tuple([looked[dim] if dim in looked else next(along) for dim in range(op.given[0].ndim)])
        array = jnp.asarray(self.whole(table) if not is_constant(table) else table.val)
        mode, fill = op.options["mode"], op.options["fill_value"]
        return array.at[at].get(mode=mode, fill_value=fill, wrap_negative_indices=False)

    def _follows(self, atom: Atom) -> bool:
        """Whether a value is made, place by place, of positions, numbers, and values that are at hand."""
        if is_constant(atom):
            return True
        if atom not in self._followed:
            self._followed[atom] = self._is_followed(atom)
        return self._followed[atom]

    def _is_followed(self, atom: int) -> bool:
        node = self.values.maker(atom)
        if node is None:
            return False
        at_hand = lambda each: is_constant(each) or self.values.at(each, self.level) is not None
        if node.name == "gather":
            return (
                _is_lookup(node)
                and at_hand(node.inputs[0])
                and (self._follows(node.inputs[1]) or at_hand(node.inputs[1]))
            )
        if node.name == "reshape" and node.equation.op.options["dimensions"] is not None:
            return False
        followed = is_elementwise(node.name) and len(node.outputs) == 1 and not node.equation.op.has_effects
        known = followed or node.name in MOVED or node.name == "iota"
        return known and all(self._follows(each) or at_hand(each) for each in node.inputs)


def _is_lookup(node: Node) -> bool:
    """Whether a gather takes rows of a table, whole along all other dims."""
    op = node.equation.op
    dims, sizes, shape = op.options["dimension_numbers"], op.options["slice_sizes"], op.given[0].shape
    plain = not dims.operand_batching_dims and tuple(dims.start_index_map) == tuple(dims.collapsed_slice_dims)
    taken = [1 if dim in dims.start_index_map else size for dim, size in enumerate(shape)]
    return plain and list(sizes) == taken
