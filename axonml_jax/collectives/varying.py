"""Casting values to a varying type, in this floor's words: trees and axis names. `compat/varying_types.py` reads the types.

With `check_vma=False` no value has a varying type: `varying_axes` is empty and `vary` changes nothing.
"""

from typing import TypeVar

import jax

from axonml_jax.compat.around import manual_axes
from axonml_jax.compat.varying_types import cast_to_varying
from axonml_jax.compat.varying_types import varying_axes as varying_axes
from axonml_jax.mesh.axes import AxisNames, as_axes

T = TypeVar("T")


def vary(tree: T, axes: AxisNames) -> T:
    """Type every leaf of `tree` as varying over `axes`: costs nothing, may be repeated; its transpose sums over `axes`.

    Args:
      tree: a pytree of arrays, inside `shard_map`.
      axes: mesh axis names; those a leaf already varies over are skipped.
    """
    manual = manual_axes()  # an axis that vmap names has no varying type
    names = [axis for axis in as_axes(axes) if axis in manual]

    def cast(x):
        missing = tuple(axis for axis in names if axis not in varying_axes(x))
        return cast_to_varying(x, missing) if missing else x

    return jax.tree.map(cast, tree)


def vary_like(x, like):
    """`x` typed as varying over at least the axes that `like` varies over."""
    return vary(x, tuple(varying_axes(like)))


def types_are_checked(axis: str) -> bool:
    """Whether this `shard_map` over `axis` runs with `check_vma=True`: there a rank's own index varies."""
    return bool(varying_axes(jax.lax.axis_index(axis)))
