"""Outputs that are split on a rank: positions, or what a model's own layers leave split; along which dims and mesh axes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from axonml_jax._types import PyTree, named_leaves, path_name
from axonml_jax.collectives.varying import varying_axes
from axonml_jax.compat.jaxpr import trace
from axonml_jax.mesh.axes import as_axes
from axonml_jax.parallel.placement import Placement
from axonml_jax.program.differing import differing
from axonml_jax.program.program import read_program

SPLITTING = ("row", "col", "tensor")
"""The axes along which layers may leave outputs split; `depth` splits the batch."""


def split_dims(
    whole: PyTree, parts: PyTree, batch_dims: PyTree, splitting: Mapping[str, int], typed: Callable[[], PyTree]
) -> PyTree:
    """For every output `{dim: mesh axes}` of what is split besides rows.

    Args:
      whole: the outputs' shapes on one device.
      parts: those on one rank.
      batch_dims: the dim of each that grows with the batch, or -1.
      splitting: the mesh axes that may split outputs besides rows, and their sizes.
      typed: the axes each output varies over; called only where sizes leave a choice.

    Raises:
      ValueError: naming the outputs whose axis cannot be told.
    """
    splitting = {axis: degree for axis, degree in splitting.items() if degree > 1}
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
            "these outputs are split on a rank, and it cannot be told over which mesh axis "
            f"({splitting}):\n"
            + "\n".join(unclear)
            + "\ngather them in the model (for features: gather_output=True of its last layer)"
        )
    return dims


def refuse_partial(
    call: Callable[..., PyTree], args: tuple, specs: tuple, split: PyTree, placement: Placement, mesh: Mesh
) -> None:
    """Refuse outputs that ranks make of their own positions and that have no positions themselves, such as a mean over them.

    Args:
      call: what a rank runs, inside `shard_map`.
      args, specs: its arguments' shapes, and how they are split.
      split: what `split_dims` found.
      placement, mesh: where.

    Raises:
      ValueError: naming them.
    """
    along, found = frozenset(axis for axis in placement.position_axes if placement.ranks(axis) > 1), {}

    def local(*args: PyTree) -> None:
        named = {}

        def flat(*args: PyTree) -> list[jax.Array]:
            named.update({name: x for name, x in named_leaves(call(*args)).items() if isinstance(x, jax.Array)})
            return list(named.values())

        program = read_program(trace(flat, *args).jaxpr)
        spread = lambda spec: frozenset(axis for entry in spec for axis in as_axes(entry or ()))
        given = jax.tree.leaves(jax.tree.map(spread, specs, is_leaf=lambda x: isinstance(x, PartitionSpec)))
        found.update(zip(named, differing(program, given, lambda *_: None), strict=True))

    options = {"axis_names": placement.manual_axes, "check_vma": False}
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), **options), *args)
    taken = {name: set(sum(dims.values(), ())) for name, dims in _named(split).items()}
    wrong = {name: sorted(along & axes - taken.get(name, set())) for name, axes in found.items()}
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
