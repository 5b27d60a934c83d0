"""A setting that is a mapping or a list of mappings: taken as it is written, so that reading it imports and makes nothing."""

import argparse
import typing
from collections.abc import Mapping
from typing import Any

import yaml
from jsonargparse import get_loader


class NotPlain(argparse.ArgumentTypeError, ValueError):
    """A value that is not made of what a YAML file writes, or not as the setting wants it."""


class Structure:
    """The type of such a setting, for a parser, which by itself would import what a `class_path` inside of it names.

    Args:
      kind: what `is_structure` is true of.
      words: the values as people read them.
    """

    def __init__(self, kind: Any, words: str):
        self._kinds = typing.get_args(kind) if typing.get_origin(kind) not in (dict, list) else (kind,)
        self._words = words

    def __call__(self, value: Any) -> Any:
        """The value in plain types; text, as a command line has it, is read as YAML.

        Raises:
          NotPlain: when it is of another kind.
        """
        found = as_yaml(value) if isinstance(value, str) else value
        if not any(_fits(found, kind) for kind in self._kinds):
            raise NotPlain(f"Given value: {value}")
        return plain(float(found) if isinstance(found, int) else found)

    def __repr__(self) -> str:
        return self._words


def is_structure(kind: Any) -> bool:
    """Whether a setting of this type may hold anything, and so descriptions of objects.

    >>> is_structure(list[dict[str, Any]] | None), is_structure(dict[str, float])
    (True, False)
    """
    return kind is Any or any(is_structure(part) for part in typing.get_args(kind))


def plain(value: Any) -> Any:
    """A copy in what YAML writes: text, numbers, true and false, null, lists, and mappings with keys of those.

    >>> plain({"boundaries": {10: 0.5}, "paths": ("a", "b")})
    {'boundaries': {10: 0.5}, 'paths': ['a', 'b']}

    Raises:
      NotPlain: for anything else.
    """
    if isinstance(value, Mapping):
        return {plain(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise NotPlain(f"Given value: {value!r}, a {type(value).__name__}")


def as_yaml(text: str) -> Any:
    """The value of a flag's text, numbers as people write them; the text itself where it is no YAML."""
    try:
        return get_loader("yaml")(text)
    except (yaml.YAMLError, ValueError):  # a tag whose text is none of its kind
        return text


def _fits(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(each, *typing.get_args(kind)) for each in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return value is None and kind is type(None)
