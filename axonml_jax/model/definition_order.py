"""In which order a model's parameters are read, as far as it can be told before a batch is seen: as its author defined them."""

from collections.abc import Iterator
from typing import Any

from flax import nnx


def definition_order(model: nnx.Module) -> dict[str, tuple]:
    """A sort key of every variable's path: the places of the attributes on the way to it, in the order of assignment."""
    return {"/".join(path): place for path, place in _walk(model, (), (), set())}


def _walk(node: Any, path: tuple, place: tuple, seen: set[int]) -> Iterator[tuple[tuple, tuple]]:
    if isinstance(node, nnx.Variable):
        yield path, place
        return
    if id(node) in seen:
        return
    seen.add(id(node))
    for i, (name, child) in enumerate(_children(node)):
        yield from _walk(child, (*path, name), (*place, i), seen)


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, (list, tuple, nnx.List)):
        return [(str(i), child) for i, child in enumerate(node)]
    if isinstance(node, dict):
        return [(str(name), child) for name, child in node.items()]
    if isinstance(node, nnx.Module):
        return [(name, child) for name, child in vars(node).items() if not name.startswith("_pytree")]
    return []
