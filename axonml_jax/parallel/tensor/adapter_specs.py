"""How adapters of low rank are split over the tensor axes: as the sides of their matrices are."""

from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from axonml_jax.mesh.axes import BATCH_AXES, LAYER_AXES, as_axes
from axonml_jax.model.functional import Functional
from axonml_jax.model.lora.lora_view import Adapter
from axonml_jax.parallel.tensor.bound_axes import bound, degree
from axonml_jax.parallel.tensor.specs import tensor_specs


def layer_specs(model: Functional, axis_sizes: Mapping[str, int]) -> dict[str, Any]:
    """`tensor_specs` of a model's view: of its adapters too.

    Of a matrix [..., i, o] the first one, [..., i, r], is split as i is and the second, [..., r, o], as o is; so are the
    scales [..., o] of one that rests as int8.

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

    >>> specs_beside(PartitionSpec(None, "tensor"), Adapter("a", "b", 1.0, 0))["b"] == PartitionSpec(None, "tensor")
    True
    """
    *stack, i, o = _entries(spec, adapter.stacked)
    scales = {} if adapter.column_scales is None else {adapter.column_scales: PartitionSpec(*stack, o)}
    return {adapter.a: PartitionSpec(*stack, i, None), adapter.b: PartitionSpec(*stack, None, o)} | scales


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
            *_, i, o = _entries(spec, adapter.stacked)
            found |= {adapter.a: _summed(o), adapter.b: _summed(i)}
    return {name: axes for name, axes in found.items() if axes}


def _entries(spec: PartitionSpec, stacked: int) -> list[Any]:
    return [*spec, *[None] * (stacked + 2 - len(spec))]


def _summed(entry: Any) -> tuple[str, ...]:
    return tuple(axis for axis in bound(as_axes(entry or ())) if axis not in BATCH_AXES and degree(axis) > 1)
