"""Outputs that are split on a rank: positions, or what a model's own layers leave split; along which dims and mesh axes."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from axonml_jax._types import PyTree, path_name
from axonml_jax.collectives.varying import varying_axes

SPLITTING = ("row", "col", "tensor")
"""The axes along which layers may leave outputs split; `depth` splits the batch."""


def split_dims(
    whole: PyTree,
    parts: PyTree,
    batch_dims: PyTree,
    known: PyTree,
    splitting: Mapping[str, int],
    typed: Callable[[], PyTree],
    padded: Collection[int] = (),
) -> PyTree:
    """For every output `{dim: mesh axes}` of what is split besides rows.

    Args:
      whole: the outputs' shapes on one device.
      parts: those on one rank.
      batch_dims: the dim of each that grows with the batch, or -1.
      known: `{dim: mesh axes}` of what is known already.
      splitting: the mesh axes that may split other dims, and their sizes.
      typed: the axes each output varies over; called only where sizes leave a choice.
      padded: sizes of dims that ranks may share unevenly, with padding behind.

    Raises:
      ValueError: naming the outputs whose axis cannot be told.
    """
    splitting = {axis: degree for axis, degree in splitting.items() if degree > 1}
    unclear: list[str] = []

    def of(path: tuple, full: Any, part: Any, batch_dim: int, own: dict) -> dict[int, tuple[str, ...]]:
        found = dict(own)
        for dim, (size, left) in enumerate(zip(getattr(full, "shape", ()), getattr(part, "shape", ()), strict=True)):
            if dim == batch_dim or dim in own or size == left:
                continue
            fits = lambda degree, size=size, left=left: (
                left * degree == size or (size in padded and left == -(-size // degree))
            )
            axes = [axis for axis, degree in splitting.items() if fits(degree)]
            if len(axes) != 1:
                axes = [axis for axis in axes if axis in _at(typed(), path)]
            if len(axes) != 1:
                unclear.append(f"  {path_name(path) or 'output'}: {left} of {size} along dim {dim}")
            found[dim] = tuple(axes)
        return found

    dims = jax.tree_util.tree_map_with_path(of, whole, parts, batch_dims, known)
    if unclear:
        raise ValueError(
            "these outputs are split on a rank, and it cannot be told over which mesh axis "
            f"({splitting}):\n"
            + "\n".join(unclear)
            + "\ngather them in the model (for features: gather_output=True of its last layer)"
        )
    return dims


def longer_dims(known: dict, small: Any, large: Any, axis: str) -> dict[int, tuple[str, ...]]:
    """The dims of an output that are longer where ranks have all positions of an axis, added to what is known of them."""
    sizes = zip(getattr(small, "shape", ()), getattr(large, "shape", ()), strict=True)
    return {dim: (*known.get(dim, ()), axis) for dim, (a, b) in enumerate(sizes) if a != b}


def refuse_partial(differs: Mapping[str, frozenset[str]], split: PyTree, along: Collection[str]) -> None:
    """Refuse outputs that ranks make of their own positions and that have no positions themselves, such as a mean over them.

    Args:
      differs: over which axes each output may differ, by its path.
      split: `{dim: mesh axes}` of each output.
      along: the axes that split positions.

    Raises:
      ValueError: naming them.
    """
    taken = {name: set(sum(dims.values(), ())) for name, dims in _named(split).items()}
    wrong = {name: sorted(axes & set(along) - taken.get(name, set())) for name, axes in differs.items()}
    if wrong := {name or "output": axes for name, axes in wrong.items() if axes}:
        raise ValueError(
            f"these outputs have no positions, but every rank makes its own of the positions that it has: {wrong} (output: "
            "axes). Join them over the axis in the model (jax.lax.psum), or return one per position"
        )


def _named(split: PyTree) -> dict[str, dict[int, tuple[str, ...]]]:
    is_dims = lambda x: isinstance(x, dict) and all(isinstance(key, int) for key in x)
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(split, is_leaf=is_dims)}


def varying(outputs: PyTree) -> PyTree:
    """The axes that each output is typed as varying over (inside `shard_map` with `check_vma=True`)."""
    return jax.tree.map(lambda x: varying_axes(x) if isinstance(x, jax.Array) else frozenset(), outputs)


def _at(tree: PyTree, path: tuple) -> frozenset[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, frozenset))
    return next(leaf for where, leaf in leaves if where == path)
