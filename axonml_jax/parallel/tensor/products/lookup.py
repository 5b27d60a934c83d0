"""Rows of a table of which this rank holds a block: its own are read, the others are zeros, to be summed over the ranks."""

import jax
import jax.numpy as jnp

from axonml_jax.collectives.primitives import axis_index, axis_size


def own_rows(table_shard: jax.Array, ids: jax.Array, axes: tuple[str, ...], words: int | None = None) -> jax.Array:
    """This rank's contribution to `table[ids]`.

    Args:
      table_shard: [v/n, f], block number `axis_index(axes)` of the table.
      ids: integers of any shape; negative ones count from the table's end.
      axes: bound mesh axes of total size n; none at all: the shard is the table.
      words: v, where the last ranks' blocks end with padding; None: nothing is padding.

    Returns:
      [..., f]: zeros where another rank holds the row, and nan where no rank does, as `nnx.Embed` returns.
    """
    rows = table_shard.shape[0]
    total = words or rows * (axis_size(axes) if axes else 1)
    # Compare in a type that holds the table's size: ids may be int8.
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
    ids = jnp.where(ids < 0, ids + total, ids)
    local = ids - axis_index(axes) * rows if axes else ids
    mine = (local >= 0) & (local < rows)
    taken = jnp.take(table_shard, jnp.where(mine, local, rows), axis=0, mode="fill", fill_value=0)
    nowhere = (ids < 0) | (ids >= total)
    return jnp.where(nowhere[..., None], jnp.nan, taken) if jnp.issubdtype(taken.dtype, jnp.inexact) else taken


def require_integers(name: str, ids: jax.Array) -> None:
    """Refuse ids that are no integers, as `nnx.Embed` does.

    Raises:
      ValueError: naming the dtype.
    """
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name} looks up integers, not {ids.dtype.name}: cast the ids with astype(jnp.int32)")
