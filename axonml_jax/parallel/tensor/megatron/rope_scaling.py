"""How rotary frequencies are changed for sequences longer than those of pretraining. Nothing here imports JAX."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from axonml_jax.field_types import wrong_types


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A rule by which rotary frequencies change.

    Attributes:
      kind: linear divides all frequencies (Chen et al. 2023); llama3 the low ones, with a ramp in between (Llama 3.1); yarn
        likewise by turns within the length of pretraining, and scales queries and keys (Peng et al. 2023).
      factor: by which low frequencies are divided.
      original_length: longest sequence of pretraining; for llama3 and yarn.
      low_frequency: llama3: frequencies of fewer turns than this within original_length are divided.
      high_frequency: llama3: those of more stay.
      slow: yarn: those of fewer turns are divided.
      fast: yarn: those of more stay.
      truncate: yarn: whether the ramp begins and ends at whole dims.
      attention_factor: yarn: what multiplies cosines and sines; null: 0.1 * ln(factor) + 1.
    """

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_length: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    slow: float = 1.0
    fast: float = 32.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self):
        if problems := list(wrong_types(self)) or list(self._problems()):
            raise ValueError("RopeScaling:\n" + "\n".join(f"  - {line}" for line in problems))

    def _problems(self) -> Iterator[str]:
        foreign = [
            f"{each.name}={getattr(self, each.name)}"
            for each in fields(self)
            if each.name not in ("kind", *_OWN[self.kind]) and getattr(self, each.name) != each.default
        ]
        if foreign:
            yield f"{', '.join(foreign)}: without effect for kind={self.kind}"
        if self.kind != "none" and self.factor < 1:
            yield f"factor={self.factor}: must be at least 1"
        if "original_length" in _OWN[self.kind] and self.original_length < 1:
            yield f"original_length={self.original_length}: must be the longest sequence of pretraining"
        for low, high in (("low_frequency", "high_frequency"), ("slow", "fast")):
            if not 0 < getattr(self, low) < getattr(self, high):
                yield f"{low}={getattr(self, low)}: must be positive and below {high}={getattr(self, high)}"
        if self.attention_factor is not None and self.attention_factor <= 0:
            yield f"attention_factor={self.attention_factor}: must be positive"

    @property
    def attention_scale(self) -> float:
        """What multiplies cosines and sines, and so queries and keys."""
        if self.kind != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def frequencies(self, theta: float, size: int, xp: Any = np) -> Any:
        """Radians per position of each pair of dims of a head, float32 [size / 2].

        Args:
          theta: base of the frequencies.
          size: of a head.
          xp: NumPy, or `jax.numpy`, by which they are computed where they are used: a constant would be an array that a
            traced program takes in.

        >>> RopeScaling(kind="linear", factor=2.0).frequencies(10_000.0, 4).tolist()
        [0.5, 0.004999999888241291]
        """
        plain = theta ** (-xp.arange(size // 2, dtype=np.float32) / (size // 2))
        kept = self._kept(plain, theta, size, xp)
        return plain * (1 - kept) / self.factor + plain * kept

    def _kept(self, plain: Any, theta: float, size: int, xp: Any) -> Any:
        """Which part of a frequency stays, from 0 to 1."""
        if self.kind in ("none", "linear"):
            return float(self.kind == "none")
        if self.kind == "llama3":
            turns = self.original_length * plain / (2 * math.pi)
            return xp.clip((turns - self.low_frequency) / (self.high_frequency - self.low_frequency), 0, 1)
        dim = lambda turns: size * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        first, last = dim(self.fast), dim(self.slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        ramp = (xp.arange(size // 2, dtype=np.float32) - first) / (last - first if last != first else 0.001)
        return 1 - xp.clip(ramp, 0, 1)


_OWN = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_length", "low_frequency", "high_frequency"),
    "yarn": ("factor", "original_length", "slow", "fast", "truncate", "attention_factor"),
}
"""Which attributes each kind reads."""
