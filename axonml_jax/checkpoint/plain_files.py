"""Values that JSON holds as they are: what a checkpoint may say about itself."""

import math
import operator
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def plain(name: str, value: Any) -> Any:
    """A value as Python's own: NumPy's and JAX's numbers and arrays become numbers and lists, tuples become lists.

    Args:
      name: what the value is, for the error.
      value: nested dicts with text as keys, lists, text, numbers, booleans and None.

    Raises:
      TypeError: naming every value that is none of these, by path.
    """
    wrong: list[str] = []
    found = _plain(name, value, wrong)
    if wrong:
        raise TypeError(
            f"a checkpoint keeps plain values (text, numbers, booleans, None, lists, dicts with text as keys), not "
            f"{', '.join(wrong)}: turn it into one, or leave it out"
        )
    return found


def number(name: str, value: Any) -> float:
    """A metric as a float.

    Raises:
      TypeError: when it is no number.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a {type(value).__name__}, and must be a number") from None


def step_number(step: Any) -> int:
    """A step as a plain number; NumPy's and JAX's are numbers too.

    Raises:
      TypeError, ValueError: when it is no whole number, or below 0.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step={step!r} must be a whole number: the updates made") from None
    if number < 0:
        raise ValueError(f"step={number} must be at least 0: the updates made")
    return number


def is_whole(value: Any, lowest: int = 0, below: float = math.inf) -> bool:
    """Whether something is a whole number of a range; a boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value < below


def _plain(name: str, value: Any, wrong: list[str]) -> Any:
    if isinstance(value, np.generic | np.ndarray | jax.Array) and not _is_key(value):
        value = np.asarray(value).tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        wrong += [f"the key {key!r} of {name}" for key in value if not isinstance(key, str)]
        return {str(key): _plain(f"{name}[{key!r}]", each, wrong) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{index}]", each, wrong) for index, each in enumerate(value)]
    wrong.append(f"{name}, a {type(value).__name__}")
    return None


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
