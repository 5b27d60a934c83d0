"""Which numbers a configuration may hold, whatever they are for."""

import math
from typing import Any

_COUNTED = 2**31 - 1
_WIDER = {"data.max_bytes": 2**63 - 1, "train.seed": 2**64 - 1}


def unusable(key: str, value: Any) -> list[str]:
    """What is wrong with a value as a number: not finite, or more than the steps, sizes and places of arrays can count.

    >>> unusable("optim.learning_rate", float("inf")), unusable("train.steps", 1000)
    (['optim.learning_rate=inf: must be a finite number'], [])

    Args:
      key: the whole key.
      value: of any kind.
    """
    if isinstance(value, tuple | list):
        return [line for each in value for line in unusable(key, each)]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{key}={value}: must be a finite number"]
    most = _WIDER.get(key, _COUNTED)
    if isinstance(value, int) and abs(value) > most:
        bits = {_COUNTED: 32}.get(most, 64)
        return [f"{key}={value}: must be at most {most:,}, as it is counted in {bits} bits"]
    return []
