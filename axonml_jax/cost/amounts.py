"""Sizes and counts as the cost model takes them: numbers, or arrays with an entry for every candidate of a planner."""

from typing import Any

import numpy as np

Many = Any
"""An int, a `Fraction` or a float; or a numpy array: of floats where it is large, as integers overflow without a word."""


def varies(amount: Many) -> bool:
    """Whether an amount is an array."""
    return isinstance(amount, np.ndarray)


def nothing(amount: Many) -> bool:
    """Whether an amount is the number 0; an array may hold something."""
    return not varies(amount) and not amount


def divided(amount: Many, parts: Many) -> Many:
    """`amount // parts`, which numpy does slowly to arrays of floats; those are exact up to 2**53.

    >>> divided(7, 2), divided(np.array([7.0, 8.0]), 2)
    (3, array([3., 4.]))
    """
    return np.floor(amount / parts) if varies(amount) or varies(parts) else amount // parts


def plain(amount: Many) -> Many:
    """An array whose entries are all equal as the number.

    >>> plain(np.array([2, 4]) * np.array([4, 2])), plain(3)
    (8, 3)
    """
    return amount.flat[0].item() if varies(amount) and (amount == amount.flat[0]).all() else amount


def several(ranks: Many) -> bool:
    """Whether ranks are more than one; of arrays they may be."""
    return varies(ranks) or ranks > 1


def either(holds: Many, yes: Many, no: Many) -> Many:
    """`yes` where something holds, elsewhere `no`.

    >>> either(2 > 1, 3, 4), either(np.array([True, False]), 3, 4)
    (3, array([3, 4]))
    """
    if varies(holds):
        return np.where(holds, yes, no)
    return yes if holds else no


def most(*amounts: Many) -> Many:
    """The largest.

    >>> most(1, 2), most(2, np.array([1, 3]))
    (2, array([2, 3]))
    """
    return _chosen(amounts, max, np.maximum)


def least(*amounts: Many) -> Many:
    """The smallest."""
    return _chosen(amounts, min, np.minimum)


def _chosen(amounts: tuple[Many, ...], one: Any, many: Any) -> Many:
    numbers = [amount for amount in amounts if not varies(amount)]
    chosen = [one(numbers)] if numbers else []
    for amount in amounts:
        if varies(amount):
            chosen = [many(chosen[0], amount) if chosen else amount]
    return chosen[0]
