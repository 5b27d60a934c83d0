"""Mesh shapes, and the order of devices along their axes."""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from axonml_jax.base import AXIS_SYNONYMS, NO_AXIS, nearest
from axonml_jax.mesh.axes import AXES

# --------------------------------------------------------------------------------------------------
# Which device stands where in a mesh over all devices: near neighbours on the inner axes, slow links outside.
# --------------------------------------------------------------------------------------------------

_SPLITS_PHYSICAL_AXES = ("TPU v5 lite", "TPU v5e")


def order_devices(sizes: tuple[int, ...], devices: Sequence[Any] | None = None) -> np.ndarray:
    """Devices as an array of shape `sizes`, axes from the slowest link to the fastest.

    TPUs follow the torus, several slices (or several hosts of GPUs in separate slices) are split over the outermost
    axes; CPU devices keep their own order.

    Args:
      sizes: the degrees of the mesh, outermost first.
      devices: as many devices as the degrees multiply to; None: all.

    Raises:
      ValueError: when the slices cannot be split over the outermost axes.
    """
    devices = jax.devices() if devices is None else devices
    slices = {getattr(device, "slice_index", 0) for device in devices}
    # JAX decides the same way for v5e in jax.make_mesh; create_device_mesh alone refuses many legal shapes there.
    split = devices[0].device_kind in _SPLITS_PHYSICAL_AXES
    if len(slices) == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=split)
    outer = split_over_slices(sizes, len(slices))
    inner = tuple(size // factor for size, factor in zip(sizes, outer, strict=True))
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=split)


def split_over_slices(sizes: tuple[int, ...], num_slices: int) -> tuple[int, ...]:
    """The number of slices that each axis spans, outermost axes first.

    Raises:
      ValueError: when the degrees have no room for the slices.

    >>> split_over_slices((2, 4, 8), 4)
    (2, 2, 1)
    """
    factors, left = [], num_slices
    for size in sizes:
        factors.append(math.gcd(size, left))
        left //= factors[-1]
    if left != 1:
        raise ValueError(
            f"mesh degrees {sizes} over {num_slices} slices: the outermost degrees must contain the number of slices "
            f"as a factor; make the first one a multiple of {num_slices}"
        )
    return tuple(factors)


# --------------------------------------------------------------------------------------------------
# The degrees of a mesh as a value, and the `jax.sharding.Mesh` made from them (of users: `as_mesh` in mesh/world.py).
# --------------------------------------------------------------------------------------------------


class _Unnamed(int):
    """The degree of an axis that the caller did not name: 1, and the mesh does not have the axis."""


_UNNAMED = _Unnamed(1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MeshShape:
    """The degree of every mesh axis: how many ways the work is split along it.

    Args:
      data, pipe, fsdp, expert, context, depth, row, col, tensor: an int >= 1, or -1 for "whatever the devices leave" (at most
        once).

    Raises:
      ValueError: for any other degree, or a second -1.

    >>> shape = MeshShape(tensor=2, data=-1)
    >>> shape.resolve(8), shape.resolve(8).size
    (MeshShape(data=4, tensor=2), 8)
    """

    data: int = _UNNAMED
    pipe: int = _UNNAMED
    fsdp: int = _UNNAMED
    expert: int = _UNNAMED
    context: int = _UNNAMED
    depth: int = _UNNAMED
    row: int = _UNNAMED
    col: int = _UNNAMED
    tensor: int = _UNNAMED

    def __post_init__(self):
        illegal = {axis: degree for axis, degree in self.degrees.items() if not _is_degree(degree)}
        open_axes = {axis: degree for axis, degree in self.degrees.items() if axis not in illegal and degree == -1}
        offenders = illegal | (open_axes if len(open_axes) > 1 else {})
        if offenders:
            raise ValueError(
                f"mesh degrees {_show(offenders)}: a degree is an int >= 1, or -1 (to be filled in) on one axis at most"
            )
        for axis, degree in self.degrees.items():
            object.__setattr__(self, axis, int(degree))

    @classmethod
    def of(cls, mesh: Mesh) -> "MeshShape":
        """The shape of a mesh whose axes all have the library's names."""
        return cls(**check_axis_names(dict(mesh.shape)))

    @property
    def degrees(self) -> dict[str, int]:
        """The named degrees, in canonical order; the mesh lacks the axes that were left out."""
        return {axis: getattr(self, axis) for axis in AXES if not isinstance(getattr(self, axis), _Unnamed)}

    @property
    def size(self) -> int:
        """The number of devices the shape needs.

        Raises:
          ValueError: while a degree is still -1.
        """
        if -1 in self.degrees.values():
            raise ValueError(f"{self} has no size before `resolve(num_devices)` fills in the -1")
        return math.prod(self.degrees.values())

    def resolve(self, num_devices: int) -> "MeshShape":
        """Fill in the -1, and check that the degrees use every device.

        Raises:
          ValueError: when no degree, or not these degrees, make the product equal to `num_devices`.
        """
        filled = dict(self.degrees)
        fixed = math.prod(degree for degree in filled.values() if degree != -1)
        for axis, degree in filled.items():
            if degree == -1 and num_devices % fixed == 0:
                filled[axis] = num_devices // fixed
        if -1 in filled.values() or math.prod(filled.values()) != num_devices:
            raise ValueError(_wrong_product(self, fixed, num_devices))
        return MeshShape(**filled)

    def __eq__(self, other):
        return self.degrees == other.degrees if isinstance(other, MeshShape) else NotImplemented

    def __hash__(self):
        return hash(tuple(self.degrees.items()))

    def __repr__(self):
        return f"MeshShape({_show(self.degrees)})"


def make_mesh(*, devices: Sequence | None = None, **degrees: int) -> Mesh:
    """Make a mesh with the named axes in canonical order (`data` always among them), all of type Auto.

    Args:
      devices: JAX devices, taken in the order given. None: all devices, in the order that suits the machine's network.
      **degrees: axis name (or dp, pp, cp, tp) to degree, at most one of them -1. An axis given as 1 is kept; with no degree at
        all, `data` takes every device.

    Raises:
      ValueError: for an unknown axis, an illegal degree, or a product that is not the number of devices.
      RuntimeError: for all devices of one of several launched processes that has not called `ax.init`.

    >>> make_mesh(data=-1).axis_names
    ('data',)
    """
    if devices is None:
        from axonml_jax.mesh.launchers import refuse_unjoined  # not imported by whom a mesh is given

        refuse_unjoined()
    named = check_axis_names(degrees or {"data": -1})
    there = jax.devices() if devices is None else devices
    asked = MeshShape(**({"data": 1} | named))
    try:
        shape = asked.resolve(len(there)).degrees
    except ValueError as error:
        needed = math.prod(degree for degree in asked.degrees.values() if degree != -1)
        if devices is not None or needed <= len(there) or there[0].platform != "cpu":
            raise
        raise ValueError(f"{error}. Did you forget ax.fake_devices({needed}), before anything of JAX runs?") from None
    sizes = tuple(shape.values())
    grid = order_devices(sizes) if devices is None else np.array(devices, dtype=object).reshape(sizes)
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def check_axis_names(degrees: Mapping[str, int]) -> dict[str, int]:
    """Translate the names of degrees to the library's (`dp` is `data`, as for `as_mesh`).

    Raises:
      ValueError: naming every unknown axis and the nearest known name, or two names of one axis.
    """
    ours = {name: name if name in AXES else AXIS_SYNONYMS.get(name.lower(), name) for name in degrees}
    if unknown := [name for name, axis in ours.items() if axis not in AXES]:
        raise ValueError(f"unknown mesh axes {', '.join(map(axis_hint, unknown))}: the axes are {', '.join(AXES)}")
    if doubled := [name for name, axis in ours.items() if list(ours.values()).count(axis) > 1]:
        raise ValueError(f"mesh axes {doubled} are names of one axis, {ours[doubled[0]]!r}: give one of them")
    return {ours[name]: degree for name, degree in degrees.items()}


def axis_hint(name: str) -> str:
    """An unknown axis, with a suggestion of what was meant, or why there is no such axis."""
    if why := NO_AXIS.get(name.lower()):
        return f"{name!r} ({why})"
    near = nearest(name, AXES, AXIS_SYNONYMS, cutoff=0.4)
    return f"{name!r} (did you mean {near!r}?)" if near else repr(name)


def nearest_degrees(degrees: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """The degrees whose product is `num_devices` that are closest in ratio to those wanted (-1: any).

    Of several as close it is those that change `data` and `fsdp`, which any model divides over.

    >>> nearest_degrees({"data": 3, "tensor": 2}, 8), nearest_degrees({"data": 4, "tensor": 2}, 32)
    ({'data': 4, 'tensor': 2}, {'data': 16, 'tensor': 2})
    """
    axes = list(degrees)

    def distance(candidate):
        triples = zip(axes, candidate, degrees.values(), strict=True)
        each = {axis: abs(math.log(got / wanted)) for axis, got, wanted in triples if wanted != -1}
        others = sum(own for axis, own in each.items() if axis not in ("data", "fsdp"))
        return round(sum(each.values()), 9), others

    return dict(zip(axes, min(_factorizations(num_devices, len(axes)), key=distance), strict=True))


def _factorizations(number, parts):
    if parts == 1:
        yield (number,)
        return
    for divisor in range(1, number + 1):
        if number % divisor == 0:
            yield from ((divisor, *rest) for rest in _factorizations(number // divisor, parts - 1))


def _wrong_product(shape, fixed, num_devices):
    nearest = _show(nearest_degrees(shape.degrees or {"data": -1}, num_devices))
    if -1 in shape.degrees.values():
        rule = f"the product of the other degrees, {fixed}, must divide the number of devices"
    else:
        rule = f"the product of the degrees, {fixed}, must equal the number of devices"
    remedies = [f"use the nearest legal degrees ({nearest})"]
    if fixed < num_devices:
        usable = num_devices // fixed * fixed if -1 in shape.degrees.values() else fixed
        remedies.append(f"pass devices=jax.devices()[:{usable}]")
    return f"{shape} does not fit {num_devices} devices: {rule}; {' or '.join(remedies)}"


def _is_degree(value):
    try:
        number = operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool) and (number >= 1 or number == -1)


def _show(degrees):
    return ", ".join(f"{axis}={degree!r}" for axis, degree in degrees.items())
