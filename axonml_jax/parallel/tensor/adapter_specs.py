"""How adapters of low rank are split over the tensor axes: as the sides of their matrices are."""

from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from axonml_jax.mesh.axes import BATCH_AXES, LAYER_AXES, as_axes
from axonml_jax.model.functional import Functional
from axonml_jax.model.lora.lora_view import Adapter
from axonml_jax.model.lora.sides import Sides
from axonml_jax.parallel.tensor.bound_axes import bound, degree
from axonml_jax.parallel.tensor.specs import tensor_specs


def layer_specs(model: Functional, axis_sizes: Mapping[str, int]) -> dict[str, Any]:
    """`tensor_specs` of a model's view: of its adapters too.

    Of a matrix [..., i, o] the first one, [..., i, r], is split as i is and the second, [..., r, o], as o is; so are the
    scales [..., o] of one that rests as int8. Of kernels with several dims on a side each dim is.

    Raises:
      ValueError: see `tensor_specs`.
    """
    specs: dict[Any, Any] = flatten_dict(tensor_specs(model.abstract_module, axis_sizes))
    for path, spec in list(specs.items()):
        if (adapter := model.adapters.get("/".join(map(str, path)))) is not None:
            for name, own in specs_beside(spec, adapter).items():
                specs[*path[:-1], name.rpartition("/")[2]] = own
    return unflatten_dict(specs)


def specs_beside(spec: PartitionSpec, adapter: Adapter) -> dict[str, PartitionSpec]:
    """How what lies beside a matrix of this spec is split, by path: its adapters, and the scales of its columns if it has some.

    >>> specs_beside(PartitionSpec(None, "tensor"), Adapter("a", "b", 1.0, Sides()))["b"] == PartitionSpec(None, "tensor")
    True
    """
    stack, inputs, outputs = _entries(spec, adapter.sides)
    scales = {} if adapter.column_scales is None else {adapter.column_scales: PartitionSpec(*stack, *outputs)}
    return {adapter.a: PartitionSpec(*stack, *inputs, None), adapter.b: PartitionSpec(*stack, None, *outputs)} | scales


def summed_axes(model: Functional) -> dict[str, tuple[str, ...]]:
    """Over which bound axes the gradient of an adapter is the sum of the ranks', by its path, where there are any.

    Of a matrix whose columns are split each rank has a part of the first adapter's gradient; of one whose rows are, of the
    second's. Along axes that split rows of the batch the step sums already.
    """
    sizes = {axis: degree(axis) for axis in bound(LAYER_AXES)}
    specs: dict[Any, Any] = flatten_dict(tensor_specs(model.abstract_module, sizes))
    found = {}
    for path, spec in specs.items():
        if (adapter := model.adapters.get("/".join(map(str, path)))) is not None:
            _, inputs, outputs = _entries(spec, adapter.sides)
            found |= {adapter.a: _summed(outputs), adapter.b: _summed(inputs)}
    return {name: axes for name, axes in found.items() if axes}


def _entries(spec: PartitionSpec, sides: Sides) -> tuple[list[Any], list[Any], list[Any]]:
    """What the spec says of the stack, the input side and the output side of a matrix."""
    entries = [*spec, *[None] * (sides.stacked + len(sides.roles) - len(spec))]
    return entries[: sides.stacked], [entries[d] for d in sides.dims("i")], [entries[d] for d in sides.dims("o")]


def _summed(entries: list[Any]) -> tuple[str, ...]:
    axes = bound(tuple(axis for entry in entries for axis in as_axes(entry or ())))
    return tuple(axis for axis in axes if axis not in BATCH_AXES and degree(axis) > 1)
