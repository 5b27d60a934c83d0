"""Options of layers, by name and number: attention kernels, rotary scaling, sizes of latents."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from axonml_jax.base import wrong_types

# --------------------------------------------------------------------------------------------------
# The forms of attention by name: read by configurations, which must not start JAX.
# --------------------------------------------------------------------------------------------------

ATTENTIONS = ("auto", "xla", "blocks", "splash", "cudnn")
"""What a configuration may ask for: the best that applies, the einsum form, the blockwise form, or one of the kernels."""


# --------------------------------------------------------------------------------------------------
# How rotary frequencies are changed for sequences longer than those of pretraining. Nothing here imports JAX.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A rule that changes rotary frequencies for longer sequences.

    Attributes:
      kind: linear divides all frequencies (Chen et al. 2023); llama3 the low ones, with a ramp in between (Llama 3.1); yarn
        likewise by turns within the length of pretraining, and scales queries and keys (Peng et al. 2023).
      factor: what frequencies are divided by: all of them (linear), or the low ones.
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
        """The factor of cosines and sines, and so of queries and keys."""
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
        """The share, from 0 to 1, of each frequency that is not scaled."""
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


# --------------------------------------------------------------------------------------------------
# The sizes of multi-head latent attention as a frozen value. Nothing here imports JAX.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of multi-head latent attention, whose keys and values are computed from a few numbers (DeepSeek-V3).

    Attributes:
      kv_rank: size of a position's latent, from which keys and values are computed; 0: attention has no latents.
      query_rank: size of the latent from which queries are computed; null: they are computed from the block's input.
      plain_size: size of the part of a head's query and key that has no rotary positions.
      rotary_size: size of the part that has; the key's is the same for all heads.
      value_size: size of a head's value.
      norm_eps: epsilon of the norms of the latents.
      mscale: with rope_scaling of kind yarn: scores are multiplied by (1 + 0.1 * mscale * ln(factor)) ** 2.
    """

    kv_rank: int = 0
    query_rank: int | None = None
    plain_size: int = 128
    rotary_size: int = 64
    value_size: int = 128
    norm_eps: float = 1e-6
    mscale: float = 0.0

    def __post_init__(self):
        if problems := list(wrong_types(self)) or list(self._problems()):
            raise ValueError("LatentConfig:\n" + "\n".join(f"  - {line}" for line in problems))

    def _problems(self) -> Iterator[str]:
        if not self.kv_rank:
            given = [
                f"{name}={getattr(self, name)}"
                for name, field in self.__dataclass_fields__.items()
                if getattr(self, name) != field.default
            ]
            if given:
                yield f"{', '.join(given)}: without effect while kv_rank=0"
        for name in ("plain_size", "rotary_size", "value_size", "norm_eps"):
            if getattr(self, name) <= 0:
                yield f"{name}={getattr(self, name)}: must be positive"
        if self.kv_rank < 0 or self.mscale < 0:
            yield f"kv_rank={self.kv_rank}, mscale={self.mscale}: must not be negative"
        if self.query_rank is not None and self.query_rank < 1:
            yield f"query_rank={self.query_rank}: must be positive, or None for queries of the block's input"
        if self.rotary_size % 2:
            yield f"rotary_size={self.rotary_size}: pairs are turned, so it must be even"

    @property
    def query_size(self) -> int:
        """The size of a head's query, and of its key."""
        return self.plain_size + self.rotary_size

    def scale(self, rope_scaling: Any) -> float:
        """The factor of the scores.

        Args:
          rope_scaling: a `RopeScaling`, or None.

        >>> LatentConfig(kv_rank=512, plain_size=12, rotary_size=4).scale(None)
        0.25
        """
        plain = self.query_size**-0.5
        if rope_scaling is None or not self.mscale:
            return plain
        return plain * (1 + 0.1 * self.mscale * math.log(rope_scaling.factor)) ** 2
