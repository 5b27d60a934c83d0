"""How each parameter of a model is split over the tensor axes: written in its metadata, read for a mesh, checked at once.

A parameter carries `tensor_spec`, a PartitionSpec over the layer's axes, and, where its last dim consists of parts that must
stay in one piece, such as attention heads, `tensor_units`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import PartitionSpec

from axonml_jax.mesh.axes import as_axes
from axonml_jax.parallel.tensor.bound_axes import degree

SPEC = "tensor_spec"
UNITS = "tensor_units"
PADS = "tensor_pads"
"""On a parameter whose dims may leave a remainder: the last ranks' parts then end with zeros, which its layer knows."""
WHOLE = "tensor_whole"
"""The whole shape, on a parameter that looks whole to all but its own layer (`whole_reads.py`)."""


@dataclass(frozen=True)
class Units:
    """The last dim of a parameter consists of `count` equal parts that are not cut.

    Attributes:
      count: how many.
      name: what they are, for messages.
      replicated: with fewer parts than ranks every rank holds all of them; otherwise that is refused.
    """

    count: int
    name: str
    replicated: bool = False

    def whole_on(self, ranks: int) -> bool:
        """Whether every one of that many ranks holds all parts."""
        return self.replicated and self.count < ranks and ranks % self.count == 0


def metadata(
    spec: PartitionSpec, given: Mapping[str, Any] | None = None, units: Units | None = None, *, pads: bool = False
) -> dict[str, Any]:
    """What to write on a parameter: its split, after what the user wrote."""
    return {**(given or {}), SPEC: spec, **({} if units is None else {UNITS: units}), **({PADS: True} if pads else {})}


def tensor_specs(model: nnx.Module | None, axis_sizes: Mapping[str, int]) -> dict[str, Any]:
    """How the parameters of a model are split on a mesh.

    Args:
      model: a module with or without parallel layers, on arrays or on shapes; None has none.
      axis_sizes: the sizes of the mesh's axes (`mesh.shape`). An axis that the mesh lacks splits nothing.

    Returns:
      A PartitionSpec for every `nnx.Param`, in the structure of `nnx.to_pure_dict(nnx.state(model, nnx.Param))`.

    Raises:
      ValueError: when dims do not divide; every offender is listed by path, with the remedy.
    """
    specs, offenders = {}, []
    if model is None:
        return specs
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        written = variable.get_metadata()
        stacked = len(variable.shape) - len(written.get(WHOLE, variable.shape))  # by `nnx.vmap`, along new first dims
        spec = PartitionSpec(*[None] * stacked, *written.get(SPEC, PartitionSpec()))
        spec = split_of(spec, written.get(UNITS), axis_sizes)
        specs[path] = spec
        if written.get(PADS):
            continue
        offenders += _indivisible("/".join(map(str, path)), variable.shape, spec, written.get(UNITS), axis_sizes)
    if offenders:
        raise ValueError(
            "these parameters do not divide over the tensor axes of the mesh:\n"
            + "\n".join(offenders)
            + "\nchange the sizes or the degrees of the mesh (of a table of words or its head: pads=True of the layer)"
        )
    return unflatten_dict(specs)


def split_of(spec: PartitionSpec, units: Units | None, axis_sizes: Mapping[str, int]) -> PartitionSpec:
    """A written spec on a mesh: without the axes it lacks, and whole where there are fewer units than ranks."""
    entries = [tuple(axis for axis in as_axes(entry or ()) if axis in axis_sizes) for entry in spec]
    if units is not None and entries and units.whole_on(_ranks(entries[-1], axis_sizes)):
        entries[-1] = ()
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def padded_sizes(model: nnx.Module | None) -> set[int]:
    """The sizes of dims that may leave a remainder over the ranks that split them."""
    if model is None:
        return set()
    found = [(each.shape, each.get_metadata()) for _, each in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    return {
        size
        for shape, written in found
        if written.get(PADS)
        for size, entry in zip(shape, written[SPEC], strict=False)
        if entry
    }


def check_shard(what: str, array: jax.Array, shape: Sequence[int], spec: PartitionSpec, *, pads: bool = False) -> None:
    """Refuse a parameter that is not the shard its spec says (in a layer's call, where its axes are bound).

    Args:
      what: the layer and the parameter, for the message.
      array: what the layer was given.
      shape: that of the whole parameter.
      spec: how it is split.
      pads: whether dims may leave a remainder.

    Raises:
      ValueError: when a dim does not divide, or the parameter was not split.
    """
    parts = [degree(entry or ()) for entry in spec] + [1] * (len(shape) - len(spec))
    uneven = [dim for dim, (size, count) in enumerate(zip(shape, parts, strict=True)) if size % count]
    expected = tuple(-(-size // count) for size, count in zip(shape, parts, strict=True))
    if uneven and not pads:
        raise ValueError(
            f"{what} of shape {tuple(shape)} does not divide into {tuple(parts)} parts ({spec}): dims {uneven} leave a "
            "remainder; change the sizes or the degrees of the mesh (of a table of words or its head: pads=True of the layer)"
        )
    if array.shape != expected:
        raise ValueError(
            f"{what} has shape {array.shape} on each rank, where the whole {tuple(shape)} split by {spec} gives {expected}: "
            "give shard_map the specs of axonml_jax.parallel.tensor.specs.tensor_specs(model, mesh.shape) for the parameters"
        )


def check_units(what: str, units: Units | None, axis: str) -> None:
    """Refuse to cut units (in a layer's call, where its axis is bound).

    Raises:
      ValueError: naming the layer, the units and the ranks.
    """
    if units is not None and units.count % degree(axis):
        raise ValueError(
            f"{what}: {units.count} {units.name} do not divide over the {degree(axis)} ranks of {axis!r}: choose a degree "
            "that divides them"
        )


def _ranks(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _indivisible(path, shape, spec, units: Units | None, sizes) -> list[str]:
    found = []
    for dim, entry in enumerate(spec):
        ranks = _ranks(as_axes(entry or ()), sizes)
        if shape[dim] % ranks:
            found.append(
                f"  {path}: dim {dim} of {tuple(shape)} over {entry} ({shape[dim]} % {ranks} = {shape[dim] % ranks})"
            )
        elif units is not None and dim == len(spec) - 1 and units.count % ranks:
            found.append(
                f"  {path}: {units.count} {units.name} over {entry} ({units.count} % {ranks} = {units.count % ranks})"
            )
    return found
