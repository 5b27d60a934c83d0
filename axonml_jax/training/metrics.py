"""What was measured, as numbers, and how fast a run is: tokens or examples per second, time per step, share of the peak."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from axonml_jax.sharding.place import to_host


def as_floats(metrics: Mapping[str, jax.Array]) -> dict[str, float]:
    """Metrics as floats; the mean over models where there are several (NO_SYNC). Every process must call it."""
    return {name: float(np.mean(value, dtype=np.float64)) for name, value in to_host(dict(metrics)).items()}


def mean_of(results: Sequence[Mapping[str, float]], weights: Sequence[float] | None = None) -> dict[str, float]:
    """The mean of every metric over batches, of these weights or of equal ones.

    Raises:
      ValueError: when there are no batches.
    """
    if not results:
        raise ValueError("there are no batches to evaluate on: a mean needs at least one")
    return {name: float(np.average([result[name] for result in results], weights=weights)) for name in results[0]}


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What turns a step's duration into speeds.

    Attributes:
      tokens_per_step: tokens (or other units) of a global batch.
      flops_per_token: model FLOPs of one training token (see `TransformerConfig.flops_per_token`); None where it is not known,
        and then there is no MFU.
      num_devices: devices that share the work.
      peak_flops: peak FLOP/s of one device; None where it is not known, and then there is no MFU.
      unit: what is counted: "tokens", or "examples".
      before: how many more of them the first steps had, of batches of another size.

    >>> speed = Throughput(tokens_per_step=1000, flops_per_token=6e9, num_devices=2, peak_flops=12e12)
    >>> speed.of(num_steps=10, seconds=5.0)
    {'step_time': 0.5, 'tokens_per_second': 2000.0, 'mfu': 0.5}
    """

    tokens_per_step: int
    flops_per_token: float | None
    num_devices: int
    peak_flops: float | None = None
    unit: str = "tokens"
    before: int = 0

    def total(self, step: int) -> int:
        """Tokens of all steps up to one."""
        return self.before + step * self.tokens_per_step

    def of(self, *, num_steps: int, seconds: float) -> dict[str, float]:
        """Metrics of steps that took `seconds` together.

        Returns:
          `step_time` (seconds), `tokens_per_second` (all devices; or `examples_per_second`) and, where the peak is known,
          `mfu`: model FLOPs per second over peak FLOP/s (Chowdhery et al. 2022).
        """
        tokens_per_second = num_steps * self.tokens_per_step / seconds
        speeds = {"step_time": seconds / num_steps, f"{self.unit}_per_second": tokens_per_second}
        if self.peak_flops is not None and self.flops_per_token is not None:
            speeds["mfu"] = self.flops_per_token * tokens_per_second / (self.num_devices * self.peak_flops)
        return speeds
