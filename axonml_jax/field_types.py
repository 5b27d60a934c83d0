"""Whether a value's numbers, flags and choices are what its class says: no type checker has seen what a file holds."""

import functools
import math
import numbers
import typing
from collections.abc import Iterator
from typing import Any

_COUNTED = 2**31
_WORDS = {int: f"a whole number below {_COUNTED:,}", float: "a finite number", bool: "true or false"}


def wrong_types(config: Any) -> Iterator[str]:
    """A line for every number and flag that is none, and for every choice that there is not.

    Args:
      config: a dataclass.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Sizes:
    ...     width: int | None = None
    ...     kind: typing.Literal["plain", "gated"] = "plain"
    >>> list(wrong_types(Sizes(width=3, kind="plain")))
    []
    >>> print(*wrong_types(Sizes(width=True, kind="gelu")), sep="\\n")
    width=True: must be a whole number below 2,147,483,648, or None
    kind='gelu': must be one of plain, gated
    """
    for name, kinds in _kinds(type(config)).items():
        value = getattr(config, name)
        if not any(_fits(value, kind) for kind in kinds):
            words = [_WORDS[kind] for kind in kinds if kind in _WORDS]
            words += [f"one of {', '.join(map(str, chosen))}" for chosen in map(_choices, kinds) if chosen]
            yield f"{name}={value!r:.60}: must be {', or '.join(words)}{', or None' * (type(None) in kinds)}"


@functools.cache
def _kinds(cls: type) -> dict[str, tuple[Any, ...]]:
    hints = typing.get_type_hints(cls).items()
    found = {name: (kind,) if _choices(kind) else typing.get_args(kind) or (kind,) for name, kind in hints}
    return {name: kinds for name, kinds in found.items() if any(each in _WORDS or _choices(each) for each in kinds)}


def _choices(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _fits(value: Any, kind: Any) -> bool:
    if chosen := _choices(kind):
        return isinstance(value, str) and value in chosen
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, numbers.Integral) and abs(int(value)) < _COUNTED
    if kind is float:
        return isinstance(value, numbers.Real) and _is_finite(value)
    return isinstance(value, kind)


def _is_finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number without end
        return False
