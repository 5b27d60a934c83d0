"""Which parameters train: splitting a nest of parameters by path name."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from axonml_jax._types import PyTree, named_leaves


def selector(trainable: Any) -> Callable[[str], bool]:
    """A predicate of path names from None (all), regular expressions (searched in the name), or a predicate.

    >>> selector(["^head/", "bias$"])("blocks/0/bias")
    True
    """
    if trainable is None:
        return lambda name: True
    if callable(trainable):
        return lambda name: bool(trainable(name))
    patterns = [trainable] if isinstance(trainable, str) else trainable
    if not isinstance(patterns, Iterable) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"trainable={trainable!r} says nothing about parameters: give regular expressions of path names, a predicate "
            "of the path name, an NNX variable type, or None for all"
        )
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise ValueError(f"trainable={trainable!r}: {error.pattern!r} is no regular expression: {error}") from error
    return lambda name: any(pattern.search(name) for pattern in compiled)


def partition(params: PyTree, trainable: Any, given: Any = None) -> tuple[PyTree, PyTree]:
    """Split a nest of dicts into (trained, frozen); the two merge back with `merge`. `given` is what the user wrote.

    Raises:
      ValueError: when there are parameters and none of them trains.
    """
    names = list(named_leaves(params))
    select = selector(trainable)
    chosen = {name for name in names if select(name)}
    if names and not chosen:
        raise ValueError(
            f"trainable={trainable if given is None else given!r} matches none of the {len(names)} parameters, so nothing "
            f"would train; their paths are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        )
    return _keep(params, chosen, True, ()), _keep(params, chosen, False, ())


def _keep(tree: PyTree, chosen: set[str], wanted: bool, path: tuple) -> PyTree:
    kept = {}
    for key, value in tree.items():
        name = (*path, str(key))
        if isinstance(value, dict):
            if inner := _keep(value, chosen, wanted, name):
                kept[key] = inner
        elif ("/".join(name) in chosen) == wanted:
            kept[key] = value
    return kept


def merge(*trees: PyTree) -> PyTree:
    """The union of nests of dicts that share no leaf.

    >>> merge({"a": {"x": 1}}, {"a": {"y": 2}}, {})
    {'a': {'x': 1, 'y': 2}}
    """
    merged: dict = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and key in merged
            merged[key] = merge(merged[key], value) if both else value
    return merged
