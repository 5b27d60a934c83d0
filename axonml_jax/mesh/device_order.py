"""Which device stands where in a mesh over all devices: near neighbours on the inner axes, slow links outside."""

import math

import jax
import numpy as np
from jax.experimental import mesh_utils

_SPLITS_PHYSICAL_AXES = ("TPU v5 lite", "TPU v5e")


def order_devices(sizes: tuple[int, ...]) -> np.ndarray:
    """All devices as an array of shape `sizes`, axes from the slowest link to the fastest.

    TPUs follow the torus, several slices (or several hosts of GPUs in separate slices) are split over the outermost
    axes; CPU devices keep their own order.

    Raises:
      ValueError: when the slices cannot be split over the outermost axes.
    """
    devices = jax.devices()
    slices = {getattr(device, "slice_index", 0) for device in devices}
    # JAX decides the same way for v5e in jax.make_mesh; create_device_mesh alone refuses many legal shapes there.
    split = devices[0].device_kind in _SPLITS_PHYSICAL_AXES
    if len(slices) == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=split)
    outer = split_over_slices(sizes, len(slices))
    inner = tuple(size // factor for size, factor in zip(sizes, outer, strict=True))
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=split)


def split_over_slices(sizes: tuple[int, ...], num_slices: int) -> tuple[int, ...]:
    """How many slices each axis spans, outermost axes first.

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
