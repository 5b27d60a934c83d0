"""On which stage every parameter lives: decided from the model alone, before any batch is seen.

Where a stage begins is named by a module whose parameters it reads first. A guess that turns out wrong costs
communication, never correctness: a parameter that another stage reads than the one it lives on is sent there once per step.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axonml_jax.parallel.units.wrap import units

_LOOKED_UP = re.compile(r"(^|/|_)(embed\w*|wte|wpe|tok\w*|pos(?!t)\w*|patch\w*|stem\w*)(/|_|$)", re.IGNORECASE)

Order = Mapping[str, tuple]
"""A sort key of every parameter's path: its place in the model."""


@dataclass(frozen=True)
class Assignment:
    """Where parameters live and where stages begin.

    Attributes:
      stages: the stage of every parameter, in tree order.
      begins: for every stage but the first the parameters (positions in tree order) whose first use begins it; None: marks
        in the program say where (see `chain.py`).
    """

    stages: tuple[int, ...]
    begins: tuple[tuple[int, ...], ...] | None


def assign(
    shapes: Mapping[str, Any], num_stages: int, *, split: Sequence[str] | None = None, order: Order | None = None
) -> Assignment:
    """Assign a model's parameters to stages.

    Args:
      shapes: anything with a shape for every parameter, by path, in tree order.
      num_stages: how many.
      split: module paths at which the second and later stages begin; None: between repeated blocks, by balanced cost.
      order: the places of parameters in the model; None: known by their names.

    Raises:
      ValueError: when there are more stages than blocks, or a path names nothing.

    >>> import numpy as np
    >>> shapes = {name: np.ones((4, 4)) for name in ("embed/w", "blocks/0/w", "blocks/1/w", "head/w")}
    >>> assign(shapes, 2).stages
    (0, 0, 1, 1)
    """
    names = list(shapes)
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
    """The assignment of modules whose stages are given: a parameter belongs to the module whose prefix its path has.

    >>> by_prefix(["stages/0/w", "stages/1/w", "stages/2/w"], ["stages/0/", "stages/1/", "stages/2/"], [0, 0, 1]).stages
    (0, 0, 1)
    """
    owner = (next(i for i, prefix in enumerate(prefixes) if name.startswith(prefix)) for name in names)
    return Assignment(tuple(stages[i] for i in owner), None)


def balanced(costs: Sequence[float], num_parts: int) -> list[int]:
    """Where the second and later of `num_parts` runs of consecutive items begin so that the dearest run is cheapest.

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
            "chunks), or say where stages begin with split=('path/of/module', ...) or Pipeline.from_modules([...]). Blocks "
            "whose parameters are stacked under one scan count as one module; write them as a list of modules"
        )
    costs = [_cost(shapes, [names[i] for i in found[path]]) for path in blocks]
    first, last = (min(order[names[i]] for i in found[path]) for path in (blocks[0], blocks[-1]))
    loose = [name for name in names if not any(name.startswith(path + "/") for path in blocks)]
    costs[0] += _cost(shapes, [name for name in loose if order[name] < first and not _LOOKED_UP.search(name)])
    costs[-1] += _cost(shapes, [name for name in loose if order[name] > last])
    return [blocks[i] for i in balanced(costs, num_stages)]


def _cost(shapes: Mapping[str, Any], names: Sequence[str]) -> float:
    """Multiplications per example: the elements of matrices. What is looked up costs nothing."""
    total = 0.0
    for name in names:
        size = 1.0
        for dim in shapes[name].shape:
            size *= dim
        total += size if len(shapes[name].shape) > 1 else 0.0
    return total


def _by_name(name: str) -> tuple:
    """The place of a parameter that only its name tells: embeddings first, then numbered modules, then the rest."""
    numbered = re.search(r"\d+", name)
    kind = 0 if _LOOKED_UP.search(name) else 1 if numbered else 2
    return kind, *((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
