"""The part `plan.diloco` of a configuration: replicas along mesh.data that join once in so many steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from axonml_jax.launch.config.lowest import at_least

if TYPE_CHECKING:
    from axonml_jax.parallel.strategies.diloco import DiLoCo


@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig:
    """Local steps (see `ax.DiLoCo`).

    Attributes:
      every: steps that replicas along mesh.data make by themselves before they join; null joins their gradients in every
        step, without replicas.
      lr: the outer learning rate.
      momentum: the outer Nesterov momentum.
      wire: what parameters changed by travels as bf16 or int8; null sends float32.
    """

    every: int | None = None
    lr: float = 0.7
    momentum: float = 0.9
    wire: Literal["bf16", "int8"] | None = None

    def __post_init__(self):
        problems = []
        if self.every is None:
            others = {"lr": self.lr != 0.7, "momentum": self.momentum != 0.9, "wire": self.wire is not None}
            problems = [f"{name} has no effect without every" for name, given in others.items() if given]
        at_least("plan.diloco", self, problems, every=1)
        if self.every is not None:
            self.build()

    def build(self) -> "DiLoCo":
        """The strategy that is described; `every` is set."""
        from axonml_jax.parallel.strategies.diloco import DiLoCo

        assert self.every is not None
        return DiLoCo(every=self.every, lr=self.lr, momentum=self.momentum, wire=self.wire)

    def problems(self, steps: int, decay: float | None, stages: int) -> Iterator[str]:
        """What does not go with `train.steps`, `ema.decay` and `mesh.pipe`."""
        if self.every is None:
            return
        if steps % self.every:
            left = steps % self.every
            yield (
                f"train.steps={steps} is no multiple of plan.diloco.every={self.every}: replicas join at the end of a round, "
                f"and the model would be without the last {left} steps; use {steps - left or self.every}"
            )
        if decay is not None:
            yield f"ema.decay={decay} with plan.diloco would average each replica by itself: leave it out"
        if stages != 1:
            yield f"mesh.pipe={stages} with plan.diloco: a pipeline's buffers have no place for outer parameters: leave one out"
