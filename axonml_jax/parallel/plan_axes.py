"""The strategies of mesh axes that a plan has no name of its own for, as an immutable mapping."""

from collections.abc import Iterator, Mapping
from typing import Any

from axonml_jax.mesh.axes import AXES, LAYER_AXES, AxisNames, as_axes
from axonml_jax.parallel.strategies.strategy import AbstractStrategy


class PlanAxes(Mapping[AxisNames, AbstractStrategy]):
    """Strategies by axis name, or by the tuple of names of the axes that one strategy owns together; hashable.

    >>> from axonml_jax.parallel.strategies.replicate import Replicate
    >>> PlanAxes({"island": Replicate()}) == {"island": Replicate()}
    True
    """

    def __init__(self, strategies: Mapping[AxisNames, AbstractStrategy]):
        self._items = {key if isinstance(key, str) else tuple(key): value for key, value in strategies.items()}

    def __getitem__(self, axis: AxisNames) -> AbstractStrategy:
        return self._items[axis if isinstance(axis, str) else tuple(axis)]

    def __iter__(self) -> Iterator[AxisNames]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def axes_problems(axes: Any) -> list[str]:
    """What is wrong with a plan's `axes`."""
    if not isinstance(axes, Mapping):
        return [f"axes={axes!r} must be a mapping of axis names (or tuples of them) to strategies"]
    keys = [key for key in axes if not _is_key(key)]
    names = [name for key in axes if key not in keys for name in as_axes(key)]
    problems = [f"axes: {key!r} must be an axis name, or a tuple of them" for key in keys]
    problems += [f"axes: {name!r} has two strategies: give it one" for name in {n for n in names if names.count(n) > 1}]
    problems += [
        f"axes: {name!r} is split by the model's own layers, which bring their strategy: leave it out"
        for name in names
        if name in LAYER_AXES
    ]
    return problems + [
        f"axes: {axis!r} has {strategy!r}, which must be an ax.AbstractStrategy"
        for axis, strategy in axes.items()
        if not isinstance(strategy, AbstractStrategy) and axis != "pipe"
    ]


def _is_key(key: Any) -> bool:
    return (isinstance(key, str) and bool(key)) or (
        isinstance(key, tuple) and bool(key) and all(isinstance(name, str) and name for name in key)
    )


def inwards(
    strategies: Mapping[AxisNames, AbstractStrategy], mesh_axes: tuple[str, ...]
) -> dict[AxisNames, AbstractStrategy]:
    """Those strategies whose axes a mesh has, from the outermost axis inwards.

    The library's axes come in their canonical order. An axis of the user's own comes right behind the library's axis that
    stands before it in the mesh.

    Args:
      strategies: by axis, or by several.
      mesh_axes: the names of the mesh's axes, in its order.

    Raises:
      ValueError: when the mesh has some but not all axes of one strategy.
    """

    def place(key: AxisNames) -> tuple[float, int]:
        first = as_axes(key)[0]
        position = mesh_axes.index(first)
        if first in AXES:
            return AXES.index(first), position
        before = [AXES.index(name) for name in mesh_axes[:position] if name in AXES]
        return (before[-1] if before else -1) + 0.5, position

    missing = {key: [name for name in as_axes(key) if name not in mesh_axes] for key in strategies}
    if torn := {key: names for key, names in missing.items() if names and len(names) < len(as_axes(key))}:
        raise ValueError(
            f"one strategy owns the axes {', '.join(map(str, torn))} together, but the mesh {mesh_axes} lacks "
            f"{sorted({name for names in torn.values() for name in names})}: give the mesh these axes (of degree 1 if need be)"
        )
    there = [key for key, names in missing.items() if not names]
    return {key: strategies[key] for key in sorted(there, key=place)}
