"""Flags of `train` and `explain` that are no keys of a configuration: taken out before it is read, and told of in its help."""

import argparse
from collections.abc import Sequence
from typing import Any


def split_flags(
    parsers: Sequence[argparse.ArgumentParser], argv: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The values of every parser's flags, and the arguments that are left for the configuration."""
    found, rest = [], list(argv)
    for parser in parsers:
        values, rest = parser.parse_known_args(rest)
        found.append(vars(values))
    return found, rest


def help_of(parsers: Sequence[argparse.ArgumentParser]) -> str:
    """One sentence that names the flags and says what they do."""
    actions = [action for parser in parsers for action in parser._actions]
    return f"Beside the keys there are {'; '.join(map(_told, actions))}."


def _told(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or 'NAME'}"
    return f"{action.option_strings[0]}{value}: {action.help}"
