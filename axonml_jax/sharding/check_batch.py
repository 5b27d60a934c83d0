"""Whether a batch splits evenly over the ranks and microbatches of a plan."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.compat.around import is_traced_around
from axonml_jax.sharding.batch import BatchLayout, second_dim


def check_batch(layout: BatchLayout, batch: PyTree, microbatches: int = 1) -> None:
    """Refuse a batch whose leaves do not split evenly into shards and microbatches.

    Raises:
      TypeError: naming every leaf that is not made of numbers; for a loader in the place of a batch, or arrays that JAX traces.
      ValueError: naming every leaf that does not divide, the rule and the nearest sizes that do; or that the batch has
        no leaf with a batch dim, or none with positions where an axis splits these.
    """
    degree, parts = layout.row_degree, layout.row_degree * microbatches
    leaves = _leaves(batch)
    if texts := {name or "batch": kind for name, leaf in leaves.items() if (kind := _not_numeric(leaf))}:
        raise TypeError(f"the batch's leaves must be arrays of numbers, but some are not: {texts}; take them out")
    split = {name: np.shape(leaf) for name, leaf in leaves.items() if np.ndim(leaf)}
    if not split:
        raise ValueError(
            f"the batch has no array with a batch dim to split over {degree} shards: leaves {list(leaves)}"
        )
    sizes = {shape[0] for shape in split.values()}
    wrong = {name: shape for name, shape in split.items() if shape[0] % parts or shape[0] == 0}
    if not wrong and len(sizes) == 1:
        return _check_positions(layout, split)
    rows = "\n".join(f"  {name or 'batch'}: shape {shape}" for name, shape in (wrong or split).items())
    if not wrong:
        raise ValueError(
            f"the batch's leaves differ in the size of dim 0, which is the batch dim of all of them:\n{rows}"
        )
    size = min(shape[0] for shape in wrong.values())
    below, above = size // parts * parts, (size // parts + 1) * parts
    how = f"{degree} batch shards (mesh {dict(layout.degrees)})" + (
        f" x {microbatches} microbatches = {parts} parts" if microbatches > 1 else ""
    )
    raise ValueError(
        f"the global batch does not split evenly into {how}:\n{rows}\n"
        f"dim 0 must be a multiple of {parts}: use {f'{below} or ' if below else ''}{above} rows"
        f"{', another number of microbatches,' if microbatches > 1 else ''} or another mesh"
    )


def _leaves(batch: PyTree) -> dict[str, Any]:
    """A batch's leaves by path, if it is one."""
    leaves = {} if isinstance(batch, Iterator) else named_leaves(batch)  # JAX would not flatten an iterator
    if isinstance(batch, Iterator) or ("" in leaves and _is_loader(batch)):
        raise TypeError(
            f"a {type(batch).__name__} was given in the place of a batch: take batches out of it, `for batch in loader: "
            "trainer.step(batch)`"
        )
    if any(isinstance(leaf, Tracer) for leaf in leaves.values()):
        raise TypeError(_TRACED.format("this call got arrays that JAX traces"))
    return leaves


def _is_loader(leaf: Any) -> bool:
    return isinstance(leaf, Iterable) and not hasattr(leaf, "dtype") and not isinstance(leaf, str | bytes)


def several_batches(batch: PyTree) -> str | None:
    """What to say where a loss failed on what may be several batches in the place of one; None: no list of parts alike."""
    if not isinstance(batch, list | tuple) or hasattr(batch, "_fields") or not batch:
        return None
    kinds = {(jax.tree.structure(part), *map(np.shape, jax.tree.leaves(part))) for part in batch}
    arrays = jax.tree.structure(batch[0]) == jax.tree.structure(0)
    if len(kinds) > 1 or (arrays and isinstance(batch, tuple)):  # (inputs, labels), it may be
        return None
    return (
        f"the loss was given a {type(batch).__name__} of {len(batch)} parts of the same shapes. If these are batches: a step "
        "takes one, whose rows are dim 0 of every leaf. Give them one after another, or joined, "
        "jax.tree.map(lambda *parts: np.concatenate(parts), *batches), which accumulate= splits into microbatches"
    )


def refuse_tracing(call: str) -> None:
    """Refuse a call that changes the object it is of, within a function that JAX traces: what it kept would be no arrays.

    Raises:
      TypeError: naming the call, and the remedy.
    """
    if is_traced_around():
        raise TypeError(_TRACED.format(f"{call} was called"))


_TRACED = (
    "{} inside a function that JAX transforms (jax.jit, jax.grad, jax.vmap, jax.lax.scan or another): a parallel model's calls "
    "are compiled already, whole, so call them as they are, trainer.step(batch), in a Python loop; what you want compiled "
    "around them belongs into the loss or the model"
)


def _check_positions(layout: BatchLayout, shapes: Mapping[str, tuple[int, ...]]) -> None:
    split = lambda name: layout.split(name, shapes[name], placed=True)
    dims = {name: {d: axes for d, axes in split(name).items() if d} for name in shapes}
    along = {axis: dim_of for axis, dim_of in layout.bound if layout.size((axis,)) > 1}
    there = {axis for at in dims.values() for axes in at.values() for axis in axes}
    left = [axis for axis, _ in layout.positions if axis in layout.left and layout.size((axis,)) > 1]
    if torn := [axis for axis in left if axis not in there]:
        raise ValueError(
            f"no leaf's positions divide over {torn} ({layout.size(torn)} ranks): {dict(shapes)}. Pad the sequences to a "
            "multiple with positions of weight 0, or use another mesh"
        )
    missing = [axis for axis in along if axis not in there]
    if missing:
        raise ValueError(
            f"{missing} split positions, but no leaf of the batch has any:\n"
            + "\n".join(f"  {name or 'batch'}: shape {shape}" for name, shape in shapes.items())
            + "\nthe strategy's position_dim(path, shape) says which dim of a leaf holds them"
        )
    unlike = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    if second_dim in along.values() and len({shape[1] for shape in unlike.values()}) > 1:
        raise ValueError(
            f"{', '.join(along)} splits positions, which are dim 1 of every leaf unless the strategy's position_dim(path, "
            "shape) says otherwise, but these leaves have different sizes there:\n"
            + "\n".join(f"  {name or 'batch'}: shape {shape}" for name, shape in unlike.items())
            + "\nsay which dim of each holds positions; None for those without, such as features or classes"
        )
    _check_lengths(layout, shapes, dims)


def _check_lengths(
    layout: BatchLayout, shapes: Mapping[str, tuple[int, ...]], dims: Mapping[str, Mapping[int, tuple[str, ...]]]
) -> None:
    cut = [(name, shapes[name][dim], dim, axes) for name, at in dims.items() for dim, axes in at.items()]
    orders = dict(layout.orders)
    if mixed := {name or "batch": axes for name, _, _, axes in cut if len(axes) > 1 and orders.keys() & set(axes)}:
        raise ValueError(
            f"several axes split the positions of {mixed}, and an order is that of one axis: {orders}. Split positions "
            "over one axis, or in order 'contiguous'"
        )
    wrong = [
        f"  {name or 'batch'}: shape {shapes[name]}, {length} positions (dim {dim}) over {axes} ({layout.size(axes)} ranks"
        f"{', order ' + repr(orders[axes[0]]) if axes[0] in orders else ''}): {_nearest(layout, length, axes)}"
        for name, length, dim, axes in cut
        if length % layout.parts(axes) or not length
    ]
    if wrong:
        raise ValueError(
            "these positions do not split evenly:\n"
            + "\n".join(wrong)
            + "\npad the sequences to a multiple with positions of weight 0, or use another mesh"
        )


def _nearest(layout: BatchLayout, length: int, axes: Iterable[str]) -> str:
    parts = layout.parts(axes)
    below, above = length // parts * parts, (length // parts + 1) * parts
    return f"{below} or {above} do" if below else f"{above} do"


def _not_numeric(leaf: Any) -> str | None:
    """The kind of a leaf that no device can hold; None for numbers."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return str(dtype) if isinstance(dtype, np.dtype) and dtype.kind in "OSUMm" else None
