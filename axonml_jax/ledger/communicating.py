"""What a communicating equation sends: the primitives and their kinds stand in `program/rules.py`.

The names differ with the `check_vma` mode (`psum` off, `psum_invariant` on) and with the JAX version; tests trace each.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.compat.operation import Operation
from axonml_jax.program import rules
from axonml_jax.program.rules import rule_of


class Call(NamedTuple):
    """One communicating equation: everything of a `Collective` that does not depend on where it stands."""

    kind: str
    op: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    itemsize: int
    elements: int


def read(op: Operation, axis_sizes: Mapping[str, int]) -> Call | None:
    """What one equation communicates, or None when it is silent.

    Args:
      op: an equation without inner programs.
      axis_sizes: the sizes of the mesh axes in scope.

    Raises:
      ValueError: for an equation that names mesh axes but is no collective the ledger knows.
    """
    axes, rule = op.mesh_axes, rule_of(op.name)
    if not axes or rule.casts or (rule.kind == "collective" and rule.sends is None):
        return None
    if rule.sends is None:
        raise ValueError(
            f"primitive {op.name!r} names the mesh axes {axes} but the ledger does not know what it sends: "
            f"add it to {rules.__name__}, as a collective or as silent"
        )
    kind, reduction = rule.sends
    unbound = [axis for axis in axes if axis not in axis_sizes]
    if unbound:
        raise ValueError(
            f"{op.name} over {axes}: the sizes of {unbound} are unknown here (known: {dict(axis_sizes)}); "
            "count the jaxpr of the whole shard_map, or pass axis_sizes="
        )
    full = op.made[0] if kind == "all_gather" else op.given[0]
    dtype, elements = _physical(full)
    group = _group_size(op.groups, math.prod(axis_sizes[axis] for axis in axes))
    return Call(kind, reduction, axes, group, dtype.name, dtype.itemsize, elements)


def _group_size(groups: Any, axes_size: int) -> int:
    """Ranks per group; of unequal groups the largest, whose ranks send most."""
    return max(map(len, groups)) if groups else axes_size


def _physical(aval: Any) -> tuple[Any, int]:
    """Element type and count as they travel: typed random keys travel as their words."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return aval.dtype, math.prod(aval.shape)
