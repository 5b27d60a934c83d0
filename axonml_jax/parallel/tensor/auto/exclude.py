"""Layers that the user leaves out of `auto_parallelize`: by path, or by the type of a module."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

Rule = str | type
"""A regular expression of a module's whole path, or a type of modules; what is inside such a module is left out too."""


def rules_of(exclude: Rule | Collection[Rule], *, paths: bool = True) -> tuple[Rule, ...]:
    """What the user wrote as a tuple.

    Args:
      exclude: one rule or several.
      paths: whether layers have paths yet.

    Raises:
      TypeError: for anything else, and for paths where there are none.
      ValueError: for what is no regular expression.
    """
    rules: tuple[Any, ...] = tuple(exclude) if isinstance(exclude, list | tuple | set | frozenset) else (exclude,)
    wrong = [rule for rule in rules if not isinstance(rule, str | type)]
    if wrong:
        raise TypeError(
            f"exclude={exclude!r} has {wrong}: give regular expressions of module paths ('decoder/position') or "
            "types of modules"
        )
    if not paths and (names := [rule for rule in rules if isinstance(rule, str)]):
        raise TypeError(
            f"exclude={names} are paths, and layers made in a block have none yet: give types of modules there, or swap the "
            "finished model, auto_parallelize(model, mesh, exclude=...)"
        )
    for rule in rules:
        try:
            re.compile(rule if isinstance(rule, str) else "")
        except re.error as error:
            raise ValueError(f"exclude: {rule!r} is no regular expression: {error}") from error
    return rules


def excluded(modules: Mapping[tuple, Any], rules: Iterable[Rule]) -> dict[tuple, str]:
    """The modules that are left out, each with the reason.

    Raises:
      ValueError: for a rule that matches nothing, with the nearest path or the types there are.
    """
    names = {path: "/".join(map(str, path)) for path in modules}
    found: dict[tuple, str] = {}
    unused = []
    for rule in rules:
        outer = [path for path, module in modules.items() if _matches(rule, names[path], module)]
        if not outer:
            unused.append(_nothing(rule, [name for name in names.values() if name], modules))
        for path in modules:
            if any(path[: len(each)] == each for each in outer):
                found[path] = f"excluded by {rule!r}" if isinstance(rule, str) else f"excluded by {rule.__name__}"
    if unused:
        raise ValueError("exclude leaves out nothing by these:\n" + "\n".join(unused))
    return found


def _matches(rule: Rule, name: str, module: Any) -> bool:
    return re.fullmatch(rule, name) is not None if isinstance(rule, str) else isinstance(module, rule)


def _nothing(rule: Rule, names: list[str], modules: Mapping[tuple, Any]) -> str:
    if isinstance(rule, type):
        kinds = sorted({type(module).__name__ for module in modules.values()})
        return f"  {rule.__name__}: the model has no such module, but {', '.join(kinds)}"
    near = difflib.get_close_matches(rule, names, n=1, cutoff=0.0)
    return f"  {rule!r}: no module has this path" + (f"; the nearest is {near[0]!r}" if near else "")
