"""A setting with a fixed set of values, taken however its value is spelt and by the names that others have for it."""

import argparse
import typing
from typing import Any

from axonml_jax.synonyms import meant


class WrongChoice(argparse.ArgumentTypeError, ValueError):
    """A value that is none of a setting's."""


class Choice:
    """The type of such a setting, for a parser.

    Args:
      key: of the setting; its last part is the row of the table of synonyms.
      kind: a Literal, or one or None.
      words: the values as people read them.
    """

    def __init__(self, key: str, kind: Any, words: str):
        self._setting = key.rpartition(".")[2]
        self._values = values_of(kind)
        self._nullable = type(None) in typing.get_args(kind)
        self._words = words

    def __call__(self, value: Any) -> Any:
        """The setting's value that is meant.

        Raises:
          WrongChoice: when it is none.
        """
        if self._nullable and value in (None, "null"):
            return None
        found = meant(self._setting, value, self._values)
        if found not in self._values:
            raise WrongChoice(f"Given value: {value}")
        return found

    def __repr__(self) -> str:
        return self._words


def values_of(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, or of one or None; none for any other type."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    literals = [part for part in typing.get_args(kind) if typing.get_origin(part) is typing.Literal]
    return typing.get_args(literals[0]) if literals else ()
