"""Making the model's own state (BatchNorm averages, counters) equal on all ranks after a step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree, path_name
from axonml_jax.collectives.gradients.bucketed import all_reduce_leaves
from axonml_jax.collectives.primitives import axis_index, sum_over
from axonml_jax.collectives.varying import varying_axes
from axonml_jax.parallel.placement import Placement


def sync_buffers(state: PyTree, placement: Placement, synchronized: Callable[[str], bool]) -> PyTree:
    """The state every rank goes on with.

    With `batch_stats="global"` floating leaves become the mean over ranks (exact for averages of per-example values) and
    others the first rank's; leaves that the forward pass joined itself are left alone. With "local" and
    `broadcast_buffers` all become the first rank's; without, each rank keeps its own.

    Communicates: at most one all-reduce of the leaves that need it.
    """
    plan, apart = placement.plan, placement.buffer_axes or ()
    axes = tuple(axis for axis in placement.batch_axes if axis not in apart)
    if not axes:
        return state

    def finish(path, leaf):
        joined = plan.batch_stats == "global" and synchronized(path_name(path))
        if joined or (plan.check_vma and not varying_axes(leaf) & set(axes)):
            return leaf
        if plan.batch_stats == "global" and jnp.issubdtype(leaf.dtype, jnp.floating):
            return all_reduce_leaves([leaf], axes, flat=False)[0] / placement.ranks(axes)
        return first_ranks(leaf, axes)

    with jax.named_scope("axonml.buffers"):
        return jax.tree_util.tree_map_with_path(finish, state)


def first_ranks(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The value of x on the first rank of `axes`, bit for bit, typed as the same everywhere. Communicates: one all-reduce."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(first_ranks(jax.random.key_data(x), axes), impl=jax.random.key_impl(x))
    if x.dtype == jnp.bool_:
        return first_ranks(x.astype(jnp.int8), axes).astype(jnp.bool_)
    if jnp.issubdtype(x.dtype, jnp.floating):  # a sum of floats may flush denormals and loses the sign of a zero
        bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        wire = jnp.promote_types(bits, jnp.uint32)  # NCCL cannot add 16-bit integers
        sent = jax.lax.bitcast_convert_type(x, bits).astype(wire)
        return jax.lax.bitcast_convert_type(first_ranks(sent, axes).astype(bits), x.dtype)
    return sum_over(jnp.where(axis_index(axes) == 0, x, jnp.zeros_like(x)), axes)
