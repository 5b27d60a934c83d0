"""Which numbers and names a configuration may hold, whatever they are for."""

import math
import os
from collections.abc import Mapping
from typing import Any

_COUNTED = 2**31 - 1
_ANY_TEXT = ("sample.prompt", "init_args")
"""Keys whose text is never a path or a name."""
_WIDER = {"data.max_bytes": 2**63 - 1, "train.seed": 2**64 - 1}


def unusable(key: str, value: Any) -> list[str]:
    """What is wrong with a value as a number (not finite, or more than the steps, sizes and places of arrays can count), or as
    text, all of which becomes names and paths but prompts and one's own arguments: what none can hold.

    >>> unusable("optim.learning_rate", float("inf")), unusable("train.steps", 1000)
    (['optim.learning_rate=inf: must be a finite number'], [])
    >>> unusable("name", "a\\0b")
    ["name='a\\\\x00b': holds '\\\\x00', which no name or path can"]

    Args:
      key: the whole key.
      value: of any kind.
    """
    if key.endswith(_ANY_TEXT):
        return []
    if isinstance(value, str):
        return [f"{key}={value!r}: holds {bad!r}, which no name or path can" for bad in _unnameable(value)[:1]]
    if isinstance(value, Mapping):
        inside = {f"{key}.{name}": each for name, each in value.items()}
        return unusable(f"{key}'s keys", [*value]) + [line for each in inside.items() for line in unusable(*each)]
    if isinstance(value, tuple | list):
        return [line for each in value for line in unusable(key, each)]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{key}={value}: must be a finite number"]
    most = _WIDER.get(key, _COUNTED)
    if isinstance(value, int) and abs(value) > most:
        bits = {_COUNTED: 32}.get(most, 64)
        return [f"{key}={value}: must be at most {most:,}, as it is counted in {bits} bits"]
    return []


def _unnameable(text: str) -> list[str]:
    """The characters of a text that no file's name can have: zeros, and halves of characters."""
    return [each for each in dict.fromkeys(text) if each == "\0" or not _encodes(each)]


def _encodes(character: str) -> bool:
    try:
        os.fsencode(character)
    except UnicodeEncodeError:
        return False
    return True
