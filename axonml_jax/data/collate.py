"""From samples to batches: stacking them on the host, and placing rows on the mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import keystr


def stack_samples(samples: Sequence) -> object:
    """Stack samples of equal structure, leaf by leaf, along a new leading dim; the default `collate`.

    Args:
      samples: pytrees (dicts, tuples, lists, ...) whose leaves are numbers, NumPy arrays or anything with `__array__`,
        such as CPU tensors of PyTorch.

    Returns:
      The same pytree of arrays [len(samples), ...].

    Raises:
      ValueError: structures or shapes differ between samples; lists every such leaf by path.
    """
    leaves, structure = jax.tree.flatten(samples[0])
    columns = [leaves]
    for i, sample in enumerate(samples[1:], start=1):
        leaves, other = jax.tree.flatten(sample)
        if other != structure:
            raise ValueError(
                f"samples of one batch differ in structure: {structure} and, {i} later, {other}. Give a collate"
            )
        columns.append(leaves)
    stacked = [[np.asarray(leaf) for leaf in column] for column in zip(*columns, strict=True)]
    paths = [keystr(path) or "the sample" for path, _ in jax.tree_util.tree_leaves_with_path(samples[0])]
    ragged = [
        f"{path}: {sorted({array.shape for array in arrays})}"
        for path, arrays in zip(paths, stacked, strict=True)
        if len({array.shape for array in arrays}) > 1
    ]
    if ragged:
        raise ValueError(
            f"samples of one batch differ in shape: {'; '.join(ragged)}. Pad them, or give a collate that does"
        )
    return jax.tree.unflatten(structure, [np.stack(arrays) for arrays in stacked])


@dataclass(frozen=True)
class OwnMemory:
    """A collate whose arrays are copied, so that it may return the same ones again.

    Attributes:
      collate: samples -> pytree of arrays.
    """

    collate: Callable[[Sequence], Any]

    def __call__(self, samples: Sequence) -> Any:
        """The batch in memory of its own."""
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf), self.collate(samples))


def local_rows(sharding: NamedSharding, global_batch_size: int) -> np.ndarray:
    """Which rows of the global batch the devices of this process hold: ascending indices, int64 [n]."""
    slices = sharding.addressable_devices_indices_map((global_batch_size,)).values()
    held = np.zeros(global_batch_size, bool)
    for index in slices:
        held[index] = True
    return np.flatnonzero(held)


def place_rows(batch, sharding: NamedSharding, global_batch_size: int, rows: np.ndarray):
    """Make a host batch of this process's rows into global arrays; nothing crosses processes.

    Args:
      batch: pytree of arrays [len(rows), ...].
      sharding: splits dim 0 over the batch axes.
      global_batch_size: B.
      rows: what `local_rows` says.

    Returns:
      The same pytree of `jax.Array` [B, ...].

    Raises:
      TypeError: leaves that no device can hold, such as strings; all by path.
      ValueError: leaves whose leading dim is not the number of rows; all by path.
    """
    _check_leaves(batch, len(rows))
    offset = {int(row): i for i, row in enumerate(rows)}

    def place(leaf):
        # What jax.numpy does to 64-bit values unless jax_enable_x64 is set, here without a warning per batch.
        leaf = np.asarray(leaf)
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)

        def local(index):
            start, stop, _ = index[0].indices(global_batch_size)
            return leaf[offset[start] : offset[start] + stop - start]

        return jax.make_array_from_callback((global_batch_size, *leaf.shape[1:]), sharding, local)

    return jax.tree.map(place, batch)


def _check_leaves(batch, num_rows: int) -> None:
    leaves = [(keystr(path) or "the batch", np.asarray(x)) for path, x in jax.tree_util.tree_leaves_with_path(batch)]
    numeric = (jnp.number, jnp.bool_)
    foreign = [f"{at}: {x.dtype}" for at, x in leaves if not any(jnp.issubdtype(x.dtype, kind) for kind in numeric)]
    if foreign:
        raise TypeError(
            f"devices cannot hold these leaves of the batch: {'; '.join(foreign)}. Drop or encode them in collate"
        )
    wrong = "; ".join(f"{at}: shape {x.shape}" for at, x in leaves if x.shape[:1] != (num_rows,))
    if wrong:
        raise ValueError(f"collate was given {num_rows} samples and must return arrays with as many rows, not {wrong}")
