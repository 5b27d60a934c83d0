"""The mixture-of-experts layers of a transformer as a frozen value. Nothing here imports JAX."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from axonml_jax.field_types import wrong_types


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Which feed-forward parts are mixtures of experts, and what they are made of (see `ax.ParallelMoE`).

    Attributes:
      num_experts: experts of a layer; 0: all feed-forward parts are dense.
      top_k: experts per token.
      inner_size: inner width of an expert; null: that of the dense feed-forward part.
      every: only every so many-th block has experts, the last of each so many.
      first_dense: so many first blocks have none.
      router: softmax, or sigmoid with a bias for the choice that follows the load (DeepSeek-V3).
      renormalize: whether the gates of a token are divided by their sum.
      groups: sigmoid: experts lie in so many groups, of which a token uses top_groups.
      top_groups: sigmoid: see groups.
      scale: sigmoid: by which gates are multiplied.
      bias_rate: sigmoid: by how much the bias changes in an update; 0: there is none.
      noise: standard deviation of what is added to scores for the choice, in training.
      router_bias: whether scores have a bias that is trained.
      activation: of an expert, swiglu, clamped_swiglu or gelu; null: the model's.
      shared_size: inner width of an expert through which all tokens go; 0: there is none.
      capacity_factor: of an expert's slots over its share of a device's tokens, behind which choices are dropped; null: none
        is.
      dispatch: how tokens travel to their experts: rounds, ragged, gather, or auto.
      load_balance: weight of the load-balancing loss, a mean over layers, in the loss.
      z: weight of the router's z loss, likewise.
    """

    num_experts: int = 0
    top_k: int = 2
    inner_size: int | None = None
    every: int = 1
    first_dense: int = 0
    router: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    bias_rate: float = 0.001
    noise: float = 0.0
    router_bias: bool = False
    activation: Literal["swiglu", "clamped_swiglu", "gelu"] | None = None
    shared_size: int = 0
    capacity_factor: float | None = None
    dispatch: Literal["auto", "rounds", "ragged", "gather"] = "auto"
    load_balance: float = 0.01
    z: float = 0.0

    def __post_init__(self):
        if problems := list(wrong_types(self)) or list(self._problems()):
            raise ValueError("ExpertsConfig:\n" + "\n".join(f"  - {line}" for line in problems))

    def _problems(self) -> Iterator[str]:
        lowest = {
            "num_experts": 0,
            "top_k": 1,
            "every": 1,
            "first_dense": 0,
            "shared_size": 0,
            "load_balance": 0,
            "z": 0,
        }
        for name, least in (lowest | {"groups": 1, "top_groups": 1, "bias_rate": 0, "noise": 0}).items():
            if getattr(self, name) < least:
                yield f"{name}={getattr(self, name)}: must be at least {least}"
        for name in ("inner_size", "capacity_factor", "scale"):
            if (value := getattr(self, name)) is not None and value <= 0:
                yield f"{name}={value}: must be positive"
        if self.num_experts and self.top_k > self.num_experts:
            yield f"top_k={self.top_k}: there are num_experts={self.num_experts}"
        if self.router == "softmax":
            defaults = {"groups": 1, "top_groups": 1, "scale": 1.0, "bias_rate": 0.001}
            given = [
                f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value
            ]
            if given:
                yield f"{', '.join(given)}: belong to router='sigmoid'"
        elif self.num_experts:
            yield from self._group_problems()
        if self.capacity_factor is not None and self.dispatch in ("ragged", "gather"):
            yield f"dispatch={self.dispatch}: is for layers that drop no token; with capacity_factor leave it out"
        if self.shared_size and self.activation == "clamped_swiglu":
            yield f"shared_size={self.shared_size}: activation clamped_swiglu has no shared expert"
        if not self.num_experts:
            defaults = {name: field.default for name, field in self.__dataclass_fields__.items()}
            given = [
                f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value
            ]
            if given:
                yield f"{', '.join(given)}: without effect while num_experts=0"

    def _group_problems(self) -> Iterator[str]:
        if self.num_experts % self.groups:
            yield f"groups={self.groups}: do not divide num_experts={self.num_experts}"
        elif self.top_groups > self.groups:
            yield f"top_groups={self.top_groups}: there are groups={self.groups}"
        elif self.top_k > (least := self.num_experts * self.top_groups // self.groups):
            yield f"top_k={self.top_k}: a token's top_groups={self.top_groups} groups have {least} experts"

    def has_experts(self, block: int) -> bool:
        """Whether a block, counted from 0, has experts."""
        return bool(self.num_experts) and block >= self.first_dense and (block + 1) % self.every == 0

    @property
    def alike(self) -> bool:
        """Whether all blocks are of one kind."""
        return not self.num_experts or (self.every == 1 and self.first_dense == 0)

    def make_router(self) -> Any:
        """The router's value, which imports JAX."""
        from axonml_jax.parallel.experts.routers import SigmoidRouter, SoftmaxRouter

        shared: dict[str, Any] = {"top_k": self.top_k, "renormalize": self.renormalize, "noise": self.noise}
        if self.router == "softmax":
            return SoftmaxRouter(**shared)
        grouped: dict[str, Any] = {"groups": self.groups, "top_groups": self.top_groups}
        return SigmoidRouter(**shared, **grouped, scale=self.scale, bias_rate=self.bias_rate)
