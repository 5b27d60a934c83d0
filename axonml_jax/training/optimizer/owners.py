"""Which parameter a leaf of the optimizer's state belongs to: seen in the structure of the state, never in names alone."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from axonml_jax._types import PyTree

Path = tuple[Any, ...]


def owners(state: PyTree, params: PyTree) -> list[int | None]:
    """For every leaf of an optimizer's state the parameter (position in tree order) it belongs to, or None.

    Optax keeps what belongs to parameters in trees shaped like theirs, in which `optax.MaskedNode` may stand for those that
    a mask leaves out, and a parameter may have several leaves. A node of the state whose leaves cover all parameters and
    nothing else is such a tree. A dict of hyperparameters is none, even if one is called like a parameter.

    >>> params = {"learning_rate": 0.0, "w": 1.0}
    >>> owners(({"learning_rate": 3e-4}, {"learning_rate": 0.0, "w": 0.0}, 7), params)
    [None, 0, 1, None]
    """
    positions = {path: i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    paths = [path for path, _ in _nodes(state)]
    roots = {path[:k] for path in paths for k in range(len(path) + 1)}
    below: dict[Path, list[tuple[Path, bool]]] = {root: [] for root in roots}
    for path, node in _nodes(state):
        for k in range(len(path) + 1):
            below[path[:k]].append((path[k:], _is_masked(node)))
    trees = {root for root, leaves in below.items() if _covers(leaves, positions)}

    def owner(path: Path) -> int | None:
        ends = (path[k:] for k in range(len(path)) if path[:k] in trees)
        return next((positions[end[:k]] for end in ends for k in range(1, len(end) + 1) if end[:k] in positions), None)

    return [owner(path) for path, node in _nodes(state) if not _is_masked(node)]


def _covers(leaves: list[tuple[Path, bool]], positions: Mapping[Path, int]) -> bool:
    """Whether paths of a node's leaves, and of what masks left out, are those of all parameters and of nothing else."""
    seen: set[int] = set()
    for path, masked in leaves:
        at = next((positions[path[:k]] for k in range(1, len(path) + 1) if path[:k] in positions), None)
        if at is not None:
            seen.add(at)
        elif masked and (left_out := [i for end, i in positions.items() if end[: len(path)] == path]):
            seen.update(left_out)
        else:
            return False
    return len(seen) == len(positions)


def _nodes(state: PyTree) -> list[tuple[Path, Any]]:
    return jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
