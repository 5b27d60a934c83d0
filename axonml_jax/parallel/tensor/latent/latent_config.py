"""The sizes of multi-head latent attention as a frozen value. Nothing here imports JAX."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from axonml_jax.field_types import wrong_types


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: keys and values of all heads are made of a few numbers of each position (DeepSeek-V3).

    Attributes:
      kv_rank: numbers of a position of which keys and values are made; 0: attention has no latents.
      query_rank: numbers of a position of which queries are made; null: these are made of the block's input.
      plain_size: of a head's query and key, numbers that do not turn with the position.
      rotary_size: numbers that do; those of the key are the same for all heads.
      value_size: of a head's value.
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
        """Numbers of a head's query, and of its key."""
        return self.plain_size + self.rotary_size

    def scale(self, rope_scaling: Any) -> float:
        """By what scores are multiplied.

        Args:
          rope_scaling: a `RopeScaling`, or None.

        >>> LatentConfig(kv_rank=512, plain_size=12, rotary_size=4).scale(None)
        0.25
        """
        plain = self.query_size**-0.5
        if rope_scaling is None or not self.mscale:
            return plain
        return plain * (1 + 0.1 * self.mscale * math.log(rope_scaling.factor)) ** 2
