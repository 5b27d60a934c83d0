"""The section `optim`: what changes parameters, and how fast."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from axonml_jax.launch.config.lowest import at_least

NAMED_ONLY = ("name", "betas", "weight_decay")
"""Keys of the optimizers that have a name here; others take their arguments under `init_args`."""

OTHERS = {
    "name": "; any other optimizer goes under optim.class_path, such as optax.adafactor",
    "schedule": "; any other goes under optim.learning_rate as a class_path, such as optax.linear_schedule, with init_args",
}
"""What to say of a choice that has another way beside it."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning rate over time.

    Attributes:
      name: adamw (Loshchilov and Hutter 2019) or lion (Chen et al. 2023).
      class_path: any other optimizer by the path of its factory, such as optax.adafactor; null takes the named one.
      init_args: its arguments, without the learning rate; a mask is {paths: [...]}, {not_paths: [...]} or {matrices: true}.
      chain: transformations one after the other, each a class_path with init_args; null takes a single optimizer.
      groups: parameters with keys of their own, each {paths: [expressions], learning_rate: ..., ...}; the first to fit counts.
      learning_rate: the highest learning rate, or a schedule by class_path and init_args.
      warmup_steps: steps over which the learning rate rises from 0.
      schedule: after the warmup, cosine falls to a tenth at the last step; constant stays.
      weight_decay: decoupled weight decay of matrices; vectors are not decayed.
      betas: decay rates of the first and second average.
      max_grad_norm: clip gradients to this global norm; null does not clip.
    """

    name: Literal["adamw", "lion"] = "adamw"
    class_path: str | None = None
    init_args: dict[str, Any] | None = None
    chain: list[dict[str, Any]] | None = None
    groups: list[dict[str, Any]] | None = None
    learning_rate: float | dict[str, Any] = 3e-4
    warmup_steps: int = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float | None = 1.0

    def __post_init__(self):
        problems = [f"betas={list(self.betas)}: each must be at least 0 and below 1"]
        problems *= not all(0 <= beta < 1 for beta in self.betas)
        for name, allowed in (("name", ("adamw", "lion")), ("schedule", ("cosine", "constant"))):
            if getattr(self, name) not in allowed:  # a group's; the section's own are checked as they are read
                problems.append(f"{name}={getattr(self, name)}: must be one of {', '.join(allowed)}{OTHERS[name]}")
        if not isinstance(self.learning_rate, int | float | Mapping):
            problems.append(f"learning_rate={self.learning_rate}: must be a number or a schedule")
        for name in ("learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not value > 0:
                problems.append(f"{name}={value}: must be positive")
        at_least("optim", self, [*problems, *self._without_effect()], warmup_steps=0, weight_decay=0)

    @property
    def links(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """(key, description) of the factories that are chained; none where the optimizer has a name."""
        if self.class_path is not None:
            return (("", {"class_path": self.class_path, "init_args": self.init_args or {}}),)
        return [(f".chain[{number}]", link) for number, link in enumerate(self.chain or ())]

    def _without_effect(self) -> list[str]:
        problems = []
        if self.class_path is not None and self.chain is not None:
            problems.append("class_path beside chain: give one of them")
        if self.init_args is not None and self.class_path is None:
            problems.append("init_args without class_path have no effect")
        if self.class_path is not None or self.chain is not None:
            problems += [
                f"{name} has no effect beside class_path or chain: give it in init_args"
                for name in NAMED_ONLY
                if getattr(self, name) != DEFAULTS[name]
            ]
        if isinstance(self.learning_rate, Mapping):
            problems += [
                f"{name} has no effect beside a learning_rate that is a schedule: give {DEFAULTS[name]}, or leave it out"
                for name in ("warmup_steps", "schedule")
                if getattr(self, name) != DEFAULTS[name]
            ]
        return problems


DEFAULTS = {field.name: field.default for field in fields(OptimConfig)}
"""What the section's keys are where nothing is said."""
