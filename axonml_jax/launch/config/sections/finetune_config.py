"""The section `finetune`: what of a model trains, where it is not all of it."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from axonml_jax.launch.config.lowest import at_least

if TYPE_CHECKING:
    from axonml_jax.model.lora.adapters import Lora

MATRICES = ("attention/.*kernel$", "mlp/(shared/)?(gate|up|down)(/kernel)?$")
"""The transformer's matrices of attention, of feed-forward parts and of experts, shared ones too."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of low rank, which alone train.

    Attributes:
      rank: columns of each adapter; null trains the model itself.
      alpha: the adapters' product counts alpha / rank times; null counts it once.
      targets: regular expressions of the paths of the matrices that get adapters.
      stacked: of targets whose last two dims are a matrix and whose others number them; the transformer's stacks say so
        themselves.
      dims: of targets of more than two dims, by regular expressions, what each dim is (stack, in, out), such as
        {query/kernel: in out out}; most layers say it themselves.
      base: int8: the matrices that have adapters rest as int8 with a scale for every column; null: as they are.
    """

    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] = MATRICES
    stacked: tuple[str, ...] = ()
    dims: dict[str, str] | None = None
    base: str | None = None

    def __post_init__(self):
        problems = []
        if self.rank is None:
            others = {"alpha": self.alpha is not None, "targets": self.targets != MATRICES}
            others |= {"stacked": bool(self.stacked), "dims": bool(self.dims), "base": self.base is not None}
            problems = [f"{name} has no effect without rank" for name, given in others.items() if given]
        elif self.alpha is not None and not 0 < self.alpha < math.inf:
            problems = [f"alpha={self.alpha}: must be positive"]
        at_least("finetune.lora", self, problems, rank=1)
        if self.rank is not None:
            self.build(0)

    def build(self, seed: int) -> "Lora":
        """The adapters that the section describes; it has a rank."""
        from axonml_jax.model.lora.adapters import Lora

        assert self.rank is not None
        alpha = self.alpha or self.rank
        own: dict[str, Any] = {"targets": self.targets, "stacked": self.stacked, "base": self.base}
        own["dims"] = tuple((self.dims or {}).items())
        return Lora(rank=self.rank, alpha=alpha, seed=seed, **own)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """What of the model trains."""

    lora: LoraConfig = field(default_factory=LoraConfig)
