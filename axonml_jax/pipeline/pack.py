"""The buffers of a pipeline: stages of parameters, arrays packed by dtype and axes, shared leaves, and how they rest."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from axonml_jax.base import PyTree, named_leaves, warn
from axonml_jax.collectives.collectives import broadcast
from axonml_jax.collectives.gradients import own_slice
from axonml_jax.collectives.primitives import (
    axis_index,
    exchange_along,
    gather_along,
    sum_over,
    types_are_checked,
    vary,
    vary_like,
)
from axonml_jax.compat.jaxpr import Operation
from axonml_jax.compat.order import together
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.model.view import Functional, ModelAround
from axonml_jax.pipeline.schedules import AXIS, Pipelined
from axonml_jax.sharding.batch import BatchLayout
from axonml_jax.sharding.layout import Layout, is_layout, to_device_memory, to_host, to_stored
from axonml_jax.strategies.strategy import units

# --------------------------------------------------------------------------------------------------
# On which stage every parameter lives: decided from the model alone, before any batch is seen.
#
# Where a stage begins is named by a module whose parameters it reads first. A guess that turns out wrong costs
# communication, never correctness: a parameter that another stage reads than the one it lives on is sent there once per
# step.
# --------------------------------------------------------------------------------------------------

_LOOKED_UP = re.compile(r"(^|/|_)(embed\w*|wte|wpe|tok\w*|pos(?!t)\w*|patch\w*|stem\w*)(/|_|$)", re.IGNORECASE)

Order = Mapping[str, tuple]
"""A sort key of every parameter's path: its place in the model."""


class Stack(NamedTuple):
    """Repeated blocks whose parameters are stacked along dim 0, and which run in one loop (`nnx.scan`, `nn.scan`).

    Attributes:
      path: that of the module with the stacked parameters.
      rows: how many blocks.
    """

    path: str
    rows: int

    def holds(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether an array of the model, by its path, is stacked from the blocks' own."""
        return name.startswith(f"{self.path}/") and shape[:1] == (self.rows,)

    def row_name(self, name: str, row: int) -> str:
        """The path of one block's part of a stacked array.

        >>> Stack("layers", 4).row_name("layers/up/kernel", 2)
        'layers/2/up/kernel'
        """
        return f"{self.path}/{row}/{name.removeprefix(self.path + '/')}"

    def row_types(self, types: Mapping[str, type]) -> dict[str, type]:
        """The types of modules by their paths, with those of every row beside the stack's."""
        found = dict(types)
        for path, kind in types.items():
            if path == self.path or path.startswith(f"{self.path}/"):
                found |= {f"{self.path}/{row}{path.removeprefix(self.path)}": kind for row in range(self.rows)}
        return found


@dataclass(frozen=True)
class Assignment:
    """The stage of every parameter, and where stages begin.

    Attributes:
      stages: the stage of every parameter, in tree order; None: it is a stack, whose rows are divided evenly over all stages.
      begins: for every stage but the first the parameters (positions in tree order) whose first use begins it; None: marks
        in the program say where (see `mark`), or the rows of a stack do.
      stack: the blocks that are divided row by row; None: there are none.
    """

    stages: tuple[int | None, ...]
    begins: tuple[tuple[int, ...], ...] | None
    stack: Stack | None = None


def assign(
    shapes: Mapping[str, Any], num_stages: int, *, split: str | Sequence[str] | None = None, order: Order | None = None
) -> Assignment:
    """Assign a model's parameters to stages.

    Args:
      shapes: anything with a shape for every parameter, by path, in tree order.
      num_stages: how many.
      split: module paths at which the second and later stages begin; the path of a module whose parameters are stacked along
        dim 0, as `nnx.scan` and `nn.scan` take them: every stage has as many of its rows; None: between repeated blocks, by
        balanced cost, or between the rows of the largest stack.
      order: the places of parameters in the model; None: known by their names.

    Raises:
      ValueError: when there are more stages than blocks, a path names nothing, or a stack does not divide.

    >>> import numpy as np
    >>> shapes = {name: np.ones((4, 4)) for name in ("embed/w", "blocks/0/w", "blocks/1/w", "head/w")}
    >>> assign(shapes, 2).stages
    (0, 0, 1, 1)
    >>> shapes = {"embed/w": np.ones((9, 4)), "layers/w": np.ones((6, 4, 4)), "head/w": np.ones((4, 9))}
    >>> assign(shapes, 2)
    Assignment(stages=(0, None, 1), begins=None, stack=Stack(path='layers', rows=6))
    """
    names = list(shapes)
    if (stack := _stack_of(shapes, num_stages, split)) is not None:
        return _by_rows(shapes, stack, num_stages, order)
    assert not isinstance(split, str)
    order = order or {name: _by_name(name) for name in names}
    if split is None:
        split = _between_blocks(shapes, num_stages, order)
    inside = {path: [i for i, name in enumerate(names) if name.startswith(path.rstrip("/") + "/")] for path in split}
    problems = [f"split={path!r} names no module with parameters" for path in split if not inside[path]]
    if len(split) != num_stages - 1:
        problems.append(f"split names {len(split)} beginnings, and {num_stages} stages have {num_stages - 1}")
    if problems:
        raise ValueError(f"{'; '.join(problems)}; the parameters are {_listed(names)}")
    firsts = [min(order[names[i]] for i in inside[path]) for path in split]
    if firsts != sorted(firsts):
        raise ValueError(f"split={tuple(split)!r} must be in the order in which the model runs")
    stages = [sum(first <= order[name] for first in firsts) for name in names]
    return Assignment(tuple(stages), tuple(tuple(inside[path]) for path in split))


def by_prefix(names: Sequence[str], prefixes: Sequence[str], stages: Sequence[int]) -> Assignment:
    """The assignment of given modules: a parameter is on the stage of the module whose prefix its path has.

    >>> by_prefix(["stages/0/w", "stages/1/w", "stages/2/w"], ["stages/0/", "stages/1/", "stages/2/"], [0, 0, 1]).stages
    (0, 0, 1)
    """
    owner = (next(i for i, prefix in enumerate(prefixes) if name.startswith(prefix)) for name in names)
    return Assignment(tuple(stages[i] for i in owner), None)


def balanced(costs: Sequence[float], num_parts: int) -> list[int]:
    """Returns where to cut items into `num_parts` consecutive runs so that the most expensive run is as cheap as possible.

    >>> balanced([1, 1, 1, 1, 3], 2), balanced([1] * 6, 3)
    ([3], [2, 4])
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[i] = (cost of the dearest run, sum of squares, beginnings) of the first i items; squares break ties evenly.
    best: list[Any] = [None] + [(total[i], total[i] ** 2, []) for i in range(1, len(costs) + 1)]
    for part in range(1, num_parts):
        later: list[Any] = [None] * (len(costs) + 1)
        for end in range(part + 1, len(costs) + 1):
            later[end] = min(
                (max(best[k][0], (run := total[end] - total[k])), best[k][1] + run**2, [*best[k][2], k])
                for k in range(part, end)
            )
        best = later
    return best[-1][2]


def _between_blocks(shapes: Mapping[str, Any], num_stages: int, order: Order) -> list[str]:
    names = list(shapes)
    if num_stages == 1:
        return []
    found = units(names, None, {})
    blocks = sorted(found, key=lambda path: min(order[names[i]] for i in found[path]))
    if len(blocks) < num_stages:
        what = f"{len(blocks)} repeated blocks ({_listed(blocks)})" if blocks else "no repeated blocks"
        raise ValueError(
            f"the model has {what} to divide over {num_stages} stages: use fewer stages (a smaller `pipe` degree, fewer "
            "chunks), or say where stages begin with split=('path/of/module', ...) or Pipeline.from_modules([...])"
            f"{_stacks_in_words(shapes, num_stages)}"
        )
    costs = [_cost(shapes, [names[i] for i in found[path]]) for path in blocks]
    first, last = (min(order[names[i]] for i in found[path]) for path in (blocks[0], blocks[-1]))
    loose = [name for name in names if not any(name.startswith(path + "/") for path in blocks)]
    costs[0] += _cost(shapes, [name for name in loose if order[name] < first and not _LOOKED_UP.search(name)])
    costs[-1] += _cost(shapes, [name for name in loose if order[name] > last])
    return [blocks[i] for i in balanced(costs, num_stages)]


def _stack_of(shapes: Mapping[str, Any], num_stages: int, split: str | Sequence[str] | None) -> Stack | None:
    """The stack whose rows are divided over the stages; None: stages begin at modules."""
    if isinstance(split, str):
        return _stack_at(shapes, split.rstrip("/"), num_stages)
    if split is not None or num_stages == 1 or max([len(leaf.shape) for leaf in shapes.values()], default=0) < 3:
        return None
    stacks = _stacks(shapes)
    stack = max(stacks, key=stacks.__getitem__, default=None)
    if stack is None or stack.rows % num_stages or 2 * stacks[stack] <= sum(stacks.values()):
        return None
    return stack if _blocks_beside(shapes, stack, stacks[stack] / num_stages) < num_stages else None


def _blocks_beside(shapes: Mapping[str, Any], stack: Stack, share: float) -> int:
    """How many numbered modules speak for a list of blocks, and against a stack that is only guessed.

    Outside of it those that are no smaller than a stage's `share` of it (elements); inside of it, where a dim that all have in
    common may be the width of a list's blocks, those with a sibling of the same shapes that are no vectors or matrices.
    """
    names, below = list(shapes), stack.path + "/"
    found, outside, alike = units(names, None, {}), 0, Counter[tuple]()
    for path, leaves in found.items():
        each = [tuple(shapes[names[i]].shape) for i in leaves]
        if not path.startswith(below):
            outside += sum(map(math.prod, each)) >= share
        elif not _is_scan(stack.path) and max(map(len, each)) > 2:
            alike[path.rstrip("0123456789"), *each] += 1
    return outside + sum(count for count in alike.values() if count > 1)


def _is_scan(path: str) -> bool:
    """Whether a module has the name that `nn.scan` gives."""
    return path.rpartition("/")[2].startswith("Scan")


def _stacks(shapes: Mapping[str, Any]) -> dict[Stack, int]:
    """The modules whose parameters look like stacks of blocks, and how many elements they have.

    All of a stack's parameters have one size of dim 0, and some are matrices besides. A list of modules, which are numbered,
    may look so too; what lies within one of them is not looked at.
    """
    within: dict[str, list[str]] = {}
    for name in shapes:
        for path in _above(name):
            within.setdefault(path, []).append(name)
    blocks, numbered = units(list(shapes), None, {}), Counter[str]()
    for block, leaves in blocks.items():
        numbered.update(dict.fromkeys(_above(block), len(leaves)))
    found: dict[str, int] = {}
    for path, names in within.items():  # outer modules come before those in them
        each = [tuple(shapes[name].shape) for name in names]
        listed = numbered[path] == len(names) or not blocks.keys().isdisjoint((*_above(path), path))
        alike = len({shape[:1] for shape in each}) == 1 and max(map(len, each)) > 2
        if alike and (_is_scan(path) or not listed) and found.keys().isdisjoint(_above(path)):
            found[path] = sum(map(math.prod, each))
    return {Stack(path, shapes[within[path][0]].shape[0]): size for path, size in found.items()}


def _above(path: str) -> list[str]:
    """The modules around a leaf or a module, outer ones first."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _stack_at(shapes: Mapping[str, Any], path: str, num_stages: int) -> Stack:
    names = [name for name in shapes if name.startswith(path + "/")]
    if not names:
        raise ValueError(f"split={path!r} names no module with parameters; the parameters are {_listed(list(shapes))}")
    sizes = {name: tuple(shapes[name].shape) for name in names}
    if len({shape[:1] for shape in sizes.values()}) > 1 or () in sizes.values():
        raise ValueError(
            f"split={path!r} must be a module whose parameters are all stacked along dim 0, or a sequence of the modules at "
            f"which stages begin; its parameters are {_listed([f'{name} {list(shape)}' for name, shape in sizes.items()])}"
        )
    stack = Stack(path, sizes[names[0]][0])
    if stack.rows % num_stages:
        raise ValueError(f"{_rows_in_words(stack)} do not divide into {num_stages} stages: each takes as many")
    return stack


def _stacks_in_words(shapes: Mapping[str, Any], num_stages: int) -> str:
    if not (found := list(_stacks(shapes))):
        return ""
    there = _listed([_rows_in_words(stack) for stack in found])
    return (
        f". There is a loop's stack of blocks: {there}. split={found[0].path!r} gives every stage as many of its rows, where "
        f"their number is a multiple of {num_stages}"
    )


def _rows_in_words(stack: Stack) -> str:
    return f"the {stack.rows} rows of the parameters of {stack.path!r}"


def _by_rows(shapes: Mapping[str, Any], stack: Stack, num_stages: int, order: Order | None) -> Assignment:
    """Divides the rows of a stack evenly; what comes before it is on the first stage, and all else on the last."""
    names = list(shapes)
    inside = lambda name: stack.holds(name, tuple(shapes[name].shape))
    first = None if order is None else min(order[name] for name in names if inside(name))
    before = lambda name: bool(_LOOKED_UP.search(name)) if order is None or first is None else order[name] < first
    stage = lambda name: None if inside(name) else 0 if before(name) else num_stages - 1
    return Assignment(tuple(map(stage, names)), None, stack)


def _cost(shapes: Mapping[str, Any], names: Sequence[str]) -> float:
    """Multiplications per example: the elements of matrices. Embeddings are looked up, and cost nothing."""
    total = 0.0
    for name in names:
        size = 1.0
        for dim in shapes[name].shape:
            size *= dim
        total += size if len(shapes[name].shape) > 1 else 0.0
    return total


def _by_name(name: str) -> tuple:
    """A sort key from a parameter's name alone: embeddings first, then numbered modules, then the rest."""
    numbered = re.search(r"\d+", name)
    kind = 0 if _LOOKED_UP.search(name) else 1 if numbered else 2
    return kind, *((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


# --------------------------------------------------------------------------------------------------
# Modules given one by one as the stages of a pipeline: one model that applies them in order and marks where each
# begins.
# --------------------------------------------------------------------------------------------------

_MARK = "axonml.stage"


@dataclass(frozen=True)
class PipelineStage:
    """A module of a pipeline, and the device that it runs on.

    Attributes:
      module: an NNX or a Linen module that takes what the one before returns.
      device: its index on the `pipe` axis; neighbours on one device are one stage.
    """

    module: Any
    device: int


def mark(tree: PyTree, stage: int) -> PyTree:
    """Marks arrays in the program as the inputs of stage `stage`, and returns them as they are."""
    return jax.tree.map(lambda x: checkpoint_name(x, f"{_MARK}{stage}"), tree)


def marked(op: Operation) -> int | None:
    """The stage that an operation marks the beginning of; None for all others."""
    return int(op.label[len(_MARK) :]) if op.label.startswith(_MARK) else None


class Chain(nnx.Module):
    """NNX modules applied in order; `groups[i]` is how many of them make stage i."""

    def __init__(self, modules: Sequence[nnx.Module], groups: Sequence[int]):
        self.stages = nnx.List(modules)
        self.groups = tuple(groups)

    def __call__(self, x: PyTree) -> PyTree:
        """Applies the modules in order."""
        start = 0
        for stage, count in enumerate(self.groups):
            x = mark(x, stage) if stage else x
            for module in self.stages[start : start + count]:
                x = module(x)
            start += count
        return x

    def prefixes(self) -> list[str]:
        """The prefixes of the paths of each module's parameters."""
        return [f"stages/{i}/" for i in range(len(self.stages))]


class LinenChain(linen.Module):
    """Linen modules applied in order; `groups[i]` is how many of them make stage i."""

    stages: tuple[linen.Module, ...]
    groups: tuple[int, ...]

    def __call__(self, x: PyTree) -> PyTree:
        """Applies the modules in order."""
        start = 0
        for stage, count in enumerate(self.groups):
            x = mark(x, stage) if stage else x
            for module in self.stages[start : start + count]:
                x = module(x)  # pyright: ignore[reportCallIssue]
            start += count
        return x

    def prefixes(self) -> list[str]:
        """The prefixes of the paths of each module's parameters."""
        return [f"stages_{i}/" for i in range(len(self.stages))]


def stage_of_modules(chain: Chain | LinenChain) -> list[int]:
    """The stage of every module."""
    return [stage for stage, count in enumerate(chain.groups) for _ in range(count)]


def join_variables(variables: Sequence[PyTree]) -> PyTree:
    """The variables of a `LinenChain` from those of its modules, each all collections or the params alone."""
    joined: dict[str, dict[str, Any]] = {}
    for i, given in enumerate(variables):
        collections = dict(given) if "params" in given else {"params": given}
        for name, tree in collections.items():
            joined.setdefault(name, {})[f"stages_{i}"] = tree
    return joined


# --------------------------------------------------------------------------------------------------
# Arrays of which a dim is split over an axis that is left to XLA's partitioner, as rows of a buffer: a row for each
# rank.
#
# A flat buffer of such arrays would be whole on every rank of the axis: flat, the parts of a dim lie between each
# other. Which dim is split is a guess from its size, since the partitioner decides it after everything is traced. Where
# the guess is wrong the partitioner sends what it must to store an array so; numbers are the same.
# --------------------------------------------------------------------------------------------------


class PartRanks(NamedTuple):
    """The ranks of an axis, each of which has one row of a buffer in parts.

    Attributes:
      axis: the mesh axis.
      count: how many.
    """

    axis: str
    count: int


@dataclass(frozen=True)
class PositionParts:
    """Guesses from sizes which dim of an array holds positions, which an axis left to XLA's partitioner splits.

    Attributes:
      parts: the ranks among which positions are split.
      lengths: how many positions sequences have, in the batch's leaves.

    >>> guess = PositionParts(PartRanks("context", 2), (16,))
    >>> [guess.dim_of(shape) for shape in ((4, 16, 8), (16,), (4, 15, 8), (16, 16), (4, 6))]
    [1, 0, 1, 1, None]
    """

    parts: PartRanks
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, layout: BatchLayout, shapes: Mapping[str, tuple[int, ...]]) -> "PositionParts | None":
        """Finds the dims of positions from the shapes of a microbatch's leaves by path.

        Returns:
          None where no axis that splits positions is left to XLA's partitioner.
        """
        rules = {axis: rule for axis, rule in layout.positions if axis in layout.automatic and layout.size((axis,)) > 1}
        if not rules:
            return None
        ((axis, rule),) = rules.items()
        count = layout.size((axis,))
        dims = ((shape, rule(name, shape)) for name, shape in shapes.items() if shape)
        lengths = {shape[dim] for shape, dim in dims if dim is not None and shape[dim] % count == 0}
        return cls(PartRanks(axis, count), tuple(sorted(lengths)))

    def dim_of(self, shape: tuple[int, ...]) -> int | None:
        """The dim of an array that is as long as the sequences, or shorter by fewer positions than ranks, as after a shift.

        None where there is none. Rows come first, so dim 0 is taken last.
        """
        count = self.parts.count
        near = lambda size: any(length - count < size <= length for length in self.lengths)
        dims = [dim for dim, size in enumerate(shape) if size >= count and near(size)]
        return next((dim for dim in dims if dim), dims[0] if dims else None)


def row_size(shape: tuple[int, ...], dim: int, count: int) -> int:
    """Elements of one part, of `count`, of an array that is split along `dim`; the last part may be padded."""
    return math.prod(size for d, size in enumerate(shape) if d != dim) * -(-shape[dim] // count)


def apart(x: jax.Array, dim: int, parts: PartRanks) -> jax.Array:
    """Splits a dim into a row for each rank, the last one padded with zeros: [..., s, ...] -> [N, n]."""
    size, each = x.shape[dim], -(-x.shape[dim] // parts.count)
    if more := each * parts.count - size:
        x = jnp.pad(x, [(0, more if d == dim else 0) for d in range(x.ndim)])
    cut = x.reshape(*x.shape[:dim], parts.count, each, *x.shape[dim + 1 :])
    rows = split_over(jnp.moveaxis(cut, dim, 0), parts.axis)
    return rows.reshape(parts.count, math.prod(rows.shape[1:]))


def reassembled(rows: jax.Array, shape: tuple[int, ...], dim: int, parts: PartRanks) -> jax.Array:
    """Joins rows [N, n] to the array; the inverse of `apart`."""
    each = -(-shape[dim] // parts.count)
    cut = split_over(rows.reshape(parts.count, *shape[:dim], each, *shape[dim + 1 :]), parts.axis)
    whole = jnp.moveaxis(cut, 0, dim).reshape(*shape[:dim], parts.count * each, *shape[dim + 1 :])
    return jax.lax.slice_in_dim(whole, 0, shape[dim], axis=dim)


def split_over(x: jax.Array, axis: str) -> jax.Array:
    """Constrains dim 0 of x to be split over an axis that is left to the partitioner."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axis))


def on_every_rank(x: Any) -> Any:
    """Constrains x to be replicated over the axes that are left to the partitioner; random keys stay as they are."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.lax.with_sharding_constraint(x, PartitionSpec())


# --------------------------------------------------------------------------------------------------
# A leaf that rests on one rank of a pipeline, brought to all devices: split over as many of them as its dims divide by.
#
# Every movement is a collective that is written here. XLA's partitioner, left to find them, gathers whole leaves
# everywhere ("Involuntary full rematerialization").
# --------------------------------------------------------------------------------------------------

Move = Callable[[jax.Array], jax.Array]


@dataclass
class Spread:
    """The moves that bring a leaf from one rank of the pipeline to all devices, split over as many as its dims divide by.

    Attributes:
      shape: what a device holds in the end.
      axes: the mesh axes that split each dim in the end, outermost first.
      moves: what is done with the part that rests, one after the other, inside `shard_map`.
    """

    shape: list[int]
    axes: list[tuple[str, ...]]
    moves: list[Move] = field(default_factory=list)

    @staticmethod
    def of(layout: Layout, rank: int | None, degrees: Mapping[str, int], chunks: int = 1) -> "Spread":
        """The moves of a leaf that rests in a layout.

        Args:
          layout: the leaf's.
          rank: the rank of the pipeline that has it; None: every rank has the rows of its stages (see `StageStore`).
          degrees: the sizes of all mesh axes.
          chunks: stages per rank.
        """
        dims = range(len(layout.stored))
        spread = Spread(list(layout.shard), [layout.axes_of(dim) for dim in dims])
        if rank is None and chunks > 1:
            whole = [dim for dim, size in enumerate(layout.shape) if layout.stored[dim] == size]
            spread._order_rows(chunks, degrees[AXIS], whole)
        scalars = len(layout.stored) - len(layout.shape)  # they rest as one element per rank
        for dim, size in enumerate((*layout.shape, *[1] * scalars)):
            if layout.stored[dim] != size:
                spread._cut_padding(dim, size, layout.parts[dim])
        if scalars:
            spread._append(lambda x: x[..., 0], spread.shape[:-1], spread.axes[:-1])
        if rank is not None:
            spread._over_pipeline(rank, degrees[AXIS])
        for axis, size in degrees.items():
            if axis != AXIS and not any(axis in axes for axes in spread.axes):
                spread._own_slice(axis, size)
        return spread

    @property
    def spec(self) -> PartitionSpec:
        """The spec of the whole leaf after all moves."""
        return PartitionSpec(*(axes or None for axes in self.axes))

    def apply(self, part: jax.Array) -> jax.Array:
        """Runs the moves on a device's part, inside `shard_map`.

        Communicates: over `pipe` one all-to-all, or one all-reduce where no dim divides; over the axes that split a padded dim
        one all-to-all, or one all-gather where no other dim divides.
        """
        for move in self.moves:
            part = move(part)
        return part

    def _cut_padding(self, dim: int, size: int, count: int) -> None:
        """Cuts the padding of a dim; the axes that split it split another one then, or none."""
        over, other = self.axes[dim], self._divisible(count, but=dim)
        shape, axes = list(self.shape), list(self.axes)
        shape[dim], axes[dim] = size, ()
        cut = lambda x: jax.lax.slice_in_dim(x, 0, size, axis=dim)
        if other is None:
            self._append(lambda x: cut(gather_along(x, over, dim)), shape, axes)
            return
        shape[other], axes[other] = shape[other] // count, (*axes[other], *over)
        self._append(lambda x: cut(exchange_along(x, over, other, dim)), shape, axes)

    def _order_rows(self, chunks: int, count: int, whole: Sequence[int]) -> None:
        """Puts rows that lie rank by rank into the model's order; their ranks split another dim then, or none."""
        shape, axes = list(self.shape), list(self.axes)
        shape[0], axes[0] = shape[0] * count, ()
        ordered = lambda x: _regrouped(x, count, chunks)
        other = next((d for d in whole if d and self.shape[d] and self.shape[d] % count == 0), None)
        if other is None:
            self._append(lambda x: ordered(gather_along(x, (AXIS,), 0)), shape, axes)
            return
        shape[other], axes[other] = shape[other] // count, (*axes[other], AXIS)
        self._append(lambda x: ordered(exchange_along(x, (AXIS,), other, 0)), shape, axes)

    def _over_pipeline(self, rank: int, count: int) -> None:
        """Gives every rank of the pipeline a part of what one of them has, bit for bit; all of it if no dim divides."""
        if count == 1:
            return
        dim = self._divisible(count)
        if dim is None:
            self._append(lambda x: broadcast(x, AXIS, rank), self.shape, self.axes)
            return
        shape, axes = list(self.shape), list(self.axes)
        shape[dim], axes[dim] = shape[dim] // count, (*axes[dim], AXIS)
        self._append(lambda x: exchange_along(x[None], (AXIS,), dim + 1, 0)[rank], shape, axes)

    def _own_slice(self, axis: str, count: int) -> None:
        """Cuts each rank's part out of what all ranks of an axis have."""
        dim = self._divisible(count)
        if count == 1 or dim is None:
            return
        shape, axes = list(self.shape), list(self.axes)
        shape[dim], axes[dim] = shape[dim] // count, (*axes[dim], axis)
        self._append(lambda x: own_slice(x, axis, dim), shape, axes)

    def _divisible(self, count: int, but: int | None = None) -> int | None:
        return next((d for d, n in enumerate(self.shape) if d != but and n and n % count == 0), None)

    def _append(self, move: Move, shape: list[int], axes: list[tuple[str, ...]]) -> None:
        self.moves.append(move)
        self.shape, self.axes = shape, axes


# --------------------------------------------------------------------------------------------------
# Several arrays in one flat buffer per (dtype, axes they vary over): what lets unlike stages share one program.
#
# All ranks run the same program, so what stages hold, send and keep must have one shape on all of them, however
# different their arrays are. Concatenating arrays joins the axes they vary over, so those that vary over other axes
# stay apart; so do those of which XLA's partitioner splits a dim (`apart`).
# --------------------------------------------------------------------------------------------------


class BufferGroup(NamedTuple):
    """The common properties of the arrays in one buffer.

    Attributes:
      dtype: numpy's name.
      axes: the mesh axes over which they vary, sorted.
      frozen: whether they are parameters without a gradient.
      parts: the ranks among which a dim of each is split by XLA's partitioner, the buffer's dim before the last; (): it is not.
      number: tells buffers apart whose arrays have the rest in common.
      rows: whether they are rows of stacks, of which all ranks have as many, at the same places.
    """

    dtype: str
    axes: tuple[str, ...] = ()
    frozen: bool = False
    parts: PartRanks | tuple[()] = ()
    number: int = 0
    rows: bool = False

    def shape(self, size: int) -> tuple[int, ...]:
        """The shape of a buffer of `size` elements (per part)."""
        return (self.parts.count, size) if self.parts else (size,)


Buffers = dict[BufferGroup, jax.Array]
"""A flat array per group, [n], or one per group and slot, [slots, n]; [N, n] and [slots, N, n] of groups in N parts."""

Sizes = Mapping[BufferGroup, int]
"""Elements per group, or per part of one."""


class Slot(NamedTuple):
    """The place of one array in a buffer.

    Attributes:
      group: the group of its buffer.
      offset: at which element it begins.
      shape: the shape of the array; for a key array, of its data.
      key_impl: which random generator's keys these are; None: they are no keys.
      place: the offset as a value of the running program, by which the array is read and written; None: a constant.
      dim: in a group in parts, the dim of the array that is split.
    """

    group: BufferGroup
    offset: int
    shape: tuple[int, ...]
    key_impl: Any = None
    place: Any = None
    dim: int = 0

    @property
    def size(self) -> int:
        """Elements, or those of one part."""
        parts = self.group.parts
        return row_size(self.shape, self.dim, parts.count) if parts else math.prod(self.shape)

    def flat(self, data: jax.Array) -> jax.Array:
        """Flattens the array as it lies in its buffer: [n], or [N, n]."""
        return apart(data, self.dim, self.group.parts) if self.group.parts else jnp.ravel(data)

    def opened(self, flat: jax.Array) -> jax.Array:
        """The inverse of `flat`; leading dims of size 1 are allowed."""
        if not (parts := self.group.parts):
            return flat.reshape(self.shape)
        return reassembled(flat.reshape(parts.count, self.size), self.shape, self.dim, parts)


@dataclass(frozen=True)
class Packing:
    """The slots of several arrays.

    >>> packing = Packing.of([jnp.zeros((2, 3), "float32"), jnp.zeros(4, "int32"), jnp.ones((), "float32")])
    >>> packing.sizes[BufferGroup("float32")], [slot.offset for slot in packing.slots]
    (7, [0, 0, 6])
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(
        cls, arrays: Iterable[Any], axis: str | None = None, split: tuple[PartRanks, Sequence[int | None]] | None = None
    ) -> "Packing":
        """Places one array behind the other, each in the group of its dtype, its varying axes and its parts.

        Args:
          arrays: arrays or abstract values, of which only shape, dtype and varying axes are read.
          axis: a mesh axis over which they are all to vary; without a meaning where types are not checked.
          split: in which parts, and the dim of each array that is split so, or None; None: none is.
        """
        slots, ends = [], {}
        more = {axis} if axis is not None and types_are_checked(axis) else frozenset()
        for i, array in enumerate(arrays):
            data, key_impl = data_of(array.dtype, array.shape)
            dim = None if split is None or key_impl is not None else split[1][i]
            group = BufferGroup(jnp.dtype(data.dtype).name, tuple(sorted(varying_axes(array) | more)))
            if split is not None and dim is not None:
                group = group._replace(parts=split[0])
            slots.append(Slot(group, ends.get(group, 0), data.shape, key_impl, dim=dim or 0))
            ends[group] = slots[-1].offset + slots[-1].size
        return cls(tuple(slots))

    @cached_property
    def sizes(self) -> dict[BufferGroup, int]:
        """The size of each group's buffer: where its last array ends."""
        return largest({slot.group: slot.offset + slot.size} for slot in self.slots)

    def at(self, places: Mapping[int, Any]) -> "Packing":
        """The same slots, with offsets as values of the running program where `places` has them."""
        return Packing(tuple(slot._replace(place=places.get(slot.offset)) for slot in self.slots))

    def pack(self, arrays: Sequence[Any], sizes: Sizes) -> Buffers:
        """Packs the arrays into buffers of these sizes, with zeros elsewhere."""
        pieces: dict[BufferGroup, list[Any]] = {group: [] for group in sizes}
        ends = dict.fromkeys(sizes, 0)
        # By size too: an array without elements begins where the next one does, and could come behind it.
        for slot, array in sorted(
            zip(self.slots, arrays, strict=True), key=lambda pair: (pair[0].offset, pair[0].size)
        ):
            gap = slot.offset - ends[slot.group]
            pieces[slot.group] += [_group_zeros(slot.group, gap)] * (gap > 0) + [slot.flat(_data(array)[0])]
            ends[slot.group] = slot.offset + slot.size
        for group, size in sizes.items():
            pieces[group] += [_group_zeros(group, size - ends[group])] * (size > ends[group])
        return {group: jnp.concatenate(vary(these, group.axes), axis=-1) for group, these in pieces.items()}

    def unpack(self, buffers: Buffers, row: ArrayLike | None = None) -> list[jax.Array]:
        """Unpacks the arrays from flat buffers, or from one row of buffers with slots."""
        return [slot_value(slot, buffers[slot.group], row) for slot in self.slots]

    def write(self, buffers: Buffers, arrays: Sequence[Any]) -> Buffers:
        """Writes the arrays into flat buffers at their places."""
        return self._changed(buffers, arrays, lambda old, value: value)

    def add(self, buffers: Buffers, arrays: Sequence[Any]) -> Buffers:
        """Adds the arrays to flat buffers at their places, the last one first, as a backward makes its gradients."""
        # Apart from the write: one fusion that reads and writes a part of a buffer writes all of it on CPU.
        backwards = replace(self, slots=self.slots[::-1])
        return backwards._changed(buffers, arrays[::-1], lambda old, value: together(old + value))

    def store(self, buffers: Buffers, arrays: Sequence[Any], row: ArrayLike) -> Buffers:
        """Writes the arrays into one row of buffers with slots, [slots, n]."""
        buffers = dict(buffers)
        for group in {slot.group: None for slot in self.slots}:
            own = [
                (slot, _data(array)[0]) for slot, array in zip(self.slots, arrays, strict=True) if slot.group == group
            ]
            # All at once, so that XLA does not compute what makes an array again in the loop that stores it.
            values = together([value for _, value in own])
            for (slot, _), value in zip(own, values, strict=True):
                flat = vary_like(slot.flat(value), buffers[group])
                at = _row_start(slot, row)
                buffers[group] = jax.lax.dynamic_update_slice(
                    buffers[group], flat[None], at, allow_negative_indices=False
                )
        return buffers

    def _changed(self, buffers: Buffers, arrays: Sequence[Any], change) -> Buffers:
        buffers = dict(buffers)
        for slot, array in zip(self.slots, arrays, strict=True):
            buffer = buffers[slot.group]
            value = vary_like(slot.flat(_data(array)[0]).astype(buffer.dtype), buffer)
            new = change(_flat(slot, buffer), value)
            at = slot.offset if slot.place is None else slot.place
            buffers[slot.group] = jax.lax.dynamic_update_slice(buffer, new, (at,), allow_negative_indices=False)
        return buffers


def slot_value(slot: Slot, buffer: jax.Array, row: ArrayLike | None = None) -> jax.Array:
    """Unpacks one array from its buffer."""
    data = slot.opened(_flat(slot, buffer, row))
    return data if slot.key_impl is None else jax.random.wrap_key_data(data, impl=slot.key_impl)


def _flat(slot: Slot, buffer: jax.Array, row: ArrayLike | None = None) -> jax.Array:
    """The elements of an array in a buffer, or in one row of it."""
    sizes = slot.group.shape(slot.size)
    if row is not None:
        return jax.lax.dynamic_slice(buffer, _row_start(slot, row), (1, *sizes), allow_negative_indices=False)
    if slot.place is not None:
        at = (*_firsts(slot, slot.place), slot.place)
        return jax.lax.dynamic_slice(buffer, at, sizes, allow_negative_indices=False)
    return jax.lax.slice_in_dim(buffer, slot.offset, slot.offset + slot.size, axis=-1)


def _row_start(slot: Slot, row: ArrayLike) -> tuple[jax.Array, ...]:
    """The start of an array in a row of a buffer with slots."""
    row = jnp.asarray(row)
    offset = slot.offset if slot.place is None else slot.place
    return row, *_firsts(slot, row), vary_like(jnp.asarray(offset, row.dtype), row)


def _firsts(slot: Slot, like: jax.Array) -> list[jax.Array]:
    """The index of the first part, for a group in parts; else nothing."""
    return [vary_like(jnp.zeros_like(like), like)] * bool(slot.group.parts)


def _group_zeros(group: BufferGroup, size: int) -> jax.Array:
    return jnp.zeros(group.shape(size), group.dtype)


def data_of(dtype: Any, shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, Any]:
    """The shape and dtype of an array's numbers, and the random generator whose keys they are, or None."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.ShapeDtypeStruct(shape, dtype), None
    impls = []

    def data(keys):
        impls.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    return jax.eval_shape(data, jax.ShapeDtypeStruct(shape, dtype)), impls[0]


def largest(many: Iterable[Sizes]) -> dict[BufferGroup, int]:
    """The largest size of each group among several sizes, in a fixed order.

    >>> largest([{BufferGroup("int8"): 1}, {BufferGroup("int8"): 3, BufferGroup("bool"): 2}])[BufferGroup("int8")]
    3
    """
    sizes: dict[BufferGroup, int] = {}
    for each in many:
        for group, size in each.items():
            sizes[group] = max(size, sizes.get(group, 0))
    return dict(sorted(sizes.items()))


def _data(array: Any) -> tuple[Any, Any]:
    """The numbers of an array, and the random generator whose keys they are, or None."""
    if jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key):
        return jax.random.key_data(array), jax.random.key_impl(array)
    return jnp.asarray(array), None


# --------------------------------------------------------------------------------------------------
# How the stages' parameters (or states) lie on the ranks: one padded buffer per group, a rank's chunks behind each
# other.
#
# The executor reads buffers; optimizers and users see trees, by `pack_rank` and `unpack_rank`.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One leaf of a stage, as a rank holds it.

    Attributes:
      shape: the shape of the rank's own part, without the axes that split it.
      dtype: the dtype in which its buffer holds it.
      axes: other mesh axes over which its parts differ ("fsdp", "tensor", ...), in any order.
      frozen: whether it has no gradient.
      shared: a name that the same leaf has in other stages too (a tied embedding); None: it is in one stage alone.
      number: the number of its buffer's group.
      rows: whether it is made of rows of a stack.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...] = ()
    frozen: bool = False
    shared: str | None = None
    number: int = 0
    rows: bool = False

    @property
    def group(self) -> BufferGroup:
        """The group of the buffer in which it lies."""
        data, _ = data_of(self.dtype, self.shape)
        name, axes = jnp.dtype(data.dtype).name, tuple(sorted(self.axes))
        return BufferGroup(name, axes, self.frozen, number=self.number, rows=self.rows)


@dataclass(frozen=True)
class StageBuffers:
    """The slot of every leaf of every stage. Stage p lives on rank p mod S; a shared leaf lies once on each of its ranks.

    >>> stages = [{"w": Stored((2, 3), "float32")}, {"w": Stored((4,), "float32")}]
    >>> StageBuffers.of(stages, num_ranks=2).sizes[BufferGroup("float32")]
    6

    Attributes:
      num_ranks: S.
      packings: the packing of every stage.
      treedefs: the tree of every stage.
      shared: for every shared leaf its slot on each rank that holds it, by name.
    """

    num_ranks: int
    packings: tuple[Packing, ...]
    treedefs: tuple[Any, ...]
    shared: dict[str, dict[int, Slot]] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Sequence[PyTree], num_ranks: int) -> "StageBuffers":
        """Lays out every stage's tree.

        Args:
          stages: per stage a tree of `Stored`, or of anything with shape and dtype: leaves of one stage and rank alone.
          num_ranks: S.

        Raises:
          ValueError: when the stages do not divide over the ranks, or a shared leaf differs between stages; all are named.
        """
        if len(stages) % num_ranks:
            raise ValueError(f"{len(stages)} stages do not divide over {num_ranks} ranks: give every rank as many")
        trees = [jax.tree.map(_stored, stage, is_leaf=_is_stored) for stage in stages]
        flat = [jax.tree.flatten(tree, is_leaf=_is_stored) for tree in trees]
        _check_shared([leaves for leaves, _ in flat])
        ends: list[dict[BufferGroup, int]] = [{} for _ in range(num_ranks)]
        shared: dict[str, dict[int, Slot]] = {}
        packings = []
        for stage, (leaves, _) in enumerate(flat):
            rank = stage % num_ranks
            slots = [_slot_of(leaf, ends[rank], shared, rank) for leaf in leaves]
            packings.append(Packing(tuple(slots)))
        return cls(num_ranks, tuple(packings), tuple(treedef for _, treedef in flat), shared)

    @cached_property
    def sizes(self) -> dict[BufferGroup, int]:
        """Elements per group, the same on every rank."""
        return largest(packing.sizes for packing in self.packings)

    def stages(self, rank: int) -> range:
        """The stages of a rank."""
        return range(rank, len(self.packings), self.num_ranks)

    def pack_rank(self, rank: int, trees: Sequence[PyTree]) -> Buffers:
        """Packs the trees of a rank's stages, in order, into its buffers, each [n]."""
        placed: dict[Slot, Any] = {}
        for stage, tree in zip(self.stages(rank), trees, strict=True):
            placed |= dict(zip(self.packings[stage].slots, self.treedefs[stage].flatten_up_to(tree), strict=True))
        return Packing(tuple(placed)).pack(list(placed.values()), self.sizes)

    def unpack_rank(self, rank: int, buffers: Buffers) -> list[PyTree]:
        """Unpacks the trees of a rank's stages, in order."""
        return [self.unpack(stage, buffers) for stage in self.stages(rank)]

    def unpack(self, stage: int, buffers: Buffers) -> PyTree:
        """Unpacks the tree of one stage from its rank's buffers."""
        return self.treedefs[stage].unflatten(self.packings[stage].unpack(buffers))


def _slot_of(leaf: Stored, ends: dict[BufferGroup, int], shared: dict[str, dict[int, Slot]], rank: int) -> Slot:
    """The slot of a leaf on a rank: the one it has there already, or the next free one."""
    holders = {} if leaf.shared is None else shared.setdefault(leaf.shared, {})
    if rank not in holders:
        data, key_impl = data_of(leaf.dtype, leaf.shape)
        holders[rank] = Slot(leaf.group, ends.get(leaf.group, 0), data.shape, key_impl)
        ends[leaf.group] = holders[rank].offset + holders[rank].size
    return holders[rank]


def _check_shared(stages: Sequence[Sequence[Stored]]) -> None:
    seen: dict[str, tuple[int, Stored]] = {}
    wrong = []
    for stage, leaves in enumerate(stages):
        for leaf in leaves:
            first, other = seen.setdefault(leaf.shared, (stage, leaf)) if leaf.shared is not None else (stage, leaf)
            if leaf != other:
                wrong.append(f"{leaf.shared!r} is {other} in stage {first} and {leaf} in stage {stage}")
    if wrong:
        raise ValueError(f"a shared leaf must be the same in all its stages: {'; '.join(wrong)}")


def _stored(leaf: Any) -> Stored:
    return leaf if isinstance(leaf, Stored) else Stored(tuple(leaf.shape), leaf.dtype)


def _is_stored(leaf: Any) -> bool:
    return isinstance(leaf, Stored)


# --------------------------------------------------------------------------------------------------
# Leaves that several stages share, such as a tied embedding: copied to their ranks, one gradient, counted once.
#
# Communicates: what `sum_shared` says.
# --------------------------------------------------------------------------------------------------


def sum_shared(layout: StageBuffers, grads: Buffers, axis: str = "pipe") -> Buffers:
    """Sums the gradients of all copies of a shared leaf, and gives each copy the sum; inside `shard_map`.

    Args:
      layout: where the leaves lie.
      grads: this rank's gradients.
      axis: the pipeline's mesh axis.

    Communicates: one all-reduce over `axis` per leaf that several ranks hold.
    """
    holders = [slots for slots in _copied(layout).values() if next(iter(slots.values())).group in grads]
    if not holders:
        return grads
    rank = axis_index(axis)

    def own(r: int):
        # A leaf that this rank does not hold adds zeros.
        return lambda: [
            slot_value(slots[r], grads[slots[r].group])
            if r in slots
            else _slot_zeros(next(iter(slots.values())), grads)
            for slots in holders
        ]

    totals = [sum_over(part, axis) for part in jax.lax.switch(rank, [own(r) for r in range(layout.num_ranks)])]

    def put(r: int):
        held = [(slots[r], total) for slots, total in zip(holders, totals, strict=True) if r in slots]
        return lambda: Packing(tuple(slot for slot, _ in held)).write(grads, [total for _, total in held])

    return jax.lax.switch(rank, [put(r) for r in range(layout.num_ranks)])


def _copied(layout: StageBuffers) -> dict[str, dict[int, Slot]]:
    return {name: slots for name, slots in layout.shared.items() if len(slots) > 1}


def _slot_zeros(slot: Slot, grads: Buffers) -> jax.Array:
    return vary_like(jnp.zeros(slot.shape, grads[slot.group].dtype), grads[slot.group])


# --------------------------------------------------------------------------------------------------
# How the leaves of a tree rest on the ranks of a pipeline: per group one array, split over `pipe` and the group's axes.
#
# A rank holds the leaves of its own stages behind each other, padded to the longest rank. Optimizers and users see
# trees.
# --------------------------------------------------------------------------------------------------

Named = dict[str, Any]
"""The arrays of groups by their names: the form in which they rest, and that optimizers and checkpoints hold."""


@dataclass(frozen=True)
class StageStore:
    """The buffers in which the leaves of a tree rest on the ranks of a pipeline.

    Attributes:
      layouts: the layout of every leaf, in tree order: along the other axes than the pipeline's, and of a stack along that too.
      stages: the stage of every leaf; None: it is a stack, and every rank has the rows of its stages, one after the other.
      num_stages, num_ranks: S*V and S.
      degrees: size of every mesh axis.
      frozen: whether the leaves have no gradient.
      numbers: the number of every leaf's group; empty: all 0.
    """

    layouts: tuple[Layout, ...]
    stages: tuple[int | None, ...]
    num_stages: int
    num_ranks: int
    degrees: Mapping[str, int]
    frozen: bool = False
    numbers: tuple[int, ...] = ()

    @cached_property
    def buffers(self) -> StageBuffers:
        """The layout of a rank's buffers."""
        trees = [[self.stored(i) for i in leaves] for leaves in self.leaves_of_stages]
        return StageBuffers.of(trees, self.num_ranks)

    @cached_property
    def slots(self) -> dict[int, Slot]:
        """The slot of every leaf on its rank."""
        own = zip(self.leaves_of_stages, self.buffers.packings, strict=True)
        return {i: slot for leaves, packing in own for i, slot in zip(leaves, packing.slots, strict=True)}

    def stored(self, leaf: int) -> Stored:
        """A leaf as one rank holds it."""
        layout = self.layouts[leaf]
        number, rows = self.numbers[leaf] if self.numbers else 0, self.stages[leaf] is None
        axes = tuple(axis for axis in layout.axes if axis != AXIS) if rows else layout.axes
        return Stored(layout.shard, layout.dtype, axes, self.frozen, number=number, rows=rows)

    @cached_property
    def leaves_of_stages(self) -> list[list[int]]:
        """The leaves that live on each stage; a stack's part counts to the first stage of every rank."""
        found: list[list[int]] = [[] for _ in range(self.num_stages)]
        for i, stage in enumerate(self.stages):
            for each in range(self.num_ranks) if stage is None else (stage,):
                found[each] += [i]
        return found

    def leaves_of_rank(self, rank: int) -> list[int]:
        """The leaves that live on a rank."""
        return [i for i, stage in enumerate(self.stages) if stage is None or stage % self.num_ranks == rank]

    def rank_of(self, leaf: int) -> int | None:
        """The rank of a leaf; None: it is a stack, of which every rank has a part."""
        stage = self.stages[leaf]
        return None if stage is None else stage % self.num_ranks

    # The rows of a stack, [L, ...]: in the model's order, or rank by rank, each rank's in the order of its stages

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.num_stages // self.num_ranks

    def by_rank(self, whole: Any, leaf: int) -> Any:
        """A whole leaf with the rows of a stack rank by rank."""
        return whole if self.stages[leaf] is not None else _regrouped(whole, self.chunks, self.num_ranks)

    def in_order(self, whole: Any, leaf: int) -> Any:
        """The inverse of `by_rank`."""
        return whole if self.stages[leaf] is not None else _regrouped(whole, self.num_ranks, self.chunks)

    # Names, and the whole arrays over all ranks

    @property
    def groups(self) -> dict[str, BufferGroup]:
        """Every group by its name."""
        return {group_name(group): group for group in self.buffers.sizes}

    def specs(self) -> dict[str, PartitionSpec]:
        """The PartitionSpec of every group's array."""
        return {name: PartitionSpec((AXIS, *group.axes)) for name, group in self.groups.items()}

    def shapes(self) -> Named:
        """Shape and dtype of every group's array over all ranks."""
        sizes = self.buffers.sizes
        return {
            name: jax.ShapeDtypeStruct((math.prod(self._grid(group)) * sizes[group],), group.dtype)
            for name, group in self.groups.items()
        }

    def named(self, buffers: Buffers) -> Named:
        """Buffers by the names of their groups."""
        return {group_name(group): buffer for group, buffer in buffers.items()}

    def grouped(self, named: Named) -> Buffers:
        """Buffers by group. The inverse of `named`."""
        return {group: named[name] for name, group in self.groups.items()}

    def place(self, leaves: Iterable[Any], mesh: Mesh) -> Named:
        """Packs full leaves into the resting arrays; they are the same in every process, or split over devices in any way.

        Leaves are taken one after the other. No device ever holds more than its own part, and no process more than the parts
        of its devices and one leaf.
        """
        shapes = {name: shape.shape for name, shape in self.shapes().items()}
        places = {name: NamedSharding(mesh, spec) for name, spec in self.specs().items()}
        parts: dict[str, dict[int, np.ndarray]] = {}
        for name, group in self.groups.items():
            here = places[name].addressable_devices_indices_map(shapes[name]).values()
            parts[name] = {start: np.zeros(self.buffers.sizes[group], group.dtype) for start in map(_start, here)}
        for i, leaf in enumerate(leaves):
            self._fill(parts[group_name(self.slots[i].group)], i, to_host(leaf))
        return {
            # A copy: devices that hold the same part must not share this process's memory.
            name: jax.make_array_from_callback(
                shapes[name], places[name], lambda index, name=name: parts[name][_start(index)].copy()
            )
            for name in parts
        }

    def spread(self, named: Named, mesh: Mesh) -> list[jax.Array]:
        """Unpacks every leaf from the resting arrays, split over as many devices as its dims divide by.

        Communicates: see `Spread.apply`; no device ever holds more than the parts that come and go.
        """
        if mesh not in self._programs:
            self._programs[mesh] = self._spreading(mesh)
        return self._programs[mesh](named)

    @cached_property
    def _programs(self) -> dict[Mesh, Any]:
        return {}

    def _spreading(self, mesh: Mesh) -> Any:
        ways = [Spread.of(layout, self.rank_of(i), self.degrees, self.chunks) for i, layout in enumerate(self.layouts)]

        def local(named: Named) -> list[jax.Array]:
            buffers = self.grouped(named)
            parts = [slot_value(self.slots[i], buffers[self.slots[i].group]) for i in range(len(self.layouts))]
            return [way.apply(part) for way, part in zip(ways, parts, strict=True)]

        specs = [way.spec for way in ways]
        spread = jax.shard_map(local, mesh=mesh, in_specs=(self.specs(),), out_specs=specs, check_vma=False)
        return jax.jit(lambda named: spread(to_device_memory(named)))

    def _fill(self, parts: Mapping[int, np.ndarray], leaf: int, whole: Any) -> None:
        """Writes a leaf into those parts of its group that hold some of it; parts are known by where they start."""
        slot, layout = self.slots[leaf], self.layouts[leaf]
        stored = np.asarray(to_stored(self.by_rank(np.asarray(whole), leaf), layout))
        for start, part in parts.items():
            rank, *where = np.unravel_index(start // len(part) if len(part) else 0, self._grid(slot.group))
            if self.rank_of(leaf) in (None, rank):
                along = dict(zip(slot.group.axes, map(int, where), strict=True)) | {AXIS: int(rank)}
                part[slot.offset : slot.offset + slot.size] = _shard(stored, layout, along, self.degrees).reshape(-1)

    def _grid(self, group: BufferGroup) -> tuple[int, ...]:
        return (self.num_ranks, *(self.degrees[axis] for axis in group.axes))

    # On one rank, inside `shard_map`

    def unpack(self, buffers: Buffers, rank: int) -> dict[int, jax.Array]:
        """Unpacks a rank's own leaves, by position."""
        leaves = self.leaves_of_rank(rank)
        return dict(zip(leaves, Packing(tuple(self.slots[i] for i in leaves)).unpack(buffers), strict=True))

    def pack(self, values: Mapping[int, Any]) -> Buffers:
        """Packs a rank's own leaves into its buffers."""
        return Packing(tuple(self.slots[i] for i in values)).pack(list(values.values()), self.buffers.sizes)


def group_name(group: BufferGroup) -> str:
    """The name of a group.

    >>> group_name(BufferGroup("float32")), group_name(BufferGroup("float32", ("fsdp",)))
    ('float32', 'float32 over fsdp')
    """
    over = f" over {' '.join(group.axes)}" if group.axes else ""
    return group.dtype + " in rows" * group.rows + over + (f" ({group.number})" if group.number else "")


def _regrouped(x: Any, outer: int, inner: int) -> Any:
    """An array [outer * inner * n, ...] with its blocks of n rows in the order of [inner, outer]."""
    if 1 in (outer, inner):
        return x
    blocks = x.reshape(outer, inner, -1, *x.shape[1:])
    return blocks.swapaxes(0, 1).reshape(x.shape)


def _start(index: Any) -> int:
    """The first element of a part of a flat array."""
    return index[0].start or 0


def _shard(stored: np.ndarray, layout: Layout, along: Mapping[str, int], degrees: Mapping[str, int]) -> np.ndarray:
    """The part of a stored array on the rank with these positions along the axes."""
    index = []
    for dim, size in enumerate(layout.shard):
        place = 0
        for axis in layout.axes_of(dim):
            place = place * degrees[axis] + along[axis]
        index.append(slice(place * size, (place + 1) * size))
    return stored[tuple(index)]


def on_own_rank(index: Any, num_ranks: int, run: Callable[[int], PyTree]) -> PyTree:
    """Runs `run(rank)` with this rank's number; ranks run different programs that return the same types."""
    if num_ranks == 1:
        return run(0)
    return jax.lax.switch(index, [lambda rank=rank: run(rank) for rank in range(num_ranks)])


# --------------------------------------------------------------------------------------------------
# A pipelined plan bound to a model: on which stage each parameter lives and how all of them rest.
# --------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """What a stage reads as one: a parameter, or one row of a stack of them.

    Attributes:
      name: its path; a row's has the row's number behind the stack's path.
      leaf: the parameter's position, trained ones first.
      row: the row's number; None: it is the whole parameter.
      stage: where it lives.
      layout: how it is split over the other axes than the pipeline's.
      frozen: whether it has no gradient.
    """

    name: str
    leaf: int
    row: int | None
    stage: int
    layout: Layout
    frozen: bool


@dataclass(frozen=True)
class Staging:
    """The stages of one model's parameters, and the buffers in which they rest.

    Attributes:
      policy: the schedule and its options.
      assignment: the stages of all parameters, trained ones first.
      params, frozen: how trained and frozen parameters rest.
      names: the names of all parameters, trained ones first.
      treedefs: the structures of both trees.
    """

    policy: Pipelined
    assignment: Assignment
    params: StageStore
    frozen: StageStore
    names: tuple[str, ...]
    treedefs: tuple[Any, Any]

    @classmethod
    def of(
        cls, policy: Pipelined, assignment: Assignment, params: PyTree, frozen: PyTree, degrees: Mapping[str, int]
    ) -> "Staging":
        """Binds an assignment to stages to the layouts of the parameters.

        Args:
          policy: the plan's.
          assignment: the stages of all parameters, trained ones first.
          params, frozen: trees of layouts.
          degrees: size of every mesh axis.
        """
        num_ranks = degrees[AXIS]
        flat = [jax.tree.flatten(tree, is_leaf=is_layout) for tree in (params, frozen)]
        count, num_stages = len(flat[0][0]), policy.num_stages(num_ranks)
        sizes = (num_stages, num_ranks, degrees)
        stores = (
            StageStore(tuple(flat[0][0]), assignment.stages[:count], *sizes),
            StageStore(tuple(flat[1][0]), assignment.stages[count:], *sizes, frozen=True),
        )
        names = (*_names(params), *_names(frozen))
        return cls(policy, assignment, *stores, names, (flat[0][1], flat[1][1]))

    @property
    def num_ranks(self) -> int:
        """S, the ranks of the pipeline."""
        return self.params.num_ranks

    @property
    def num_stages(self) -> int:
        """S*V, the stages of the model."""
        return self.params.num_stages

    @property
    def stack(self) -> Stack | None:
        """The blocks that are divided row by row; None: there are none."""
        return self.assignment.stack

    @property
    def rows_per_stage(self) -> int:
        """How many rows of a stack every stage has; 0: there is none."""
        return self.stack.rows // self.num_stages if self.stack is not None else 0

    @cached_property
    def weights(self) -> list[Weight]:
        """What stages read, parameter by parameter, trained ones first, and of a stack row by row."""
        found, count = [], len(self.params.layouts)
        layouts = (*self.params.layouts, *self.frozen.layouts)
        for leaf, (name, layout, stage) in enumerate(zip(self.names, layouts, self.assignment.stages, strict=True)):
            if stage is not None:
                found.append(Weight(name, leaf, None, stage, layout, leaf >= count))
                continue
            assert self.stack is not None
            own = layout.row()
            for row in range(self.stack.rows):
                place = row // self.rows_per_stage
                found.append(Weight(self.stack.row_name(name, row), leaf, row, place, own, leaf >= count))
        return found

    @cached_property
    def begins(self) -> Sequence[Sequence[int]] | None:
        """For every stage but the first the weights (positions) whose first use begins it; None: marks say where."""
        if self.stack is None:
            return self.assignment.begins
        firsts = [stage * self.rows_per_stage for stage in range(1, self.num_stages)]
        return [[i for i, weight in enumerate(self.weights) if weight.row == first] for first in firsts]

    def slots(self, rank: int) -> dict[int, Slot]:
        """The slots in which the weights (positions) of a rank rest."""
        found, count = {}, len(self.params.layouts)
        for i, (_, leaf, row, stage, layout, frozen) in enumerate(self.weights):
            if stage % self.num_ranks != rank:
                continue
            slot = self.frozen.slots[leaf - count] if frozen else self.params.slots[leaf]
            if row is not None:
                place = stage // self.num_ranks * self.rows_per_stage + row % self.rows_per_stage
                size = math.prod(layout.shard)
                slot = slot._replace(offset=slot.offset + place * size, shape=layout.shard)
            found[i] = slot
        return found

    def place_params(self, params: PyTree, mesh: Mesh) -> Named:
        """Packs full trained parameters in this process's memory into the resting arrays."""
        return self.params.place(jax.tree.leaves(params), mesh)

    def place_frozen(self, frozen: PyTree, mesh: Mesh) -> Named:
        """Packs full frozen parameters in this process's memory into the resting arrays."""
        return self.frozen.place(jax.tree.leaves(frozen), mesh)

    def spread_params(self, named: Named, mesh: Mesh) -> PyTree:
        """Unpacks trained parameters, or their gradients, into the model's tree, split over all devices."""
        return self.treedefs[0].unflatten(self.params.spread(named, mesh))

    def spread_frozen(self, named: Named, mesh: Mesh) -> PyTree:
        """Unpacks frozen parameters into the model's tree, split over all devices."""
        return self.treedefs[1].unflatten(self.frozen.spread(named, mesh))

    def parts(self, named: Named) -> Iterator[tuple[jax.Array, Any, tuple[str, ...]]]:
        """Every buffer of trained parameters or their gradients, its dtype, and the axes that split it."""
        for name, group in sorted(self.params.groups.items()):
            yield named[name], group.dtype, (AXIS, *group.axes)

    def resting(self, params: Named, frozen: Named) -> Buffers:
        """This rank's buffers of trained and frozen parameters, by group."""
        return self.params.grouped(params) | self.frozen.grouped(frozen)


def _names(tree: PyTree) -> Sequence[str]:
    return list(named_leaves(jax.tree.map(lambda _: 0, tree, is_leaf=is_layout)))


# --------------------------------------------------------------------------------------------------
# How the parameters of the model a user gives are assigned to stages.
# --------------------------------------------------------------------------------------------------


def stage_assigner(model: Any, view: Functional, policy: Pipelined) -> Callable[[Mapping[str, Any], int], Assignment]:
    """Builds the function by which `bind_plan` assigns a model's parameters to stages.

    Args:
      model: what the user gave, of which only a chain says more than its view.
      view: its view, which knows in what order it was written.
      policy: the plan's.
    """

    model = model.model if isinstance(model, ModelAround) else model

    def assigned(shapes: Mapping[str, Any], num_stages: int) -> Assignment:
        if isinstance(model, (Chain, LinenChain)):
            return _of_chain(model, shapes, num_stages, policy)
        order = view.order
        known = order is not None and all(name in order for name in shapes)
        found = assign(shapes, num_stages, split=policy.split, order=order if known else None)
        if not known and policy.split is None and num_stages > 1:
            loose = [name for name, stage in zip(shapes, found.stages, strict=True) if stage is not None]
            _warn_of_names(loose, kinds=2 if found.stack is None else 1)
        return found

    return assigned


def _warn_of_names(names: Sequence[str], kinds: int) -> None:
    """Warns where blocks of so many kinds, or more, are ordered by their names alone."""
    found = dict.fromkeys(path.rstrip("0123456789") for path in units(names, None, {}))
    if len(found) >= kinds:
        warn(
            f"stages follow the names of {', '.join(f'{kind}*' for kind in found)}: the order in which these are called is "
            "unknown, because jax.jit and jax.tree.map sort parameters. What a stage reads of another stage is sent in "
            "every step. Give params= what module.init returned, or a function that calls it (params=lambda: module.init(key, "
            "example)), or say where stages begin (split=)",
        )


def _of_chain(chain: Chain | LinenChain, shapes: Mapping[str, Any], num_stages: int, policy: Pipelined) -> Assignment:
    given = len(chain.groups)
    if policy.split is not None:
        raise ValueError(
            f"split={policy.split!r} says where stages begin, and so do the modules given one by one: give one"
        )
    if given != num_stages:
        ranks = num_stages // policy.chunks
        raise ValueError(
            f"{given} stages were given for {ranks} ranks x {policy.chunks} chunks = {num_stages}: give that many, or a mesh "
            f"and chunks whose product is {given}"
        )
    return by_prefix(list(shapes), chain.prefixes(), stage_of_modules(chain))
