"""The section `ema` of a configuration."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An exponential moving average of the parameters, kept beside them and validated too.

    Attributes:
      decay: of the average in every update, such as 0.999; null keeps none.
    """

    decay: float | None = None

    def __post_init__(self):
        if self.decay is not None and not 0 <= self.decay < 1:
            raise ValueError(f"ema.decay={self.decay}: must be at least 0 and below 1, such as 0.999")
