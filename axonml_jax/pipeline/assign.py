"""On which stage every parameter lives, and stages that are given as modules one by one."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

from axonml_jax.base import PyTree, warn
from axonml_jax.compat.jaxpr import Operation
from axonml_jax.model.view import Functional, ModelAround
from axonml_jax.pipeline.schedules import Pipelined
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
