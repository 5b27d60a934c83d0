"""Which JAX primitives communicate, and how to read one: the only file that knows their parameters.

The names differ with the `check_vma` mode (`psum` off, `psum_invariant` on) and with the JAX version; tests trace each.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.collectives.varying import CASTS

_KINDS: dict[str, tuple[str, str]] = {
    "psum": ("all_reduce", "sum"),
    "psum_invariant": ("all_reduce", "sum"),
    "unreduced_psum": ("all_reduce", "sum"),
    "pmax": ("all_reduce", "max"),
    "unreduced_pmax": ("all_reduce", "max"),
    "pmin": ("all_reduce", "min"),
    "unreduced_pmin": ("all_reduce", "min"),
    "all_gather": ("all_gather", ""),
    "all_gather_invariant": ("all_gather", ""),
    "all_gather_reduced": ("all_gather", ""),
    "reduce_scatter": ("reduce_scatter", "sum"),
    "unreduced_reduce_scatter": ("reduce_scatter", "sum"),
    "all_to_all": ("all_to_all", ""),
    "ragged_all_to_all": ("ragged_all_to_all", ""),
    "ppermute": ("permute", ""),
    "pbroadcast": ("broadcast", ""),
    "pbroadcast_dynamic": ("broadcast", ""),
}

_SILENT = CASTS | {"axis_index"}


class Call(NamedTuple):
    """One communicating equation: everything of a `Collective` that does not depend on where it stands."""

    kind: str
    op: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    itemsize: int
    elements: int


def read(eqn: Any, axis_sizes: dict[str, int]) -> Call | None:
    """What one equation communicates, or None when it is silent.

    Args:
      eqn: an equation without inner jaxprs.
      axis_sizes: the sizes of the mesh axes in scope.

    Raises:
      ValueError: for an equation that names mesh axes but is no collective the ledger knows.
    """
    name = eqn.primitive.name.removesuffix("_start")
    axes = _named_axes(eqn.params)
    if not axes or name in _SILENT or name.endswith("_done"):
        return None
    if name not in _KINDS:
        raise ValueError(
            f"primitive {name!r} names the mesh axes {axes} but the ledger does not know what it sends: "
            f"add it to {__name__}, as a collective or as silent"
        )
    kind, op = _KINDS[name]
    unbound = [axis for axis in axes if axis not in axis_sizes]
    if unbound:
        raise ValueError(
            f"{name} over {axes}: the sizes of {unbound} are unknown here (known: {axis_sizes}); "
            "count the jaxpr of the whole shard_map, or pass axis_sizes="
        )
    full = eqn.outvars[0].aval if kind == "all_gather" else eqn.invars[0].aval
    dtype, elements = _physical(full)
    group = _group_size(eqn.params.get("axis_index_groups"), math.prod(axis_sizes[axis] for axis in axes))
    return Call(kind, op, axes, group, dtype.name, dtype.itemsize, elements)


def _named_axes(params: dict[str, Any]) -> tuple[str, ...]:
    """The mesh axes an equation names; positional ones (ints, as in `reduce_sum`) are no mesh axes."""
    axes = params.get("axis_name", params.get("axes", ()))
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _group_size(groups: Any, axes_size: int) -> int:
    """Ranks per group; of unequal groups the largest, whose ranks send most."""
    return max(map(len, groups)) if groups else axes_size


def _physical(aval: Any) -> tuple[Any, int]:
    """Element type and count as they travel: typed random keys travel as their words."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return aval.dtype, math.prod(aval.shape)
