"""The section `plan` of a configuration, and the `ax.Plan` that it means."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from axonml_jax.launch.config.sections.diloco_config import DiLoCoConfig

if TYPE_CHECKING:
    from axonml_jax.parallel.plan import Plan
    from axonml_jax.parallel.strategies.strategy import AbstractStrategy


REDUCING = {"sync_strategy": "overlapped", "bucket_size_mb": 25.0, "comm_dtype": None}
"""The defaults of how gradients are reduced along mesh.data."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How the step runs on the mesh (see `ax.Plan`, `ax.DDP` and `ax.FSDP`).

    Attributes:
      sync_strategy: when gradients are averaged: inside the backward, after it, or never.
      bucket_size_mb: gradients are reduced in buckets of this many MiB.
      gradient_as_bucket_view: true reduces without a flat copy, false with one; null takes the faster on the backend.
      comm_dtype: dtype in which gradients travel, such as bfloat16; null sends them as they are.
      sharding_strategy: what is split along mesh.fsdp during a step; null is full_shard.
      prefetch: units whose parameters are gathered ahead (full_shard and hybrid_shard); each costs a unit of memory.
      gather: parameters travel as int8 or fp8 with a scale per block when they are gathered; null sends them as they are.
      reduce: parts of gradients travel as bf16 or int8 to the device that sums them in float32; int8-feedback adds what
        rounding left out to the next ones (shard_optimizer); null reduces and scatters them in their own dtype.
      offload: what rests in host memory between its uses.
      precision: float32; bf16 or fp16 (compute in it, the rest in float32; bf16 sends gradients in bfloat16 too, fp16 scales
        the loss); bf16-reduce-float32 (gradients travel in float32); bf16-reduce (they accumulate in bfloat16 too); fp8 (bf16
        with products of operands rounded to 8 bits); null leaves the model's dtypes.
      products_kept: with fp8, regular expressions of parameters' path names whose products stay; null names none.
      accumulate: microbatches per update and rank.
      remat: what the backward recomputes: full, selective (all but weight multiplications), or null for nothing.
      check_vma: let JAX check which values vary over which axes.
      diloco: replicas along mesh.data that join once in so many steps.
    """

    sync_strategy: Literal["overlapped", "synchronous", "no_sync"] = "overlapped"
    bucket_size_mb: float = 25.0
    gradient_as_bucket_view: bool | None = None
    comm_dtype: str | None = None
    sharding_strategy: Literal["full_shard", "shard_grad_op", "shard_optimizer", "no_shard", "hybrid_shard"] | None = (
        None
    )
    prefetch: int = 0
    gather: Literal["int8", "fp8"] | None = None
    reduce: Literal["bf16", "int8", "int8-feedback"] | None = None
    offload: Literal["none", "params", "optimizer_states", "full"] = "none"
    precision: Literal["float32", "bf16", "bf16-reduce", "bf16-reduce-float32", "fp16", "fp8"] | None = None
    products_kept: tuple[str, ...] | None = None
    accumulate: int = 1
    remat: Literal["full", "selective"] | None = None
    check_vma: bool = False
    diloco: DiLoCoConfig = field(default_factory=DiLoCoConfig)

    def __post_init__(self):
        if self.diloco.every is not None and (idle := self._idle()):
            said = ", ".join(f"plan.{name}={value}" for name, value in idle.items())
            raise ValueError(f"{said}: no gradient is reduced beside plan.diloco: leave this out")
        try:
            self.build()
        except (TypeError, ValueError) as error:
            raise ValueError(f"plan: {error}") from error

    def _idle(self) -> dict[str, Any]:
        """Settings of how gradients are reduced along mesh.data that are not at their defaults."""
        return {name: found for name, value in REDUCING.items() if (found := getattr(self, name)) != value}

    def build(self) -> "Plan":
        """The plan that the section describes, without stages.

        Raises:
          ValueError, TypeError: for values that do not go together.
        """
        from axonml_jax.collectives.gradients.buckets import GradSyncStrategy
        from axonml_jax.model.precision import Precision
        from axonml_jax.parallel.offload import CPUOffload
        from axonml_jax.parallel.plan import Plan
        from axonml_jax.parallel.strategies.replicate import Replicate

        data = (
            self.diloco.build()
            if self.diloco.every is not None
            else Replicate(
                sync_strategy=GradSyncStrategy(self.sync_strategy),
                bucket_size_mb=self.bucket_size_mb,
                gradient_as_bucket_view=self.gradient_as_bucket_view,
                comm_dtype=self.comm_dtype,
            )
        )
        return Plan(
            data=data,
            fsdp=self._sharding(),
            precision=replace(Precision.of(self.precision), products_kept=self.products_kept or ()),
            offload=CPUOffload(self.offload),
            accumulate=self.accumulate,
            remat=self.remat,
            check_vma=self.check_vma,
        )

    def _sharding(self) -> "AbstractStrategy":
        from axonml_jax.parallel.strategies.sharding_strategy import ShardingStrategy

        view = self.gradient_as_bucket_view
        strategy = ShardingStrategy(self.sharding_strategy or "full_shard")
        if strategy is ShardingStrategy.NO_SHARD:
            return strategy.on_axis(prefetch=self.prefetch, gather=self.gather, reduce=self.reduce)
        return strategy.on_axis(
            prefetch=self.prefetch, gather=self.gather, reduce=self.reduce, flat=None if view is None else not view
        )
