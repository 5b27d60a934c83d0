"""Batches: how rows and positions are split, and what a valid batch is."""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.base import PyTree, from_every_process, is_key, named_leaves, path_name, refuse_not_held, some_of
from axonml_jax.compat.order import is_traced_around
from axonml_jax.mesh.axes import batch_axes
from axonml_jax.sharding.layout import InRankOrder, Order, RankOrder, order_parts

# --------------------------------------------------------------------------------------------------
# `BatchLayout`: how a global batch is split over a mesh; it checks batches, places them, and gives their specs.
# --------------------------------------------------------------------------------------------------

PositionDim = Callable[[str, tuple[int, ...]], int | None]
"""`dim(path, shape)`: the dim of a batch leaf that holds its positions; None: it has none."""


def second_dim(path: str, shape: tuple[int, ...]) -> int | None:
    """The default dim of positions: dim 1 of every leaf that has one, as tokens [rows, positions] do."""
    return 1 if len(shape) > 1 else None


@dataclass(frozen=True)
class BatchLayout:
    """Which mesh axes split which dims of a batch's leaves.

    Rows are dim 0 of every leaf that is no scalar; which dim holds positions, the axis's strategy says for each leaf, and in
    which order ranks hold them. What no axis splits, and scalars, are the same everywhere.

    Attributes:
      rows: the axes that split rows, outermost first.
      degrees: (axis, size) of every mesh axis.
      positions: (axis, its rule) of every axis that splits positions.
      orders: (axis, order) of the position axes of several ranks whose order is not contiguous.
      automatic: the axes that a step leaves to XLA's partitioner: its code sees whole sequences along them, and positions that
        do not divide are not split.
      spread: the automatic axes that split rows, where these divide.

    >>> layout = BatchLayout.of({"data": 2, "fsdp": 2, "tensor": 2})
    >>> layout.degree, layout.rows
    (4, ('data', 'fsdp'))
    >>> layout = BatchLayout.of({"data": 2, "context": 4}, positions={"context": second_dim})
    >>> layout.split("tokens", (8, 64)), layout.split("weights", (8,))
    ({0: ('data',), 1: ('context',)}, {0: ('data',)})
    """

    rows: tuple[str, ...]
    degrees: tuple[tuple[str, int], ...]
    positions: tuple[tuple[str, PositionDim], ...] = ()
    orders: tuple[tuple[str, Order], ...] = ()
    automatic: frozenset[str] = frozenset()
    spread: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        degrees: Mapping[str, int],
        rows: Iterable[str] | None = None,
        positions: Mapping[str, PositionDim] | None = None,
        orders: Mapping[str, Order] | None = None,
        automatic: Collection[str] = (),
    ) -> "BatchLayout":
        """The layout on a mesh of these degrees.

        Args:
          degrees: size of every mesh axis.
          rows: the axes that split rows; None: those of the library's own axes that do.
          positions: the axes that split positions, and the rule of each.
          orders: in which order their ranks hold them; those left out contiguously.
          automatic: the axes that a step leaves to the partitioner.
        """
        every = batch_axes(degrees) if rows is None else tuple(rows)
        rows, spread = (tuple(axis for axis in every if (axis in automatic) == there) for there in (False, True))
        kept = tuple(each for each in (orders or {}).items() if degrees[each[0]] > 1 and each[1] != "contiguous")
        return cls(rows, tuple(degrees.items()), tuple((positions or {}).items()), kept, frozenset(automatic), spread)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes over which a step's ranks hold parts of the batch: those of rows, then those of positions."""
        return (*self.rows, *(axis for axis, _ in self.bound))

    @cached_property
    def bound(self) -> tuple[tuple[str, PositionDim], ...]:
        """The axes that split positions in a step's `shard_map`."""
        return tuple(each for each in self.positions if each[0] not in self.automatic)

    @cached_property
    def row_degree(self) -> int:
        """The number of parts into which rows are split."""
        return self.size(self.rows)

    @cached_property
    def degree(self) -> int:
        """The number of batch shards."""
        return self.size(self.axes)

    @property
    def by_rank(self) -> PartitionSpec:
        """The spec of a value stacked by rank: one entry of dim 0 per batch shard."""
        return PartitionSpec(self.axes)

    def size(self, axes: Iterable[str]) -> int:
        """The product of the sizes of these axes."""
        sizes = dict(self.degrees)
        return math.prod(sizes[axis] for axis in axes)

    def split(self, path: str, shape: tuple[int, ...], *, placed: bool = False) -> dict[int, tuple[str, ...]]:
        """Map each dim of a leaf to the axes that split it; dims that no axis splits are absent.

        Args:
          path: of the leaf.
          shape: the whole leaf's.
          placed: of a placed leaf; False: as a step's `shard_map` splits it, which leaves some axes to the partitioner.

        Raises:
          ValueError: when an axis's rule returns dim 0, or a dim that the leaf does not have.
        """
        rows = self.rows
        if placed and shape and shape[0] % self.size((*self.rows, *self.spread)) == 0:
            rows = (*self.rows, *self.spread)
        found: dict[int, tuple[str, ...]] = {0: rows} if shape and rows else {}
        for axis, dim_of in self.positions if placed else self.bound:
            if (dim := dim_of(path, shape)) is not None:
                if not 0 < dim < len(shape):
                    raise ValueError(
                        f"along {axis!r} the strategy's position_dim() returned {dim} for the batch's leaf "
                        f"{path or 'batch'!r} of shape {shape}: dim 0 holds rows, so it must be one of "
                        f"{list(range(1, len(shape)))}, or None"
                    )
                if axis not in self.automatic or shape[dim] % self.size((axis,)) == 0:
                    found[dim] = (*found.get(dim, ()), axis)
        return found

    def spec(self, path: str, leaf: Any, *, placed: bool = False) -> PartitionSpec:
        """The spec of one leaf, by its path in the batch (see `split`)."""
        split = self.split(path, np.shape(leaf), placed=placed)
        return PartitionSpec(*(split.get(dim) for dim in range(max(split, default=-1) + 1)))

    def specs(self, batch: PyTree) -> PyTree:
        """The spec of every leaf."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self.spec(path_name(path), leaf), batch)

    @cached_property
    def position_parts(self) -> int:
        """The number that must divide the length of a sequence."""
        return self.parts(axis for axis, _ in self.positions)

    def parts(self, axes: Iterable[str]) -> int:
        """The number that must divide a length that these axes split, given their orders of positions."""
        orders = dict(self.orders)
        return math.prod(order_parts(orders.get(axis, "contiguous"), self.size((axis,))) for axis in axes)

    def place(self, batch: PyTree, mesh: Mesh) -> PyTree:
        """Put the global batch on `mesh`, split over the batch shards, for a program that calls `opened`.

        Args:
          batch: arrays with the global batch as dim 0 (the same in every process), wherever they are, with positions in
            their own order.
          mesh: a mesh of these degrees.

        Returns:
          Global arrays, `marked`; each process has moved only the parts that its devices hold. On CPU none shares memory with a
          NumPy array, which may be written at once; other devices may still be reading it.

        Raises:
          TypeError: for shapes in the place of arrays.
        """
        # On CPU, JAX takes the memory of a NumPy array for its own (also with may_alias=False).
        own = np.array if mesh.devices.flat[0].platform == "cpu" else np.asarray

        def place(path, leaf):
            name = path_name(path)
            sharding, order = NamedSharding(mesh, self.spec(name, leaf, placed=True)), self._order(name, np.shape(leaf))
            if isinstance(leaf, Tracer):
                return _moved(sharding, order)(leaf)
            if not isinstance(leaf, jax.Array):
                if isinstance(leaf, jax.ShapeDtypeStruct):
                    raise TypeError(_without_values(batch))
                leaf = own(leaf) if jax.process_count() == 1 else np.asarray(leaf)
            elif order is None and leaf.sharding == sharding:
                return leaf
            elif not leaf.is_fully_addressable:
                return _moved(sharding, order)(leaf)
            if jax.process_count() == 1:
                if isinstance(leaf, jax.Array) and order is not None:
                    there = getattr(leaf.sharding, "mesh", None) == mesh
                    return _moved(sharding, order)(leaf if there else jax.device_put(leaf, sharding))
                return jax.device_put(leaf if order is None else order(leaf), sharding)
            if is_key(leaf) and order is None:
                return from_every_process(leaf, sharding)
            host = np.asarray(leaf) if order is None else order(np.asarray(leaf))
            return jax.make_array_from_callback(host.shape, sharding, lambda index: own(host[index]))

        return self.marked(jax.tree_util.tree_map_with_path(place, batch))

    def placed(self, batch: PyTree, mesh: Mesh) -> PyTree:
        """The shapes and shardings that `place` gives a batch of arrays or shapes, for tracing a program."""

        def shape(path, leaf):
            sharding = NamedSharding(mesh, self.spec(path_name(path), leaf, placed=True))
            return jax.ShapeDtypeStruct(np.shape(leaf), jax.numpy.result_type(leaf), sharding=sharding)

        return self.marked(jax.tree_util.tree_map_with_path(shape, batch))

    def _order(self, path: str, shape: tuple[int, ...]) -> RankOrder | None:
        """The reordering of a leaf's positions; None if they keep their order."""
        orders = dict(self.orders)
        found = [(dim, axis) for dim, axes in self.split(path, shape).items() for axis in axes if axis in orders]
        return next((RankOrder(dim, orders[axis], self.size((axis,))) for dim, axis in found), None)

    def marked(self, batch: PyTree) -> PyTree:
        """Wrap a batch (or shapes) as `place` does, if ranks hold positions in another order."""
        return InRankOrder(batch) if self.orders else batch

    def opened(self, batch: PyTree) -> PyTree:
        """The inverse of `marked`, inside a compiled program.

        Raises:
          TypeError: for a batch that was not placed, whose positions stand in another order.
        """
        if not self.orders:
            return batch
        if not isinstance(batch, InRankOrder):
            raise TypeError(
                f"ranks hold positions in the orders {dict(self.orders)}, but this batch was not placed in them: call the step "
                "itself, which places the batch"
            )
        return batch.batch

    def microbatches(self, rows: PyTree, count: int) -> PyTree:
        """Reshape one rank's rows [b, ...] to [count, b/count, ...]; scalars are repeated."""

        def split(x: Any) -> jax.Array:
            x = jax.numpy.asarray(x)
            return (
                x.reshape(count, x.shape[0] // count, *x.shape[1:]) if x.ndim else jax.numpy.broadcast_to(x, (count,))
            )

        return jax.tree.map(split, rows)

    def common_count(self, rows: PyTree, count: int) -> int:
        """The largest divisor of a number of microbatches that also divides one rank's rows."""
        return math.gcd(count, *(np.shape(x)[0] for x in jax.tree.leaves(rows) if np.ndim(x)))


def _without_values(batch: PyTree) -> str:
    shapes = [name or "batch" for name, leaf in named_leaves(batch).items() if isinstance(leaf, jax.ShapeDtypeStruct)]
    return (
        f"these leaves of the batch are shapes without values (jax.ShapeDtypeStruct): {some_of(shapes)}. "
        "Steps, evaluations and calls compute with arrays; trainer.trace(batch) and ax.explain(trainer, batch) take shapes"
    )


@functools.cache
def _moved(sharding: NamedSharding, order: RankOrder | None) -> Callable[[jax.Array], jax.Array]:
    return jax.jit((lambda x: x) if order is None else order, out_shardings=sharding)


# --------------------------------------------------------------------------------------------------
# Whether a batch splits evenly over the ranks and microbatches of a plan.
# --------------------------------------------------------------------------------------------------


def check_batch(layout: BatchLayout, batch: PyTree, microbatches: int = 1) -> None:
    """Refuse a batch whose leaves do not split evenly into shards and microbatches.

    Raises:
      TypeError: as `refuse_not_held`; for a loader in the place of a batch, or arrays that JAX traces.
      ValueError: naming leaves that differ in their rows, or do not divide, the rule and the nearest sizes that do; or that the
        batch has no rows, no leaf with a batch dim, or none with positions where an axis splits these.
    """
    degree, parts = layout.row_degree, layout.row_degree * microbatches
    leaves = _leaves(batch)
    refuse_not_held(leaves)
    split = {name: np.shape(leaf) for name, leaf in leaves.items() if np.ndim(leaf)}
    if not leaves:
        raise ValueError(
            "the batch has no array with a batch dim: it has no leaves. Give arrays whose dim 0 holds the rows"
        )
    if not split:
        raise ValueError(
            f"the batch has no array with a batch dim to split over {degree} shards: its leaves are "
            f"{some_of([repr(name or 'batch') for name in leaves])}. Turn lists of numbers into arrays, "
            "np.asarray(rows); for a Hugging Face dataset use .with_format('numpy')"
        )
    named = lambda names: "\n".join(f"  {name or 'batch'}: shape {split[name]}" for name in names)
    size, *others = {shape[0] for shape in split.values()}
    if others:
        raise ValueError(
            "the batch's leaves differ in the size of dim 0, which is the batch dim of all of them:\n"
            f"{named(split)}\n"
            "rows of several kinds (labelled and unlabelled ones) go in as groups, [7 * B, d] as [B, 7, d], which the loss "
            "flattens; graphs are padded and stacked, and the loss maps the model over them (jax.vmap). Rows that are another "
            "dim, as in time-major sequences, are put first, np.swapaxes(x, 0, 1). A random key must be jax.random.key(seed), "
            "which has no dim. An array without rows does not belong in the batch: keep it in the model, or let the loss close "
            "over it, which makes it a constant from the first step on"
        )
    if not size:
        raise ValueError(f"the batch is empty, its leaves have no rows:\n{named(split)}\nskip it, or give it rows")
    if size % parts:
        raise ValueError(_uneven(layout, microbatches, size, named(split)))
    _check_positions(layout, split)


def _uneven(layout: BatchLayout, microbatches: int, size: int, rows: str) -> str:
    degree, parts = layout.row_degree, layout.row_degree * microbatches
    below, above = size // parts * parts, (size // parts + 1) * parts
    how = f"{degree} batch shards (mesh {dict(layout.degrees)})" + (
        f" x {microbatches} microbatches = {parts} parts" if microbatches > 1 else ""
    )
    return (
        f"the global batch does not split evenly into {how}:\n{rows}\n"
        f"dim 0 must be a multiple of {parts}: use {f'{below} or ' if below else ''}{above} rows"
        f"{', another number of microbatches,' if microbatches > 1 else ''} or another mesh"
    )


def number_of_rows(layout: BatchLayout, batch: PyTree) -> int:
    """The number of rows of a batch, which need not divide over the shards.

    Raises:
      TypeError, ValueError: as `check_batch`, but not for rows that do not divide.
    """
    check_batch(replace(layout, rows=(), spread=()), batch)
    return next(np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x))


def rows_of(batch: PyTree, start: int, end: int) -> PyTree:
    """The rows `start` to `end` of a batch, with its scalars."""
    return jax.tree.map(lambda x: (x if hasattr(x, "ndim") else np.asarray(x))[start:end] if np.ndim(x) else x, batch)


def filled_up(batch: PyTree, more: int) -> PyTree:
    """Append `more` copies of the last row to a batch."""

    def longer(x: Any) -> Any:
        if not more or not np.ndim(x):
            return x
        join, x = (jax.numpy.concatenate, x) if isinstance(x, jax.Array) else (np.concatenate, np.asarray(x))
        return join([x, *[x[-1:]] * more])

    return jax.tree.map(longer, batch)


def _leaves(batch: PyTree) -> dict[str, Any]:
    """A batch's leaves by path; refuses iterators and loaders."""
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
    """A message for a loss that failed on a list of several batches; None if the batch is no such list."""
    if not isinstance(batch, list | tuple) or hasattr(batch, "_fields") or not batch:
        return None
    kinds = {(jax.tree.structure(part), *map(np.shape, jax.tree.leaves(part))) for part in batch}
    arrays = jax.tree.structure(batch[0]) == jax.tree.structure(0)
    if len(kinds) > 1 or (arrays and isinstance(batch, tuple)):  # (inputs, labels), it may be
        return None
    return (
        f"the loss was given a {type(batch).__name__} of {len(batch)} parts of the same shapes. If these are batches: a step "
        "takes one, whose rows are dim 0 of every leaf. Give them one after another, or concatenate them, "
        "jax.tree.map(lambda *parts: np.concatenate(parts), *batches), and let accumulate= split that into microbatches"
    )


def shapes_of(batch: PyTree) -> PyTree:
    """The shapes and dtypes of a batch's leaves."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.numpy.result_type(x)), batch)


def refuse_tracing(call: str) -> None:
    """Refuse a call that changes its object inside a JAX transform, where it would store tracers.

    Raises:
      TypeError: naming the call, and the remedy.
    """
    if is_traced_around():
        raise TypeError(_TRACED.format(f"{call} was called"))


_TRACED = (
    "{} inside a function that JAX transforms (jax.jit, jax.grad, jax.vmap, jax.lax.scan or another): a parallel model's calls "
    "are already compiled, so call trainer.step(batch) in a Python loop, and move what you want compiled with it into the "
    "loss or the model. JAX can transform the pure step: state, metrics = trainer.train_step(state, batch), from "
    "trainer.state"
)


def _check_positions(layout: BatchLayout, shapes: Mapping[str, tuple[int, ...]]) -> None:
    split = lambda name: layout.split(name, shapes[name], placed=True)
    dims = {name: {d: axes for d, axes in split(name).items() if d} for name in shapes}
    along = {axis: dim_of for axis, dim_of in layout.bound if layout.size((axis,)) > 1}
    there = {axis for at in dims.values() for axes in at.values() for axis in axes}
    automatic = [axis for axis, _ in layout.positions if axis in layout.automatic and layout.size((axis,)) > 1]
    if torn := [axis for axis in automatic if axis not in there]:
        raise ValueError(
            f"no leaf's positions divide over {torn} ({layout.size(torn)} ranks): {dict(shapes)}. Pad the sequences to a "
            "multiple with positions of weight 0, or use another mesh; if the loss compares tokens[:, :-1] with "
            "tokens[:, 1:], slice before, and give both as leaves of the batch"
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
            f"several axes split the positions of {mixed}, but an order of positions works along one axis only: {orders}. "
            "Split positions over one axis, or in order 'contiguous'"
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
