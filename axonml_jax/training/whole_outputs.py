"""Outputs that a model's own layers leave split, such as logits over the vocabulary: along which dim and mesh axes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from axonml_jax._types import PyTree, path_name
from axonml_jax.collectives.varying import varying_axes

SPLITTING = ("row", "col", "tensor")
"""The axes along which layers may leave outputs split; `depth` splits the batch."""


def split_dims(
    whole: PyTree, parts: PyTree, batch_dims: PyTree, degrees: Mapping[str, int], typed: Callable[[], PyTree]
) -> PyTree:
    """For every output `{dim: mesh axes}` of what layers leave split.

    Args:
      whole: the outputs' shapes on one device.
      parts: those on one rank.
      batch_dims: the dim of each that grows with the batch, or -1.
      degrees: size of every mesh axis.
      typed: the axes each output varies over; called only where sizes leave a choice.

    Raises:
      ValueError: naming the outputs whose axis cannot be told.
    """
    splitting = {axis: degrees[axis] for axis in SPLITTING if degrees.get(axis, 1) > 1}
    unclear: list[str] = []

    def of(path: tuple, full: Any, part: Any, batch_dim: int) -> dict[int, tuple[str, ...]]:
        found = {}
        for dim, (size, own) in enumerate(zip(getattr(full, "shape", ()), getattr(part, "shape", ()), strict=True)):
            if dim == batch_dim or size == own:
                continue
            axes = [axis for axis, degree in splitting.items() if own * degree == size]
            if len(axes) != 1:
                axes = [axis for axis in axes if axis in _at(typed(), path)]
            if len(axes) != 1:
                unclear.append(f"  {path_name(path) or 'output'}: {own} of {size} along dim {dim}")
            found[dim] = tuple(axes)
        return found

    dims = jax.tree_util.tree_map_with_path(of, whole, parts, batch_dims)
    if unclear:
        raise ValueError(
            "the model's layers leave these outputs split, and it cannot be told over which mesh axis "
            f"({splitting}):\n"
            + "\n".join(unclear)
            + "\ngather them in the model (gather_output=True of its last layer)"
        )
    return dims


def varying(outputs: PyTree) -> PyTree:
    """The axes that each output is typed as varying over (inside `shard_map` with `check_vma=True`)."""
    return jax.tree.map(lambda x: varying_axes(x) if isinstance(x, jax.Array) else frozenset(), outputs)


def _at(tree: PyTree, path: tuple) -> frozenset[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, frozenset))
    return next(leaf for where, leaf in leaves if where == path)
