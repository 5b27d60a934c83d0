"""Wrap policies: which parts of a model are units, whose weights are gathered together and freed again."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Wrap = type | str | Sequence[type | str] | Callable[[str], bool] | None
"""None: repeated blocks. A module type or several; regular expressions of module paths; a predicate of the module path."""


def checked_wrap(wrap: Wrap) -> Any:
    """A wrap policy as a value: None, a predicate, or a tuple of types and patterns.

    Raises:
      TypeError: when it is none of those.
      ValueError: when a pattern is no regular expression.
    """
    if wrap is None or (callable(wrap) and not isinstance(wrap, type)):
        return wrap
    rules = (wrap,) if isinstance(wrap, (type, str)) else tuple(wrap) if isinstance(wrap, Iterable) else (wrap,)
    if not rules or not all(isinstance(rule, (type, str)) for rule in rules):
        raise TypeError(
            f"wrap={wrap!r} names no parts of a model: give None for repeated blocks, a module type, a regular expression of "
            "module paths (or several), or a predicate of the module path"
        )
    for rule in rules:
        try:
            re.compile(rule if isinstance(rule, str) else "")
        except re.error as error:
            raise ValueError(f"wrap={rule!r} is no regular expression: {error}") from error
    return rules


def units(names: Sequence[str], wrap: Any, module_types: Mapping[str, type]) -> dict[str, list[int]]:
    """The leaves of every unit.

    Args:
      names: path name of every leaf, such as `blocks/0/attention/query/kernel`.
      wrap: a checked policy.
      module_types: the type of every module by its path; needed for policies of types.

    Returns:
      Positions in `names` by module path; a leaf is in the innermost unit around it, or in none.

    Raises:
      ValueError: when a policy matches no module.

    >>> units(["embed/kernel", "blocks/0/w", "blocks/1/w", "blocks/1/b"], None, {})
    {}
    >>> units(["embed/kernel", "blocks/0/w", "blocks/1/w"], None, {})
    {'blocks/0': [1], 'blocks/1': [2]}
    """
    paths = _repeated(names) if wrap is None else _matching(names, wrap, module_types)
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        around = [path for path in paths if name.startswith(path + "/")]
        if around:
            found.setdefault(max(around, key=len), []).append(i)
    return found


def _modules(names: Iterable[str]) -> list[str]:
    """The path of every module that holds a leaf, outer ones first."""
    paths: dict[str, None] = {}
    for name in names:
        parts = name.split("/")
        paths.update(dict.fromkeys("/".join(parts[:n]) for n in range(1, len(parts))))
    return sorted(paths, key=lambda path: path.count("/"))


def _repeated(names: Sequence[str]) -> list[str]:
    """Outermost modules that are numbered (`blocks/0`, `Block_0`) and have leaves of the same names as a sibling."""
    families: dict[tuple, list[str]] = {}
    for path in _modules(names):
        if numbered := re.fullmatch(r"(.*?)\d+", path):
            inside = tuple(sorted(name[len(path) :] for name in names if name.startswith(path + "/")))
            families.setdefault((numbered.group(1), inside), []).append(path)
    chosen: list[str] = []
    for paths in families.values():
        if len(paths) > 1:
            chosen += [path for path in paths if not any(path.startswith(outer + "/") for outer in chosen)]
    return chosen


def _matching(names: Sequence[str], wrap: Any, module_types: Mapping[str, type]) -> list[str]:
    paths = _modules(names)
    if not isinstance(wrap, tuple):
        chosen = [path for path in paths if wrap(path)]
    else:
        kinds = tuple(rule for rule in wrap if isinstance(rule, type))
        patterns = [rule for rule in wrap if isinstance(rule, str)]
        chosen = [
            path
            for path in paths
            if any(re.fullmatch(pattern, path) for pattern in patterns)
            or (kinds and issubclass(module_types.get(path, object), kinds))
        ]
    if not chosen:
        kinds = sorted({kind.__name__ for kind in module_types.values()})
        raise ValueError(
            f"wrap={wrap!r} matches no module with parameters; there are {', '.join(paths[:12]) or 'none'}"
            f"{', ...' if len(paths) > 12 else ''}" + (f" of the types {', '.join(kinds)}" if kinds else "")
        )
    return chosen
