"""The only file that looks at JAX's varying types (`check_vma=True`): which axes a value varies over, and casting.

With `check_vma=False` no value has a varying type: `varying_axes` is empty and `vary` changes nothing.
"""

from typing import TypeVar

import jax
from jax.core import AbstractValue

from axonml_jax.mesh.axes import AxisNames, as_axes

T = TypeVar("T")

CASTS: frozenset[str] = frozenset({"pvary", "pcast", "preduced", "vary_unreduced_cast", "vary_unreduced_cast_p"})
"""Primitives that change a varying type: they name axes but move nothing."""


def varying_axes(x) -> frozenset[str]:
    """The manual mesh axes a value is typed as varying over (none with `check_vma=False` or outside `shard_map`).

    Args:
      x: an array, a tracer, or the abstract value of a variable of a traced program.
    """
    manual = getattr(x if isinstance(x, AbstractValue) else jax.typeof(x), "mat", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def vary(tree: T, axes: AxisNames) -> T:
    """Type every leaf of `tree` as varying over `axes`: costs nothing, may be repeated; its transpose sums over `axes`.

    Args:
      tree: a pytree of arrays, inside `shard_map`.
      axes: mesh axis names; those a leaf already varies over are skipped.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes  # an axis that vmap names has no varying type
    names = [axis for axis in as_axes(axes) if axis in manual]

    def cast(x):
        missing = tuple(axis for axis in names if axis not in varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def vary_like(x, like):
    """`x` typed as varying over at least the axes that `like` varies over."""
    return vary(x, tuple(varying_axes(like)))


def types_are_checked(axis: str) -> bool:
    """Whether this `shard_map` over `axis` runs with `check_vma=True`: there a rank's own index varies."""
    return bool(varying_axes(jax.lax.axis_index(axis)))
