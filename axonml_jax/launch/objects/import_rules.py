"""Which packages a configuration may import: `optax`, and those that the user names. Nothing is imported here."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

ALWAYS = frozenset({"optax"})
"""Packages whose objects a configuration may name without being asked."""

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def is_named(value: Any) -> bool:
    """Whether a value of a configuration describes an object."""
    return isinstance(value, Mapping) and "class_path" in value


def named_paths(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, class_path) of every object that a value describes, those among arguments too.

    >>> [*named_paths({"class_path": "optax.sgd", "init_args": {"learning_rate": {"class_path": "a.b"}}}, "optim")]
    [('optim.class_path', 'optax.sgd'), ('optim.init_args.learning_rate.class_path', 'a.b')]
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            at = f"{key}.{name}" if key else str(name)
            if name == "class_path" and inner is not None:
                yield at, inner
            else:
                yield from named_paths(inner, at)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from named_paths(inner, f"{key}[{number}]")


def import_problems(value: Any, allowed: Collection[str]) -> list[str]:
    """Every object that the user has not said may be imported, with the flag that says so. Imports nothing.

    >>> import_problems({"model": {"class_path": "mine.Net"}}, {"optax"})
    ["model.class_path=mine.Net: imports the package 'mine', which runs its code; if you trust it, add --allow-imports mine"]
    """
    problems = []
    for key, path in named_paths(value):
        if not isinstance(path, str) or not _DOTTED.fullmatch(path):
            problems.append(f"{key}={path}: must be the dotted path of a class or function, such as optax.adafactor")
        elif (package := path.partition(".")[0]) not in ALWAYS | set(allowed):
            problems.append(
                f"{key}={path}: imports the package {package!r}, which runs its code; if you trust it, add "
                f"--allow-imports {package}"
            )
    return problems
