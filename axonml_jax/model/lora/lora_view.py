"""The pure view of a model with adapters (`adapters.py`): they train, the model's own parameters are frozen."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.model.functional import Functional, Mode, Trainable, Variables, abstract
from axonml_jax.model.lora.adapters import Lora, adapter_names, first_adapters, merged
from axonml_jax.model.lora.int8_base import dequantized, quantized, scales_name
from axonml_jax.model.lora.sides import Sides
from axonml_jax.model.state_joins import Join
from axonml_jax.model.trainable import merge, partition


@dataclass(frozen=True)
class Adapter:
    """The adapters of one matrix.

    Attributes:
      a, b: their paths.
      scale: how often their product counts.
      sides: the dims of the matrix; as many first ones of all three number matrices.
      column_scales: the path of the scales of a matrix that rests as int8; None: it rests as it is.
    """

    a: str
    b: str
    scale: float
    sides: Sides
    column_scales: str | None = None

    @property
    def added(self) -> tuple[str, ...]:
        """The paths of all that is no parameter of the model itself."""
        return (self.a, self.b) if self.column_scales is None else (self.a, self.b, self.column_scales)


def lora_functional(
    base: Functional, variables: Variables, lora: Lora, trainable: Trainable = None
) -> tuple["LoraFunctional", Variables]:
    """The view of a model with adapters, and its variables, or their shapes where these are still to be made.

    Args:
      base: the model's own view, of which every parameter trains.
      variables: its variables.
      lora: which adapters.
      trainable: which of the model's own parameters train besides; None: none.

    Raises:
      ValueError: for targets that do not fit the model, parameters that are called as their adapters would be, or `trainable`
        that matches nothing, or matrices that rest as int8.
    """
    shapes = named_leaves(base.shapes.params)
    chosen = lora.chosen(shapes, base.stacked_dims, base.sides)
    adapters = {name: _adapter(lora, name, sides) for name, sides in chosen.items()}
    if taken := [each for adapter in adapters.values() for each in adapter.added if each in shapes]:
        raise ValueError(
            f"lora: adapters would be called as the model's own parameters are: {', '.join(taken)}; rename these, or leave "
            "their neighbours out of targets"
        )

    def with_adapters(variables: Variables) -> Variables:
        own = ({}, variables.params) if trainable is None else partition(variables.params, trainable)
        made = {}
        for path, leaf in flatten_dict(variables.params).items():
            if (name := _name(path)) in chosen:
                adapters_of = first_adapters(lora, name, leaf, chosen[name])
                made |= {_beside(path, each): array for each, array in adapters_of.items()}
        frozen = own[1] if lora.base is None else _int8(own[1], chosen)
        return Variables(merge(unflatten_dict(made), own[0]), frozen, variables.state)

    given = with_adapters(variables)
    view = LoraFunctional(base, abstract(given), adapters)
    if (create := base.create) is not None:
        view.create, view.hollow = (lambda: with_adapters(create())), base.hollow
    return view, given


def _adapter(lora: Lora, name: str, sides: Sides) -> Adapter:
    return Adapter(*adapter_names(name), lora.scale, sides, None if lora.base is None else scales_name(name))


def _int8(frozen: PyTree, chosen: Mapping[str, Sides]) -> PyTree:
    """Frozen parameters, of which those that are chosen rest as int8, with their scales beside them.

    Raises:
      ValueError: naming those that train, and therefore are no frozen ones.
    """
    leaves = flatten_dict(frozen)
    paths = {_name(path): path for path in leaves}
    if training := [name for name in chosen if name not in paths]:
        raise ValueError(
            f"lora: {', '.join(training)} are to train and to rest as int8: leave them out of trainable, or of targets"
        )
    for name, sides in chosen.items():
        path = paths[name]
        leaves[path], leaves[_beside(path, scales_name(name))] = quantized(leaves[path], sides)
    return unflatten_dict(leaves)


class LoraFunctional(Functional):
    """A model as pure functions of its parameters and of adapters; `bind` takes both, or parameters that are merged already."""

    def __init__(self, base: Functional, shapes: Variables, adapters: Mapping[str, Adapter]):
        self._base, self._shapes, self._adapters = base, shapes, adapters
        self.param_prefix, self.order = base.param_prefix, base.order
        if self.order is not None:
            places = {path: (*self.order[n], 0) for n, own in adapters.items() for path in own.added}
            self.order = {**self.order, **places}

    @property
    def shapes(self) -> Variables:
        """The shapes and dtypes of the variables: adapters train."""
        return self._shapes

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters of every matrix that has some, by its path."""
        return self._adapters

    @property
    def stacked_dims(self) -> Mapping[str, int]:
        """The model's, and those of what is beside its stacks: adapters, and the scales of an int8 base."""
        beside = {
            path: own.sides.stacked for name, own in self._adapters.items() for path in (*own.added, scales_name(name))
        }
        return {**self._base.stacked_dims, **beside}

    def bind(self, variables: Variables, key: jax.Array, mode: Mode) -> Any:
        """The model on these arrays, merged where there are adapters among them."""
        return self._base.bind(self.merged(variables), key, mode)

    def merged(self, variables: Variables) -> Variables:
        """The model's own variables, as floats, each matrix with its adapters in it."""
        leaves = flatten_dict(merge(variables.params, variables.frozen))
        there = {_name(path): leaf for path, leaf in leaves.items()}
        added = {each for adapter in self._adapters.values() for each in adapter.added}
        own = {path: leaf for path, leaf in leaves.items() if _name(path) not in added}
        for path in own if len(own) < len(leaves) else ():
            if (adapter := self._adapters.get(_name(path))) is not None:
                scales = adapter.column_scales
                matrix = own[path] if scales is None else dequantized(own[path], there[scales], adapter.sides)
                own[path] = merged(matrix, there[adapter.a], there[adapter.b], adapter.scale, adapter.sides)
        return Variables(unflatten_dict(own), {}, variables.state)

    def module(self, variables: Variables) -> Any:
        """What the user gave, with these arrays in it, merged."""
        return self._base.module(self.merged(variables))

    def state_of(self, bound: Any) -> PyTree:
        """The state after calls of a bound model."""
        return self._base.state_of(bound)

    @property
    def abstract_module(self) -> Any:
        """The model itself on shapes, without adapters; None for Linen."""
        return self._base.abstract_module

    def module_types(self) -> Mapping[str, type]:
        """The model's."""
        return self._base.module_types()

    def declares(self, attribute: str) -> bool:
        """The model's."""
        return self._base.declares(attribute)

    def synchronized(self) -> Callable[[str], bool]:
        """The model's."""
        return self._base.synchronized()

    def batch_statistics(self) -> Callable[[str], bool]:
        """The model's."""
        return self._base.batch_statistics()

    def state_joins(self) -> Mapping[str, Join]:
        """The model's."""
        return self._base.state_joins()

    def after_update(self, state: PyTree) -> PyTree:
        """The model's."""
        return self._base.after_update(state)


def _name(path: tuple) -> str:
    return "/".join(map(str, path))


def _beside(path: tuple, name: str) -> tuple:
    """The path of the leaf of another name beside a leaf, whose own path is given."""
    return (*path[:-1], name.rpartition("/")[2])
